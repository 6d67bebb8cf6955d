"""Whether calls that raised count as collectives without records, where the backend counts some of them (NCCL)."""

from __future__ import annotations

import pytest

from commprof.recorder import selfcheck
from commprof.recorder.groups import Group
from commprof.recorder.selfcheck import SelfCheck
from commprof.recorder.sequence import count_raised


class FakeProcessGroup:
    group_name = "0"

    def __init__(self):
        self.number = 0

    def _get_sequence_number_for_group(self):
        return self.number


class FakeGroups:
    def __init__(self, group):
        self.group = group

    def find(self, pg):
        return self.group


class FakeJournal:
    def write(self, kind, row):
        pass


@pytest.fixture
def checked(monkeypatch):
    """A group on NCCL, torch's object for it, and what compares their numbers."""
    group, pg = Group("0", None, [0, 1], 0, {"cuda": "nccl"}), FakeProcessGroup()
    monkeypatch.setattr(selfcheck, "live_groups", lambda: [pg])
    return group, pg, SelfCheck(FakeJournal(), FakeGroups(group), lambda group: None)


@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("is_p2p", [True, False])
def test_a_call_that_raised_is_no_gap_whether_the_backend_counted_it_or_not(checked, is_counted, is_p2p):
    group, pg, check = checked
    for _ in range(3):
        for _ in range(5):
            next(group.collectives)
            pg.number += 1
        next(group.messages if is_p2p else group.collectives)
        pg.number += is_counted and not is_p2p  # NCCL's number of a group is that of its collectives
        count_raised(group)
        check.run()
    assert group.unseen == 0


def test_a_gap_is_found_after_a_call_that_raised(checked):
    group, pg, check = checked
    next(group.collectives)
    count_raised(group)
    check.run()
    pg.number += 1  # of which there is no record
    check.run()
    assert group.unseen == 1
