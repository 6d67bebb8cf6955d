"""Reduction of whole gradients, once per step, after the last micro-batch (stage 0, and stage 1 in bf16).

``ReplicatedGradients`` is for stage 0. ``AccumulatedGradients`` is for stage 1 in bf16 with accumulation in
fp32. Neither class uses the buckets of stages 1 and 2. All gradients are concatenated and sent at once, up to a
limit of 5e8 elements. The last tensor of a message may exceed this limit (DeepSpeed 0.19.8's rule and
constant).
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

# The key of gradients that are sent together: the ranks, the dtype of the parameters, and the communication dtype.
_Alike = tuple[DataParallelGroup, torch.dtype, torch.dtype]


class Sent(NamedTuple):
    """The gradients of one step after their reduction has been started.

    Attributes:
        results: For each parameter, the tensor that gets the result; 1-D.
        finishes: Functions that must be called before the results are used, if collectives are in flight.
    """

    results: list[tuple[torch.nn.Parameter, torch.Tensor]]
    finishes: list[Finish]

    def take(self) -> None:
        """Wait for the results, and store them as the gradients of the parameters."""
        for finish in self.finishes:
            finish()
        for parameter, part in self.results:
            parameter.grad = part.view(parameter.shape)


class ReplicatedGradients:
    """Reduces the parameters' own gradients, which become views of the sent tensors.

    Parameters without a gradient contribute zeros, so that all ranks issue the same collectives.

    Args:
        names: The names of the trainable parameters, in the model's order.
        parameters: The trainable parameters.
        dtypes: The communication dtype of each parameter's gradient.
        policy: The rules by which gradients are reduced.
        group: The data-parallel ranks.
        at_boundary: A function that returns whether the current micro-batch is the last of its step.
        expert_ranks: The ranks that store each parameter of an expert. Empty without experts.
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
        """Yield nothing, because gradients are in each parameter's ``grad``."""
        return iter(())

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yield nothing, because there are no buckets."""
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
        groups: The param groups, partitioned into shards.
        dtype: The communication dtype.
        policy: The rules by which gradients are reduced.
        group: The data-parallel ranks.
        accumulation: The dtype of the buffers.
        at_boundary: A function that returns whether the current micro-batch is the last of its step.

    Attributes:
        shards: For each param group, this rank's shard of the buffer.
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
        """Add this micro-batch's gradients. Reduce the buffers after the last micro-batch of a step."""
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
        """Return the accumulated gradient of ``parameter``, a 1-D view of the buffer; None if it is in no group."""
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
        """Return the norm of all gradients.

        There is no communication, because every rank has all gradients, except those of experts.
        """
        if not any(each.ranks is not None for each in self._groups):
            return replicated_norm(self._flat)
        dense = [flat for each, flat in zip(self._groups, self._flat, strict=True) if each.ranks is None]
        return norm_with_experts(dense, self._expert_gradients())

    def _expert_gradients(self) -> dict[DataParallelGroup, list[torch.Tensor]]:
        """Return the gradients of this rank's experts. Each key is the group of ranks that have the other experts."""
        by_ranks: dict[DataParallelGroup, list[torch.Tensor]] = {}
        for each, flat in zip(self._groups, self._flat, strict=True):
            if each.experts is not None:
                by_ranks.setdefault(each.experts.parallel, []).append(flat)
        return by_ranks

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the buffers to which gradients are added, and this rank's shards of these buffers."""
        yield from self._flat
        yield from self.shards

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yield nothing, because there are no buckets."""
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
        For each message the sums of its gradients, as 1-D views of the sent tensor. Also the functions that
        must be called before the sums are read, if the policy only starts the collectives.
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
