"""The self-check: detects collectives of a group without a record, by its sequence number or by torch's hooks."""

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
    """Compares, for each live group, the change of its sequence number with the number of its records.

    If the counting of a group's backends is not known, torch's hooks count, if this torch has them.

    A surplus is ``unseen``: collectives that bypassed every recorded layer. If the records account for more than the group
    counted, nothing is reported: a backend may count in unknown ways.

    Args:
        journal: where the findings are written.
        groups: the process groups of this process.
        on_gap: called at each surplus.
    """

    def __init__(self, journal: Journal, groups: Groups, on_gap: Callable[[Group], None]) -> None:
        self._journal = journal
        self._groups = groups
        self._on_gap = on_gap
        self._before: dict[str, int] = {}  # numbers of the groups that were there before recording began
        self._silent: set[str] = set()  # groups whose backend does not count
        self._checked: dict[str, tuple[int, int]] = {}  # at the last check: the group's own number, and ours
        self._watched: set[str] = set()  # groups that torch's hooks count
        self._refused: dict[str, int] = {}  # calls that raised and that the group did not count
        self._ahead: dict[str, int] = {}  # records at the last check that the group had not counted

    def start(self) -> None:
        """Recording begins now: what the groups have counted so far is nobody's loss."""
        for pg in live_groups():
            self._before[pg.group_name] = sequence_number(pg) or 0

    def add(self, group: Group, pg: Any) -> None:
        """``group`` is seen for the first time, before its first call is issued; ``pg``: its ProcessGroup."""
        if expected_number(group) is None:
            group.dispatched = watch(pg)
            if group.dispatched is not None:
                self._watched.add(pg.group_name)

    def stop(self, name: str | None = None) -> None:
        """The group called ``name`` (None: every group) or recording is about to end: hooks count no longer."""
        for pg in live_groups(name) if self._watched else ():
            if pg.group_name in self._watched:
                self._watched.discard(pg.group_name)
                unwatch(pg)

    def forget(self, name: str | None) -> None:
        """The group called ``name`` (None: every group) was destroyed; a new one of that name counts from 0."""
        if name is None:
            self._before.clear()
            self._silent.clear()
        else:
            self._before.pop(name, None)
            self._silent.discard(name)

    def begin(self, pg: Any) -> None:
        """``pg`` was given other members in place: what it has counted until now is no loss of theirs."""
        self.forget(pg.group_name)
        self._before[pg.group_name] = sequence_number(pg) or 0

    def skip(self) -> None:
        """Nothing was recorded since the last check, on purpose: what the groups have counted meanwhile is not missing."""
        for pg in live_groups():
            group = self._groups.find(pg)
            own, expected = self._counted(pg, group)
            if own is not None and expected is not None:
                self._checked[group.name] = own, expected
            group.raised = 0

    def run(self, is_last: bool = False, only: str | None = None) -> None:
        """Check every live group, or the one called ``only``, and write down what was found.

        The last time, nobody needs to be told of it.
        """
        for pg in live_groups(only):
            name = pg.group_name
            if name in self._silent:
                continue
            group = self._groups.find(pg)
            own, expected = self._counted(pg, group)
            if own is None:
                self._silent.add(name)  # its backend raises, which takes as long as a hundred answers
            if own is None or expected is None:
                continue
            before = 0 if group.dispatched is not None else self._before.get(name, 0)
            own_then, expected_then = self._checked.get(group.name, (before, 0))
            refused = min(group.raised, max(0, (expected - expected_then) - (own - own_then)))
            # Calls that raised before anybody counted them.
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
        """How many calls somebody else has counted, and how many the records account for; None for what is not known."""
        refused = self._refused.get(group.name, 0)
        if group.dispatched is not None:
            # Methods called directly on a backend are recorded, and call no hook.
            return group.dispatched.calls, count_of(group.collectives) + count_of(group.messages) - refused
        expected = expected_number(group)
        return sequence_number(pg), None if expected is None else expected - refused

    def _report(self, group: Group, unseen: int, is_last: bool) -> None:
        group.unseen += unseen
        self._journal.write("unseen", {"pg": group.name, "unseen": group.unseen})
        if not is_last:
            self._on_gap(group)


def sequence_number(pg: Any) -> int | None:
    """How many operations the group's backend has counted; None where it does not say."""
    try:
        return int(pg._get_sequence_number_for_group())
    except Exception as error:
        pass_on(error)
        return None
