"""Replace the layers of experts in a traced pass by layers that run without other ranks.

The original layers need process groups. Their gate chooses by values, which fake tensors do not have. The replacement
allocates the same tensors as the original layer: the tensors of the gate in fp32, [experts, capacity, width] before
and after each all_to_all, and [k, tokens, width] for the outputs of the experts of each token. These are the tensors
of zero_runtime and of DeepSpeed 0.19.8 (``moe/sharded_moe.py``, ``_sparse_encode`` and ``_sparse_decode``). Neither
runtime has a mask of [tokens, experts, capacity], which DeepSpeed before 0.19 had.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from commprof.requested.experts.layers import ExpertLayer


class _Exchange(torch.autograd.Function):
    """A substitute for an all_to_all of equal rows, which returns a buffer of the same size."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(rows.contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(gradients[0].contiguous())


def place_experts(module: torch.nn.Module, layers: Iterable[ExpertLayer]) -> None:
    """Change the layers of experts in ``module`` so that they run without other ranks.

    Each layer gets the experts that one rank stores.

    Args:
        module: A module with layers of DeepSpeed's or zero_runtime's class ``MoE``. It is changed in place.
        layers: The settings of these layers. Their number of tokens is ignored; the inputs of the pass determine it.
    """
    for layer in layers:
        inner: Any = module.get_submodule(layer.layer).deepspeed_moe
        local = layer.num_experts // layer.ep_size
        first = inner.experts.deepspeed_experts[0]
        others = [copy.deepcopy(first) for _ in range(local - 1)]
        inner.experts.deepspeed_experts = torch.nn.ModuleList([first, *others])
        inner.experts.num_local_experts = local
        inner.forward = partial(_routed, inner, layer)


def _routed(inner: Any, layer: ExpertLayer, hidden: torch.Tensor, _used: object = None) -> torch.Tensor:
    """Return the output of ``layer`` for ``hidden``, both of shape [..., width]."""
    tokens = hidden.reshape(-1, hidden.shape[-1])
    count, width = tokens.shape
    capacity = layer._replace(tokens=count).capacity
    scratch = layer.num_experts * capacity
    weights, places = _chosen(inner, layer, tokens)
    source = torch.full((scratch + 1,), count, dtype=torch.long, device=hidden.device)
    numbers = torch.arange(count, device=hidden.device).expand_as(places)
    source.scatter_(0, places.reshape(-1), numbers.reshape(-1))
    padded = torch.cat([tokens, tokens.new_zeros(1, width)])
    sent = padded.index_select(0, source[:-1])
    del padded, source
    received = _exchanged(layer, sent)
    del sent
    outputs = inner.experts(received.reshape(layer.ep_size, -1, capacity, width))
    del received
    returned = _exchanged(layer, outputs.reshape(scratch, width))
    del outputs
    padded = torch.cat([returned, returned.new_zeros(1, width)])
    del returned
    routed = padded.index_select(0, places.reshape(-1)).view(*places.shape, width)
    combined = (routed * weights.unsqueeze(-1)).sum(0)
    return combined.to(hidden.dtype).reshape(hidden.shape)


def _exchanged(layer: ExpertLayer, rows: torch.Tensor) -> torch.Tensor:
    exchanged: torch.Tensor = _Exchange.apply(rows) if layer.ep_size > 1 else rows.contiguous()  # type: ignore[no-untyped-call]
    return exchanged


def _chosen(inner: Any, layer: ExpertLayer, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and the slots of the experts of each token, both of shape [k, tokens]."""
    values = tokens.float()
    if getattr(inner.gate, "noisy_gate_policy", None) == "Jitter":
        values = values * torch.rand_like(values)
    logits = torch.nn.functional.linear(values, inner.gate.wg.weight.float())
    gates = torch.softmax(logits, dim=1)
    top, chosen = torch.topk(gates, layer.k, dim=1)
    mask = torch.zeros_like(gates, dtype=torch.long).scatter_(1, chosen, 1)
    inner.l_aux = torch.sum(gates.mean(dim=0) * mask.float().mean(dim=0)) * layer.num_experts
    inner.exp_counts = mask.sum(dim=0)
    slots = (torch.cumsum(mask, dim=0) - 1).gather(1, chosen)
    weights = top / torch.clamp(top.sum(dim=1, keepdim=True), min=torch.finfo(top.dtype).eps)
    return weights.t().contiguous(), (chosen + slots).t().contiguous()
