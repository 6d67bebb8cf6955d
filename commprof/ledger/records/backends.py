"""What a backend runs for an issued operation, and how much each rank of the group then sends to each other.

gloo: read in its sources (of May 2025), and measured with torch 2.13 on 2, 3 and 4 hosts of one rank each, with buffers of
4 bytes to 20 MB and several roots. The interfaces of each host counted the bytes below, about 150 bytes of gloo's own
for each message, and TCP's headers. torch's Flight Recorder gives the operations the same names. S is the payload of
schema.py, n the ranks of the group:

==================  ==========  ======================================================================================
issued              executed    which rank sends what
==================  ==========  ======================================================================================
all_reduce          all_reduce  2(n-1)/n S to the rank before it in the group
reduce_scatter      all_reduce  the same: an all_reduce of the whole input; each rank keeps its chunk. Of a list,
                                an all_reduce of each chunk
reduce              reduce      S minus two segments to the rank before it, then a chunk of S/n to the root. A segment is
                                S/2n, but never more than 1 MiB: up to 2n MiB a mean rank sends (n^2-1)/n^2 S
broadcast           broadcast   along a binomial tree, S to each child: the root sends most, half of the ranks nothing
all_gather          all_gather  (n-1)/n S to the rank after it
all_to_all          all_to_all  to each other rank its chunk: as recorded, or S/n, where all are equal
gather, scatter     the same    S/n from each other rank to the root, or from the root to each other rank
send                send        S
barrier             barrier     nothing
==================  ==========  ======================================================================================

NCCL chooses among rings and trees, and its rings need not go in the order of the group. The bytes that
all ranks together send for an operation are known. The bytes of a single rank are known only if every rank sends the same
in any order, or if the records give them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from commprof.schema import Op, parse_splits, wire_bytes

GLOO: Final = "gloo"
NCCL: Final = "nccl"
_SEGMENT_BYTES: Final = 2**20  # of gloo's rings, at most
_EXECUTED_BY_GLOO: Final[dict[str, str]] = {Op.REDUCE_SCATTER: Op.ALL_REDUCE}
_EVEN_ON_NCCL: Final = frozenset({Op.ALL_GATHER, Op.REDUCE_SCATTER})  # each rank sends the same

Pair: TypeAlias = tuple[int, int]
ANY: Final = -1


class Execution(NamedTuple):
    """What a backend runs for one collective.

    Attributes:
        op: the operation.
        wire_bytes: mean bytes that each rank of the group sends.
    """

    op: str
    wire_bytes: float


class Call(NamedTuple):
    """One collective or message, as far as its bytes depend on it. Ranks are positions in the group.

    Attributes:
        root: the root of a rooted operation; None for none, or not known.
        sender, receiver: of a message.
        inputs, outputs: bytes that each rank gives and gets, where these may differ; empty where that is not known.
        sent_to: of an all_to_all, bytes from each rank to each; empty where the records do not say.
        chunks: of a reduce_scatter, bytes that each rank keeps, where these differ.
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
    """Who sends what for a call.

    Attributes:
        sent: bytes by sender and receiver, which is :data:`ANY` where it may be any other; None where that is not known.
        total: bytes that all ranks together send; None where not even that is known.
        reason: why one of them is not known.
        messages: into how many messages a rank puts what it sends to another, at most.
    """

    sent: Mapping[Pair, float] | None
    total: float | None
    reason: str | None = None
    messages: int = 1


def known(backend: str | None) -> bool:
    """Whether the behaviour of ``backend`` is known without a log."""
    return backend == GLOO


def execution(op: str, payload_bytes: int, group_size: int) -> Execution:
    """What gloo runs for ``op`` with ``payload_bytes`` in a group of ``group_size`` ranks."""
    executed = _EXECUTED_BY_GLOO.get(op, op)
    if executed != Op.REDUCE or group_size < 2:
        return Execution(executed, wire_bytes(executed, payload_bytes, group_size))
    return Execution(executed, _reduced_by_all(payload_bytes, group_size) / group_size)


def flows(call: Call) -> Flows:
    """Which rank of the group sends how much to which for ``call``."""
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
    """A gather or scatter: from each other rank to the root, or back."""
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
    """Bytes from each rank to each in an all_to_all, from the records of all its ranks in the group's order.

    Empty where no record has splits: all are equal then, or an older version, which recorded no splits, wrote them.

    Args:
        inputs, outputs: ``input_bytes`` and ``output_bytes``.
        input_splits, output_splits: as recorded; null where a rank's are equal.
    """
    n = len(inputs)
    if not any(input_splits) and not any(output_splits):
        return ()
    sent = [_shares(text, size, n) for text, size in zip(input_splits, inputs, strict=True)]
    got = [_shares(text, size, n) for text, size in zip(output_splits, outputs, strict=True)]
    by_sender = []
    for a, row in enumerate(sent):
        # Where the splits of a sender are not known, those of its receivers are used.
        sent_bytes = row or [shares[a] for shares in got if shares is not None]
        if len(sent_bytes) < n:
            return ()
        by_sender.append(tuple(sent_bytes))
    return tuple(by_sender)


def _shares(text: str | None, size: int, ranks: int) -> tuple[float, ...] | None:
    return (size / ranks,) * ranks if text is None else parse_splits(text, ranks)


def _pairwise(call: Call) -> Flows:
    """An all_to_all. Records without splits have what each rank gives and gets in all.

    Where one of the two is the same on all ranks, each of them divides equally, and the splits follow from the other.
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
    """gloo's reduce_scatter of a list: an all_reduce of each chunk."""
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
        # In round i the ranks below 2^i, counted from the root, send to those 2^i above them.
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
    """Bytes of a segment of gloo's reduce, but for the size of an element, and how many of them are a rank's chunk."""
    length = max(1, min(_ceiling(size, 2 * ranks), _SEGMENT_BYTES))
    each = max(2, _ceiling(_ceiling(size, length), ranks))
    return length, each


def _ceiling(size: int, part: int) -> int:
    return -(-size // part)


def _clipped(size: int, begin: int, length: int) -> int:
    """How much of ``length`` bytes from ``begin`` is within a buffer of ``size``."""
    return max(0, min(length, size - begin))


def _reduced_by_all(size: int, ranks: int) -> int:
    """Bytes that all ranks together send for gloo's reduce; the chunk of the root counts as a mean one.

    ``analysis/relations/operations.sql`` has the same.
    """
    length, each = _segments(size, ranks)
    chunks = size // (each * length)  # complete ones; the next may end within the buffer
    unsent = chunks * 2 * length
    if chunks < ranks:
        unsent += _clipped(size, ((chunks + 1) * each - 2) * length, 2 * length)
    return (ranks + 1) * size - unsent - size // ranks
