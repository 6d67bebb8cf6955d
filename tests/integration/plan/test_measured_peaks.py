"""The peak of a plan, against the most bytes of tensors that real ranks have at once, each storage counted once."""

from __future__ import annotations

import weakref

import pytest

from commprof.plan.models import Model, parameters_of
from commprof.plan.predictions import Job, predict
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

WORLD, STEPS = 2, 3
MICRO_BATCH, SEQUENCE, WIDTH, VOCABULARY, LAYERS = 4, 64, 128, 512, 2
ONE_AT_A_TIME = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


def make_model(recomputes):
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            return x + self.down(self.act(self.up(self.norm(x))))

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
            logits = self.head(self.norm(x)).flatten(0, 1)
            return nn.functional.cross_entropy(logits, tokens.flatten())

    return Network(), torch.zeros(MICRO_BATCH, SEQUENCE, dtype=torch.int64)


def make_config(stage, precision="bf16", micro_batches=1, **zero):
    zero = {"stage": stage, "reduce_bucket_size": 100_000, **zero}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        **({precision: {"enabled": True}} if precision != "fp32" else {}),
    }


CASES = {
    **{f"stage {stage}": (make_config(stage), False) for stage in range(4)},
    **{f"stage {stage}, checkpoints": (make_config(stage), True) for stage in range(4)},
    "stage 1 in fp32": (make_config(1, "fp32"), False),
    "stage 1, accumulation": (make_config(1, micro_batches=2), True),
    "stage 2, offload": (make_config(2, offload_optimizer={"device": "cpu"}), False),
    "stage 3, offload, checkpoints": (make_config(3, offload_optimizer={"device": "cpu"}), True),
    "stage 3 in fp32, one at a time": (make_config(3, "fp32", **ONE_AT_A_TIME), True),
    "stage 2, reduce_scatter": (make_config(2, gradient_reduction="reduce_scatter"), True),
}


def measured_peaks(rank, world):
    """Most bytes of tensors in the last of some steps: of all storages that operations returned and that still exist."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    import zero_runtime

    class Storages(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.alive, self.total, self.most = {}, 0, 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            results = function(*args, **(kwargs or {}))
            for each in tree_leaves(results):
                if isinstance(each, torch.Tensor):
                    self.count(each.untyped_storage())
            return results

        def count(self, storage):
            key, size = storage._cdata, storage.nbytes()
            if key not in self.alive:
                self.alive[key] = weakref.ref(storage, lambda _: self.end(key, size))
                self.total += size
                self.most = max(self.most, self.total)

        def end(self, key, size):
            del self.alive[key]
            self.total -= size

    def train(config, recomputes):
        with Storages() as storages:
            model, tokens = make_model(recomputes)
            engine, *_ = zero_runtime.initialize(
                model=model, model_parameters=model.parameters(), config=config
            )
            for _ in range(STEPS):
                storages.most = storages.total
                for _ in range(config["gradient_accumulation_steps"]):
                    engine.backward(engine(tokens))
                    engine.step()
        engine.destroy()
        return storages.most

    return {name: train(*case) for name, case in CASES.items()}


def planned_peak(config, recomputes):
    import torch

    def build(micro_batch, sequence):
        with torch.device("meta"):
            return make_model(recomputes)

    model = Model(parameters_of(build(0, None)[0]), None, "", build)
    planned = predict(config, Job(model, WORLD, WORLD, "gloo"))
    # On a CPU, the host's memory is the device's.
    return planned.peak.device + sum(each.host for each in planned.memory)


def test_peaks_are_within_five_percent():
    measured = run_ranks(WORLD, measured_peaks)[0]
    errors = {name: planned_peak(*case) / measured[name] - 1 for name, case in CASES.items()}
    assert {name: error for name, error in errors.items() if abs(error) > 0.05} == {}
