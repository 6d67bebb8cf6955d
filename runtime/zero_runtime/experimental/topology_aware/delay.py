"""Bounded delay, in which means of gradients are applied some steps late (``communication.bounded_delay``, stage 0).

With a delay of K, a rank sends the gradients of step t to every other rank with P2P messages. It does not
wait for the gradients of the other ranks in step t. The optimizer then applies the mean of all gradients of
step t - K, and waits for this mean if necessary. So a rank that is less than K steps behind does not delay
other ranks, and no rank gets further ahead. Each rank sums the gradients in rank order, so that the replicas
stay bitwise equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from zero_runtime.comm import DataParallelGroup
from zero_runtime.gradient_reduction.gradient_buckets import Bucket
from zero_runtime.gradient_reduction.reducer import Policy
from zero_runtime.gradient_reduction.reduction import Finish, scaled
from zero_runtime.gradient_reduction.whole_gradients import ReplicatedGradients, Sent


def exchange(bucket: Bucket, group: DataParallelGroup) -> Finish:
    """Start to send the bucket to every other rank, and to receive the buckets of the other ranks.

    This function is a :data:`zero_runtime.gradient_reduction.reduction.Reduction`.

    For each pair of ranks, both ranks start the message of the lower rank first. Each rank processes the
    other ranks in ascending order. So a backend that runs messages one after the other cannot deadlock.

    Returns:
        A function that waits for these messages and writes the sum to ``bucket.tensor``. Sums of 16-bit
        gradients are rounded once.
    """
    outgoing = scaled(bucket)
    received = {
        member: torch.empty_like(outgoing) for member in range(group.world_size) if member != group.rank
    }
    why = bucket.why(intended_op="all_reduce")
    works = []
    for member, room in received.items():
        if group.rank < member:
            works.append(group.start_send(outgoing, member, why))
        works.append(group.start_receive(room, member, why))
        if group.rank > member:
            works.append(group.start_send(outgoing, member, why))

    def finish() -> None:
        for work in works:
            if work is not None:
                work.wait()
        total = torch.zeros_like(outgoing, dtype=torch.promote_types(outgoing.dtype, torch.float32))
        for member in range(group.world_size):
            total.add_(received.get(member, outgoing))
        if bucket.scaling.factor_after != 1.0:
            total.mul_(bucket.scaling.factor_after)
        bucket.tensor.copy_(total)

    return finish


class DelayedGradients(ReplicatedGradients):
    """The gradients of stage 0 with a bounded delay. A step uses the means of an earlier step.

    Args:
        names, parameters, dtypes, group, at_boundary: The same arguments as for :class:`ReplicatedGradients`.
        policy: The scaling and concatenation of gradients. :func:`exchange` replaces the reduction of the
            policy.
        steps: The delay in steps, at least 1.

    Attributes:
        due: Whether the gradients of the parameters are means for the next optimizer step.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        dtypes: Mapping[torch.nn.Parameter, torch.dtype],
        policy: Policy,
        group: DataParallelGroup,
        at_boundary: Callable[[], bool],
        steps: int,
    ) -> None:
        super().__init__(names, parameters, dtypes, policy._replace(reduce=exchange), group, at_boundary)
        self.due = False
        self._steps = steps
        self._under_way: deque[Sent] = deque()

    @property
    def steps_under_way(self) -> int:
        """The number of steps whose gradients have been sent but not applied."""
        return len(self._under_way) + self.due

    def reduce_accumulated(self) -> None:
        """Send all gradients, and wait for the gradients of the step that is now due, if there is such a step."""
        self._under_way.append(self._send())
        self.clear()
        if len(self._under_way) > self._steps:
            self._take_oldest()

    def outstanding(self) -> Iterator[None]:
        """Set the parameters' gradients to the means of each delayed step, oldest first, and yield after each step.

        The caller takes an optimizer step at each yield. Gradients that have accumulated for a step that is
        not sent yet are restored at the end.
        """
        if self.due:
            yield
        accumulated = [parameter.grad for parameter in self._parameters]
        while self._under_way:
            self._take_oldest()
            yield
        for parameter, gradient in zip(self._parameters, accumulated, strict=True):
            parameter.grad = gradient

    def settle(self) -> int:
        """Wait for the messages in flight without applying them. All ranks must call this method.

        The engine calls this method when it is released. If only the handle of a message were dropped, the
        message would be received in place of a later message between the same two ranks.

        Returns:
            The number of steps that were not taken.

        Raises:
            RuntimeError: Another rank has exited.
        """
        left = self.steps_under_way
        while self._under_way:
            self._under_way.popleft().take()
        self.clear()
        return left

    def clear(self) -> None:
        """Drop the gradients of the step that has been taken. Gradients in flight stay."""
        super().clear()
        self.due = False

    def _take_oldest(self) -> None:
        self._under_way.popleft().take()
        self.due = True
