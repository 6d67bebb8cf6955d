"""Models with experts and the settings of the recorded DeepSpeed runs.

``tools/deepspeed_experts.py`` trains these cases with the real DeepSpeed and writes
``tests/golden/deepspeed_experts``. Tests train the same cases with zero_runtime. ``train`` imports ``deepspeed``
for both. The tests call ``zero_runtime.as_deepspeed`` first.

Random numbers are part of the data. Both runtimes construct the parts of an expert layer in the same order: the
copies of the expert, the matrix of the gate, then the coefficient of a residual layer. Gates draw random
numbers from torch's generator, which is seeded before each forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from support.process_group_log import Call, Log, logged

STEPS = 4
MICRO_BATCHES = {"gpt": 4, "cifar": 16}
VOCABULARY, CONTEXT, HIDDEN, HEADS = 100, 8, 32, 2
GATE_LOSS = 0.01  # the weight of the load-balancing loss
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01, "torch_adam": True}}
_CIFAR_ADAM = {
    "type": "Adam",
    "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7, "torch_adam": True},
}
# The configuration of cifar10_deepspeed.py, with fewer warmup steps.
_CIFAR_CONFIG = {
    "optimizer": _CIFAR_ADAM,
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 10},
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
}
_CIFAR_ZERO = {
    "allgather_partitions": True,
    "reduce_scatter": True,
    "allgather_bucket_size": 50_000_000,
    "reduce_bucket_size": 50_000_000,
    "overlap_comm": True,
    "contiguous_gradients": True,
}


def _case(
    model: str,
    stage: int,
    world: int,
    *layers: dict[str, Any],
    config: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    **rest: Any,
) -> dict[str, Any]:
    """Return a case. ``layers`` are the arguments of its expert layers."""
    base_config, base_zero = (_CIFAR_CONFIG, _CIFAR_ZERO) if model == "cifar" else ({"optimizer": _ADAM}, {})
    return {
        "model": model,
        "world": world,
        "layers": [{"num_experts": 4, **layer} for layer in layers],
        "config": {
            "train_micro_batch_size_per_gpu": MICRO_BATCHES[model],
            "steps_per_print": 1_000_000,
            **base_config,
            "zero_optimization": {"stage": stage, **base_zero, **(zero or {})},
            **(config or {}),
        },
        **rest,
    }


def _gpt(
    stage: int, ep_size: int, world: int, layer: dict[str, Any] | None = None, **rest: Any
) -> dict[str, Any]:
    return _case("gpt", stage, world, {"ep_size": ep_size, **(layer or {})}, **rest)


def _cifar(
    stage: int, ep_size: int, world: int, layer: dict[str, Any] | None = None, **rest: Any
) -> dict[str, Any]:
    """Return a case with the expert layer of ``cifar10_deepspeed.py --moe``, which has no minimum capacity."""
    return _case("cifar", stage, world, {"ep_size": ep_size, "min_capacity": 0, **(layer or {})}, **rest)


_BF16 = {"bf16": {"enabled": True}}
_FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
_OVERFLOW = {"fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}}
_TWICE = {"gradient_accumulation_steps": 2}
_AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
_CLIPPED = {"gradient_clipping": 0.1}
_FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
_SMALL = {"reduce_bucket_size": 3000}
_PER_OWNER = {"use_multi_rank_bucket_allreduce": False}
_ON_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
_DATA_FIRST = {"use_data_before_expert_parallelism": True}
_ALL_TOKENS = {"drop_tokens": False}
_HALF = {"capacity_factor": 0.5}

# The name of a case contains its model, stage, ep_size and world size, then the feature that distinguishes the case.
CASES: dict[str, dict[str, Any]] = {
    "gpt_s0_ep1_w2": _gpt(0, 1, 2),
    "gpt_s0_ep2_w2": _gpt(0, 2, 2),
    "gpt_s0_ep2_w4": _gpt(0, 2, 4),
    "gpt_s0_ep4_w4": _gpt(0, 4, 4),
    "gpt_s1_ep1_w2": _gpt(1, 1, 2),
    "gpt_s1_ep2_w2": _gpt(1, 2, 2),
    "gpt_s1_ep2_w4": _gpt(1, 2, 4),
    "gpt_s1_ep4_w4": _gpt(1, 4, 4),
    "gpt_s2_ep1_w2": _gpt(2, 1, 2),
    "gpt_s2_ep2_w2": _gpt(2, 2, 2),
    "gpt_s2_ep2_w4": _gpt(2, 2, 4),
    "gpt_s2_ep4_w4": _gpt(2, 4, 4),
    # Options of the gates.
    "gpt_s2_ep2_w2_drops": _gpt(2, 2, 2, _HALF),
    "gpt_s2_ep2_w2_first_tokens": _gpt(2, 2, 2, {**_HALF, "use_rts": False}),
    "gpt_s2_ep2_w2_capacity": _gpt(2, 2, 2, {"capacity_factor": 2.0, "eval_capacity_factor": 0.5}),
    "gpt_s2_ep2_w2_min_capacity": _gpt(2, 2, 2, {"min_capacity": 13}),
    "gpt_s2_ep2_w2_all_tokens": _gpt(2, 2, 2, _ALL_TOKENS),
    "gpt_s2_ep1_w2_all_tokens": _gpt(2, 1, 2, _ALL_TOKENS),
    "gpt_s0_ep2_w4_all_tokens": _gpt(0, 2, 4, _ALL_TOKENS),
    "gpt_s2_ep2_w2_used_tokens": _gpt(2, 2, 2, used_tokens=True),
    "gpt_s2_ep2_w2_rsample": _gpt(2, 2, 2, {"noisy_gate_policy": "RSample"}),
    "gpt_s2_ep2_w2_jitter": _gpt(2, 2, 2, {"noisy_gate_policy": "Jitter"}),
    "gpt_s2_ep2_w2_residual": _gpt(2, 2, 2, {"use_residual": True}),
    "gpt_s2_ep2_w2_8_experts": _gpt(2, 2, 2, {"num_experts": 8}),
    "gpt_s2_ep2_w2_2_experts": _gpt(2, 2, 2, {"num_experts": 2}),
    "gpt_s2_ep2_w2_k2": _gpt(2, 2, 2, {"k": 2}),
    "gpt_s2_ep2_w4_k2_drops": _gpt(2, 2, 4, {"k": 2, **_HALF}),
    "gpt_s0_ep2_w2_k2_no_sampling": _gpt(0, 2, 2, {"k": 2, "top2_2nd_expert_sampling": False}),
    "gpt_s1_ep2_w2_k2_all_tokens": _gpt(1, 2, 2, {"k": 2, **_ALL_TOKENS}),
    "gpt_s2_ep2_w2_k3": _gpt(2, 2, 2, {"k": 3, **_HALF}),
    "gpt_s1_ep2_w2_k3_all_tokens": _gpt(1, 2, 2, {"k": 3, **_ALL_TOKENS}),
    "gpt_s1_ep3_w3": _gpt(1, 3, 3, {"num_experts": 6, "k": 2}),
    "gpt_s2_ep2_w4_recomputed": _gpt(2, 2, 4, {"k": 2}, recomputed=True),
    # Precision, clipping and gradient accumulation.
    "gpt_s0_ep2_w2_bf16": _gpt(0, 2, 2, config=_BF16),
    "gpt_s0_ep2_w2_bf16_frozen": _gpt(0, 2, 2, config=_BF16, frozen_experts=True),
    "gpt_s1_ep2_w2_bf16": _gpt(1, 2, 2, config=_BF16),
    "gpt_s2_ep2_w4_bf16": _gpt(2, 2, 4, config=_BF16),
    "gpt_s1_ep2_w4_bf16_fp32_sums": _gpt(1, 2, 4, config={**_BF16, **_CLIPPED, **_FP32_SUMS}),
    "gpt_s1_ep2_w2_fp16": _gpt(1, 2, 2, config=_FP16),
    "gpt_s2_ep2_w2_fp16_overflow": _gpt(2, 2, 2, config=_OVERFLOW),
    "gpt_s0_ep2_w2_autocast_k2": _gpt(0, 2, 2, {"k": 2}, config=_AUTOCAST),
    "gpt_s0_ep2_w4_clip": _gpt(0, 2, 4, config=_CLIPPED),
    "gpt_s1_ep2_w2_clip": _gpt(1, 2, 2, config=_CLIPPED),
    "gpt_s2_ep2_w4_clip": _gpt(2, 2, 4, config=_CLIPPED),
    "gpt_s0_ep2_w2_twice": _gpt(0, 2, 2, config=_TWICE),
    "gpt_s1_ep2_w4_twice": _gpt(1, 2, 4, config=_TWICE),
    "gpt_s2_ep2_w2_twice": _gpt(2, 2, 2, config=_TWICE),
    # Gradient reduction.
    "gpt_s0_ep2_w4_small": _gpt(0, 2, 4, zero=_SMALL),
    "gpt_s1_ep2_w4_small": _gpt(1, 2, 4, zero=_SMALL),
    "gpt_s2_ep2_w4_small": _gpt(2, 2, 4, zero=_SMALL),
    "gpt_s2_ep2_w4_per_owner": _gpt(2, 2, 4, zero=_PER_OWNER),
    "gpt_s1_ep2_w2_per_owner_small": _gpt(1, 2, 2, zero={**_PER_OWNER, **_SMALL}),
    "gpt_s2_ep2_w4_overlap_small": _gpt(2, 2, 4, zero={"overlap_comm": True, **_SMALL}),
    "gpt_s1_ep2_w2_not_contiguous": _gpt(1, 2, 2, zero={"contiguous_gradients": False}),
    "gpt_s2_ep2_w4_round_robin": _gpt(2, 2, 4, zero={"round_robin_gradients": True}),
    "gpt_s1_ep2_w4_offload_twice": _gpt(1, 2, 4, config=_TWICE, zero=_ON_HOST),
    "gpt_s2_ep2_w2_offload": _gpt(2, 2, 2, config=_CLIPPED, zero=_ON_HOST),
    # Groups.
    "gpt_s0_ep2_w4_data_first": _gpt(0, 2, 4, config=_DATA_FIRST),
    "gpt_s2_ep2_w4_data_first": _gpt(2, 2, 4, config=_DATA_FIRST),
    "gpt_s0_w4_two_sizes": _case("gpt", 0, 4, {"ep_size": 2}, {"ep_size": 4}, config=_CLIPPED),
    "gpt_s1_w4_two_sizes": _case("gpt", 1, 4, {"ep_size": 2}, {"ep_size": 4}),
    "gpt_s2_w4_two_sizes": _case("gpt", 2, 4, {"ep_size": 2}, {"ep_size": 4}, zero=_SMALL),
    "gpt_s2_ep2_w2_decay": _gpt(2, 2, 2, groups="decay"),
    "gpt_s2_ep2_w2_client": _gpt(2, 2, 2, groups="split", client_optimizer="AdamW"),
    "gpt_s0_ep2_w2_client_decay": _gpt(0, 2, 2, groups="decay", client_optimizer="AdamW"),
    "gpt_s2_ep2_w4_client_decay": _gpt(
        2, 2, 4, {"k": 2}, groups="decay", client_optimizer="AdamW", zero=_SMALL
    ),
    # DeepSpeed's cifar example. The first two cases use the arguments of run_ds_moe.sh and run_ds_prmoe.sh.
    "cifar_s0_ep2_w2_run_ds_moe": _cifar(0, 2, 2, {"num_experts": 2, "noisy_gate_policy": "RSample"}),
    "cifar_s2_ep2_w2_run_ds_prmoe": _case(
        "cifar",
        2,
        2,
        *(
            {
                "num_experts": experts,
                "ep_size": 2,
                "min_capacity": 0,
                "noisy_gate_policy": "RSample",
                "use_residual": True,
            }
            for experts in (2, 4)
        ),
    ),
    "cifar_s0_ep1_w2": _cifar(0, 1, 2),
    "cifar_s0_ep2_w2": _cifar(0, 2, 2),
    "cifar_s0_ep4_w4": _cifar(0, 4, 4),
    "cifar_s1_ep1_w2": _cifar(1, 1, 2),
    "cifar_s1_ep2_w2": _cifar(1, 2, 2),
    "cifar_s1_ep4_w4": _cifar(1, 4, 4),
    "cifar_s2_ep1_w2": _cifar(2, 1, 2),
    "cifar_s2_ep2_w2": _cifar(2, 2, 2),
    "cifar_s2_ep2_w4": _cifar(2, 2, 4),
    "cifar_s2_ep4_w4": _cifar(2, 4, 4),
    "cifar_s2_ep2_w2_k2": _cifar(2, 2, 2, {"k": 2}),
    "cifar_s2_ep2_w2_bf16": _cifar(2, 2, 2, config=_BF16),
    # Refused cases.
    "gpt_s3_ep2_w2": _gpt(3, 2, 2),
    "gpt_s1_ep2_w2_all_reduce": _gpt(1, 2, 2, zero={"reduce_scatter": False}),
    "gpt_s2_ep2_w2_all_reduce": _gpt(2, 2, 2, zero={"reduce_scatter": False}),
    "gpt_s2_ep2_w2_not_contiguous": _gpt(2, 2, 2, zero={"contiguous_gradients": False}),
    "gpt_s2_ep4_w2": _gpt(2, 4, 2),
    "gpt_s2_ep2_w2_3_experts": _gpt(2, 2, 2, {"num_experts": 3}),
    "gpt_s2_ep2_w2_unknown_policy": _gpt(2, 2, 2, {"noisy_gate_policy": "Gauss"}),
    "gpt_s2_ep2_w2_few_tokens": _gpt(2, 2, 2, {"min_capacity": 40}),
    "gpt_s0_ep2_w2_client_unsplit": _gpt(0, 2, 2, client_optimizer="AdamW"),
    "gpt_s2_ep2_w2_client_unsplit": _gpt(2, 2, 2, client_optimizer="AdamW"),
}


@dataclass
class Training:
    """The results of one rank in one case."""

    losses: list[float] = field(default_factory=list)  # by micro-batch
    gate_losses: list[list[float]] = field(default_factory=list)  # by micro-batch and layer
    expert_counts: list[list[list[int]]] = field(default_factory=list)  # by micro-batch, layer and expert
    grad_norms: list[float | None] = field(default_factory=list)  # by step
    loss_scales: list[float | None] = field(default_factory=list)
    # The norms after the last step: of all dense parameters, and of all expert parameters.
    weight_norms: list[float] = field(default_factory=list)
    evaluated: float | None = None  # the loss of one evaluation after the last step
    calls: list[Call] = field(default_factory=list)
    error: str | None = None

    def messages(self, step: int) -> list[str]:
        """Return the messages of ``step`` as text. Step -1 is the initialization, and STEPS is the evaluation."""
        return [message(call) for call in self.calls if call.step == step]


def message(call: Call) -> str:
    """Return a call as text.

    The text contains the phase, the operation, the ranks of the group, the number of elements, the dtype, and the
    reduction or the root. If the numbers of input and output elements differ, the text contains "in>out".
    """
    elements = str(call.numel_in) if call.numel_in == call.numel_out else f"{call.numel_in}>{call.numel_out}"
    rest = [call.reduction] if call.reduction else [] if call.root is None else [f"root={call.root}"]
    return " ".join([call.phase, call.method, call.group, elements, call.dtype, *rest])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.output = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden):
        samples, length, _ = hidden.shape
        heads = self.qkv(self.norm(hidden)).view(samples, length, 3, HEADS, HIDDEN // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden + self.output(attended.transpose(1, 2).reshape(samples, length, HIDDEN))


def feed_forward() -> nn.Sequential:
    return nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))


class WithExperts(nn.Module):
    """A model that stores the losses of the gates and the expert counts of the last forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_losses: list[torch.Tensor] = []
        self.expert_counts: list[torch.Tensor] = []

    def route(self, layer, hidden, used=None, recomputed=False):
        if recomputed:
            output, gate_loss, counts = checkpoint(layer, hidden, used, use_reentrant=False)
        else:
            output, gate_loss, counts = layer(hidden, used)
        self.gate_losses.append(gate_loss)
        self.expert_counts.append(counts)
        return output


class Transformer(WithExperts):
    """A GPT with two blocks for each expert layer.

    The second block has the expert layer instead of a feed-forward network.
    """

    def __init__(self, expert_layer, case: dict[str, Any]) -> None:
        super().__init__()
        self.used_tokens, self.recomputed = case.get("used_tokens", False), case.get("recomputed", False)
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(CONTEXT, HIDDEN)
        self.blocks = nn.ModuleList()
        for arguments in case["layers"]:
            for network in (
                feed_forward,
                lambda given=arguments: expert_layer(HIDDEN, feed_forward(), **given),
            ):
                self.blocks.append(nn.ModuleList([Attention(), nn.LayerNorm(HIDDEN), network()]))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens, targets):
        self.gate_losses, self.expert_counts = [], []
        used = (tokens.flatten() % 5 > 0).long() if self.used_tokens else None
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for number, (attention, norm, network) in enumerate(self.blocks):
            hidden = attention(hidden)
            normed = norm(hidden)
            hidden = hidden + (
                self.route(network, normed, used, self.recomputed) if number % 2 else network(normed)
            )
        loss = F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1).float(), targets.flatten())
        return loss + GATE_LOSS * sum(self.gate_losses)


class Convolutions(WithExperts):
    """The model ``Net`` of DeepSpeed's cifar example with ``--moe``.

    All expert layers copy the same module to make their experts.
    """

    def __init__(self, expert_layer, case: dict[str, Any]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        fc3 = nn.Linear(84, 84)
        self.moe_layer_list = nn.ModuleList(
            expert_layer(hidden_size=84, expert=fc3, **arguments) for arguments in case["layers"]
        )
        self.fc4 = nn.Linear(84, 10)

    def forward(self, images, labels):
        self.gate_losses, self.expert_counts = [], []
        hidden = self.pool(F.relu(self.conv1(images.to(self.conv1.weight.dtype))))
        hidden = self.pool(F.relu(self.conv2(hidden))).view(-1, 16 * 5 * 5)
        hidden = F.relu(self.fc2(F.relu(self.fc1(hidden))))
        for layer in self.moe_layer_list:
            hidden = self.route(layer, hidden)
        return F.cross_entropy(self.fc4(hidden).float(), labels)


MODELS = {"gpt": Transformer, "cifar": Convolutions}


def make_model(case: dict[str, Any], rank: int) -> WithExperts:
    """Return the model of a case for one rank.

    Every expert has different weights, which depend on the number of the expert among all experts.
    """
    from deepspeed.moe.layer import MoE

    torch.manual_seed(0)
    model = MODELS[case["model"]](MoE, case)
    layers = [each for each in model.modules() if isinstance(each, MoE)]
    for layer, arguments in zip(layers, case["layers"], strict=True):
        experts = layer.deepspeed_moe.experts.deepspeed_experts
        first = place_of(rank, arguments["ep_size"], case) * len(experts)
        for number, expert in enumerate(experts, first):
            generator = torch.Generator().manual_seed(number)
            with torch.no_grad():
                for parameter in expert.parameters():
                    parameter.requires_grad_(not case.get("frozen_experts", False))
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def place_of(rank: int, ep_size: int, case: dict[str, Any]) -> int:
    """Return the position of ``rank`` in its expert-parallel group.

    A group consists of consecutive ranks. With ``use_data_before_expert_parallelism``, it consists of every n-th rank.
    """
    if case["config"].get("use_data_before_expert_parallelism"):
        return rank // (case["world"] // ep_size)
    return rank % ep_size


def make_batch(case: dict[str, Any], step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    if case["model"] == "gpt":
        # Each token is the smaller of two random numbers. Small tokens are frequent, so the load of the experts
        # is uneven.
        pairs = torch.randint(0, VOCABULARY, (2, 2, MICRO_BATCHES["gpt"], CONTEXT), generator=generator)
        tokens, targets = pairs.amin(dim=0)
        return tokens, targets
    samples = MICRO_BATCHES["cifar"]
    images = torch.randn(samples, 3, 32, 32, generator=generator)
    return images, torch.randint(0, 10, (samples,), generator=generator)


def make_engine(case: dict[str, Any], rank: int):
    """Return the engine of a case, which gets its param groups or its client optimizer as the case specifies."""
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split_groups

    model = make_model(case, rank)
    parameters: Any = list(model.parameters())
    given = case.get("groups", "split" if case["model"] == "cifar" else "plain")
    if given == "split":  # as the cifar example does
        parameters = split_groups({"params": parameters, "name": "parameters"})
    elif given == "decay":
        matrices = [each for each in parameters if each.dim() > 1]
        vectors = [each for each in parameters if each.dim() <= 1]
        parameters = [
            {"params": matrices, "weight_decay": 0.1, "name": "matrices"},
            {"params": vectors, "weight_decay": 0.0, "name": "vectors"},
        ]
        if "client_optimizer" in case:
            parameters = split_groups(parameters)
    optimizer = None
    if "client_optimizer" in case:
        optimizer = getattr(torch.optim, case["client_optimizer"])(parameters, lr=0.01)
        parameters = None
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, optimizer=optimizer, config=case["config"]
    )
    return engine


def train(name: str, rank: int, refusals: tuple[type[Exception], ...]) -> Training:
    """Train case ``name`` on this rank. If an exception in ``refusals`` is raised, the result contains its text."""
    case, training = CASES[name], Training()
    with logged() as log:
        try:
            _train(case, rank, log, training)
        except refusals as error:
            training.error = f"{type(error).__name__}: {error}"
    training.calls = [call for call in log.calls if call.phase != "report"]
    return training


def _train(case: dict[str, Any], rank: int, log: Log, training: Training) -> None:
    engine = make_engine(case, rank)
    for step in range(STEPS):
        for micro in range(case["config"].get("gradient_accumulation_steps", 1)):
            loss = _forward(engine, case, rank, log, training, step, micro, "forward")
            log.at("backward")
            engine.backward(loss)
            log.at("step")
            engine.step()
            log.at("between")
            training.losses.append(loss.item())
        norm = engine.get_global_grad_norm()
        training.grad_norms.append(None if norm is None else float(norm))
        scale = getattr(engine.optimizer, "cur_scale", None)
        training.loss_scales.append(None if scale is None else float(scale))
    engine.eval()
    with torch.no_grad():
        training.evaluated = _forward(engine, case, rank, log, training, STEPS, 0, "eval").item()
    log.at("report")
    experts = {id(each) for each in engine.module.parameters() if not getattr(each, "allreduce", True)}
    for of_experts in (False, True):
        chosen = [each for each in engine.module.parameters() if (id(each) in experts) == of_experts]
        training.weight_norms.append(
            sum(each.detach().double().square().sum().item() for each in chosen) ** 0.5
        )


def _forward(engine, case, rank, log, training, step, micro, phase) -> torch.Tensor:
    batch = make_batch(case, step, micro, rank)
    torch.manual_seed(1_000_000 + 10_000 * step + 100 * micro + rank)
    log.at(phase, step, micro)
    loss = engine(*(each.to(engine.device) for each in batch))
    training.gate_losses.append([each.item() for each in engine.module.gate_losses])
    training.expert_counts.append([each.tolist() for each in engine.module.expert_counts])
    return loss
