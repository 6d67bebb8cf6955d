"""Reduction of whole gradients, once a step, after the last micro-batch (stage 0, and stage 1 in bf16).

``ReplicatedGradients`` are for stage 0, ``AccumulatedGradients`` for stage 1 in bf16 with accumulation in fp32. Neither has
the buckets of stages 1 and 2. All gradients are concatenated and sent at once, up to a limit of 5e8 elements, which a
message exceeds by its last tensor (DeepSpeed 0.19.8's rule and constant).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.gradient_reduction.clip import norm_with_experts, replicated_norm
from zero_runtime.gradient_reduction.flat_layout import Run, flushed_runs
from zero_runtime.gradient_reduction.gradient_buckets import END_OF_BACKWARD, Bucket, Entry, joined
from zero_runtime.gradient_reduction.reducer import ParameterGroup, Policy
from zero_runtime.gradient_reduction.reduction import Finish

# What is sent together: the ranks, the dtype of the parameters, and the communication dtype.
_Alike = tuple[DataParallelGroup, torch.dtype, torch.dtype]


class Sent(NamedTuple):
    """The gradients of one step whose reduction has been started.

    Attributes:
        results: for each parameter the tensor that gets the result, 1-D.
        finishes: functions to call first, where collectives are in flight.
    """

    results: list[tuple[torch.nn.Parameter, torch.Tensor]]
    finishes: list[Finish]

    def take(self) -> None:
        """Wait for the results, and make them the gradients of the parameters."""
        for finish in self.finishes:
            finish()
        for parameter, part in self.results:
            parameter.grad = part.view(parameter.shape)


class ReplicatedGradients:
    """Reduces the parameters' own gradients, which become views of the sent tensors.

    Parameters without a gradient contribute zeros, so that all ranks issue the same collectives.

    Args:
        names: of the trainable parameters, in the model's order.
        parameters: the trainable parameters.
        dtypes: the communication dtype of each parameter's gradient.
        policy: how they are reduced.
        group: the data-parallel ranks.
        at_boundary: whether the current micro-batch is the last of its step.
        expert_ranks: the ranks that hold each parameter of an expert; empty without experts.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        dtypes: Mapping[torch.nn.Parameter, torch.dtype],
        policy: Policy,
        group: DataParallelGroup,
        at_boundary: Callable[[], bool],
        expert_ranks: Mapping[torch.nn.Parameter, DataParallelGroup] = MappingProxyType({}),
    ) -> None:
        self._expert_ranks = expert_ranks
        self._names = names
        self._parameters = parameters
        self._dtypes = dtypes
        self._policy = policy
        self._group = group
        self._at_boundary = at_boundary
        self._paused = False

    def begin_step(self) -> None:
        """Do nothing: there are no buckets to count."""

    def finish_backward(self) -> None:
        """Reduce all gradients, after the last micro-batch of a step."""
        if not self._paused and self._at_boundary():
            self.reduce_accumulated()

    def reduce_accumulated(self) -> None:
        """Reduce all gradients, once."""
        self._send().take()

    def _send(self) -> Sent:
        by_message: dict[_Alike, list[tuple[torch.nn.Parameter, Entry]]] = {}
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = parameter.grad.contiguous()
            if parameter.numel():
                entry = Entry(name, parameter.grad.detach().view(-1), ())
                ranks = self._expert_ranks.get(parameter, self._group)
                key = ranks, parameter.dtype, self._dtypes[parameter]
                by_message.setdefault(key, []).append((parameter, entry))
        number = 0
        sent = Sent([], [])
        # Experts after all others, as in DeepSpeed.
        for (ranks, _, dtype), members in sorted(
            by_message.items(), key=lambda each: each[0][0] is not self._group
        ):
            entries = [entry for _, entry in members]
            sums, finishes = _reduce(entries, number, dtype, self._policy, ranks)
            number += len(sums)
            results = [part for each in sums for part in each]
            sent.results.extend(
                (parameter, part) for (parameter, _), part in zip(members, results, strict=True)
            )
            sent.finishes.extend(finishes)
        return sent

    def pause(self, paused: bool) -> None:
        """Set whether gradients only accumulate (``no_sync``)."""
        self._paused = paused

    def tensors(self) -> Iterator[torch.Tensor]:
        """Nothing: gradients are in each parameter's ``grad``."""
        return iter(())

    def buffers(self) -> Iterator[torch.Tensor]:
        """Nothing: there are no buckets."""
        return iter(())

    def free_buffers(self) -> None:
        """Do nothing: there are no buckets."""

    def clear(self) -> None:
        """Drop the gradients, after a step."""
        for parameter in self._parameters:
            parameter.grad = None


class AccumulatedGradients:
    """Adds every micro-batch's gradients to flat buffers of another dtype, and reduces the buffers.

    Args:
        groups: the param groups, partitioned into shards.
        dtype: the communication dtype.
        policy: how they are reduced.
        group: the data-parallel ranks.
        accumulation: dtype of the buffers.
        at_boundary: whether the current micro-batch is the last of its step.

    Attributes:
        shards: for each param group, this rank's shard of the buffer.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        dtype: torch.dtype,
        policy: Policy,
        group: DataParallelGroup,
        accumulation: torch.dtype,
        at_boundary: Callable[[], bool],
    ) -> None:
        self._groups = groups
        self._dtype = dtype
        self._policy = policy
        self._group = group
        self._at_boundary = at_boundary
        self._paused = False
        self._flat = [
            torch.zeros(each.flat_layout.numel, dtype=accumulation, device=each.parameters[0].device)
            for each in groups
        ]
        self._ranks = [each.ranks or group for each in groups]
        self.shards = [
            flat.chunk(ranks.world_size)[ranks.rank]
            for flat, ranks in zip(self._flat, self._ranks, strict=True)
        ]

    def begin_step(self) -> None:
        """Do nothing: there are no buckets to count."""

    def finish_backward(self) -> None:
        """Add this micro-batch's gradients; reduce the buffers after the last one of a step."""
        for each, flat in zip(self._groups, self._flat, strict=True):
            for parameter, offset in zip(each.parameters, each.flat_layout.offsets, strict=True):
                if parameter.grad is not None:
                    flat.narrow(0, offset, parameter.numel()).add_(parameter.grad.reshape(-1))
                    parameter.grad = None
        if not self._paused and self._at_boundary():
            self.reduce_accumulated()

    def reduce_accumulated(self) -> None:
        """Reduce the buffers, once."""
        number = 0
        # Experts after all others, as in DeepSpeed.
        for ranks in sorted(dict.fromkeys(self._ranks), key=lambda each: each is not self._group):
            members = [index for index, each in enumerate(self._ranks) if each is ranks]
            flats = [self._flat[index] for index in members]
            entries = [
                Entry(",".join(self._groups[index].names), flat, ())
                for index, flat in zip(members, flats, strict=True)
            ]
            sums, _ = _reduce(entries, number, self._dtype, self._policy, ranks)
            number += len(sums)
            if any(len(each) > 1 for each in sums):
                torch._foreach_copy_(flats, [part for each in sums for part in each])

    def accumulated(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """The accumulated gradient of ``parameter``, a 1-D view of the buffer; None if it is in no group."""
        for each, flat in zip(self._groups, self._flat, strict=True):
            for candidate, offset in zip(each.parameters, each.flat_layout.offsets, strict=True):
                if candidate is parameter:
                    return flat.narrow(0, offset, parameter.numel())
        return None

    def pause(self, paused: bool) -> None:
        """Set whether gradients only accumulate (``no_sync``)."""
        self._paused = paused

    @property
    def norm_dtype(self) -> torch.dtype:
        """The dtype in which squared norms are summed over ranks."""
        return self._policy.norm_dtype

    def norm(self) -> torch.Tensor:
        """The norm of all gradients, without communication: every rank has all of them, except those of experts."""
        if not any(each.ranks is not None for each in self._groups):
            return replicated_norm(self._flat)
        dense = [flat for each, flat in zip(self._groups, self._flat, strict=True) if each.ranks is None]
        return norm_with_experts(dense, self._expert_gradients())

    def _expert_gradients(self) -> dict[DataParallelGroup, list[torch.Tensor]]:
        """The gradients of this rank's experts, by the ranks that have the others."""
        by_ranks: dict[DataParallelGroup, list[torch.Tensor]] = {}
        for each, flat in zip(self._groups, self._flat, strict=True):
            if each.experts is not None:
                by_ranks.setdefault(each.experts.parallel, []).append(flat)
        return by_ranks

    def tensors(self) -> Iterator[torch.Tensor]:
        """The buffers that gradients are added to, and this rank's shards of them."""
        yield from self._flat
        yield from self.shards

    def buffers(self) -> Iterator[torch.Tensor]:
        """Nothing: there are no buckets."""
        return iter(())

    def free_buffers(self) -> None:
        """Do nothing: there are no buckets."""

    def clear(self) -> None:
        """Drop the gradients, after a step."""
        for flat in self._flat:
            flat.zero_()
        for each in self._groups:
            for parameter in each.parameters:
                parameter.grad = None


def _reduce(
    entries: Sequence[Entry],
    first: int,
    dtype: torch.dtype,
    policy: Policy,
    group: DataParallelGroup,
) -> tuple[list[tuple[torch.Tensor, ...]], list[Finish]]:
    """Concatenate gradients of one dtype and reduce them, in messages numbered from ``first``.

    Returns:
        For each message the sums of its gradients, 1-D views of the sent tensor. And functions to call before reading them,
        where the policy only starts the collectives.
    """
    sums, finishes = [], []
    runs = [Run(0, position, entry.gradient.numel()) for position, entry in enumerate(entries)]
    for number, batch in enumerate(flushed_runs(runs, policy.limit), first):
        sent = tuple(entries[run.start] for run in batch)
        tensor = joined([entry.gradient for entry in sent])
        bucket = Bucket(number, tensor, (), dtype, policy.limit, policy.scaling, sent, END_OF_BACKWARD)
        if hooks.recording():
            bucket.publish()
        finish = policy.reduce(bucket, group)
        if finish is not None:
            finishes.append(finish)
        sums.append(tensor.split([run.numel for run in batch]))
    return sums, finishes
