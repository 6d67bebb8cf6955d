"""Stage 3 with unusual models, compared with DeepSpeed 0.19.8: equal messages and equal losses.

tests/golden/stage3_models.json was written by DeepSpeed. A phase has the messages of one forward pass,
backward pass or step, in order, as ``name elements-in elements-out``. The second number is omitted if it
equals the first.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

import zero_runtime
from support import unusual_models as models
from support.process_group_log import logged
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "stage3_models.json").read_text())
CASES = GOLDEN["cases"]
NAMES = {
    "all_gather_single": "gather",
    "reduce_scatter_single": "scatter",
    "allreduce": "reduce",
    "broadcast": "broadcast",
    "barrier": "barrier",
}


@functools.cache
def outcomes(names):
    return run_ranks(2, lambda rank, world: {name: train(CASES[name], rank) for name in names}, timeout=200)


def train(case, rank):
    model = models.make(case["model"])
    if case["model"] == "Hidden":
        zero_runtime.zero.register_external_parameter(model, model.first.weight)
    if case["model"] == "Experts":
        zero_runtime.zero.set_z3_leaf_modules(model, [models.Experts.Mixture])
    zero = {**GOLDEN["config"]["zero_optimization"], **case["zero"], "reduce_scatter_impl": "native"}
    config = {
        **GOLDEN["config"],
        "zero_optimization": zero,
        "gradient_accumulation_steps": case["micro_batches"],
    }
    losses = []
    with logged() as log:
        engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
        for step in range(4):
            for micro in range(case["micro_batches"]):
                log.at("forward", step, micro)
                batches = [
                    models.batch(10 * step + micro + at, rank) for at in range(getattr(model, "passes", 1))
                ]
                loss = sum(engine(each) for each in batches)
                log.at("backward")
                engine.backward(loss)
                log.at("step")
                engine.step()
                losses.append(loss.item())
    phases = {}
    for call in log.calls:
        sizes = dict.fromkeys(str(size) for size in (call.numel_in, call.numel_out))
        words = [NAMES[call.method], *(sizes if call.method != "barrier" else ())]
        phases.setdefault(f"{call.step}.{call.micro} {call.phase}", []).append(" ".join(words))
    return losses, {name: ", ".join(messages) for name, messages in phases.items()}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_model(cases_that_run, name):
    for rank, each in enumerate(outcomes(cases_that_run)):
        losses, phases = each[name]
        assert phases == CASES[name]["calls"]
        torch.testing.assert_close(losses, CASES[name]["losses"][rank], rtol=1e-6, atol=0.0)
