"""Algorithm and bus bandwidth as nccl-tests defines them (doc/PERFORMANCE.md). Uses only the standard library.

S is the payload of the schema (``payload_bytes``), and t is the time of the operation::

    algbw = S / t
    busbw = algbw * factor(op, n)

    all_reduce                                                 2 (n - 1) / n
    reduce_scatter, all_gather, all_to_all, gather, scatter      (n - 1) / n
    broadcast, reduce, send and recv                             1

n is the size of the group. For every n, the bus bandwidth of an ideal algorithm is the bandwidth of the slowest link.
"""

from __future__ import annotations

from typing import Final

from commprof.schema import Op

SEND_RECV: Final = "send_recv"
_SHARED: Final = (Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER)
_WHOLE: Final = (Op.BROADCAST, Op.REDUCE, Op.SEND, Op.RECV, SEND_RECV)


def bus_factor(op: str, group_size: int) -> float | None:
    """Return the factor from algorithm bandwidth to bus bandwidth for ``op``, or None if no factor is defined.

    ``op`` is a value of ``schema.Op`` or ``send_recv``. A group of one rank has no factor because it sends nothing. A
    barrier has no factor because it has no payload.
    """
    if group_size < 2:
        return None
    if op == Op.ALL_REDUCE:
        return 2 * (group_size - 1) / group_size
    if op in _SHARED:
        return (group_size - 1) / group_size
    return 1.0 if op in _WHOLE else None


def calibrated_op(op: str) -> str:
    """Return the calibrated operation that represents ``op``: ``send_recv`` for a send or a recv, else ``op``."""
    return SEND_RECV if op in (Op.SEND, Op.RECV) else op
