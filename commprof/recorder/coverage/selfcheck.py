"""The self-check: detects collectives without a record, with the sequence number of a group or with torch's hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commprof.program_exceptions import pass_on
from commprof.recorder.coverage.dispatch_hooks import unwatch, watch
from commprof.recorder.coverage.sequence import expected_number
from commprof.recorder.process.journal import Journal
from commprof.recorder.process_group.groups import Group, Groups, live_groups
from commprof.trace.rank_files.segments import count_of


class SelfCheck:
    """Compares the change of the sequence number of each live group with the number of its new records.

    If it is not known how the backends of a group count, torch's hooks count the calls instead, if this version
    of torch has hooks.

    If the group counted more collectives than there are records, the surplus is ``unseen``: collectives that
    bypassed every recorded layer. If there are more records than counted collectives, nothing is reported,
    because a backend may count in unknown ways.

    Args:
        journal: The journal into which the findings are written.
        groups: The process groups of this process.
        on_gap: A function that is called for each group with a surplus, except in the last check.
    """

    def __init__(self, journal: Journal, groups: Groups, on_gap: Callable[[Group], None]) -> None:
        self._journal = journal
        self._groups = groups
        self._on_gap = on_gap
        self._before: dict[str, int] = {}  # sequence numbers of groups before they were recorded
        self._silent: set[str] = set()  # groups whose backend does not count
        # For each group, its own count and the count by the records at the last check.
        self._checked: dict[str, tuple[int, int]] = {}
        self._watched: set[str] = set()  # groups that torch's hooks count
        self._refused: dict[str, int] = {}  # calls that raised before the group counted them
        self._ahead: dict[str, int] = {}  # records that the group had not counted at the last check

    def start(self) -> None:
        """Start the self-check when recording begins. Earlier collectives do not count as unseen."""
        for pg in live_groups():
            self._before[pg.group_name] = sequence_number(pg) or 0

    def add(self, group: Group, pg: Any) -> None:
        """Start counting with torch's hooks for ``group``, if it is not known how its backends count.

        Must be called before the first call of the group is issued. ``pg`` is the ProcessGroup of ``group``.
        """
        if expected_number(group) is None:
            group.dispatched = watch(pg)
            if group.dispatched is not None:
                self._watched.add(pg.group_name)

    def stop(self, name: str | None = None) -> None:
        """Stop counting with torch's hooks for the group ``name`` (None: every group).

        Called before the group is destroyed or recording ends.
        """
        for pg in live_groups(name) if self._watched else ():
            if pg.group_name in self._watched:
                self._watched.discard(pg.group_name)
                unwatch(pg)

    def forget(self, name: str | None) -> None:
        """Forget the group ``name`` (None: every group), which was destroyed.

        A new group with the same name counts from 0.
        """
        if name is None:
            self._before.clear()
            self._silent.clear()
        else:
            self._before.pop(name, None)
            self._silent.discard(name)

    def begin(self, pg: Any) -> None:
        """Restart the self-check of ``pg`` after its members were changed in place.

        Collectives of the previous members do not count as unseen.
        """
        self.forget(pg.group_name)
        self._before[pg.group_name] = sequence_number(pg) or 0

    def skip(self) -> None:
        """Skip the collectives since the last check, because recording was paused on purpose.

        These collectives do not count as unseen.
        """
        for pg in live_groups():
            group = self._groups.find(pg)
            own, expected = self._counted(pg, group)
            if own is not None and expected is not None:
                self._checked[group.name] = own, expected
            group.raised = 0

    def run(self, is_last: bool = False, only: str | None = None) -> None:
        """Check every live group, or only the group named ``only``, and write the findings.

        Args:
            is_last: Whether this is the last check. ``on_gap`` is then not called.
            only: The name of the group to check; None for every group.
        """
        for pg in live_groups(only):
            name = pg.group_name
            if name in self._silent:
                continue
            group = self._groups.find(pg)
            own, expected = self._counted(pg, group)
            if own is None:
                self._silent.add(name)  # do not ask again: its exception takes as long as a hundred answers
            if own is None or expected is None:
                continue
            before = 0 if group.dispatched is not None else self._before.get(name, 0)
            own_then, expected_then = self._checked.get(group.name, (before, 0))
            refused = min(group.raised, max(0, (expected - expected_then) - (own - own_then)))
            # These are calls that raised before the group counted them.
            self._refused[group.name] = self._refused.get(group.name, 0) + refused
            group.raised = 0
            expected -= refused
            self._checked[group.name] = own, expected
            surplus = (own - own_then) - (expected - expected_then)
            # Another thread may have recorded a collective that the group had not counted yet at the last check.
            unseen = surplus - self._ahead.get(group.name, 0)
            self._ahead[group.name] = max(0, -surplus)
            if unseen > 0:
                self._report(group, unseen, is_last)

    def _counted(self, pg: Any, group: Group) -> tuple[int | None, int | None]:
        """Return the number of calls that the backend or torch's hooks counted, and the number that records explain.

        Either number is None if it is not known.
        """
        refused = self._refused.get(group.name, 0)
        if group.dispatched is not None:
            # Methods that are called directly on a backend are recorded, but torch calls no hook for them.
            return group.dispatched.calls, count_of(group.collectives) + count_of(group.messages) - refused
        expected = expected_number(group)
        return sequence_number(pg), None if expected is None else expected - refused

    def _report(self, group: Group, unseen: int, is_last: bool) -> None:
        group.unseen += unseen
        self._journal.write("unseen", {"pg": group.name, "unseen": group.unseen})
        if not is_last:
            self._on_gap(group)


def sequence_number(pg: Any) -> int | None:
    """Return the number of operations that the group's backend has counted; None if it is not reported."""
    try:
        return int(pg._get_sequence_number_for_group())
    except Exception as error:
        pass_on(error)
        return None
