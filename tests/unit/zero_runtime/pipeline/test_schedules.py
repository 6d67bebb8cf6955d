"""Test the schedules of pipelines. Every schedule is simulated and counted."""

from __future__ import annotations

import itertools
import json

import pytest

from support import recorded
from zero_runtime.errors import ConfigError, UsageError
from zero_runtime.pipeline.schedule import pipeline_schedules
from zero_runtime.pipeline.schedule.instructions import COMPUTATIONS, RECEIVES, SENDS, Action, Instruction
from zero_runtime.pipeline.schedule.schedule_simulation import simulate
from zero_runtime.pipeline.schedule.step_plan import Plan

SIZES = [(stages, micro_batches) for stages in range(1, 6) for micro_batches in range(1, 9)]
FUNCTIONS = {
    "1f1b": pipeline_schedules.one_f_one_b,
    "gpipe": pipeline_schedules.gpipe,
    "zero_bubble": pipeline_schedules.zero_bubble,
}
# The names of the instructions in a step of DeepSpeed's schedule.
THEIRS = {
    Action.LOAD: "LoadMicroBatch",
    Action.FORWARD: "ForwardPass",
    Action.BACKWARD: "BackwardPass",
    Action.SEND_ACTIVATION: "SendActivation",
    Action.RECEIVE_ACTIVATION: "RecvActivation",
    Action.SEND_GRADIENT: "SendGrad",
    Action.RECEIVE_GRADIENT: "RecvGrad",
}


def of_all_stages(function, stages, micro_batches, *more):
    return [function(stages, micro_batches, stage, *more) for stage in range(stages)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_micro_batch_once_and_messages_in_pairs(name):
    for stages, micro_batches in SIZES:
        check_pairs(name, stages, micro_batches)


def check_pairs(name, stages, micro_batches):
    found = of_all_stages(FUNCTIONS[name], stages, micro_batches)
    # The simulation raises an error for a deadlock, for a remaining message, or for a message out of order.
    simulate(found)
    for stage, schedule in enumerate(found):
        actions = [each for step in schedule for each in step]
        backward = Action.BACKWARD_INPUT if name == "zero_bubble" else Action.BACKWARD
        kinds = [Action.FORWARD, backward] + [Action.BACKWARD_WEIGHT] * (name == "zero_bubble")
        for kind in kinds:
            assert sorted(each.micro_batch for each in actions if each.action is kind) == list(
                range(micro_batches)
            )
        boundaries = (stage > 0) + (stage < stages - 1)
        assert sum(each.action in SENDS for each in actions) == boundaries * micro_batches
        assert sum(each.action in RECEIVES for each in actions) == boundaries * micro_batches


@pytest.mark.parametrize("name", [*FUNCTIONS, "interleaved"])
def test_blocking_messages_do_not_deadlock(name):
    """Blocking messages do not increase the idle time, unless one part of a rank waits for another part.

    In that case the engine only starts the messages, without blocking.
    """
    for stages, micro_batches in SIZES:
        plan = Plan(name, stages, 2 if name == "interleaved" else 1)
        if stages == 1 or (name == "interleaved" and micro_batches % stages):
            continue
        timeline = simulate(
            [plan.training(micro_batches, stage) for stage in range(stages)],
            chunks=plan.chunks,
            blocking=True,
        )
        if name != "interleaved":
            assert timeline.idle_fraction == pytest.approx(plan.idle_fraction(micro_batches))


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_idle_share_is_the_formula(name, backward):
    times = {Action.FORWARD: 1.0, Action.BACKWARD: backward}
    for stages, micro_batches in SIZES:
        timeline = simulate(of_all_stages(FUNCTIONS[name], stages, micro_batches), times)
        assert timeline.idle_fraction == pytest.approx(
            pipeline_schedules.idle_fraction(stages, micro_batches)
        )


def test_evaluation_over_virtual_stages():
    for stages, micro_batches in SIZES:
        for chunks in (1, 2, 3):
            found = of_all_stages(pipeline_schedules.interleaved_inference, stages, micro_batches, chunks)
            timeline = simulate(found, chunks=chunks, blocking=stages > 1)
            assert timeline.busy(0) == chunks * micro_batches


def test_peaks_of_live_activations():
    for stages, micro_batches in SIZES:
        one = simulate(of_all_stages(pipeline_schedules.one_f_one_b, stages, micro_batches))
        assert list(one.peaks) == [
            pipeline_schedules.live_activations(stages, micro_batches, stage) for stage in range(stages)
        ]
        assert (
            simulate(of_all_stages(pipeline_schedules.gpipe, stages, micro_batches)).peaks
            == (micro_batches,) * stages
        )
        assert (
            simulate(of_all_stages(pipeline_schedules.zero_bubble, stages, micro_batches)).peaks == one.peaks
        )


def test_zero_bubble_is_the_formula_of_its_paper():
    for stages, micro_batches in SIZES:
        if micro_batches >= stages:
            times = dict.fromkeys(COMPUTATIONS, 1.0)
            timeline = simulate(of_all_stages(pipeline_schedules.zero_bubble, stages, micro_batches), times)
            wanted = pipeline_schedules.zero_bubble_idle_fraction(stages, micro_batches, 1.0, 1.0, 1.0)
            assert timeline.idle_fraction == pytest.approx(wanted)
            assert Plan("zero_bubble", stages).idle_fraction(micro_batches) == wanted
            assert wanted < pipeline_schedules.idle_fraction(stages, micro_batches) or stages == 1


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_interleaved(stages, chunks):
    for micro_batches in (stages, 2 * stages, 4 * stages):
        found = of_all_stages(pipeline_schedules.interleaved, stages, micro_batches, chunks)
        timeline = simulate(found, chunks=chunks)
        for backward in (1.0, 2.0, 3.0):
            times = {Action.FORWARD: 1.0, Action.BACKWARD: backward}
            idle = simulate(found, times, chunks).idle_fraction
            assert idle == pytest.approx(pipeline_schedules.idle_fraction(stages, micro_batches, chunks))
        everything = list(itertools.product(range(micro_batches), range(chunks)))
        for rank, schedule in enumerate(found):
            for kind in (Action.FORWARD, Action.BACKWARD):
                mine = [
                    (each.micro_batch, each.chunk)
                    for step in schedule
                    for each in step
                    if each.action is kind
                ]
                assert sorted(mine) == everything
            most = (chunks - 1) * stages + 2 * (stages - rank - 1) + 1
            assert timeline.peaks[rank] == min(most, micro_batches * chunks)


def test_a_printed_timeline():
    shown = str(simulate(of_all_stages(pipeline_schedules.one_f_one_b, 2, 3)))
    print(shown)
    assert shown.splitlines() == [
        "F0  F1  .   B0  F2  B1  .   B2",
        ".   F0  B0  F1  B1  F2  B2  .",
    ]
    zero = str(simulate(of_all_stages(pipeline_schedules.zero_bubble, 2, 2)))
    print(zero)
    assert zero.splitlines() == ["F0  F1  .   B0  W0  B1  W1", ".   F0  B0  F1  B1  W0  W1"]
    chunked = str(simulate(of_all_stages(pipeline_schedules.interleaved, 2, 2, 2), chunks=2))
    print(chunked)
    assert chunked.splitlines()[0].startswith("F0  F1  F0' F1'")


def test_inference():
    for stages, micro_batches in SIZES:
        found = of_all_stages(pipeline_schedules.inference, stages, micro_batches)
        for blocking in (False, True):
            timeline = simulate(found, blocking=blocking)
            assert timeline.length == micro_batches + stages - 1


def test_a_deadlock_is_found():
    send, receive = Instruction(Action.SEND_ACTIVATION, 0), Instruction(Action.RECEIVE_GRADIENT, 0)
    first, last = (
        ((receive, send),),
        ((Instruction(Action.RECEIVE_ACTIVATION, 0), Instruction(Action.SEND_GRADIENT, 0)),),
    )
    with pytest.raises(UsageError, match="deadlock: rank 0 at receive_gradient"):
        simulate([first, last], blocking=True)
    with pytest.raises(UsageError, match="never receives"):
        simulate([((send,),), ()])


@pytest.mark.parametrize(
    "arguments", [(0, 1, 0), (2, 0, 0), (2, 2, 2), (2, 2, -1)], ids=lambda arguments: str(arguments)
)
def test_impossible_numbers(arguments):
    for function in (*FUNCTIONS.values(), pipeline_schedules.inference, pipeline_schedules.interleaved):
        with pytest.raises(ConfigError, match="no schedule"):
            function(*arguments)


def test_interleaving_needs_a_multiple_of_the_ranks():
    with pytest.raises(ConfigError, match="5 micro-batches and 2 chunks on 2 ranks"):
        pipeline_schedules.interleaved(2, 5, 0)


@pytest.mark.skipif(not recorded.ROOT.is_dir(), reason=recorded.MISSING)
def test_one_f_one_b_is_deepspeeds():
    """The expected instructions are recorded from DeepSpeed.

    Micro-batches are in buffers, and a stage has at least two buffers.
    """
    checked = 0
    for case in recorded.all_cases():
        recorded_steps = case.results.get("extra_rank0", {}).get("train_schedule")
        if not recorded_steps:
            continue
        stages, micro_batches = len(recorded_steps), case.config["gradient_accumulation_steps"]
        for stage in range(stages):
            buffers = max(2, min(stages - stage, micro_batches))
            mine = [
                [f"{THEIRS[each.action]}({each.micro_batch % buffers})" for each in step]
                for step in pipeline_schedules.one_f_one_b(stages, micro_batches, stage)
            ]
            mine[-1] += ["ReduceTiedGrads()", "ReduceGrads()", "OptimizerStep()"]
            assert mine == recorded_steps[str(stage)], json.dumps([case.name, stage])
            checked += 1
    assert checked >= 15
