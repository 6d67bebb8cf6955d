"""Steps of fully_shard whose parameters stay gathered, on programs made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from commprof.errors import UsageError
from commprof.prediction.program import Event, Message, Program, Step
from commprof.prediction.resharding import KEY, gathered_again, kept_bytes, with_resharding

WORLD = ((0, 1, 2, 3),)


def gather(size, phase):
    return Message("all_gather", size, "parameter_gather", WORLD, False, None, 0, phase)


def scatter(size):
    return Message("reduce_scatter", size, "gradient_reduce", WORLD, False, None, 0, "backward")


MESSAGES = (
    gather(400, "forward"),
    gather(800, "forward"),
    gather(800, "backward"),
    scatter(800),
    scatter(400),
)
EVENTS = tuple(
    Event(kind, number)
    for kind, number in (
        *(("issue", 0), ("wait", 0), ("issue", 1), ("wait", 1)),
        *(("issue", 2), ("wait", 2), ("issue", 3), ("issue", 4), ("wait", 3), ("wait", 4)),
    )
)


def step():
    spans = np.arange(1, 12, dtype=float)[:, None] * np.array([[1.0, 10.0]])
    return Step(spans, np.arange(5, dtype=float)[:, None] * np.ones((1, 2)), True)


def test_gathers_of_the_backward_pass_go_and_compute_stays():
    program = Program(MESSAGES, EVENTS)
    changed = with_resharding(program, [step()], {KEY: False})
    assert [(each.op, each.payload_bytes, each.phase) for each in changed.program.messages] == [
        ("all_gather", 400, "forward"),
        ("all_gather", 800, "forward"),
        ("reduce_scatter", 800, "backward"),
        ("reduce_scatter", 400, "backward"),
    ]
    assert changed.program.events == tuple(
        Event(kind, number)
        for kind, number in (
            *(("issue", 0), ("wait", 0), ("issue", 1), ("wait", 1)),
            *(("issue", 2), ("issue", 3), ("wait", 2), ("wait", 3)),
        )
    )
    (new,) = changed.steps
    # The spans before the two events that are gone, 5 and 6, precede the next event now, whose own is 7.
    assert new.spans[:, 0].tolist() == [1, 2, 3, 4, 18, 8, 9, 10, 11]
    assert new.spans[:, 1].tolist() == [10, 20, 30, 40, 180, 80, 90, 100, 110]
    assert new.calls[:, 0].tolist() == [0, 1, 3, 4] and new.follows


def test_what_follows_the_last_message_stays_at_the_end():
    program = Program(MESSAGES[:3], EVENTS[:6])
    changed = with_resharding(
        program, [step()._replace(spans=np.ones((7, 2)), calls=np.ones((3, 2)))], {KEY: False}
    )
    assert changed.steps[0].spans[:, 0].tolist() == [1, 1, 1, 1, 3]


def test_each_rank_keeps_the_shards_of_the_others():
    assert kept_bytes(Program(MESSAGES, EVENTS)) == 600  # three quarters of 800 bytes
    assert gathered_again(Program(MESSAGES, EVENTS)) == [2]


def test_true_is_what_was_recorded_or_not_known():
    program = Program(MESSAGES, EVENTS)
    assert with_resharding(program, [step()], {KEY: True}).program is program
    kept = with_resharding(program, [step()], {KEY: False})
    with pytest.raises(UsageError, match="record a run with true"):
        with_resharding(kept.program, kept.steps, {KEY: True})


@pytest.mark.parametrize("value", [2, "false", None])
def test_other_values_are_refused(value):
    with pytest.raises(UsageError, match="expected true or false"):
        with_resharding(Program(MESSAGES, EVENTS), [step()], {KEY: value})


def test_parameters_gathered_only_in_the_backward_pass_are_not_taken_for_kept():
    only = (gather(400, "forward"), gather(900, "backward"))
    with pytest.raises(UsageError, match="1 all_gather of 900 bytes in the backward pass"):
        with_resharding(Program(only, EVENTS[:4]), [step()], {KEY: False})
