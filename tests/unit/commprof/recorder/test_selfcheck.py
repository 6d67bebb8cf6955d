"""Test whether calls that raised count as collectives without records.

Some backends (NCCL) count some of these calls.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from commprof.recorder.coverage import dispatch_hooks, selfcheck
from commprof.recorder.coverage.selfcheck import SelfCheck
from commprof.recorder.coverage.sequence import count_raised
from commprof.recorder.process_group.groups import Group


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
    """Return a group on NCCL, torch's object for the group, and the check that compares their numbers."""
    group, pg = Group("0", None, [0, 1], 0, {"cuda": "nccl"}), FakeProcessGroup()
    monkeypatch.setattr(
        selfcheck, "live_groups", lambda name=None: [pg] if name in (None, pg.group_name) else []
    )
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
        pg.number += is_counted and not is_p2p  # NCCL's number of a group counts only its collectives.
        count_raised(group)
        check.run()
    assert group.unseen == 0


def test_a_gap_is_found_after_a_call_that_raised(checked):
    group, pg, check = checked
    next(group.collectives)
    count_raised(group)
    check.run()
    pg.number += 1  # This collective has no record.
    check.run()
    assert group.unseen == 1


def test_of_a_group_that_is_about_to_go_no_other_is_looked_at(checked, monkeypatch):
    """Thousands of groups may be destroyed one by one, so the check reads only the group that is destroyed."""
    group, pg, check = checked
    asked = []
    monkeypatch.setattr(selfcheck, "live_groups", lambda name=None: asked.append(name) or [pg])
    pg.number += 1
    check.run(only="0")
    assert (asked, group.unseen) == (["0"], 1)


class HookedProcessGroup(FakeProcessGroup):
    """A process group of torch 2.14 whose backend does not number its operations."""

    def __init__(self):
        super().__init__()
        self.hooks = {}

    def _get_sequence_number_for_group(self):
        raise RuntimeError("this backend does not count")

    def register_pre_hook(self, number, hook):
        self.hooks[number] = hook

    def unregister_pre_hook(self, number):
        self.hooks.pop(number, None)

    def dispatch(self, name):
        for hook in self.hooks.values():
            hook(SimpleNamespace(name=name))


@pytest.fixture
def hooked(monkeypatch):
    """Return the same objects as :func:`checked` for a group with an unknown backend."""
    group, pg = Group("0", None, [0, 1], 0, {"cpu": "mine"}), HookedProcessGroup()
    monkeypatch.setattr(
        selfcheck, "live_groups", lambda name=None: [pg] if name in (None, pg.group_name) else []
    )
    monkeypatch.setattr(dispatch_hooks, "_NO_COLLECTIVES", frozenset({"SPLIT"}))
    check = SelfCheck(FakeJournal(), FakeGroups(group), lambda group: None)
    check.add(group, pg)
    return group, pg, check


def test_hooks_of_the_dispatcher_tell_a_gap_of_a_backend_that_does_not_count(hooked):
    group, pg, check = hooked
    for name in ("ALLREDUCE", "SEND"):
        next(group.collectives if name == "ALLREDUCE" else group.messages)
        pg.dispatch(name)
    pg.dispatch("SPLIT")  # This call creates a group and moves no data.
    check.run()
    assert group.unseen == 0
    pg.dispatch("BROADCAST")
    check.run()
    check.run()
    assert group.unseen == 1


def test_what_is_not_recorded_on_purpose_is_no_gap_of_the_hooks(hooked):
    group, pg, check = hooked
    pg.dispatch("ALLREDUCE")
    check.skip()
    next(group.collectives)
    pg.dispatch("ALLREDUCE")
    check.run()
    assert group.unseen == 0


@pytest.mark.parametrize("is_dispatched", [True, False])
def test_a_call_that_raised_is_no_gap_of_the_hooks(hooked, is_dispatched):
    group, pg, check = hooked
    for _ in range(3):
        next(group.collectives)
        if is_dispatched:
            pg.dispatch("ALLREDUCE")
        count_raised(group)
        check.run()
    pg.dispatch("ALLREDUCE")
    check.run()
    assert group.unseen == 1


def test_hooks_are_taken_out_where_the_group_or_recording_ends(hooked):
    _, pg, check = hooked
    assert len(pg.hooks) == 1
    check.stop("another group")
    assert len(pg.hooks) == 1
    check.stop("0")
    assert not pg.hooks


def test_a_group_whose_number_can_be_compared_gets_no_hook(monkeypatch):
    group, pg = Group("0", None, [0, 1], 0, {"cpu": "gloo"}), HookedProcessGroup()
    monkeypatch.setattr(
        selfcheck, "live_groups", lambda name=None: [pg] if name in (None, pg.group_name) else []
    )
    SelfCheck(FakeJournal(), FakeGroups(group), lambda group: None).add(group, pg)
    assert not pg.hooks and group.dispatched is None
