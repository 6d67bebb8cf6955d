"""Test steps with known results.

The cases are a chain, a diamond, a straggler, two groups on one link, and compute that overlaps with a
message.
"""

from __future__ import annotations

import numpy as np
import pytest

from commprof.prediction.program import Event, Message, Program, Step
from commprof.prediction.schedule import critical_path, play

ALL = ((0, 1),)


def message(purpose="gradient_reduce", groups=ALL, blocks=False, size=8):
    return Message("all_reduce", size, purpose, groups, blocks)


def program(messages, *events):
    return Program(tuple(messages), tuple(Event(kind, number) for kind, number in events))


def step(*spans, calls=None, follows=True):
    """Return a step from the spans of each rank before each event and after the last event."""
    rows = np.array(spans, float)
    messages = 8 if calls is None else len(calls)
    return Step(
        rows, np.zeros((messages, rows.shape[1])) if calls is None else np.array(calls, float), follows
    )


def durations(*each, ranks=2):
    return np.repeat(np.array(each, float)[:, None], ranks, axis=1)


def run(program, step, times, slowdown=1.0, ranks=2):
    return play(program, step, times, np.zeros(ranks), {}, slowdown)


def test_a_chain_of_blocking_messages_adds_up():
    two = program([message(blocks=True)] * 2, ("issue", 0), ("wait", 0), ("issue", 1), ("wait", 1))
    played = run(two, step([5, 5], [0, 0], [3, 3], [0, 0], [2, 2]), durations(10, 20))
    assert played.ends.tolist() == [40, 40]
    assert played.exposed.tolist() == [[10, 10], [20, 20]]


def test_of_a_diamond_the_longer_branch_decides():
    # Both ranks issue a message, compute during the message, and then wait.
    diamond = program([message()], ("issue", 0), ("wait", 0))
    hidden = run(diamond, step([4, 4], [30, 6], [1, 1]), durations(10))
    assert hidden.ends.tolist() == [35, 15]
    assert hidden.exposed.tolist() == [[0, 4]]


def test_a_straggler_makes_the_others_wait():
    one = program([message(blocks=True)], ("issue", 0), ("wait", 0))
    played = run(one, step([5, 50], [0, 0], [1, 1]), durations(10))
    assert played.ends.tolist() == [61, 61]
    assert played.exposed.tolist() == [[55, 10]]
    path = critical_path(one, step([5, 50], [0, 0], [1, 1]), played)
    assert path == {("compute", 1): 50, ("gradient_reduce", 0): 10, ("compute", 0): 1}


def test_messages_of_one_group_queue():
    queue = program([message(), message()], ("issue", 0), ("issue", 1), ("wait", 0), ("wait", 1))
    played = run(queue, step([0, 0], [1, 1], [0, 0], [0, 0], [0, 0]), durations(10, 10))
    assert played.starts[:, 0].tolist() == [0, 10]
    assert played.ends.tolist() == [20, 20]
    assert critical_path(queue, step(*[[0, 0]] * 5), played)["gradient_reduce", 0] == 20


def test_a_message_waits_for_the_one_that_the_step_before_left():
    one = program([message()], ("issue", 0), ("wait", 0))
    played = play(one, step([0, 0], [0, 0], [0, 0]), durations(10), np.zeros(2), {ALL: np.full(2, 7.0)})
    assert played.ends.tolist() == [17, 17]


def test_two_groups_share_a_link():
    others = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    both = program(
        [message(groups=each) for each in others], ("issue", 0), ("issue", 1), ("wait", 0), ("wait", 1)
    )
    played = run(both, step(*[[0] * 4] * 5), durations(10, 10, ranks=4), ranks=4)
    assert played.finishes.tolist() == [[20] * 4] * 2
    shifted = run(both, step([0] * 4, [6] * 4, *[[0] * 4] * 3), durations(10, 2, ranks=4), ranks=4)
    # 4 of the first message remain when the second begins. The second takes twice its 2, and the first 2
    # longer.
    assert shifted.finishes[:, 0].tolist() == [12, 10]


def test_compute_beside_a_message_is_slower():
    one = program([message()], ("issue", 0), ("wait", 0))
    played = run(one, step([0, 0], [20, 20], [0, 0]), durations(9), slowdown=1.5)
    # The 9 ns during the message do 6 ns of work, and 14 ns remain.
    assert played.ends.tolist() == [23, 23]
    assert played.overlapped.tolist() == [[0, 0], [9, 9], [0, 0]]


def test_groups_wait_for_their_own_ranks_only():
    pairs = program([message(groups=((0, 1), (2, 3)), blocks=True)], ("issue", 0), ("wait", 0))
    played = run(pairs, step([1, 9, 2, 3], [0] * 4, [0] * 4), durations(10, ranks=4), ranks=4)
    assert played.ends.tolist() == [19, 19, 13, 13]


@pytest.mark.parametrize("seed", range(5))
def test_the_critical_path_is_as_long_as_the_step(seed):
    random = np.random.default_rng(seed)
    messages = [message(purpose) for purpose in ("gradient_reduce", "gradient_norm", "parameter_gather") * 3]
    events, flying = [], []
    for number in range(len(messages)):
        events.append(("issue", number))
        flying.append(number)
        while flying and random.random() < 0.6:
            events.append(("wait", flying.pop(0)))
    events += [("wait", number) for number in flying]
    whole = program(messages, *events)
    spans = step(*random.integers(0, 50, (len(events) + 1, 2)), calls=np.zeros((len(messages), 2)))
    played = run(whole, spans, durations(*random.integers(1, 40, len(messages))))
    assert sum(critical_path(whole, spans, played).values()) == pytest.approx(played.ends.max(), abs=2)
