"""Gradients that every rank reduces whole, once a step, after the last micro-batch.

``ReplicatedGradients`` are those of stage 0; ``AccumulatedGradients`` are those of stage 1 in bf16 when they are accumulated
in fp32. Neither has buckets in the sense of stages 1 and 2: everything is joined and sent at once, up to the limit
of 5e8 elements, which a message exceeds by its last tensor (DeepSpeed 0.19.8's rule and constant).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.gradient_reduction.buckets import END_OF_BACKWARD, Bucket, Entry, joined
from zero_runtime.gradient_reduction.clip import replicated_norm
from zero_runtime.gradient_reduction.layout import Run, flushed_runs
from zero_runtime.gradient_reduction.reducer import ParameterGroup, Policy
from zero_runtime.gradient_reduction.reduction import Finish


class Sent(NamedTuple):
    """The gradients of one step, sent to be reduced.

    Attributes:
        parts: of each parameter, what was sent, 1-D: the result will be there.
        finishes: what is to be called first, where messages are under way.
    """

    results: list[tuple[torch.nn.Parameter, torch.Tensor]]
    finishes: list[Finish]

    def take(self) -> None:
        """Make the results the gradients of the parameters, once they are there."""
        for finish in self.finishes:
            finish()
        for parameter, part in self.results:
            parameter.grad = part.view(parameter.shape)


class ReplicatedGradients:
    """Reduces the parameters' own gradients, which become parts of what was sent.

    Parameters without a gradient travel as zeros, so that every rank sends the same.

    Args:
        names: of the trainable parameters, in the model's order.
        parameters: the trainable parameters.
        dtypes: in which each parameter's gradient travels.
        policy: how they are reduced.
        group: the data-parallel ranks.
        at_boundary: whether the micro-batch at hand is the last of its step.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        dtypes: Mapping[torch.nn.Parameter, torch.dtype],
        policy: Policy,
        group: DataParallelGroup,
        at_boundary: Callable[[], bool],
    ) -> None:
        self._names = names
        self._parameters = parameters
        self._dtypes = dtypes
        self._policy = policy
        self._group = group
        self._at_boundary = at_boundary
        self._paused = False

    def begin_step(self) -> None:
        """Nothing is counted here."""

    def finish_backward(self) -> None:
        """Reduce all gradients, after the last micro-batch of a step."""
        if not self._paused and self._at_boundary():
            self.reduce_accumulated()

    def reduce_accumulated(self) -> None:
        """Reduce all gradients, once."""
        self._send().take()

    def _send(self) -> Sent:
        by_dtypes: dict[tuple[torch.dtype, torch.dtype], list[tuple[torch.nn.Parameter, Entry]]] = {}
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = parameter.grad.contiguous()
            if parameter.numel():
                entry = Entry(name, parameter.grad.detach().view(-1), ())
                by_dtypes.setdefault((parameter.dtype, self._dtypes[parameter]), []).append(
                    (parameter, entry)
                )
        number = 0
        sent = Sent([], [])
        for (_, dtype), members in by_dtypes.items():
            entries = [entry for _, entry in members]
            sums, finishes = _reduce(entries, number, dtype, self._policy, self._group)
            number += len(sums)
            results = [part for each in sums for part in each]
            sent.results.extend(
                (parameter, part) for (parameter, _), part in zip(members, results, strict=True)
            )
            sent.finishes.extend(finishes)
        return sent

    def pause(self, paused: bool) -> None:
        """Whether gradients only accumulate for now (``no_sync``)."""
        self._paused = paused

    def tensors(self) -> Iterator[torch.Tensor]:
        """Nothing: gradients are in each parameter's ``grad``."""
        return iter(())

    def buffers(self) -> Iterator[torch.Tensor]:
        """Nothing: there are no buckets."""
        return iter(())

    def free_buffers(self) -> None:
        """Nothing, likewise."""

    def clear(self) -> None:
        """Forget the gradients of the step that has been taken."""
        for parameter in self._parameters:
            parameter.grad = None


class AccumulatedGradients:
    """Adds every micro-batch's gradients to flat buffers of another dtype, and reduces those.

    Args:
        groups: the param groups, laid out in pieces.
        dtype: in which gradients travel.
        policy: how they are reduced.
        group: the data-parallel ranks.
        accumulation: dtype of the buffers.
        at_boundary: whether the micro-batch at hand is the last of its step.

    Attributes:
        pieces: for each param group, this rank's piece of the buffer.
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
        self.shards = [flat.chunk(group.world_size)[group.rank] for flat in self._flat]

    def begin_step(self) -> None:
        """Nothing is counted here."""

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
        entries = [
            Entry(",".join(each.names), flat, ()) for each, flat in zip(self._groups, self._flat, strict=True)
        ]
        sums, _ = _reduce(entries, 0, self._dtype, self._policy, self._group)
        if any(len(each) > 1 for each in sums):
            torch._foreach_copy_(self._flat, [part for each in sums for part in each])

    def accumulated(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """What has been added up for ``parameter`` since the last step, 1-D, in place; None for one of no group."""
        for each, flat in zip(self._groups, self._flat, strict=True):
            for candidate, offset in zip(each.parameters, each.flat_layout.offsets, strict=True):
                if candidate is parameter:
                    return flat.narrow(0, offset, parameter.numel())
        return None

    def pause(self, paused: bool) -> None:
        """Whether gradients only accumulate for now (``no_sync``)."""
        self._paused = paused

    @property
    def norm_dtype(self) -> torch.dtype:
        """In which squared norms are summed over ranks."""
        return self._policy.norm_dtype

    def norm(self) -> torch.Tensor:
        """The norm of all gradients, which every rank holds: nothing is sent."""
        return replicated_norm(self._flat)

    def tensors(self) -> Iterator[torch.Tensor]:
        """The buffers that gradients are added to, and this rank's pieces of them."""
        yield from self._flat
        yield from self.shards

    def buffers(self) -> Iterator[torch.Tensor]:
        """Nothing: there are no buckets."""
        return iter(())

    def free_buffers(self) -> None:
        """Nothing, likewise."""

    def clear(self) -> None:
        """Forget the gradients of the step that has been taken."""
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
    """Join gradients of one dtype and reduce them, from message ``first`` on.

    Returns:
        For each message the sums of its gradients, 1-D: parts of what was sent. And what is to be called before these are
        there, where the policy only begins messages.
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
