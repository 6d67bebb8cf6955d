"""``commprof verify`` of runs in which parameters of chosen classes are never partitioned.

``python tests/integration/ledger/test_partitioned_types.py`` writes the golden traces again. Review the
difference before committing it.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2])]

import pytest

from commprof.ledger.verification import verify
from support.changed_runs import Changed
from support.golden_messages import keep, kept, messages
from support.recording import record

pytestmark = pytest.mark.ranks

NORMS = {"zero_force_param_types": ["LayerNorm"]}
LINEARS = {"zero_allowed_param_types": ["Linear"]}
BOTH = {"zero_force_param_types": ["Head"], "zero_allowed_param_types": ["Linear", "Embedding"]}
SMALL = {"stage3_param_persistence_threshold": 0}


def zero(stage, types, **keys):
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 300, **types, **keys}}


# Ranks and configuration.
CASES = {
    "stage 2": (3, zero(2, LINEARS)),
    "stage 3": (2, zero(3, NORMS, **SMALL)),
    "stage 1": (2, zero(1, LINEARS)),
    "to owners": (2, zero(2, NORMS, use_multi_rank_bucket_allreduce=False, overlap_comm=True)),
    "no chunks": (3, zero(2, NORMS, gradient_reduction="reduce_scatter")),
    "no chunks, native": (
        3,
        zero(1, LINEARS, gradient_reduction="reduce_scatter", reduce_scatter_impl="native"),
    ),
    "no chunks, one owner": (
        2,
        zero(
            2, BOTH, gradient_reduction="reduce_scatter", reduce_scatter_impl="native", reduce_bucket_size=1
        ),
    ),
    "along axes": (
        4,
        zero(2, NORMS, gradient_reduction="reduce_scatter") | {"communication": {"topology": 2}},
    ),
    "all chunks": (
        2,
        zero(2, {"zero_allowed_param_types": ["Module_"]}, gradient_reduction="reduce_scatter"),
    ),
    "several micro-batches": (2, zero(3, BOTH, **SMALL) | {"gradient_accumulation_steps": 2}),
    "stage 3, bf16": (
        3,
        zero(3, LINEARS, stage3_param_persistence_threshold=20) | {"bf16": {"enabled": True}},
    ),
    "stage 3, quantized": (
        2,
        zero(3, NORMS, zero_quantized_weights=True, zero_quantized_gradients=True, **SMALL),
    ),
    "stage 3, checked": (2, zero(3, NORMS, enable_sanity_checks=True, **SMALL)),
    "stage 3, two levels": (4, zero(3, NORMS, zero_hpz_partition_size=2, **SMALL)),
    "stage 0": (2, zero(0, NORMS)),
}
QUICK = ("stage 2",)
QUICK_FIRST = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in CASES]
# The steps that are kept of each trace, from rank 0.
TRACES = {"stage 2": ("unpartitioned_gradients", (-1, 1))}
STEPS = 4


def train(rank, world, config, whole=None):
    """Train a model.

    With ``whole``, the classes in the configuration are replaced, so that other parameters stay unpartitioned
    than the configuration says.
    """
    import torch

    import zero_runtime
    from zero_runtime.optimizer_step.partitioned_types import PartitionedTypes, whole_parameters
    from zero_runtime.sharding import shard_assembly
    from zero_runtime.startup import assembly

    class Module_(torch.nn.Module):  # noqa: N801 - what all modules of the model derive from
        pass

    class Linear(torch.nn.Linear, Module_):
        pass

    class Head(Linear):
        pass

    class Norm(torch.nn.LayerNorm, Module_):
        pass

    class Embedding(torch.nn.Embedding, Module_):
        pass

    if whole is not None:
        for each in (assembly, shard_assembly):
            each.whole_parameters = lambda module, types: whole_parameters(
                module, PartitionedTypes(whole=whole)
            )
    torch.manual_seed(0)
    parts = [Embedding(11, 12), Linear(12, 17), Norm(17), Linear(17, 12), Norm(12)]
    model = torch.nn.Sequential(*parts, Head(12, 11, bias=False))
    model[5].weight = model[0].weight  # the weight belongs to an Embedding and a Head
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **config,
    }
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(STEPS * engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.randint(11, (2, 3))).float().square().mean())
        engine.step()
    engine.destroy()


@functools.cache
def recorded(name, whole=None):
    world, config = CASES[name]
    run, _ = record(Path(tempfile.mkdtemp()) / "run", world, train, config, whole)
    return run


@pytest.mark.parametrize("name", QUICK_FIRST)
def test_every_byte_is_explained(name):
    verdict = verify(recorded(name))
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict.sentences
    assert verdict.issued_bytes == verdict.explained_bytes + verdict.labelled_bytes > 0


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("stage 2", ()),
        pytest.param("stage 2", ("Embedding",), marks=pytest.mark.long),
        pytest.param("stage 3", (), marks=pytest.mark.long),
        pytest.param("stage 3", ("Linear",), marks=pytest.mark.long),
        pytest.param("no chunks", (), marks=pytest.mark.long),
    ],
)
def test_a_run_that_partitions_what_should_stay_whole_is_named(name, whole):
    verdict = verify(recorded(name, whole))
    assert str(verdict.state) == "mismatch"
    assert "gradient_reduce" in {each.purpose for each in verdict.unexplained}


@pytest.mark.parametrize("name", [*QUICK, pytest.param("stage 3", marks=pytest.mark.long)])
def test_a_longer_message_is_named(name):
    def longer(row):
        changed = row["purpose"] == "gradient_reduce" and row["payload_bytes"] and row["step"] == 2
        return [row | {"payload_bytes": row["payload_bytes"] + 8}] if changed else [row]

    verdict = verify(Changed(recorded(name), longer))
    assert str(verdict.state) == "mismatch"
    assert {(each.purpose, each.steps) for each in verdict.unexplained} == {("gradient_reduce", "2")}


@pytest.mark.parametrize("name", TRACES)
def test_what_is_sent_is_what_was_sent(name):
    trace, steps = TRACES[name]
    assert messages(recorded(name), steps) == kept(trace)


if __name__ == "__main__":
    for case, (trace, steps) in TRACES.items():
        keep(trace, messages(recorded(case), steps))
