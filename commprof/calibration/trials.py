"""The operations of a calibration as repeatable calls with checked results.

Every rank fills its buffer with small integers that depend on the rank and the position. Sums of these integers are
exact in every element type. Data from a wrong rank or position are detected. Needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Final, NamedTuple

from commprof.calibration.bandwidths import SEND_RECV
from commprof.schema import Op

if TYPE_CHECKING:
    import torch

# The period of the pattern in elements. It is not a power of two, so that chunks begin with different numbers.
_PERIOD: Final = 5
_ROOT: Final = 0


class Trial(NamedTuple):
    """One operation at one size on this rank.

    Attributes:
        call: A function that carries out the operation. All ranks must call it.
        result: The buffer for the result on this rank, or None if this rank has no result.
        expected: The expected content of ``result`` after the first call.
        sent: The input buffer. It is zeroed after the first call, because repeated sums would grow without limit.
        keeps_step: Whether the operation synchronizes the ranks, so that no rank can run ahead. If False, the ranks are
            synchronized before each call.
    """

    call: Callable[[], None]
    result: torch.Tensor | None
    expected: torch.Tensor | None
    sent: torch.Tensor
    keeps_step: bool

    def wrong(self) -> int:
        """Return the number of elements of the result that differ from the expected elements."""
        if self.result is None or self.expected is None:
            return 0
        return int((self.result != self.expected).sum().item())


class Buffers:
    """Creates the buffers that ranks send, and the expected sums of these buffers.

    Args:
        ranks: The number of ranks of the job.
        like: An empty tensor with the element type and device of the buffers.
    """

    def __init__(self, ranks: int, like: torch.Tensor) -> None:
        self.ranks = ranks
        self.like = like

    def of(self, senders: Iterable[int], begin: int, length: int) -> torch.Tensor:
        """Return the sum of the buffers of ``senders``, for the elements from ``begin`` to ``begin + length``."""
        numbers = [0] * _PERIOD
        for sender in senders:
            for place in range(_PERIOD):
                numbers[place] += (begin + place + 3 * sender) % _PERIOD - 2
        period = self.like.new_tensor(numbers)
        return period.repeat(-(-length // _PERIOD))[:length].contiguous()

    def empty(self, length: int) -> torch.Tensor:
        """Return a buffer for a result, filled with a number that no rank sends."""
        return self.like.new_full((length,), 77)


def trial(op: str, rank: int, count: int, buffers: Buffers) -> Trial:
    """Return the trial of ``op`` with a payload of ``count`` elements, a multiple of the number of ranks.

    Raises:
        KeyError: the operation is not known.
    """
    return _TRIALS[op](rank, count, buffers)


def _all_reduce(rank: int, count: int, buffers: Buffers) -> Trial:
    import torch.distributed as dist

    data = buffers.of([rank], 0, count)
    total = buffers.of(range(buffers.ranks), 0, count)
    return Trial(lambda: _finish(dist.all_reduce(data)), data, total, data, keeps_step=True)


def _reduce(rank: int, count: int, buffers: Buffers) -> Trial:
    import torch.distributed as dist

    data = buffers.of([rank], 0, count)
    total = buffers.of(range(buffers.ranks), 0, count) if rank == _ROOT else None
    # On other ranks the content of the buffer is undefined after the call.
    result = data if rank == _ROOT else None
    return Trial(lambda: _finish(dist.reduce(data, _ROOT)), result, total, data, keeps_step=False)


def _broadcast(rank: int, count: int, buffers: Buffers) -> Trial:
    import torch.distributed as dist

    data = buffers.of([_ROOT], 0, count) if rank == _ROOT else buffers.empty(count)
    sent = buffers.of([_ROOT], 0, count)
    return Trial(lambda: _finish(dist.broadcast(data, _ROOT)), data, sent, data, keeps_step=False)


def _all_gather(rank: int, count: int, buffers: Buffers) -> Trial:
    import torch
    import torch.distributed as dist

    share = count // buffers.ranks
    data, result = buffers.of([rank], 0, share), buffers.empty(count)
    expected = torch.cat([buffers.of([sender], 0, share) for sender in range(buffers.ranks)])
    gather = _newer(dist, "all_gather_single", "all_gather_into_tensor")
    return Trial(lambda: _finish(gather(result, data)), result, expected, data, keeps_step=True)


def _reduce_scatter(rank: int, count: int, buffers: Buffers) -> Trial:
    import torch.distributed as dist

    share = count // buffers.ranks
    data, result = buffers.of([rank], 0, count), buffers.empty(share)
    part = buffers.of(range(buffers.ranks), rank * share, share)
    scatter = _newer(dist, "reduce_scatter_single", "reduce_scatter_tensor")
    return Trial(lambda: _finish(scatter(result, data)), result, part, data, keeps_step=True)


def _all_to_all(rank: int, count: int, buffers: Buffers) -> Trial:
    import torch
    import torch.distributed as dist

    share = count // buffers.ranks
    data, result = buffers.of([rank], 0, count), buffers.empty(count)
    expected = [buffers.of([sender], rank * share, share) for sender in range(buffers.ranks)]
    return Trial(
        lambda: _finish(dist.all_to_all_single(result, data)),
        result,
        torch.cat(expected),
        data,
        keeps_step=True,
    )


def _send_recv(rank: int, count: int, buffers: Buffers) -> Trial:
    """Return a trial in which every rank sends to the next rank and receives from the previous rank concurrently.

    nccl-tests measures send and recv in the same way.
    """
    import torch.distributed as dist

    after, before = (rank + 1) % buffers.ranks, (rank - 1) % buffers.ranks
    data, result = buffers.of([rank], 0, count), buffers.empty(count)

    def call() -> None:
        both = [dist.P2POp(dist.isend, data, after), dist.P2POp(dist.irecv, result, before)]
        for work in dist.batch_isend_irecv(both):
            _finish(work)

    return Trial(call, result, buffers.of([before], 0, count), data, keeps_step=True)


def _newer(module: ModuleType, name: str, before: str) -> Callable[..., object]:
    """Return the function ``name`` of ``module``, or its older name ``before`` if this torch version lacks ``name``."""
    function: Callable[..., object] = getattr(module, name, None) or getattr(module, before)
    return function


def _finish(work: object) -> None:
    """Wait for ``work`` if a call returned a handle."""
    if work is not None:
        work.wait()  # type: ignore[attr-defined]


_TRIALS: Final[dict[str, Callable[[int, int, Buffers], Trial]]] = {
    Op.ALL_REDUCE: _all_reduce,
    Op.REDUCE: _reduce,
    Op.BROADCAST: _broadcast,
    Op.ALL_GATHER: _all_gather,
    Op.REDUCE_SCATTER: _reduce_scatter,
    Op.ALL_TO_ALL: _all_to_all,
    SEND_RECV: _send_recv,
}
