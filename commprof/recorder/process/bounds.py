"""Limits of a recording: the range of steps, and the size of the files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from commprof import hooks
from commprof.recorder.coverage.selfcheck import sequence_number
from commprof.recorder.process.journal import Journal
from commprof.recorder.process.recorder_options import BEFORE_THE_FIRST
from commprof.recorder.process_group.groups import live_groups

# Of the size limit, what records may fill before only sums are kept: the rest is for the sums.
RECORDS_SHARE: Final = 0.8
# ... and before torch's own list is left out, which is long and written last.
FLIGHT_SHARE: Final = 0.9
_ALWAYS_WRITTEN: Final = frozenset({"begin", "end", "note", "unseen", "outside", "clock", "group"})


class StepWindow:
    """Switches the recording on and off as the training enters and leaves the requested steps.

    Outside of them no wrapper is installed. The number of collectives there follows from the groups' sequence numbers at
    the edges, at no cost for the program.

    Args:
        bounds: the steps, half open; None: all of them, and initialisation.
        journal: where the counts are written.
        switch_on, switch_off: called where recording begins and ends within the run.
    """

    def __init__(
        self,
        bounds: tuple[int, int | None] | None,
        journal: Journal,
        switch_on: Callable[[], None],
        switch_off: Callable[[], None],
    ) -> None:
        self.bounds = bounds
        self.is_open = self._covers(BEFORE_THE_FIRST)
        self.outside = OutsideCount()
        self._journal = journal
        self._switch_on = switch_on
        self._switch_off = switch_off

    def _covers(self, step: int) -> bool:
        if self.bounds is None:
            return True
        first, end = self.bounds
        return first <= step and (end is None or step < end)

    def start(self, step: int) -> None:
        """Recording is requested while the training is at ``step``."""
        self.is_open = self._covers(step)
        if not self.is_open:
            self.outside.begin()

    def enter(self, step: int) -> bool:
        """The training enters ``step``; whether it is recorded."""
        inside = self._covers(step)
        if inside and not self.is_open:
            self.is_open = True
            self.count()
            self._switch_on()
        elif self.is_open and not inside:
            self._switch_off()
            self.is_open = False
            self.outside.begin()
        return inside

    def count(self) -> None:
        """Write down what the groups have counted outside so far. Before groups are destroyed, and at the end, too."""
        if self.bounds is None:
            return
        self.outside.end()
        self._journal.write("outside", {"collectives": self.outside.collectives})
        if not self.is_open:
            self.outside.begin()


class OutsideCount:
    """Collectives that groups counted while nothing was recorded, by their own sequence numbers."""

    def __init__(self) -> None:
        self.collectives: int | None = 0  # None: a group does not number what it issues
        self._since: dict[str, int] | None = None

    def begin(self) -> None:
        """From here on nothing is recorded."""
        self._since = {pg.group_name: sequence_number(pg) or 0 for pg in live_groups()}

    def forget(self, name: str | None) -> None:
        """The group called ``name`` (None: every group) was destroyed; a new one of that name counts from 0."""
        if self._since is None:
            return
        if name is None:
            self._since.clear()
        else:
            self._since.pop(name, None)

    def end(self) -> None:
        """Up to here nothing was recorded. Groups made meanwhile began at 0."""
        since, self._since = self._since, None
        if since is None:
            return
        for pg in live_groups():
            number = sequence_number(pg)
            if number is None:
                self.collectives = None
            elif self.collectives is not None:
                self.collectives += max(0, number - since.get(pg.group_name, 0))


class SizeLimit:
    """What a rank may write: its two files together, while it runs.

    Args:
        most_bytes: of both files; None: any number.
        journal: what writes them.
    """

    def __init__(self, most_bytes: int | None, journal: Journal) -> None:
        self._most_bytes = most_bytes
        self._journal = journal
        self._records_bytes = 0
        self._share_is_used = False
        self._is_full = False
        if most_bytes is not None:
            journal.allows_line = self.allows_line

    def allows_records(self, size: int) -> bool:
        """Whether the records file may grow to ``size`` bytes."""
        if self._most_bytes is None or size + self._events_bytes() <= RECORDS_SHARE * self._most_bytes:
            self._records_bytes = size
            return True
        return False

    def begin_sums(self) -> None:
        """The records have used up their share: that is said once."""
        if self._most_bytes is not None and not self._share_is_used:
            self._share_is_used = True
            self._journal.note(
                f"from step {hooks.position.step} on only sums are kept, by step, operation, group and purpose: more "
                f"records would leave no room for them in the {self._most_bytes:,} bytes that a rank may write (--max-size)"
            )

    def allows_line(self, kind: str) -> bool:
        """Whether the events file may get another line; one that says how the recording went always may."""
        if self._most_bytes is None or kind in _ALWAYS_WRITTEN:
            return True
        used = self._records_bytes + self._events_bytes()
        if kind == "flight":
            return used < FLIGHT_SHARE * self._most_bytes
        if used < self._most_bytes:
            return True
        if not self._is_full:
            self._is_full = True
            if self._journal.records is not None:
                self._journal.records.stop(
                    f"the {self._most_bytes:,} bytes that a rank may write are used up (--max-size)"
                )
        return False

    def _events_bytes(self) -> int:
        return self._journal.events.size if self._journal.events is not None else 0
