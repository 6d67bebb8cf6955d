"""Limits of a recording: the range of steps, and the size of the files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from commprof import hooks
from commprof.recorder.coverage.selfcheck import sequence_number
from commprof.recorder.process.journal import Journal
from commprof.recorder.process.recorder_options import BEFORE_THE_FIRST
from commprof.recorder.process_group.groups import live_groups

# The share of the size limit that records may use before only sums are written. The rest is for the sums.
RECORDS_SHARE: Final = 0.8
# The share from which on torch's flight recorder dump is left out, because it is long and written last.
FLIGHT_SHARE: Final = 0.9
_ALWAYS_WRITTEN: Final = frozenset({"begin", "end", "note", "unseen", "outside", "clock", "group"})


class StepWindow:
    """Switches the recording on and off as the training enters and leaves the requested steps.

    Outside the requested steps no wrapper is installed. The number of collectives there is the difference of the
    groups' sequence numbers, which costs the program nothing.

    Args:
        bounds: The half-open range of steps; None for all steps and initialization.
        journal: The journal that receives the counts.
        switch_on, switch_off: Functions that are called when recording begins and ends within the run.
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
        """Set the initial state; ``step`` is the current step of the training when recording is requested."""
        self.is_open = self._covers(step)
        if not self.is_open:
            self.outside.begin()

    def enter(self, step: int) -> bool:
        """Enter ``step``, and return whether this step is recorded."""
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
        """Write the number of collectives outside the recorded steps so far.

        This is also called before groups are destroyed, and at the end of the recording.
        """
        if self.bounds is None:
            return
        self.outside.end()
        self._journal.write("outside", {"collectives": self.outside.collectives})
        if not self.is_open:
            self.outside.begin()


class OutsideCount:
    """The number of collectives while nothing is recorded, from the sequence numbers of the groups."""

    def __init__(self) -> None:
        self.collectives: int | None = 0  # None: a group does not number its collectives
        self._since: dict[str, int] | None = None

    def begin(self) -> None:
        """Begin to count, because nothing is recorded from now on."""
        self._since = {pg.group_name: sequence_number(pg) or 0 for pg in live_groups()}

    def forget(self, name: str | None) -> None:
        """Forget the destroyed group ``name`` (None: every group). A new group with this name counts from 0."""
        if self._since is None:
            return
        if name is None:
            self._since.clear()
        else:
            self._since.pop(name, None)

    def end(self) -> None:
        """End the count. Groups that were created since :meth:`begin` started at 0."""
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
    """The limit for the size of a rank's two files together, while the rank runs.

    Args:
        most_bytes: The limit for both files in bytes; None for no limit.
        journal: The journal that writes the files.
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
        """Return whether the records file may grow to ``size`` bytes."""
        if self._most_bytes is None or size + self._events_bytes() <= RECORDS_SHARE * self._most_bytes:
            self._records_bytes = size
            return True
        return False

    def begin_sums(self) -> None:
        """Write a note, once, that the records have used up their share of the limit."""
        if self._most_bytes is not None and not self._share_is_used:
            self._share_is_used = True
            self._journal.note(
                f"from step {hooks.position.step} on, only sums are kept, by step, operation, group and purpose: "
                f"more records would leave no room for them in the {self._most_bytes:,} bytes that a rank may write "
                "(--max-size)"
            )

    def allows_line(self, kind: str) -> bool:
        """Return whether a line of ``kind`` may be written to the events file.

        Lines about the recording itself are always allowed.
        """
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
