"""Test changed settings of torch's wrappers on hand-made programs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from commprof.errors import UsageError
from commprof.prediction.event_places import Assumed
from commprof.prediction.program import Event, Message, Program, Step
from commprof.prediction.wrapper_settings import (
    KEY,
    gathered_again,
    kept_bytes,
    refuse_unpredictable,
    with_resharding,
    without_effect,
)
from commprof.requested.wrappers.arguments import Tensor, Wrapper
from commprof.requested.wrappers.ddp import Ddp
from commprof.requested.wrappers.fully_shard import FullyShard

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
        ("issue", 0),
        ("wait", 0),
        ("issue", 1),
        ("wait", 1),
        ("issue", 2),
        ("wait", 2),
        ("issue", 3),
        ("issue", 4),
        ("wait", 3),
        ("wait", 4),
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
            ("issue", 0),
            ("wait", 0),
            ("issue", 1),
            ("wait", 1),
            ("issue", 2),
            ("issue", 3),
            ("wait", 2),
            ("wait", 3),
        )
    )
    (new,) = changed.steps
    # Two events, 5 and 6, are removed. Their spans now precede the next event, whose own span is 7.
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
    assert kept_bytes(Program(MESSAGES, EVENTS)) == 600  # The result is three quarters of 800 bytes.
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


KEPT = {"reshard_after_forward": False}


def unit(number, **arguments):
    weight = Tensor(f"{number}.weight", (10, 10), "float32", True)
    return Wrapper("fully_shard", str(number), (0, 1), (weight,), arguments={**KEPT, **arguments})


def models(*units, passes="F0F1p1b1B1p0b0B0E0"):
    return SimpleNamespace(rules=[FullyShard(units, 0)], last_passes=[passes])


def kept_program():
    """Return a program with two units whose parameters stay gathered. There are 3 ms before each event."""
    pair = ((0, 1),)
    messages = (
        *(Message("all_gather", 400, "parameter_gather", pair, True, None, 0, "forward") for _ in range(2)),
        *(
            Message("reduce_scatter", 400, "gradient_reduce", pair, True, None, 0, "backward")
            for _ in range(2)
        ),
    )
    events = tuple(Event(kind, number) for number in range(4) for kind in ("issue", "wait"))
    return Program(messages, events), Step(np.full((9, 2), 3.0), np.zeros((4, 2)), True)


def test_units_gather_again_before_their_backward_pass():
    program, recorded = kept_program()
    changed = with_resharding(
        program, [recorded], {KEY: True}, models(unit(0), unit(1)), Assumed(copy_ns=0.01)
    )
    # The last unit gathers when its backward pass begins, and then gathers the parameters of the unit before
    # it.
    assert [(each.op, each.phase) for each in changed.program.messages] == [
        *[("all_gather", "forward")] * 2,
        *[("all_gather", "backward")] * 2,
        *[("reduce_scatter", "backward")] * 2,
    ]
    assert changed.program.events == tuple(
        Event(kind, number) for number in range(6) for kind in ("issue", "wait")
    )
    spans = changed.steps[0].spans[:, 0]
    # 400 bytes take 4 ns to fill. A third of the span before the first reduce_scatter is the forward pass.
    assert spans.tolist() == pytest.approx([3, 3, 3, 3, 1, 0, 4, 0, 6, 3, 3, 3, 3])
    assert len(changed.assumed) == 2
    even = with_resharding(
        program, [recorded], {KEY: True}, models(unit(0), unit(1)), Assumed(evenly=True)
    ).steps[0]
    assert even.spans[4:9, 0].tolist() == [1.5, 0, 0, 0, 1.5] and even.spans.sum() == recorded.spans.sum()


def test_units_that_send_something_else_are_refused():
    program, recorded = kept_program()
    with pytest.raises(UsageError, match="the run's messages are not those of its units"):
        with_resharding(program, [recorded], {KEY: True}, models(unit(0), passes="F0p0b0B0E0"))
    with pytest.raises(UsageError, match="gathers that do not block"):
        program = program._replace(messages=tuple(each._replace(blocks=False) for each in program.messages))
        with_resharding(program, [recorded], {KEY: True}, models(unit(0), unit(1)))


def test_arguments_that_change_no_message():
    wrapped = SimpleNamespace(rules=[Ddp(Wrapper("ddp", "", (0, 1), unit(0).parameters, arguments={}))])
    (said,) = without_effect({"ddp.gradient_as_bucket_view": True}, wrapped)
    assert "changes no message" in said and "400 bytes" in said
    assert without_effect({"ddp.bucket_cap_mb": 1}, wrapped) == without_effect({}, wrapped) == []
    with pytest.raises(UsageError, match="expected true or false"):
        without_effect({"ddp.static_graph": 1}, wrapped)
    with pytest.raises(UsageError, match="which this run does not train"):
        without_effect({"ddp.static_graph": True}, None)
    searching = SimpleNamespace(
        rules=[Ddp(Wrapper("ddp", "", (0, 1), (), arguments={"find_unused_parameters": True}))]
    )
    with pytest.raises(UsageError, match="with find_unused_parameters"):
        without_effect({"ddp.static_graph": True}, searching)


@pytest.mark.parametrize("key", ["fsdp.mixed_precision", "fsdp.param_dtype", "ddp.find_unused_parameters"])
def test_what_only_another_run_shows_is_refused(key):
    with pytest.raises(UsageError, match="record a run with it"):
        refuse_unpredictable({key: True})
