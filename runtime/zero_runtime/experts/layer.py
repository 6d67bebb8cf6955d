"""The layer of a mixture of experts, with DeepSpeed's names of modules and parameters.

``MoE`` contains ``deepspeed_moe`` (the gate ``wg`` and the experts). In the forward pass, each rank puts its
tokens into the slots of the experts that the gate chooses. An all_to_all sends the slots to the ranks that
have the experts, and a second all_to_all returns the results. The backward pass does the same with
gradients::

    tokens -> gate -> slots [experts, capacity, hidden] -> all_to_all -> experts -> all_to_all -> weighted sum -> tokens

All ranks send the same number of bytes for any choice of the gate, because unused slots contain zeros.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup, ReduceOp
from zero_runtime.errors import ConfigError, UnsupportedError, UsageError
from zero_runtime.experts.expert_groups import ExpertRanks, group_name
from zero_runtime.experts.gating import CapacityRule, Routes, jittered, top_1, top_2, top_k

_NOISE: Final = ("Jitter", "RSample")
_ACTIVATION: Final = hooks.tag("activation")


class Partners(NamedTuple):
    """The ranks with which a layer exchanges tokens.

    Attributes:
        group: The group of expert-parallel ranks.
        why: The tag of the messages.
    """

    group: DataParallelGroup
    why: hooks.tag


class Exchange(torch.autograd.Function):
    """An all_to_all of rows of equal length, in the forward pass and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, partners: Partners, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows that the ranks of ``partners`` send to this rank, in the order of the ranks."""
        ctx.partners = partners
        rows = rows.contiguous()
        output = torch.empty_like(rows)
        partners.group.all_to_all_single(output, rows, None, why=partners.why)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        """Return the gradients of the rows, which the ranks that received the rows send back."""
        return None, Exchange.apply(ctx.partners, gradients[0])  # type: ignore[no-untyped-call]


class Experts(torch.nn.Module):
    """The experts of one rank, which are copies of one module. Each expert has a share of the slots.

    Args:
        expert: The module. It gets a tensor of shape [..., hidden], and returns a tensor of the same shape,
            or a tuple that begins with such a tensor.
        num_local_experts: The number of experts on this rank.
        expert_group_name: The name of the groups of ranks.

    Attributes:
        deepspeed_experts: The copies of the module.
        first: The number of this rank's first expert within the layer.
        total: The number of experts of the layer.
    """

    def __init__(
        self, expert: torch.nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None
    ) -> None:
        super().__init__()
        self.deepspeed_experts = torch.nn.ModuleList(copy.deepcopy(expert) for _ in range(num_local_experts))
        self.num_local_experts = num_local_experts
        self.first = 0
        self.total = num_local_experts
        for parameter in self.deepspeed_experts.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = expert_group_name  # type: ignore[attr-defined]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs for ``inputs``. Both have the shape [ranks, local experts, capacity, hidden]."""
        outputs = []
        for part, expert in zip(
            inputs.chunk(self.num_local_experts, dim=1), self.deepspeed_experts, strict=True
        ):
            output = expert(part)
            outputs.append(output[0] if isinstance(output, tuple) else output)
        return torch.cat(outputs, dim=1)

    def global_name(self, prefix: str, name: str) -> str:
        """Return the name of a parameter in which the expert's number is its number within the layer.

        Args:
            prefix: The name of this module.
            name: The name of the parameter, which begins with ``prefix``.
        """
        before, number, after = _split(prefix, name)
        return f"{before}{self.first + number}{after}"

    def names_elsewhere(self, prefix: str, global_name: str) -> Iterator[str]:
        """Yield the names of the parameters that are at the position of ``global_name`` on the other ranks."""
        before, number, after = _split(prefix, global_name)
        for other in range((number - self.first), self.total, self.num_local_experts):
            if other != number:
                yield f"{before}{other}{after}"


def _split(prefix: str, name: str) -> tuple[str, int, str]:
    before = f"{prefix}.deepspeed_experts."
    number, dot, after = name.removeprefix(before).partition(".")
    return before, int(number), f"{dot}{after}"


class TopKGate(torch.nn.Module):
    """The gate, which is a linear layer whose outputs determine the experts of a token.

    The arguments are those of :class:`MoE`.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        self.wg = torch.nn.Linear(model_dim, num_experts, bias=False)
        self.ep_group = ep_group
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy
        self.drop_tokens = drop_tokens
        self.use_rts = use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling
        self.ranks: DataParallelGroup | None = None
        self.why = _ACTIVATION

    def forward(self, inputs: torch.Tensor, used_token: torch.Tensor | None = None) -> Routes:
        """Return the routes of ``inputs``, tokens x hidden. The gate computes in fp32."""
        values = inputs.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            values = jittered(values)
        logits = torch.nn.functional.linear(values, self.wg.weight.float())
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        largest = self._largest if self.ranks is not None and self.ranks.world_size > 1 else None
        rule = CapacityRule(factor, self.min_capacity, self.drop_tokens, largest)
        if self.k == 1:
            return top_1(
                logits,
                rule,
                used=used_token,
                noisy=self.noisy_gate_policy == "RSample" and self.training,
                random_selection=self.use_rts,
            )
        if self.k == 2:
            return top_2(logits, rule, samples_second=self.top2_2nd_expert_sampling)
        return top_k(logits, self.k, rule)

    def _largest(self, count: torch.Tensor) -> torch.Tensor:
        assert self.ranks is not None
        self.ranks.all_reduce(count, op=ReduceOp.MAX, why=self.why)
        return count


class MOELayer(torch.nn.Module):
    """The gate, the exchange of tokens and the experts.

    Args:
        gate: The gate, which chooses the experts of each token.
        experts: The experts of this rank.
        ep_group_name: The name of the groups of ranks.
        ep_size: The number of ranks over which the experts are divided.
        num_local_experts: The number of experts on this rank.

    Attributes:
        l_aux: The load-balancing loss of the last forward pass (0-D).
        exp_counts: The number of tokens of this rank that chose each expert in the last forward pass, before
            any token was dropped.
    """

    l_aux: torch.Tensor
    exp_counts: torch.Tensor

    def __init__(
        self, gate: TopKGate, experts: Experts, ep_group_name: str, ep_size: int, num_local_experts: int
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.ep_size = ep_size
        self.ep_group_name = ep_group_name
        self.num_local_experts = num_local_experts
        self.ranks: ExpertRanks | None = None
        self.name = ""
        self._why = _ACTIVATION

    def use_ranks(self, ranks: ExpertRanks, name: str) -> None:
        """Set the ranks that exchange tokens, and the name of this module in records.

        Args:
            ranks: The groups of ranks.
            name: The name of this module within the model.
        """
        self.ranks, self.name = ranks, name
        self.gate.ranks = ranks.parallel
        self.experts.first = ranks.parallel.rank * self.num_local_experts
        self.experts.total = self.ep_size * self.num_local_experts
        self._why = self.gate.why = hooks.tag("activation", module=name)

    def forward(self, *inputs: torch.Tensor | None) -> torch.Tensor:
        """Return the outputs for the tokens in ``inputs``.

        ``inputs`` are a tensor of shape [..., hidden], and optionally a mask of used tokens or None.

        Raises:
            UsageError: The layer has more than one rank, and its model was not passed to ``initialize``.
        """
        hidden_states = inputs[0]
        assert hidden_states is not None
        hidden = hidden_states.shape[-1]
        tokens = hidden_states.reshape(-1, hidden)
        routes = self.gate(tokens, inputs[1] if len(inputs) > 1 else None)
        self.l_aux, self.exp_counts = routes.loss, routes.counts
        if hooks.recording():
            # The counts are converted because a floating-point mask of used tokens makes them floating-point
            # numbers.
            hooks.expert_load(self.name, routes.counts.long(), routes.capacity, len(tokens))
        total = self.ep_size * self.num_local_experts
        scratch = total * routes.capacity  # the place of tokens without a slot
        places = torch.where(routes.experts >= 0, routes.experts * routes.capacity + routes.slots, scratch)
        sent = self._exchanged(filled(tokens, places, scratch).view(total, routes.capacity, hidden))
        outputs = self.experts(sent.reshape(self.ep_size, self.num_local_experts, -1, hidden))
        returned = self._exchanged(outputs.reshape(total, -1, hidden))
        return weighted(returned.reshape(scratch, hidden), places, routes.weights).reshape(
            hidden_states.shape
        )

    def _exchanged(self, rows: torch.Tensor) -> torch.Tensor:
        if self.ep_size == 1:
            return rows.contiguous()
        if self.ranks is None:
            raise UsageError(
                f"a MoE layer with ep_size {self.ep_size} runs before its model was passed to initialize, which creates the "
                "groups of expert-parallel ranks; call initialize first"
            )
        exchanged: torch.Tensor = Exchange.apply(Partners(self.ranks.parallel, self._why), rows)  # type: ignore[no-untyped-call]
        return exchanged


def filled(tokens: torch.Tensor, places: torch.Tensor, scratch: int) -> torch.Tensor:
    """Return the slots with their tokens. Unused slots contain zeros.

    The slots are filled by one gather, whose backward pass is one addition for each token.
    """
    count = len(tokens)
    source = torch.full((scratch + 1,), count, dtype=torch.long, device=places.device)
    numbers = torch.arange(count, device=places.device).expand_as(places)
    source.scatter_(0, places.reshape(-1), numbers.reshape(-1))
    padded = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
    return padded.index_select(0, source[:-1])


def weighted(outputs: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each token's outputs, accumulated in fp32."""
    padded = torch.cat([outputs, outputs.new_zeros(1, outputs.shape[1])])
    routed = padded.index_select(0, places.reshape(-1)).view(*places.shape, outputs.shape[1])
    return (routed * weights.unsqueeze(-1)).sum(0).to(outputs.dtype)


class MoE(torch.nn.Module):
    """A mixture of experts, which replaces one module. Pass the model to ``initialize`` before its first forward pass.

    Args:
        hidden_size: The number of elements of a token, in inputs and outputs.
        expert: The module that is copied for each expert.
        num_experts: The number of experts of the layer, on all ranks together.
        ep_size: The number of ranks over which the experts are divided. It must divide ``num_experts`` and
            the number of ranks.
        k: The number of experts to which each token is sent.
        capacity_factor: The number of slots of an expert in training, as a multiple of its mean number of
            tokens.
        eval_capacity_factor: The number of slots of an expert in evaluation, as a multiple of its mean number
            of tokens.
        min_capacity: The smallest number of slots of an expert.
        use_residual: Whether to add the output of a module that gets every token (arXiv:2201.05596).
        noisy_gate_policy: ``Jitter``, ``RSample`` or None.
        drop_tokens: Whether to drop tokens that exceed the capacity. Otherwise the capacity is as large as
            needed.
        use_rts: Whether the dropped tokens are chosen randomly, with k 1.
        use_tutel: Ignored.
        enable_expert_tensor_parallelism: Must be False.
        top2_2nd_expert_sampling: Whether to sample the second expert, with k 2.

    Raises:
        ConfigError: ``ep_size`` does not divide ``num_experts``, the policy is unknown, or k is not between 1
            and ``num_experts``.
        UnsupportedError: Tensor-parallel experts are requested.
    """

    def __init__(  # noqa: PLR0913 - DeepSpeed's arguments
        self,
        hidden_size: int,
        expert: torch.nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if ep_size < 1 or num_experts < 1 or num_experts % ep_size:
            raise ConfigError(
                f"MoE has num_experts {num_experts} and ep_size {ep_size}; expected positive numbers, and a num_experts "
                "that is a multiple of ep_size"
            )
        if noisy_gate_policy not in (None, "None", *_NOISE):
            raise ConfigError(
                f"MoE's noisy_gate_policy is {noisy_gate_policy!r}; expected {', '.join(_NOISE)} or None"
            )
        if not 1 <= k <= num_experts and not (k == 2 and num_experts == 1):
            raise ConfigError(f"MoE has k {k} and num_experts {num_experts}; expected 1 <= k <= num_experts")
        if enable_expert_tensor_parallelism:
            raise UnsupportedError(
                "MoE with enable_expert_tensor_parallelism is not in this version; leave it out, so that each expert is on "
                "one rank"
            )
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = False
        self.ep_size = ep_size
        self.expert_group_name = group_name(ep_size)
        self.num_experts = num_experts
        self.num_local_experts = num_experts // ep_size
        # As in DeepSpeed, experts are made before the gate, so that equal seeds give equal weights.
        experts = Experts(expert, self.num_local_experts, self.expert_group_name)
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            None,
            top2_2nd_expert_sampling,
        )
        self.deepspeed_moe = MOELayer(gate, experts, self.expert_group_name, ep_size, self.num_local_experts)
        if use_residual:
            self.mlp = expert
            self.coefficient = torch.nn.Linear(hidden_size, 2)

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the output, the load-balancing loss, and the number of tokens that chose each expert.

        Args:
            hidden_states: The tokens, of shape [..., hidden].
            used_token: A mask of the tokens that are routed, with k 1. None routes all tokens.
        """
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            dense = self.mlp(hidden_states)
            dense = dense[0] if isinstance(dense, tuple) else dense
            shares = torch.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * shares[..., 0:1] + dense * shares[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts


def layers_of(module: torch.nn.Module) -> dict[str, MOELayer]:
    """Return the layers of experts in ``module`` by their qualified names."""
    return {name: child for name, child in module.named_modules() if isinstance(child, MOELayer)}


def described(layers: Sequence[MOELayer]) -> list[dict[str, Any]]:
    """Return the description of each layer for the record of a run; see ``hooks.describe_expert_layers``."""
    rows = []
    for layer in layers:
        gate, ranks = layer.gate, layer.ranks
        members = () if ranks is None else ranks.parallel.global_ranks
        rows.append(
            {
                "layer": layer.name,
                "num_experts": layer.ep_size * layer.num_local_experts,
                "ep_size": layer.ep_size,
                "k": gate.k,
                "capacity_factor": gate.capacity_factor,
                "eval_capacity_factor": gate.eval_capacity_factor,
                "min_capacity": gate.min_capacity,
                "drop_tokens": gate.drop_tokens,
                "hidden": gate.wg.in_features,
                "expert_ranks": ",".join(map(str, members)),
            }
        )
    return rows
