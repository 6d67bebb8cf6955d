"""The model, the data and the settings of the recorded DeepSpeed checkpoints. This module imports no runtime.

``tools/deepspeed_checkpoints.py`` trains these cases with the real DeepSpeed and saves checkpoints. Tests load the
checkpoints into zero_runtime and continue the training with the same data.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WORLD, BEFORE, AFTER = 2, 3, 3  # ranks, steps before the save, steps after it
WORDS, WIDTH = 11, 6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CLIENT_STATE = {"epoch": 3, "seen": (1, 2.5), "names": ["a", None], "table": torch.arange(3.0)}

_PLAIN = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True, "weight_decay": 0.1}}
# Without torch_adam, DeepSpeed uses its FusedAdam. If the optimizer is offloaded, DeepSpeed uses its DeepSpeedCPUAdam.
_OWN = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
_LAMB = {"type": "Lamb", "params": {"lr": 0.01, "weight_decay": 0.1}}
_LION = {"type": "Lion", "params": {"lr": 0.01, "weight_decay": 0.1}}
_ADAGRAD = {"type": "Adagrad", "params": {"lr": 0.01, "weight_decay": 0.1}}
_MUON = {"type": "Muon", "params": {"lr": 0.01, "weight_decay": 0.1}}
_ON_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
_FP16 = {
    "fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 2, "hysteresis": 1},
}
_BF16 = {"bf16": {"enabled": True}}

# The key is the name of the fixture's directory. "version" is the version of DeepSpeed that records the case.
CASES = {
    "stage0_fp32": {"stage": 0},
    "stage0_bf16": {"stage": 0, "config": _BF16},
    "stage0_fp16": {"stage": 0, "config": _FP16},
    "stage1_fp32": {"stage": 1},
    "stage1_bf16": {"stage": 1, "config": _BF16},
    "stage1_bf16_fp32_sums": {
        "stage": 1,
        "config": {**_BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    },
    "stage2_fp32": {"stage": 2, "config": {"gradient_accumulation_steps": 2}},
    "stage2_bf16": {"stage": 2, "config": _BF16},
    "stage2_fp16": {"stage": 2, "config": _FP16},
    "stage2_round_robin": {"stage": 2, "zero": {"round_robin_gradients": True}},
    "stage2_elastic": {"stage": 2, "zero": {"elastic_checkpoint": True}, "resume": False},
    "stage2_sgd": {
        "stage": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "config": {"zero_allow_untested_optimizer": True},
    },
    "stage2_without_frozen": {"stage": 2, "exclude_frozen": True, "resume": False},
    "stage2_aligned": {"stage": 2, "zero": {"parameter_alignment": True}},
    "stage3_fp32": {"stage": 3},
    "stage3_bf16": {"stage": 3, "config": _BF16, "zero": {"stage3_param_persistence_threshold": 0}},
    "stage3_fp16": {"stage": 3, "config": _FP16},
    "stage3_sub_groups": {"stage": 3, "zero": {"sub_group_size": 60}},
    "stage3_one_group": {"stage": 3, "config": _BF16, "one_group": True},
    "stage0_fused_adam": {"stage": 0, "optimizer": _OWN},
    "stage1_fused_adam_bf16": {"stage": 1, "optimizer": _OWN, "config": _BF16},
    "stage2_fused_adam_fp16": {"stage": 2, "optimizer": _OWN, "config": _FP16},
    "stage2_cpu_adam_bf16": {"stage": 2, "optimizer": _OWN, "config": _BF16, "zero": _ON_HOST},
    "stage3_fused_adam": {"stage": 3, "optimizer": _OWN},
    "stage3_cpu_adam": {"stage": 3, "optimizer": _OWN, "zero": _ON_HOST},
    "stage0_lamb": {"stage": 0, "optimizer": _LAMB},
    "stage0_lamb_fp16": {"stage": 0, "optimizer": _LAMB, "config": _FP16},
    "stage0_lion": {"stage": 0, "optimizer": _LION},
    "stage2_lion_bf16": {"stage": 2, "optimizer": _LION, "config": _BF16},
    "stage2_cpu_lion_bf16": {"stage": 2, "optimizer": _LION, "config": _BF16, "zero": _ON_HOST},
    "stage3_cpu_lion": {"stage": 3, "optimizer": _LION, "zero": _ON_HOST},
    "stage0_adagrad": {"stage": 0, "optimizer": _ADAGRAD},
    "stage2_cpu_adagrad": {"stage": 2, "optimizer": _ADAGRAD, "zero": _ON_HOST},
    "stage3_cpu_adagrad": {"stage": 3, "optimizer": _ADAGRAD, "zero": _ON_HOST},
    "stage0_muon": {"stage": 0, "optimizer": _MUON},
    "stage1_muon": {"stage": 1, "optimizer": _MUON},
    "stage2_muon_bf16": {"stage": 2, "optimizer": _MUON, "config": _BF16},
    "stage2_muon_on_host": {"stage": 2, "optimizer": _MUON, "zero": _ON_HOST},
    "stage3_muon": {"stage": 3, "optimizer": _MUON, "zero": {"reduce_scatter": False}},
    "stage1_static_scale_one_cycle": {
        "stage": 1,
        "config": {"fp16": {"enabled": True, "loss_scale": 128.0}},
        "scheduler": {
            "type": "OneCycle",
            "params": {
                "cycle_min_lr": 0.001,
                "cycle_max_lr": 0.02,
                "cycle_first_step_size": 2,
                "cycle_second_step_size": 2,
                "decay_step_size": 1,
                "decay_lr_rate": 0.1,
                "cycle_min_mom": 0.8,
                "cycle_max_mom": 0.9,
            },
        },
    },
    **{
        f"v{version}_{name}": {**case, "version": version}
        for version in ("0.14.5", "0.16.9")
        for name, case in {
            "stage0_bf16": {"stage": 0, "config": _BF16},
            "stage1_bf16": {"stage": 1, "config": _BF16},
            "stage2_fp32": {"stage": 2},
            "stage2_round_robin": {"stage": 2, "zero": {"round_robin_gradients": True}},
            "stage3_fp32": {"stage": 3},
        }.items()
    },
}
# Cases with expert layers, whose parameters are in separate files of the checkpoint.
EXPERTS = {
    "experts_stage0": {"stage": 0, "ep_size": 2},
    "experts_stage1_w4": {"stage": 1, "ep_size": 2, "world": 4},
    "experts_stage2_bf16": {"stage": 2, "ep_size": 2, "config": _BF16},
    "experts_stage2_data_first_w4": {
        "stage": 2,
        "ep_size": 2,
        "world": 4,
        "config": {"use_data_before_expert_parallelism": True},
    },
    "experts_stage2_ep1": {"stage": 2, "ep_size": 1},
}
for _case in EXPERTS.values():
    _case["one_group"] = True
# Checkpoints that are converted from the checkpoint of a different case, by DeepSpeed's own ds_to_universal,
# save_16bit_model and zero_to_fp32. The value is the name of that case.
UNIVERSAL = {"universal_of_stage2_fp32": "stage2_fp32", "universal_of_stage3_bf16": "stage3_bf16"}
EXPORTS = {"export_of_stage2_bf16": "stage2_bf16", "export_of_stage3_fp16": "stage3_fp16"}


class Words(nn.Module):
    """A small language model with tied and frozen parameters of odd sizes, and buffers that count passes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight
        self.gain = nn.Parameter(torch.tensor([1.25]))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("level", torch.zeros(3))

    def forward(self, words, targets):
        if self.training:
            self.passes += 1
            self.level += 0.5
        hidden = self.norm(torch.tanh(self.frozen(self.table(words))))
        hidden = hidden + self.down(F.gelu(self.up(hidden))) * self.gain
        logits = self.head(hidden).float() * 3.0
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class WordsWithExperts(Words):
    """The model ``Words`` with two expert layers, whose gates draw no random numbers."""

    def __init__(self, ep_size: int) -> None:
        from deepspeed.moe.layer import MoE  # of zero_runtime, if it is installed as deepspeed

        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH))
        self.mixtures = nn.ModuleList(
            MoE(WIDTH, expert, num_experts=count, ep_size=ep_size, k=1, min_capacity=0, use_rts=False)
            for count in (4, 2)
        )

    def forward(self, words, targets):
        if self.training:
            self.passes += 1
        hidden = self.norm(torch.tanh(self.frozen(self.table(words))))
        losses = []
        for mixture in self.mixtures:
            output, loss, _ = mixture(hidden)
            hidden = hidden + output
            losses.append(loss)
        hidden = hidden + self.down(F.gelu(self.up(hidden))) * self.gain
        logits = self.head(hidden).float() * 3.0
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.01 * sum(losses)


def make_model(case: dict | None = None) -> Words:
    torch.manual_seed(11)
    return WordsWithExperts(case["ep_size"]) if case and "ep_size" in case else Words()


def make_groups(model: nn.Module, case: dict) -> list[dict]:
    """Return two param groups of different sizes and options, or one group if the case says so.

    Frozen parameters are in no group. For a case with experts, the result is the plain list of trained parameters.
    """
    trained = [each for each in model.parameters() if each.requires_grad]
    if "ep_size" in case:
        return trained  # both runtimes put experts into separate groups
    if case.get("one_group"):
        return [{"params": trained}]
    wide = [each for each in trained if getattr(each, "ds_shape", each.shape).numel() > 20]
    narrow = [each for each in trained if getattr(each, "ds_shape", each.shape).numel() <= 20]
    return [{"params": wide}, {"params": narrow, "weight_decay": 0.0, "lr": 0.02}]


def make_batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    words = torch.randint(0, WORDS, (2, 5), generator=generator)
    return words[:, :-1], words[:, 1:]


def make_config(case: dict) -> dict:
    """Return the configuration of ``case``, which both runtimes accept."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 1000000,
        "optimizer": case.get("optimizer", _PLAIN),
        "scheduler": case.get("scheduler")
        or {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": 0.001,
                "warmup_max_lr": 0.02 if case.get("one_group") else [0.02, 0.04],
                "warmup_num_steps": 5,
            },
        },
        "zero_optimization": {
            "stage": case["stage"],
            **case.get("zero", {}),
            **({"stage3_gather_16bit_weights_on_model_save": True} if case["stage"] == 3 else {}),
        },
        **case.get("config", {}),
    }


def train(engine, rank: int, first: int, steps: int) -> list[float]:
    """Train for ``steps`` steps from step ``first``, and return the losses of all micro-batches."""
    losses = []
    for step in range(first, first + steps):
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(*make_batch(step, micro, rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses
