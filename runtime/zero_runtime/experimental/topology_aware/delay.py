"""Averages of gradients that may come some steps late, over P2P (``communication.bounded_delay``, stage 0).

With a delay of K, a rank that has the gradients of step t sends them to every other rank, and waits for nobody's of that
step. What the optimizer then sees is the mean of everybody's gradients of step t - K, which the rank waits for if need be: a
rank that is behind by less than K steps holds nobody up, and none gets further ahead than that. Each rank adds up the
gradients in the order of the ranks, so that the replicas stay equal to the bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from zero_runtime.comm import DataParallelGroup
from zero_runtime.gradient_reduction.buckets import Bucket
from zero_runtime.gradient_reduction.reducer import Policy
from zero_runtime.gradient_reduction.reduction import Finish, scaled
from zero_runtime.gradient_reduction.whole_gradients import ReplicatedGradients, Sent


def exchange(bucket: Bucket, group: DataParallelGroup) -> Finish:
    """Begin to send the bucket to every other rank, and to receive theirs.

    A :data:`zero_runtime.gradient_reduction.reduction.Reduction`.

    Of two ranks the lower one sends first on both, and each rank goes through the others in ascending order: on a backend
    that runs messages one after the other nobody waits in a circle.

    Returns:
        What waits for these messages, and leaves the sum in ``bucket.tensor``. Sums of 16-bit gradients are rounded once.
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
    """The gradients of stage 0, of which a step gets the means of an earlier one.

    Args:
        names, parameters, dtypes, group, at_boundary: as of :class:`ReplicatedGradients`.
        policy: how gradients are scaled and joined; they are sent by :func:`exchange`.
        steps: of the delay, at least 1.

    Attributes:
        due: whether the parameters' gradients are means that a step is to be taken by.
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
        """Steps whose gradients have been sent, and no step has been taken by."""
        return len(self._under_way) + self.due

    def reduce_accumulated(self) -> None:
        """Send all gradients, and wait for those of the step that is due now, if there is one."""
        self._under_way.append(self._send())
        self.clear()
        if len(self._under_way) > self._steps:
            self._take_oldest()

    def outstanding(self) -> Iterator[None]:
        """Make the means of each step under way the parameters' gradients, oldest first; the caller takes a step by them.

        What has accumulated for a step that has not been sent is there again in the end.
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
        """Wait for the messages under way and take no step by them: the engine is let go of. All ranks must call it.

        A message whose handle is only dropped would be received in the place of a later one of the same two ranks.

        Returns:
            How many steps were not taken.

        Raises:
            RuntimeError: another rank is gone.
        """
        left = self.steps_under_way
        while self._under_way:
            self._under_way.popleft().take()
        self.clear()
        return left

    def clear(self) -> None:
        """Forget the gradients of the step that has been taken; those under way stay so."""
        super().clear()
        self.due = False

    def _take_oldest(self) -> None:
        self._under_way.popleft().take()
        self.due = True
