"""Models the operation that a backend runs for an issued operation, and the bytes that ranks send to each other.

The model of gloo was derived from its sources (of May 2025). It was measured with torch 2.13 on 2, 3 and 4 hosts of one
rank each, with buffers of 4 bytes to 20 MB and several roots. The interfaces of each host counted the bytes below,
about 150 bytes of gloo's own for each message, and the headers of TCP. torch's Flight Recorder uses the same names for
the operations. S is the payload of schema.py, and n is the number of ranks of the group:

==================  ==========  ======================================================================================
issued              executed    which rank sends what
==================  ==========  ======================================================================================
all_reduce          all_reduce  2(n-1)/n S to the rank before it in the group
reduce_scatter      all_reduce  the same: an all_reduce of the whole input; each rank keeps its chunk. Of a list,
                                an all_reduce of each chunk
reduce              reduce      S minus two segments to the rank before it, then a chunk of S/n to the root. A segment
                                is S/2n, at most 1 MiB. Up to 2n MiB, a rank sends (n^2-1)/n^2 S on average
broadcast           broadcast   along a binomial tree, S to each child: the root sends most, half of the ranks nothing
all_gather          all_gather  (n-1)/n S to the rank after it
all_to_all          all_to_all  to each other rank its chunk: as recorded, or S/n if all chunks are equal
gather, scatter     the same    S/n from each other rank to the root, or from the root to each other rank
send                send        S
barrier             barrier     nothing
==================  ==========  ======================================================================================

NCCL chooses between rings and trees, and its rings may have a different order than the group. The bytes that all ranks
together send for an operation are known. The bytes of a single rank are known only if every rank sends the same number
of bytes in any order, or if the records contain the bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from commprof.schema import Op, parse_splits, wire_bytes

GLOO: Final = "gloo"
NCCL: Final = "nccl"
_SEGMENT_BYTES: Final = 2**20  # the largest segment in the rings of gloo
_EXECUTED_BY_GLOO: Final[dict[str, str]] = {Op.REDUCE_SCATTER: Op.ALL_REDUCE}
# Each rank sends the same number of bytes in these operations.
_EVEN_ON_NCCL: Final = frozenset({Op.ALL_GATHER, Op.REDUCE_SCATTER})

Pair: TypeAlias = tuple[int, int]
ANY: Final = -1


class Execution(NamedTuple):
    """The operation that a backend runs for one collective.

    Attributes:
        op: The operation.
        wire_bytes: The mean number of bytes that a rank of the group sends.
    """

    op: str
    wire_bytes: float


class Call(NamedTuple):
    """The values of one collective or message that determine its bytes. Ranks are positions in the group.

    Attributes:
        backend: The backend, or None if not known.
        op: The operation.
        payload_bytes: The payload.
        group_size: The number of ranks of the group.
        root: The root of a rooted operation. None if there is no root or it is not known.
        sender, receiver: The sender and the receiver of a message.
        inputs, outputs: The input and output bytes of each rank if these may differ. Empty if not known.
        sent_to: The bytes from each rank to each rank in an all_to_all. Empty if the records do not contain them.
        chunks: The bytes that each rank keeps in a reduce_scatter, if these differ between ranks.
    """

    backend: str | None
    op: str
    payload_bytes: int
    group_size: int
    root: int | None = None
    sender: int | None = None
    receiver: int | None = None
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    sent_to: tuple[tuple[float, ...], ...] = ()
    chunks: tuple[int, ...] = ()


class Flows(NamedTuple):
    """The bytes that ranks send to each other for a call.

    Attributes:
        sent: The bytes by sender and receiver. The receiver is :data:`ANY` if it may be any other rank. None if the
            senders are not known.
        total: The bytes that all ranks together send. None if not known.
        reason: The reason why ``sent`` or ``total`` is not known.
        messages: The largest number of messages that one rank sends to another rank.
    """

    sent: Mapping[Pair, float] | None
    total: float | None
    reason: str | None = None
    messages: int = 1


def known(backend: str | None) -> bool:
    """Return whether the behavior of ``backend`` is known without a log."""
    return backend == GLOO


def execution(op: str, payload_bytes: int, group_size: int) -> Execution:
    """Return the operation that gloo runs for ``op`` with ``payload_bytes`` in a group of ``group_size`` ranks."""
    executed = _EXECUTED_BY_GLOO.get(op, op)
    if executed != Op.REDUCE or group_size < 2:
        return Execution(executed, wire_bytes(executed, payload_bytes, group_size))
    return Execution(executed, _reduced_by_all(payload_bytes, group_size) / group_size)


def flows(call: Call) -> Flows:
    """Return the bytes that the ranks of the group send to each other for ``call``."""
    n, size = call.group_size, call.payload_bytes
    if n < 2 or call.op == Op.BARRIER or not size:
        return Flows({}, 0.0)
    if call.op in (Op.SEND, Op.RECV):
        if call.sender is None or call.receiver is None:
            return Flows(None, float(size), "the sender or the receiver of a message is not known")
        return Flows({(call.sender, call.receiver): float(size)}, float(size))
    if call.op == Op.ALL_TO_ALL:
        return _pairwise(call)
    if call.op in (Op.GATHER, Op.SCATTER):
        return _direct(call)
    if known(call.backend):
        if call.op == Op.REDUCE_SCATTER and call.chunks:
            return _by_chunks(call)
        return _of_gloo(call, _EXECUTED_BY_GLOO.get(call.op, call.op))
    total = wire_bytes(call.op, size, n) * n
    even = len(set(call.inputs)) <= 1 and len(set(call.outputs)) <= 1
    if call.backend == NCCL and call.op in _EVEN_ON_NCCL and even:
        return Flows({(rank, ANY): total / n for rank in range(n)}, total)
    backend = "NCCL" if call.backend == NCCL else call.backend or "its backend"
    return Flows(None, total, f"{backend} may spread the bytes of {_named(call.op)} unevenly over the ranks")


def _named(op: str) -> str:
    return f"{'an' if op[0] in 'aeiou' else 'a'} {op}"


def _direct(call: Call) -> Flows:
    """Return the flows of a gather (from the other ranks to the root) or a scatter (from the root to the others)."""
    n, size, root = call.group_size, call.payload_bytes, call.root
    total = (n - 1) * size / n
    if root is None:
        return Flows(None, total, f"the root of {_named(call.op)} is not known")
    others = [rank for rank in range(n) if rank != root]
    return Flows({(r, root) if call.op == Op.GATHER else (root, r): size / n for r in others}, total)


def sent_by_rank(
    inputs: Sequence[int],
    outputs: Sequence[int],
    input_splits: Sequence[str | None],
    output_splits: Sequence[str | None],
) -> tuple[tuple[float, ...], ...]:
    """Return the bytes from each rank to each rank in an all_to_all, from the records of all ranks in group order.

    The result is empty if no record has splits. In this case all splits are equal, or an older version of commprof,
    which recorded no splits, wrote the records. The result is also empty if the splits of a pair are not known.

    Args:
        inputs, outputs: The ``input_bytes`` and ``output_bytes`` of each rank.
        input_splits, output_splits: The recorded splits of each rank. None if the splits of the rank are equal.
    """
    n = len(inputs)
    if not any(input_splits) and not any(output_splits):
        return ()
    sent = [_shares(text, size, n) for text, size in zip(input_splits, inputs, strict=True)]
    got = [_shares(text, size, n) for text, size in zip(output_splits, outputs, strict=True)]
    by_sender = []
    for a, row in enumerate(sent):
        # If the splits of a sender are not known, the splits of its receivers are used.
        sent_bytes = row or [shares[a] for shares in got if shares is not None]
        if len(sent_bytes) < n:
            return ()
        by_sender.append(tuple(sent_bytes))
    return tuple(by_sender)


def _shares(text: str | None, size: int, ranks: int) -> tuple[float, ...] | None:
    return (size / ranks,) * ranks if text is None else parse_splits(text, ranks)


def _pairwise(call: Call) -> Flows:
    """Return the flows of an all_to_all.

    Records without splits contain only the total input and output bytes of each rank. If all ranks have the same input
    or the same output bytes, each rank divides equally, and the splits follow from the other value.
    """
    n, inputs, outputs = call.group_size, call.inputs, call.outputs
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    if len(call.sent_to) == n:
        bytes_of_pair = {(a, b): float(call.sent_to[a][b]) for a, b in pairs if call.sent_to[a][b]}
    elif len(set(inputs)) == 1 and len(outputs) == n:
        bytes_of_pair = {(a, b): outputs[b] / n for a, b in pairs}
    elif len(set(outputs)) == 1 and len(inputs) == n:
        bytes_of_pair = {(a, b): inputs[a] / n for a, b in pairs}
    else:
        return Flows(None, None, "the splits of an all_to_all are not in its records")
    return Flows(bytes_of_pair, sum(bytes_of_pair.values()))


def _by_chunks(call: Call) -> Flows:
    """Return the flows of gloo's reduce_scatter of a list, which is an all_reduce of each chunk."""
    sent: dict[Pair, float] = defaultdict(float)
    messages = 0
    for chunk in filter(None, call.chunks):
        one = _of_gloo(call._replace(payload_bytes=chunk), Op.ALL_REDUCE)
        for pair, size in (one.sent or {}).items():
            sent[pair] += size
        messages += one.messages
    return _summed(sent, messages)


def _of_gloo(call: Call, op: str) -> Flows:
    n, size = call.group_size, call.payload_bytes
    if op == Op.ALL_GATHER:
        return _summed({(r, (r + 1) % n): (n - 1) * size / n for r in range(n)}, 2 * (n - 1))
    if op == Op.ALL_REDUCE:
        each = max(2, _ceiling(_ceiling(size, _SEGMENT_BYTES), n))
        length = _ceiling(size, n * each) * each
        chunks = [_clipped(size, r * length, length) for r in range(n)]
        sent = {(r, (r - 1) % n): 2 * size - chunks[r] - chunks[r - 1] for r in range(n)}
        return _summed(sent, 2 * (n - 1) * each)
    if call.root is None:
        return Flows(None, execution(op, size, n).wire_bytes * n, f"the root of {_named(op)} is not known")
    if op == Op.BROADCAST:
        # Positions are counted from the root. In round i, each rank r below 2^i sends to rank r + 2^i.
        tree = {v: v - (1 << (v.bit_length() - 1)) for v in range(1, n)}
        return _summed({((u + call.root) % n, (v + call.root) % n): size for v, u in tree.items()}, 1)
    length, each = _segments(size, n)
    to_next: Counter[Pair] = Counter()
    for r in range(n):
        to_next[r, (r - 1) % n] += size - _clipped(size, ((r + 1) * each - 2) * length, 2 * length)
        if r != call.root:
            to_next[r, call.root] += _clipped(size, r * each * length, each * length)
    return _summed(to_next, n * each)


def _summed(sent: Mapping[Pair, float], messages: int) -> Flows:
    return Flows(sent, float(sum(sent.values())), None, messages)


def _segments(size: int, ranks: int) -> tuple[int, int]:
    """Return the bytes of a segment of gloo's reduce, and the number of segments in the chunk of a rank.

    Segments are not rounded to whole elements here.
    """
    length = max(1, min(_ceiling(size, 2 * ranks), _SEGMENT_BYTES))
    each = max(2, _ceiling(_ceiling(size, length), ranks))
    return length, each


def _ceiling(size: int, part: int) -> int:
    return -(-size // part)


def _clipped(size: int, begin: int, length: int) -> int:
    """Return how many of the ``length`` bytes from ``begin`` are within a buffer of ``size`` bytes."""
    return max(0, min(length, size - begin))


def _reduced_by_all(size: int, ranks: int) -> int:
    """Return the bytes that all ranks together send for gloo's reduce. The chunk of the root counts as a mean chunk.

    ``analysis/relations/operations.sql`` contains the same formula.
    """
    length, each = _segments(size, ranks)
    chunks = size // (each * length)  # number of complete chunks; the next chunk may end within the buffer
    unsent = chunks * 2 * length
    if chunks < ranks:
        unsent += _clipped(size, ((chunks + 1) * each - 2) * length, 2 * length)
    return (ranks + 1) * size - unsent - size // ranks
