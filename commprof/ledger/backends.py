"""What a backend is known to run for what is issued, where it keeps no log of it.

gloo (torch 2.11 to 2.13), mean bytes that a rank sends, S the payload of schema.py and n the ranks of the group. Measured
on the counters of a loopback interface with 2, 3 and 4 ranks and buffers of 0.1 to 19 MB, all within 2 %, and named so by
torch's Flight Recorder:

==================  ===============  ========================================================================
issued              executed         bytes sent per rank
==================  ===============  ========================================================================
all_reduce          all_reduce       2(n-1)/n S
reduce_scatter      all_reduce       2(n-1)/n S: an all_reduce of the whole input, of which each rank keeps a part
reduce              reduce           (n^2-1)/n^2 S up to 2n MiB: a reduce_scatter, then the parts go to the root; more above
broadcast           broadcast        (n-1)/n S
all_gather          all_gather       (n-1)/n S
all_to_all          all_to_all       (n-1)/n S
gather, scatter     the same         (n-1)/n^2 S
send                send             S
==================  ===============  ========================================================================
"""

from __future__ import annotations

from typing import Final, NamedTuple

from commprof.schema import Op, wire_bytes

GLOO: Final = "gloo"
_SEGMENT_BYTES: Final = 2**20  # of gloo's ring: two segments per rank travel in one round
_EXECUTED_BY_GLOO: Final[dict[str, str]] = {Op.REDUCE_SCATTER: Op.ALL_REDUCE}


class Execution(NamedTuple):
    """What a backend runs for one collective.

    Attributes:
        op: the operation.
        wire_bytes: mean bytes that each rank of the group sends.
        least: the bytes are a lower bound only.
    """

    op: str
    wire_bytes: float
    least: bool = False


def known(backend: str | None) -> bool:
    """Whether the behaviour of ``backend`` is known without a log."""
    return backend == GLOO


def execution(op: str, payload_bytes: int, group_size: int) -> Execution:
    """What gloo runs for ``op`` with ``payload_bytes`` in a group of ``group_size`` ranks."""
    executed = _EXECUTED_BY_GLOO.get(op, op)
    if executed != Op.REDUCE or group_size < 2:
        return Execution(executed, wire_bytes(executed, payload_bytes, group_size))
    sent = wire_bytes(Op.REDUCE, payload_bytes, group_size) * (1 + 1 / group_size)
    return Execution(executed, sent, least=payload_bytes > 2 * group_size * _SEGMENT_BYTES)
