"""``commprof predict`` for other settings of experts: the predicted messages are those of a run with that setting."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from commprof.errors import UsageError
from commprof.ledger.requests.request import request_of
from commprof.ledger.verification import verify
from commprof.prediction import predictions
from commprof.prediction.recorded import recorded_steps
from support import expert_cases
from support.recording import record

pytestmark = pytest.mark.ranks

WORLD, STEPS = 4, 9
CASE = "gpt_s2_ep2_w4_small"


def train(rank, world, layer, stage):
    import torch

    import zero_runtime

    zero_runtime.as_deepspeed()
    case = copy.deepcopy(expert_cases.CASES[CASE])
    case["layers"][0].update(layer)
    case["config"]["zero_optimization"]["stage"] = stage
    engine = expert_cases.make_engine(case, rank)
    for step in range(STEPS):
        batch = expert_cases.make_batch(case, step, 0, rank)
        torch.manual_seed(step)
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()


@functools.cache
def recorded_with(ep_size, capacity_factor=1.0, stage=2):
    folder = Path(tempfile.mkdtemp())
    layer = {"ep_size": ep_size, "capacity_factor": capacity_factor}
    return record(folder / "run", WORLD, train, layer, stage)[0]


def messages(program):
    """Purpose, operation, groups and bytes of the messages, however they follow each other."""
    return Counter(
        (each.purpose, each.op, each.groups, each.payload_bytes)
        for each in program.messages
        if len(each.groups[0]) > 1
    )


def predicted(run, setting):
    """The program of ``run`` with ``setting``; no time is looked at."""
    recorded = recorded_steps(run)
    base = predictions.Base(recorded, request_of(run), {}, None, recorded.steps, None, None, predictions.CPUS)
    config = dict(base.request.config)
    return predictions._changed(base, setting, config, WORLD, predictions.Assumed())


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("setting", "other"),
    [
        ({"experts.ep_size": 4}, (4,)),
        ({"experts.capacity_factor": 2.0}, (2, 2.0)),
        ({"experts.ep_size": 1}, (1,)),
        ({"experts.ep_size": 4, "experts.capacity_factor": 2.0}, (4, 2.0)),
    ],
)
def test_the_messages_are_those_of_a_run_with_that_setting(setting, other):
    run, same = recorded_with(2), recorded_with(*other)
    changed = predicted(run, setting)
    assert messages(changed.program) == messages(recorded_steps(same).program)
    steps = changed.steps
    assert all(each.spans.shape == (len(changed.program.events) + 1, WORLD) for each in steps)
    assert ("capacity" in str(setting)) == any(
        "between the two all_to_alls" in text for text in changed.assumed
    )


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
def test_where_no_tokens_were_exchanged_other_sizes_are_refused():
    with pytest.raises(UsageError, match="record a run with ep_size 2 or more"):
        predicted(recorded_with(1), {"experts.ep_size": 2})
