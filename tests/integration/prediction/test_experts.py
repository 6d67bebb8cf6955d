"""``commprof predict`` for other settings of experts.

The predicted messages must equal those of a run with that setting.
"""

from __future__ import annotations

import copy
import functools
import importlib
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from commprof.errors import UsageError
from commprof.ledger.requests.request import request_of
from commprof.ledger.verification import verify
from commprof.prediction import predictions
from commprof.prediction.recorded import LEAST_STEPS, recorded_steps
from support import expert_cases
from support.recording import record

pytestmark = pytest.mark.ranks

WORLD, STEPS = 4, 1 + LEAST_STEPS  # the first step is a warm-up
CASE = "gpt_s2_ep2_w4_small"


def train(rank, world, layer, stage, name, autocast=False):
    import torch

    import zero_runtime

    zero_runtime.as_deepspeed()
    case = copy.deepcopy(expert_cases.CASES[name])
    case["layers"][0].update(layer)
    case["config"]["zero_optimization"]["stage"] = stage
    engine = expert_cases.make_engine(case, rank)
    for step in range(STEPS):
        for micro in range(case["config"].get("gradient_accumulation_steps", 1)):
            batch = expert_cases.make_batch(case, step, micro, rank)
            torch.manual_seed(10 * step + micro)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = engine(*batch)
            engine.backward(loss)
            engine.step()


@functools.cache
def import_names_of_deepspeed():
    """Import in this process the modules that each rank would otherwise import for itself."""
    import zero_runtime
    from zero_runtime.deepspeed_names.finder import uninstall

    zero_runtime.as_deepspeed()
    try:
        importlib.import_module("deepspeed.moe.layer")
        importlib.import_module("deepspeed.moe.utils")
    finally:
        uninstall()


@functools.cache
def recorded_with(ep_size, capacity_factor=1.0, stage=2, case=CASE, autocast=False, **layer):
    import_names_of_deepspeed()
    folder = Path(tempfile.mkdtemp())
    layer = {"ep_size": ep_size, "capacity_factor": capacity_factor, **layer}
    return record(folder / "run", WORLD, train, layer, stage, case, autocast)[0]


def messages(program):
    """Count the messages by purpose, operation, groups and bytes, without regard to their order."""
    return Counter(
        (each.purpose, each.op, each.groups, each.sizes or each.payload_bytes)
        for each in program.messages
        if len(each.groups[0]) > 1
    )


def exchanges(program):
    """Return the messages of tokens in their order."""
    return [
        (each.module, each.phase, each.op, each.micro_step)
        for each in program.messages
        if each.module is not None and len(each.groups[0]) > 1
    ]


def predicted(run, setting):
    """Return the predicted program of ``run`` with ``setting``, without any times."""
    recorded = recorded_steps(run)
    base = predictions.Base(recorded, request_of(run), {}, None, recorded.steps, None, None, predictions.CPUS)
    config = dict(base.request.config)
    return predictions._changed(base, setting, config, WORLD, predictions.Assumed())


def compare(run, setting, same):
    changed, program = predicted(run, setting), recorded_steps(same).program
    assert messages(changed.program) == messages(program)
    assert exchanges(changed.program) == exchanges(program)
    assert all(each.spans.shape == (len(changed.program.events) + 1, WORLD) for each in changed.steps)
    assert all(np.isfinite(each.spans).all() and (each.spans >= 0).all() for each in changed.steps)
    return changed.assumed


@pytest.mark.parametrize(
    ("ep_size", "setting", "other"),
    [
        (2, {"experts.ep_size": 4, "experts.capacity_factor": 2.0}, (4, 2.0)),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (1, {"experts.ep_size": 4}, (4,)),
                (2, {"experts.ep_size": 4}, (4,)),
                (2, {"experts.capacity_factor": 2.0}, (2, 2.0)),
                (2, {"experts.ep_size": 1}, (1,)),
                (1, {"experts.ep_size": 2}, (2,)),
                (4, {"experts.ep_size": 1}, (1,)),
                (4, {"experts.ep_size": 2}, (2,)),
            )
        ),
    ],
)
def test_the_messages_are_those_of_a_run_with_that_setting(ep_size, setting, other):
    assumed = compare(recorded_with(ep_size), setting, recorded_with(*other))
    assert ("capacity" in str(setting)) == any("between its two all_to_alls" in text for text in assumed)
    assert (ep_size == 1) == any("the run (ep_size 1) does not show" in text for text in assumed)


def test_tokens_and_results_keep_the_types_that_autocast_gave_them():
    run, same = (recorded_with(each, autocast=True) for each in (2, 4))
    compare(run, {"experts.ep_size": 4}, same)
    sizes = {each.payload_bytes for each in recorded_steps(same).program.messages if each.op == "all_to_all"}
    assert len(sizes) == 2 and max(sizes) == 2 * min(sizes)  # fp32 and bf16
    assert verify(run).state == "closed"


@pytest.mark.long
@pytest.mark.parametrize(("ep_size", "other"), [(2, 4), (1, 2), (2, 1), (4, 2), (1, 4), (4, 1)])
def test_without_dropping_the_bytes_are_those_of_the_fullest_expert(ep_size, other):
    run, same = (recorded_with(each, drop_tokens=False) for each in (ep_size, other))
    assumed = compare(run, {"experts.ep_size": other}, same)
    assert (other == 1) == (not any("by the recorded loads" in text for text in assumed))
    sizes = {len(set(each.sizes)) for each in recorded_steps(same).program.messages if each.sizes}
    assert other == 1 or max(sizes) > 1  # the steps send different numbers of bytes


def test_without_dropping_a_run_is_replayed_and_predicted(monkeypatch):
    # The ranks of tests share processors, so the replay may differ from the run by more than predict accepts.
    monkeypatch.setattr(predictions, "REFUSED_ERROR", float("inf"))
    answer = predictions.predict(
        recorded_with(2, drop_tokens=False),
        [({}, None), ({"experts.ep_size": 1}, None), ({"experts.capacity_factor": 2.0}, None)],
    )
    same, one, factor = answer.settings
    assert factor.median_ns == same.median_ns and "experts.capacity_factor changes nothing" in str(factor.why)
    assert one.median_ns > 0 and one.messages < same.messages


@pytest.mark.long
@pytest.mark.parametrize(("ep_size", "other"), [(1, 2), (2, 1), (2, 4)])
@pytest.mark.parametrize(
    "case", ["gpt_s2_ep2_w4_recomputed", "gpt_s1_ep2_w4_twice", "gpt_s0_ep2_w4", "gpt_s2_ep2_w4_data_first"]
)
def test_repeated_passes_several_micro_batches_and_other_groups(case, ep_size, other):
    run, same = (
        recorded_with(each, stage=int(case[5]), case=case, drop_tokens=False) for each in (ep_size, other)
    )
    compare(run, {"experts.ep_size": other}, same)


def test_more_slots_take_longer_to_compute():
    recorded = recorded_steps(recorded_with(2))
    spans = [
        sum(each.spans.sum() for each in steps)
        for steps in (recorded.steps, predicted(recorded_with(2), {"experts.capacity_factor": 4.0}).steps)
    ]
    assert spans[1] > spans[0]


def test_a_recorded_run_of_zero_runtime_closes():
    verdict = verify(recorded_with(2))
    assert verdict.state == "closed" and verdict.explained_bytes == verdict.issued_bytes, verdict.sentences
    factors = "1.50 instead of 0.75 of the gradient bytes on the wire per rank at n = 4, 1.00 instead of 0.50 in groups of 2"
    assert any(factors in each for each in verdict.sentences), verdict.sentences


@pytest.mark.long
def test_a_run_whose_neighbors_have_the_same_experts_closes():
    assert verify(recorded_with(2, case="gpt_s2_ep2_w4_data_first")).state == "closed"


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"experts.ep_size": 3}, "expected a number that divides the 4 ranks and the 4 experts"),
        ({"experts.capacity_factor": 0}, "expected a number above 0"),
        ({"experts.k": 2}, "experts.k cannot be predicted"),
    ],
)
def test_what_cannot_be_predicted_is_said(setting, text):
    with pytest.raises(UsageError, match=text):
        predicted(recorded_with(2), setting)


@pytest.mark.long
def test_another_capacity_of_experts_of_one_rank_is_refused():
    with pytest.raises(UsageError, match="the run does not show how long the experts"):
        predicted(recorded_with(1), {"experts.capacity_factor": 2.0})
