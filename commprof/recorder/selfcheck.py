"""Whether a group issued collectives that no record shows, by the group's own sequence number."""

from __future__ import annotations

from typing import Any

from commprof.recorder.groups import Group, Groups, live_groups
from commprof.recorder.journal import Journal
from commprof.trace.writer import count_of


class SelfCheck:
    """Compares, for each live group, how far its sequence number moved with how many collectives were recorded.

    A difference is ``unseen``: collectives started in C++, below the methods that the interception wraps.
    """

    def __init__(self, journal: Journal, groups: Groups) -> None:
        self._journal = journal
        self._groups = groups
        self._seen: dict[
            str, tuple[int, int]
        ] = {}  # by group name: its own number and ours at the last check

    def begin(self, group: Group) -> None:
        """A group is seen for the first time: count from here."""

    def run(self) -> None:
        """Check every live group and write down what is new."""
        for pg in live_groups():
            own = sequence_number(pg)
            if own is None:
                continue
            group = self._groups.find(pg)
            recorded = expected_sequence(group)
            last_own, last_recorded = self._seen.get(group.name, (0, 0))
            unseen = (own - last_own) - (recorded - last_recorded)
            self._seen[group.name] = (own, recorded)
            if unseen > 0:
                group.unseen += unseen
                self._journal.write("unseen", {"pg": group.name, "unseen": group.unseen})


def sequence_number(pg: Any) -> int | None:
    """How many operations the group's backend has counted; None where it does not say."""
    try:
        return int(pg._get_sequence_number_for_group())
    except Exception:
        return None


def expected_sequence(group: Group) -> int:
    """The sequence number that the group's records account for."""
    return count_of(group.collectives) + count_of(group.messages) + group.hidden
