"""The operations of a calibration as repeatable calls with checked results.

Every rank fills its buffer with small integers that depend on the rank and the position. So sums are exact in every element
type, and data of another rank or position are detected. Needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Final, NamedTuple

from commprof.calibration.bandwidths import SEND_RECV
from commprof.schema import Op

if TYPE_CHECKING:
    import torch

_PERIOD: Final = 5  # period of the pattern in elements; no power of two, so that chunks begin differently
_ROOT: Final = 0


class Trial(NamedTuple):
    """One operation at one size on this rank.

    Attributes:
        call: carries it out; a collective of all ranks.
        result: the result on this rank; None if it has none.
        expected: the expected ``result`` after the first call.
        sent: the buffer that the call overwrites, cleared after the first call, since sums would grow without limit.
        keeps_step: no rank can run ahead of the others; if false, ranks are synchronized before each call.
    """

    call: Callable[[], None]
    result: torch.Tensor | None
    expected: torch.Tensor | None
    sent: torch.Tensor
    keeps_step: bool

    def wrong(self) -> int:
        """The number of elements of the result that differ from the expected ones."""
        if self.result is None or self.expected is None:
            return 0
        return int((self.result != self.expected).sum().item())


class Buffers:
    """The data that ranks send, and sums of them.

    Args:
        ranks: number of ranks of the job.
        like: an empty tensor of the element type and device.
    """

    def __init__(self, ranks: int, like: torch.Tensor) -> None:
        self.ranks = ranks
        self.like = like

    def of(self, senders: Iterable[int], begin: int, length: int) -> torch.Tensor:
        """The sum of the buffers of ``senders`` from ``begin`` to ``begin + length``."""
        numbers = [0] * _PERIOD
        for sender in senders:
            for place in range(_PERIOD):
                numbers[place] += (begin + place + 3 * sender) % _PERIOD - 2
        period = self.like.new_tensor(numbers)
        return period.repeat(-(-length // _PERIOD))[:length].contiguous()

    def empty(self, length: int) -> torch.Tensor:
        """A buffer for a result, filled with a number that no rank sends."""
        return self.like.new_full((length,), 77)


def trial(op: str, rank: int, count: int, buffers: Buffers) -> Trial:
    """``op`` with a payload of ``count`` elements, a multiple of the number of ranks.

    Raises:
        KeyError: there is no such operation.
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
    result = data if rank == _ROOT else None  # elsewhere the buffer is undefined afterwards
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
    """As in nccl-tests: every rank sends to the next rank and receives from the previous one at the same time."""
    import torch.distributed as dist

    after, before = (rank + 1) % buffers.ranks, (rank - 1) % buffers.ranks
    data, result = buffers.of([rank], 0, count), buffers.empty(count)

    def call() -> None:
        both = [dist.P2POp(dist.isend, data, after), dist.P2POp(dist.irecv, result, before)]
        for work in dist.batch_isend_irecv(both):
            _finish(work)

    return Trial(call, result, buffers.of([before], 0, count), data, keeps_step=True)


def _newer(module: ModuleType, name: str, before: str) -> Callable[..., object]:
    """``name`` of ``module``, or its older name ``before`` if this torch lacks it."""
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
