"""Whether a group issued collectives that no record shows, by the group's own sequence number."""

from __future__ import annotations

from typing import Any

from commprof.recorder.groups import Group, Groups, live_groups
from commprof.recorder.journal import Journal
from commprof.recorder.sequence import expected_number


class SelfCheck:
    """Compares, for each live group, how far its sequence number moved with what was recorded of it.

    A surplus is ``unseen``: collectives started in C++, below the methods that the interception wraps. Where the records
    account for more than the group counted, nothing is said: a backend may count in ways that are not known here.
    """

    def __init__(self, journal: Journal, groups: Groups) -> None:
        self._journal = journal
        self._groups = groups
        self._before: dict[str, int] = {}  # numbers of the groups that were there before recording began
        self._checked: dict[str, tuple[int, int]] = {}  # at the last check: the group's own number, and ours

    def start(self) -> None:
        """Recording begins now: what the groups have counted so far is nobody's loss."""
        for pg in live_groups():
            self._before[pg.group_name] = sequence_number(pg) or 0

    def forget(self, name: str | None) -> None:
        """The group called ``name`` (None: every group) was destroyed; a new one of that name counts from 0."""
        if name is None:
            self._before.clear()
        else:
            self._before.pop(name, None)

    def run(self) -> None:
        """Check every live group, and write down what was found."""
        for pg in live_groups():
            group = self._groups.find(pg)
            own, expected = sequence_number(pg), expected_number(group)
            if own is None or expected is None:
                continue
            own_then, expected_then = self._checked.get(group.name, (self._before.get(pg.group_name, 0), 0))
            self._checked[group.name] = own, expected
            self._report(group, (own - own_then) - (expected - expected_then))

    def _report(self, group: Group, unseen: int) -> None:
        if unseen > 0:
            group.unseen += unseen
            self._journal.write("unseen", {"pg": group.name, "unseen": group.unseen})


def sequence_number(pg: Any) -> int | None:
    """How many operations the group's backend has counted; None where it does not say."""
    try:
        return int(pg._get_sequence_number_for_group())
    except Exception:
        return None
