"""Imports traces of torch.profiler (Kineto): JSON, plain or gzipped, one file per rank.

With NCCL each collective is a ``record_param_comms`` event with sizes and group. The times of its kernels are the times
on the device. torch 2.13 and newer give the event and its kernels a ``Comms Id``, which is equal on all ranks of a
collective. The id is a hash of the group (name, size, first rank and stride), of the sequence number in the group, and
of whether the operation is a message. With other backends there are only the ``c10d::*`` operators, without group. They
have shapes only if the profiler recorded shapes. The element type of a list of tensors is only in the event of the
backend that follows the operator.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from commprof.errors import LogError
from commprof.imports.flight_recorder import rank_of
from commprof.imports.recording import NO_STEP, Collective, Imported, ImportedRank
from commprof.schema import Op

TOOL: Final = "torch.profiler (Kineto)"
PARAM_COMMS: Final = "record_param_comms"

# The keys are the names of c10::toString and of C++ types, in lower case and without c10::.
_ITEM_BYTES: Final[dict[str, int]] = {
    **dict.fromkeys(("unsigned char", "signed char", "char", "byte", "bool", "qint8", "quint8"), 1),
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1
    ),
    **dict.fromkeys(("half", "bfloat16", "short", "short int", "uint16", "unsigned short"), 2),
    **dict.fromkeys(("float", "int", "uint32", "unsigned int", "qint32", "complexhalf", "complex<half>"), 4),
    **dict.fromkeys(
        ("double", "long int", "long", "uint64", "unsigned long", "complexfloat", "complex<float>"), 8
    ),
    **dict.fromkeys(("complexdouble", "complex<double>"), 16),
}
_DTYPES: Final[dict[str, str]] = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "int": "int32",
    "long": "int64",
    "long int": "int64",
    "short": "int16",
    "short int": "int16",
    "unsigned char": "uint8",
    "byte": "uint8",
    "char": "int8",
    "signed char": "int8",
    "bool": "bool",
    "unsigned short": "uint16",
    "unsigned int": "uint32",
    "unsigned long": "uint64",
}
# The keys are names in record_param_comms and of the c10d operators, without leading and trailing underscores.
_OPERATIONS: Final[dict[str, Op]] = {
    **dict.fromkeys(("allreduce", "all_reduce", "allreduce_coalesced", "allreduce_sparse"), Op.ALL_REDUCE),
    **dict.fromkeys(("broadcast", "broadcast_oop"), Op.BROADCAST),
    **dict.fromkeys(("reduce", "reduce_oop"), Op.REDUCE),
    **dict.fromkeys(
        (
            "allgather",
            "all_gather",
            "allgather_base",
            "allgather_coalesced",
            "allgather_into_tensor_coalesced",
        ),
        Op.ALL_GATHER,
    ),
    **dict.fromkeys(("all_gather_single", "all_gather_single_coalesced"), Op.ALL_GATHER),
    **dict.fromkeys(
        ("reduce_scatter", "reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single"),
        Op.REDUCE_SCATTER,
    ),
    **dict.fromkeys(
        ("all_to_all", "all_to_allv", "alltoall", "alltoall_base", "all_to_all_single"), Op.ALL_TO_ALL
    ),
    "gather": Op.GATHER,
    "scatter": Op.SCATTER,
    "send": Op.SEND,
    **dict.fromkeys(("recv", "recv_any_source"), Op.RECV),
    "barrier": Op.BARRIER,
}
_COMMS_ID: Final = "Comms Id"
_EXTERNAL_ID: Final = "External id"
_STEP: Final = re.compile(r"ProfilerStep#(\d+)")
# The position of the root or peer in the arguments of an operator, and the operators whose first argument is the
# output.
_ROOT_ARGUMENT: Final = {Op.BROADCAST: 2, Op.REDUCE: 3, Op.GATHER: 3, Op.SCATTER: 3, Op.SEND: 2, Op.RECV: 2}
_OUTPUT_FIRST: Final = frozenset((Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER))


def is_trace(value: Any) -> bool:
    """Return whether ``value`` is a trace of torch.profiler."""
    return isinstance(value, dict) and isinstance(value.get("traceEvents"), list)


def read_traces(traces: Sequence[tuple[Path, Mapping[str, Any]]]) -> Imported:
    """Return the traces of the ranks of a job as one recording. Times are CLOCK_REALTIME.

    Raises:
        LogError: The rank of a file is unknown, or two files have the same rank.
    """
    imported = Imported(TOOL, [])
    files: dict[int, Path] = {}
    counts: Counter[str] = Counter()
    unknown: Counter[str] = Counter()  # element types
    for path, trace in traces:
        info = trace.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        rank = info["rank"] if isinstance(info.get("rank"), int) else rank_of(path, {})
        if rank in files:
            raise LogError(
                f"{path} and {files[rank]} are both of rank {rank}; give the traces of one job, one of each rank"
            )
        files[rank] = path
        world = info.get("world_size")
        if isinstance(world, int):
            imported.world_size = max(world, imported.world_size or 0)
        imported.ranks.append(_read_rank(rank, trace, info, counts, unknown))
    imported.ranks.sort(key=lambda each: each.rank)
    imported.notes += _check_identities(imported.ranks)
    if not any(rank.collectives for rank in imported.ranks):
        imported.notes.append("the traces hold no collectives: neither record_param_comms nor c10d operators")
    if counts["group"]:
        imported.notes.append(
            f"{counts['group']} operators have no group in the trace (only those of NCCL do), and the job has "
            "several groups: "
            "their group is called '?' and has no wire bytes"
        )
    if counts["size"]:
        imported.notes.append(
            f"{counts['size']} operators have no size in the trace (record_shapes was off): they count as 0 bytes"
        )
    imported.notes += (
        f"{count} operations have elements of type {name!r}, whose size commprof does not know: they count as 0 bytes"
        for name, count in sorted(unknown.items())
    )
    imported.notes.append(
        "Kineto does not record threads that were started after it, and shows the operations into which gloo "
        "divides a collective"
    )
    return imported


def _read_rank(
    rank: int,
    trace: Mapping[str, Any],
    info: Mapping[str, Any],
    counts: Counter[str],
    unknown: Counter[str],
) -> ImportedRank:
    base = _whole(trace.get("baseTimeNanoseconds"))
    events = [
        each
        for each in trace["traceEvents"]
        if isinstance(each, dict) and each.get("ph") == "X" and "ts" in each
    ]
    imported = ImportedRank(rank, host=str(trace.get("host_name") or ""))
    imported.pid = next(
        (each["pid"] for each in events if isinstance(each.get("pid"), int) and each["pid"] > 0), 0
    )
    steps = sorted(
        (_begin(each, base), _end(each, base), int(match[1]))
        for each in events
        if (match := _STEP.fullmatch(str(each.get("name")))) and each.get("cat") == "user_annotation"
    )
    imported.steps = [(number, begin, end) for begin, end, number in steps]
    issued = [each for each in events if each.get("name") == PARAM_COMMS and each.get("cat") != "kernel"]
    groups = _groups(info)
    if issued:
        issued.sort(key=lambda each: float(each["ts"]))
        kernels = _Kernels(events, base, issued)
        collectives = [_from_parameters(each, base, rank, groups, kernels, unknown) for each in issued]
        _identify(collectives, issued)
    else:
        operators = [each for each in events if str(each.get("name", "")).startswith("c10d::")]
        operators.sort(key=lambda each: float(each["ts"]))
        kinds = _Kinds(events)
        collectives = [_from_operator(each, base, rank, groups, kinds, counts) for each in operators]
    begins = [begin for begin, _, _ in steps]
    for each in collectives:
        if each is not None:
            place = bisect_right(begins, each.issue_ns) - 1
            inside = place >= 0 and each.issue_ns < steps[place][1]
            each.step = steps[place][2] if inside else NO_STEP
            imported.collectives.append(each)
    return imported


def _begin(event: Mapping[str, Any], base: int) -> int:
    return base + round(float(event["ts"]) * 1000)


def _end(event: Mapping[str, Any], base: int) -> int:
    return base + round((float(event["ts"]) + float(event.get("dur", 0))) * 1000)


def _groups(info: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    config = info.get("pg_config")
    return {
        str(each["pg_name"]): each
        for each in (config if isinstance(config, list) else ())
        if isinstance(each, dict) and "pg_name" in each
    }


class _Kernels:
    """The device time of each call, from the begin of its first NCCL kernel to the end of its last one.

    A kernel and its call share the Comms Id and the external id. All calls of a coalesced block have the same Comms Id.
    The external id is therefore used for these calls, and for traces without a Comms Id.
    """

    def __init__(
        self, events: Iterable[Mapping[str, Any]], base: int, issued: Iterable[Mapping[str, Any]]
    ) -> None:
        self._issued = Counter(_comms_id(each) for each in issued if _operation(each) is not None)
        self._spans: dict[tuple[str, Any], tuple[int, int]] = {}
        for each in events:
            if each.get("cat") == "kernel" and "nccl" in str(each.get("name", "")).lower():
                span = _begin(each, base), _end(each, base)
                key = next(self._keys(each), None)
                if key is not None:
                    earlier = self._spans.get(key, span)
                    self._spans[key] = min(span[0], earlier[0]), max(span[1], earlier[1])

    def of(self, event: Mapping[str, Any]) -> tuple[int, int] | tuple[None, None]:
        """Return the begin and end of a call on the device, in ns; None for both if no kernel refers to the call."""
        return next((self._spans[key] for key in self._keys(event) if key in self._spans), (None, None))

    def _keys(self, event: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the keys that match a kernel to its call, the most reliable first.

        A kernel is stored under its first key only.
        """
        number = _comms_id(event)
        if number is not None and self._issued[number] == 1:
            yield _COMMS_ID, number
        external = (event.get("args") or {}).get(_EXTERNAL_ID)
        if external is not None:
            yield _EXTERNAL_ID, external


def _comms_id(event: Mapping[str, Any]) -> str | None:
    number = (event.get("args") or {}).get(_COMMS_ID)
    return None if number is None else str(number)


def _operation(event: Mapping[str, Any]) -> Op | None:
    """Return the operation of a ``record_param_comms`` event.

    The operation is None for a wait, the start of a group, and the begin and end of a coalesced block.
    """
    return _OPERATIONS.get(str((event.get("args") or {}).get("Collective name", "")).strip("_"))


def _identify(collectives: Iterable[Collective | None], issued: Iterable[Mapping[str, Any]]) -> None:
    """Set the identity of each collective with a Comms Id: the id, and how often the rank used that id before.

    A message gets no identity. Each rank numbers its own messages of a group, so the two ends of a message seldom have
    the same number.
    """
    used: Counter[str] = Counter()
    for collective, event in zip(collectives, issued, strict=True):
        number = _comms_id(event)
        if collective is not None and number is not None and not collective.is_p2p:
            collective.identity = number, used[number]
            used[number] += 1


def _check_identities(ranks: Iterable[ImportedRank]) -> Iterator[str]:
    """Remove the identities of groups whose ranks number their collectives differently, and yield a note for each.

    A backend that counts messages and collectives together (nccl2) numbers a collective differently on ranks that sent
    different numbers of messages before. In such a group, no message has the same number as a collective of the rank.
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[int, list[Collective]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for rank in ranks:
        for each in rank.collectives:
            groups[each.pg, tuple(each.group_ranks)][rank.rank].append(each)
    for (name, _), of_ranks in groups.items():
        known = [{each.identity for each in its} - {None} for its in of_ranks.values()]
        together = any(
            {each.pg_seq for each in its if each.is_p2p}
            and not {each.pg_seq for each in its if each.is_p2p}
            & {each.pg_seq for each in its if not each.is_p2p}
            for its in of_ranks.values()
        )
        if any(known) and together and any(one != known[0] for one in known):
            for each in (each for its in of_ranks.values() for each in its if not each.is_p2p):
                each.identity = each.pg_seq = None
            yield (
                f"group {name} counts messages and collectives together, so its numbers differ between ranks: its "
                "collectives are joined by their order, which is right only if all traces begin at the same collective"
            )


def _from_parameters(
    event: Mapping[str, Any],
    base: int,
    rank: int,
    groups: Mapping[str, Mapping[str, Any]],
    kernels: _Kernels,
    unknown: Counter[str],
) -> Collective | None:
    arguments = event.get("args") or {}
    name = str(arguments.get("Collective name", ""))
    op = _operation(event)
    if op is None:
        return None
    dtype = _kind(arguments.get("dtype", ""))
    item = _ITEM_BYTES.get(dtype, 0)
    received, sent = _whole(arguments.get("Out msg nelems")), _whole(arguments.get("In msg nelems"))
    numel = received if op in (Op.ALL_GATHER, Op.GATHER) else sent or received
    if numel and not item and op is not Op.BARRIER:
        unknown[dtype] += 1
    pg = str(arguments.get("Process Group Name", "?"))
    ranks = _ranks(arguments.get("Process Group Ranks")) or _ranks((groups.get(pg) or {}).get("ranks"))
    size = _whole(arguments.get("Group size")) or len(ranks)
    device = kernels.of(event)
    peer = (
        arguments.get("Dst Rank") if op is Op.SEND else arguments.get("Src Rank") if op is Op.RECV else None
    )
    sequence = arguments.get("Seq")
    return Collective(
        op=op,
        backend_method=name,
        pg=pg,
        pg_seq=sequence if isinstance(sequence, int) and sequence >= 0 else None,
        group_size=size,
        group_ranks=ranks if len(ranks) == size else (),
        group_desc=_said(arguments.get("Process Group Description")),
        group_rank=ranks.index(rank) if rank in ranks else -1,
        issue_ns=_begin(event, base),
        return_ns=_end(event, base),
        device_begin_ns=device[0],
        device_end_ns=device[1],
        payload_bytes=0 if op is Op.BARRIER else numel * item,
        input_bytes=0 if op in (Op.RECV, Op.BARRIER) else sent * item,
        output_bytes=0 if op in (Op.SEND, Op.BARRIER) else received * item,
        numel=0 if op is Op.BARRIER else numel,
        dtype=_DTYPES.get(dtype, dtype or None),
        backend="nccl",
        peer=_whole(peer) if peer is not None else -1,
        is_p2p=op in (Op.SEND, Op.RECV),
    )


def _from_operator(
    event: Mapping[str, Any],
    base: int,
    rank: int,
    groups: Mapping[str, Mapping[str, Any]],
    kinds: _Kinds,
    counts: Counter[str],
) -> Collective | None:
    name = str(event["name"]).removeprefix("c10d::")
    op = _OPERATIONS.get(name.strip("_"))
    if op is None:
        return None
    arguments = event.get("args") or {}
    shapes, types = (
        arguments.get("Input Dims") or [],
        [_kind(kind) for kind in arguments.get("Input type") or []],
    )
    elements = [_elements(shape) for shape in shapes[:2]] + [0, 0]
    # Lists of tensors have no type in the event of the operator. The annotation of the backend that follows has it.
    kind = next((each for each in types[:2] if each in _ITEM_BYTES), None)
    if kind is None and any(elements):
        kind = kinds.of(float(event["ts"]), elements)
    item = _ITEM_BYTES.get(kind or "", 0)
    first, second = elements[0] * item, elements[1] * item
    outputs, inputs = (
        (elements[0], first),
        ((elements[1], second) if op in _OUTPUT_FIRST else (elements[0], first)),
    )
    if not (outputs[1] or inputs[1]) and op is not Op.BARRIER:
        counts["size"] += 1
    # The event does not name the group. The group is certain if the job has only one. If all groups have the same
    # members, at least the members are certain.
    pg, group = next(iter(groups.items()), ("0", {}))
    if len(groups) > 1:
        pg = "?"
        group = group if len({_ranks(each.get("ranks")) for each in groups.values()}) == 1 else {}
        counts["group"] += not group
    ranks = _ranks(group.get("ranks"))
    size = _whole(group.get("pg_size")) or len(ranks)
    # The size of the whole operation (S of nccl-tests). The event has only the part of this rank.
    count, total = inputs
    if op is Op.ALL_GATHER:
        count, total = outputs if outputs[1] else (inputs[0] * size, inputs[1] * size)
    elif op is Op.GATHER:
        count, total = inputs[0] * size, inputs[1] * size
    elif op is Op.SCATTER:
        count, total = outputs[0] * size, outputs[1] * size
    if op is Op.BARRIER:
        count = total = 0
    # The event has the root or peer as a rank of the group, not as a global rank.
    root = (arguments.get("Concrete Inputs") or [])[_ROOT_ARGUMENT.get(op, 99) :][:1]
    number = int(root[0]) if root and str(root[0]).isdigit() else -1
    return Collective(
        op=op,
        backend_method=name,
        pg=pg,
        pg_seq=None,
        group_size=size,
        group_ranks=ranks,
        group_desc=_said(group.get("pg_desc")),
        group_rank=ranks.index(rank) if rank in ranks else -1,
        issue_ns=_begin(event, base),
        return_ns=_end(event, base),
        payload_bytes=total,
        input_bytes=0 if op in (Op.RECV, Op.BARRIER) else inputs[1],
        output_bytes=0 if op in (Op.SEND, Op.BARRIER) else outputs[1],
        numel=count,
        dtype=_DTYPES.get(kind or "", kind),
        peer=ranks[number] if 0 <= number < len(ranks) else number,
        is_p2p=op in (Op.SEND, Op.RECV),
    )


class _Kinds:
    """Finds element types in the annotations of the backend (``gloo:all_reduce``). Each annotation is used once."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self._annotations: list[tuple[float, int, str]] = []
        for each in events:
            arguments = each.get("args") or {}
            types = arguments.get("Input type") or []
            if each.get("cat") == "user_annotation" and ":" in str(each.get("name")) and types:
                kind = _kind(types[0])
                if kind in _ITEM_BYTES:
                    self._annotations.append(
                        (float(each["ts"]), _elements((arguments.get("Input Dims") or [[]])[0]), kind)
                    )
        self._annotations.sort()

    def of(self, issued: float, elements: Sequence[int]) -> str | None:
        """Return the type of the first unused annotation from ``issued`` on with one of these numbers of elements.

        Args:
            issued: The time stamp of the operator, in the unit of the trace (microseconds).
            elements: The numbers of elements of the first arguments of the operator.
        """
        for place, (begin, count, kind) in enumerate(self._annotations):
            if begin >= issued and count in elements:
                del self._annotations[place]
                return kind
        return None


def _kind(name: Any) -> str:
    """Return the name of an element type in the form of the keys of ``_ITEM_BYTES``."""
    return str(name).lower().removeprefix("c10::").replace("<c10::", "<")


def _elements(shape: Any) -> int:
    """Return the number of elements of one argument.

    ``shape`` is the shape of a tensor or a list of shapes. An argument without a shape has 0 elements.
    """
    if not isinstance(shape, list) or not shape:
        return 0
    if any(isinstance(each, list) for each in shape):
        return sum(_elements(each) if each else 1 for each in shape)
    return math.prod(each for each in shape if isinstance(each, int))


def _ranks(value: Any) -> tuple[int, ...]:
    """Return the ranks in a list, or in text such as ``[0, 1, 2]``; empty if the text is truncated."""
    if isinstance(value, str):
        if "..." in value:
            return ()
        try:
            value = json.loads(value)
        except ValueError:
            return ()
    return tuple(each for each in value if isinstance(each, int)) if isinstance(value, list) else ()


def _whole(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0


def _said(value: Any) -> str | None:
    return None if value in (None, "", "undefined") else str(value)
