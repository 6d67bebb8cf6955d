"""Measures the peak bytes of tensors in a training on zero_runtime or on an installed DeepSpeed: two ranks over gloo.

``python -m support.peaks deepspeed`` reads cases from standard input. The interpreter needs only torch and DeepSpeed.
"""

from __future__ import annotations

import importlib
import json
import sys
import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

STEPS = 3
MICRO_BATCH, SEQUENCE, WIDTH, VOCABULARY, LAYERS = 4, 64, 128, 512, 2
EXPERTS = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self, recomputes):
        super().__init__()
        self.recomputes = recomputes
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class ExpertBlock(nn.Module):
    def __init__(self, ep_size, **layer):
        from deepspeed.moe.layer import MoE  # of zero_runtime, if it is installed as deepspeed

        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.moe = MoE(WIDTH, expert, num_experts=EXPERTS, ep_size=ep_size, **layer)

    def forward(self, x):
        samples, length, _ = x.shape
        heads = self.qkv(self.norm(x)).view(samples, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, WIDTH))
        output, gate_loss, _ = self.moe(self.second_norm(x))
        return x + output, gate_loss


class ExpertNetwork(nn.Module):
    """A small GPT with experts in each block."""

    def __init__(self, *layer, **settings):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(ExpertBlock(*layer, **settings) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x, losses = self.embed(tokens), []
        for block in self.blocks:
            x, gate_loss = block(x)
            losses.append(gate_loss)
        loss = nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())
        return loss + 0.01 * sum(losses)


def make_model(kind):
    """Return a network and its tokens.

    Args:
        kind: ``plain``; ``checkpoints`` for activation checkpointing; ``own`` for a network in bf16 with a tied and
            with frozen parameters; or a mapping with the arguments of the expert layers of a GPT.
    """
    if isinstance(kind, dict):
        return ExpertNetwork(**kind), torch.zeros(MICRO_BATCH, SEQUENCE, dtype=torch.int64)
    model = Network(kind == "checkpoints")
    if kind == "own":
        model.bfloat16()
        model.head.weight = model.embed.weight
        model.blocks[0].requires_grad_(False)
    return model, torch.zeros(MICRO_BATCH, SEQUENCE, dtype=torch.int64)


def make_config(stage, precision="bf16", micro_batches=1, **zero):
    zero = {"stage": stage, "reduce_bucket_size": 100_000, **zero}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": micro_batches,
        "zero_optimization": zero,
        **({precision: {"enabled": True}} if precision else {}),
    }


class Storages(TorchDispatchMode):
    """Tracks the bytes of all storages that operations return, until nothing refers to a storage."""

    def __init__(self):
        super().__init__()
        self.alive, self.total, self.most = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for each in tree_leaves(results):
            if isinstance(each, torch.Tensor) and each.device.type != "meta":
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


def most_bytes(runtime, config, kind):
    """Return the peak bytes of tensors in a step of ``runtime``, which is the module zero_runtime or deepspeed.

    The result is the smaller peak of the last two steps. A thread of gloo may keep the tensors of a collective alive
    for some microseconds after the collective, which would increase a single peak.
    """
    peaks = []
    with Storages() as storages:
        model, tokens = make_model(kind)
        trained = [each for each in model.parameters() if each.requires_grad]
        if isinstance(kind, dict):
            groups = importlib.import_module("deepspeed.moe.utils")
            trained = groups.split_params_into_different_moe_groups_for_optimizer(
                {"params": trained, "name": "all"}
            )
        optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
        engine, *_ = runtime.initialize(model=model, optimizer=optimizer, config=config)
        for _ in range(STEPS):
            storages.most = storages.total
            for _ in range(config["gradient_accumulation_steps"]):
                engine.backward(engine(tokens))
                engine.step()
            peaks.append(storages.most)
    engine.destroy()
    return min(peaks[-2:])


if __name__ == "__main__":
    deepspeed = importlib.import_module(sys.argv[1])
    deepspeed.init_distributed("gloo")
    cases = json.load(sys.stdin)
    print("\n" + json.dumps({name: most_bytes(deepspeed, *case) for name, case in cases.items()}))
