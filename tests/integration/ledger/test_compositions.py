"""``commprof verify`` of runs with sums along the axes of a grid, delayed sums, or signs of optimizer updates.

``python tests/integration/ledger/test_compositions.py`` writes the golden traces again. Review the difference
before committing it.
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

GRID, CUBE = {"communication": {"topology": [2, 2]}}, {"communication": {"topology": [2, 2, 2]}}


def zero(stage, **keys):
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 900, **keys}}


def optimizer(kind, **params):
    return {"optimizer": {"type": kind, "params": {"lr": 1e-3, **params}}}


NATIVE = {"gradient_reduction": "reduce_scatter", "reduce_scatter_impl": "native"}
SIGNS = optimizer("OneBitAdam", freeze_step=2)
ZERO_ONE = optimizer(
    "ZeroOneAdam", var_freeze_step=3, var_update_scaler=1, local_step_scaler=1, local_step_clipper=2
)
# Ranks, steps, and configuration. No length in the model is divisible by four ranks.
QUICK = {
    "chunks along axes": (4, 3, GRID | zero(2, gradient_reduction="reduce_scatter")),
    "late by 1": (2, 4, {"communication": {"bounded_delay": 1}}),
    "signs in two phases, bf16": (3, 4, SIGNS | {"bf16": {"enabled": True}}),
}
# The traces to keep in addition to those of QUICK: for each, the steps that are kept. Only rank 0 is kept.
TRACES = {
    "chunks along axes": ("topology_axes", (-1, 1)),
    "late by 1": ("late_gradients", (-1, 0, 1)),
    "signs in two phases, bf16": ("signs_in_two_phases", (1, 2)),
    "topk": ("compressed_gradients", (0, 1)),
    "whole norms": ("unpartitioned_norms", (-1, 2)),
    "checkpoints": ("partitioned_activations", (-1, 1)),
}
SEEN_ONLY = {
    "topk": (2, 2, zero(2) | {"gradient_compression": {"algorithm": "topk", "warmup_steps": 1}}),
    "whole norms": (
        2,
        4,
        zero(3, zero_force_param_types=["LayerNorm"], stage3_param_persistence_threshold=0),
    ),
    "checkpoints": (2, 2, {"activation_checkpointing": {"partition_activations": True}}),
}
LONG = {
    "axes, stage 2": (4, 2, GRID | zero(2)),
    "signs": (2, 4, SIGNS),
    "axes, stage 0": (4, 2, GRID),
    "axes, stage 1": (4, 2, GRID | zero(1)),
    "axes, whole buckets": (4, 2, GRID | zero(2, reduce_scatter=False)),
    "axes, whole buckets, bf16": (4, 2, GRID | zero(2, reduce_scatter=False) | {"bf16": {"enabled": True}}),
    "axes, native chunks": (4, 2, GRID | zero(2, **NATIVE)),
    "axes, stage 3": (4, 4, GRID | zero(3, stage3_param_persistence_threshold=0)),
    "axes, stage 3, fetched in sums": (
        4,
        4,
        GRID | zero(3, stage3_use_all_reduce_for_fetch_params=True, reduce_scatter=False),
    ),
    "axes, stage 3, native": (4, 4, GRID | zero(3, reduce_scatter_impl="native")),
    "axes, stage 3, quantized": (
        4,
        4,
        GRID | zero(3, zero_quantized_weights=True, zero_quantized_gradients=True),
    ),
    "axes, compressed": (4, 3, GRID | zero(2) | {"gradient_compression": {"algorithm": "topk"}}),
    "any axes": (4, 2, {"communication": {"topology": 2}} | zero(2)),
    "no axes": (3, 2, {"communication": {"topology": 2}} | zero(2)),
    "cube": (8, 2, CUBE | zero(2, gradient_reduction="reduce_scatter")),
    "cube, stage 3": (8, 3, CUBE | zero(3)),
    "late by 1, several micro-batches": (
        3,
        4,
        {"communication": {"bounded_delay": 1}, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}},
    ),
    "signs in two phases": (4, 4, SIGNS),
    "1-bit Lamb": (2, 4, optimizer("OneBitLamb", freeze_step=1)),
    "0/1 Adam": (2, 8, ZERO_ONE),
    "0/1 Adam, bf16": (3, 8, ZERO_ONE | {"bf16": {"enabled": True}, "gradient_clipping": 0.0}),
    "1bit in two phases": (
        4,
        4,
        zero(2) | {"gradient_compression": {"algorithm": "1bit", "two_phase": True, "warmup_steps": 1}},
    ),
    "2bit in two phases": (3, 3, {"gradient_compression": {"algorithm": "2bit", "two_phase": True}}),
}


class OneModel:
    """A wrapper for a model that all ranks share."""

    def get_model_parallel_rank(self):
        import torch.distributed as dist

        return dist.get_rank()

    def get_model_parallel_world_size(self):
        import torch.distributed as dist

        return dist.get_world_size()

    def get_model_parallel_group(self):
        import torch.distributed as dist

        return dist.group.WORLD


def train(rank, world, config, steps):
    import torch

    import zero_runtime
    from zero_runtime import checkpointing

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 70), torch.nn.ReLU(), torch.nn.Linear(70, 3))
    if "zero_force_param_types" in config.get("zero_optimization", {}):
        model.append(torch.nn.LayerNorm(3))
    if "activation_checkpointing" in config:
        checkpointing.configure(OneModel(), deepspeed_config=config)
        plain = model.forward
        model.forward = lambda values: checkpointing.checkpoint(plain, values)
    config = {"train_micro_batch_size_per_gpu": 2, **optimizer("AdamW"), **config}
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    kind = next(model.parameters()).dtype
    for _ in range(steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.randn(2, 33, dtype=kind)).square().mean())
        engine.step()
    engine.destroy()


@functools.cache
def recorded(name):
    """Return the run and its verdict."""
    world, steps, config = {**QUICK, **LONG, **SEEN_ONLY}[name]
    run, _ = record(Path(tempfile.mkdtemp()) / "run", world, train, config, steps)
    return run, verify(run)


@pytest.mark.sampled
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_every_byte_is_explained(name):
    verdict = recorded(name)[1]
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict.sentences
    assert verdict.issued_bytes == verdict.explained_bytes + verdict.labelled_bytes > 0


CHANGED = "2"  # a step in which signs are sent


def without_one(row):
    """Remove a record of the first rank of each group in one step.

    The records are those of gradient_reduce whose operation is send or all_to_all.
    """
    gone = row["purpose"] == "gradient_reduce" and row["op"] in ("send", "all_to_all")
    return [] if gone and str(row["step"]) == CHANGED and row["group_rank"] == 0 else [row]


def longer(row):
    sent = row["purpose"] == "gradient_reduce" and row["payload_bytes"] and str(row["step"]) == CHANGED
    return [row | {"payload_bytes": row["payload_bytes"] + 8}] if sent else [row]


@pytest.mark.sampled
@pytest.mark.parametrize("change", [without_one, longer])
@pytest.mark.parametrize("name", QUICK)
def test_what_is_not_as_the_config_asks_is_named(name, change):
    run, _ = recorded(name)
    verdict = verify(Changed(run, change))
    assert str(verdict.state) == "mismatch"
    named = [each for each in verdict.unexplained if each.purpose == "gradient_reduce"]
    assert verdict.disagreements or {each.steps for each in named} == {CHANGED}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name in ("topk", "whole norms"))) for name in TRACES],
)
def test_what_is_sent_is_what_was_sent(name):
    trace, steps = TRACES[name]
    assert messages(recorded(name)[0], steps) == kept(trace)


if __name__ == "__main__":
    for case, (trace, steps) in TRACES.items():
        keep(trace, messages(recorded(case)[0], steps))
