"""Imports dumps of torch's Flight Recorder: JSON or pickles, whose code is never run, one file per rank.

The recorder lists the operations that the backend ran. With gloo a reduce_scatter is an all_reduce, and sends and
receives are missing. A dump has only the newest operations and no roots. It has the members of a group only if the
backend recorded them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from commprof.errors import LogError
from commprof.imports.plain_pickle import read_plain_pickle
from commprof.imports.recording import Collective, Imported, ImportedRank
from commprof.schema import Op
from commprof.trace.rank_files.flight_entries import flight_row

TOOL: Final = "torch's Flight Recorder"

_DTYPES: Final[dict[str, str]] = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Bool": "bool",
}
_LAST_NUMBER: Final = re.compile(r"(\d+)(?!.*\d)")
# torch writes ``send RANK->PEER`` and ``recv RANK<-PEER`` with ranks of the group, and ``RANK<-?`` for any source.
_PEER: Final = re.compile(r"(?:->|<-)\s*(\d+)")
_DONE: Final = ("completed",)
_VERSION: Final = "2"


def parse_dump(data: bytes) -> dict[str, Any] | None:
    """Return the dump in ``data``; None if ``data`` is not a dump.

    Raises:
        LogError: ``data`` is a pickle that cannot be read as plain data.
    """
    if data[:1] == b"\x80":
        dump = read_plain_pickle(data)
    else:
        try:
            dump = json.loads(data)
        except (ValueError, RecursionError):
            return None
    return dump if isinstance(dump, dict) and isinstance(dump.get("entries"), list) else None


def read_dumps(dumps: Sequence[tuple[Path, Mapping[str, Any]]]) -> Imported:
    """Return the dumps of the ranks of a job as one recording.

    Raises:
        LogError: The version of a dump is not supported, the rank of a file is unknown, or two files have the same
            rank.
    """
    by_rank: dict[int, tuple[Path, Mapping[str, Any]]] = {}
    for path, dump in dumps:
        version = str(dump.get("version", _VERSION))
        if version.partition(".")[0] != _VERSION:
            raise LogError(
                f"{path} is version {version} of torch's dump, and commprof reads version {_VERSION}.x; update commprof, or "
                "let a torch of version 2.5 to 2.15 write it"
            )
        rank = rank_of(path, dump)
        if rank in by_rank:
            raise LogError(
                f"{path} and {by_rank[rank][0]} are both of rank {rank}, by the last number of their names; give the files "
                "of one dump, named as torch names them: <prefix><rank>"
            )
        by_rank[rank] = path, dump
    members = _members(by_rank)
    world = max([*by_rank, *(rank for ranks in members.values() for rank in ranks)], default=-1) + 1
    result = Imported(TOOL, [], world_size=world or None)
    unread = 0
    for rank, (_, dump) in sorted(by_rank.items()):
        imported = ImportedRank(rank)
        for entry in dump["entries"]:
            if not _add(imported, entry, members):
                unread += 1
        result.ranks.append(imported)
    result.notes = list(_notes(by_rank, result.ranks, unread))
    return result


def rank_of(path: Path, dump: Mapping[str, Any]) -> int:
    """Return the rank of a file of another tool.

    The rank is the value of the key ``rank`` in ``dump``, or the last number in the name of the file, as in the names
    that torch uses.

    Raises:
        LogError: Neither ``dump`` nor the name contains a rank.
    """
    stated_rank = dump.get("rank")
    if isinstance(stated_rank, int) and not isinstance(stated_rank, bool) and stated_rank >= 0:
        return stated_rank
    number = _LAST_NUMBER.search(
        path.name.removesuffix(path.suffix) if path.suffix[1:].isalpha() else path.name
    )
    if number is None:
        raise LogError(
            f"{path} does not show its rank: expected a file name that ends in the rank, such as trace_0"
        )
    return int(number[1])


def _members(dumps: Mapping[int, tuple[Path, Mapping[str, Any]]]) -> dict[str, tuple[int, ...]]:
    """Return the global ranks of each group.

    If no dump lists the ranks of a group, they are the ranks whose dumps have entries of the group.
    """
    stated_ranks: dict[str, tuple[int, ...]] = {}
    seen: dict[str, set[int]] = {}
    for rank, (_, dump) in dumps.items():
        config = dump.get("pg_config")
        for group in config.values() if isinstance(config, dict) else ():
            if not isinstance(group, dict):
                continue
            ranks = tuple(int(number) for number in re.findall(r"\d+", str(group.get("ranks", ""))))
            if ranks and group.get("name") not in (None, ""):
                stated_ranks[str(group["name"])] = ranks
        for entry in dump["entries"]:
            if isinstance(entry, dict) and isinstance(entry.get("process_group"), list | tuple):
                seen.setdefault(str(next(iter(entry["process_group"]), "")), set()).add(rank)
    return {name: tuple(sorted(ranks)) for name, ranks in seen.items()} | stated_ranks


def _add(rank: ImportedRank, entry: Any, members: Mapping[str, tuple[int, ...]]) -> bool:
    """Add one entry to ``rank``. Return False if the entry does not have the form that torch writes."""
    try:
        row = flight_row(entry)
        collective = _collective(rank.rank, entry, row, members)
    except (KeyError, ValueError, TypeError, AttributeError):
        return False
    rank.flight.append(row)
    if collective is not None:
        rank.collectives.append(collective)
    return True


def _collective(
    rank: int, entry: Mapping[str, Any], row: Mapping[str, Any], members: Mapping[str, tuple[int, ...]]
) -> Collective | None:
    if row["op"] is None:  # for example, the begin or the end of a coalesced block
        return None
    op = Op(row["op"])
    ranks = members.get(row["pg"], ())
    input_bytes, output_bytes = row["input_bytes"] or 0, row["output_bytes"] or 0
    dtypes = entry.get("input_dtypes") or entry.get("output_dtypes") or ()
    shapes = entry.get("input_sizes") or ()
    elements = _elements(entry, "input_sizes"), _elements(entry, "output_sizes")
    return Collective(
        op=op,
        backend_method=row["name"],
        pg=row["pg"],
        pg_seq=max(0, row["seq"] - 1),  # torch counts from 1
        group_size=len(ranks),
        group_ranks=ranks,
        group_desc=row["group_desc"],
        group_rank=ranks.index(rank) if rank in ranks else -1,
        issue_ns=int(row["time_realtime_ns"] or 0),
        payload_bytes=0 if op is Op.BARRIER else _whole(op, input_bytes, output_bytes, len(ranks)),
        input_bytes=0 if op is Op.RECV else input_bytes,
        output_bytes=0 if op is Op.SEND else output_bytes,
        numel=0 if op is Op.BARRIER else _whole(op, *elements, len(ranks)),
        num_tensors=len(shapes),
        sizes=";".join("x".join(map(str, shape)) or "()" for shape in shapes) or None,
        dtype=_DTYPES.get(dtypes[0], str(dtypes[0]).lower()) if dtypes else None,
        backend=row["name"].partition(":")[0] or None,
        peer=_peer(row["name"], op, ranks),
        is_p2p=row["is_p2p"],
        call_site=_call_site(entry.get("frames")),
        thread=None if entry.get("thread_name") is None else str(entry["thread_name"]),
        finished=bool(entry.get("retired")) or row["state"] in _DONE,
    )


def _is_retired_at_issue(entry: Any) -> bool:
    """Return whether an entry is retired although its completion was not observed.

    The entries that gloo writes itself are excluded, because they are retired when the operation ends.
    """
    if not isinstance(entry, dict) or str(entry.get("profiling_name", "")).startswith("gloo:"):
        return False
    return bool(entry.get("retired")) and entry.get("state") == "scheduled"


def _is_unsized(row: Mapping[str, Any]) -> bool:
    """Return whether a row of ``flight`` is an operation with data whose size is unknown."""
    return row["op"] not in (None, Op.BARRIER) and row["input_bytes"] is None and row["output_bytes"] is None


def _whole(op: Op, sent: int, received: int, ranks: int) -> int:
    """Return the size of the whole operation.

    For a gather or scatter, only the entry of the root has the sizes of all parts.

    Args:
        op: The operation.
        sent: The size of the inputs in the entry, in bytes or elements.
        received: The size of the outputs in the entry, in the same unit.
        ranks: The number of ranks of the group.
    """
    if op is Op.ALL_GATHER:
        return received
    if op is Op.GATHER:
        return max(received, sent * ranks)
    if op is Op.SCATTER:
        return max(sent, received * ranks)
    return sent or received


def _elements(entry: Mapping[str, Any], name: str) -> int:
    return sum(math.prod(map(int, shape)) for shape in entry.get(name) or ())


def _peer(name: str, op: Op, ranks: Sequence[int]) -> int:
    """Return the peer of a message, from a name such as ``nccl:send 0->1`` or ``nccl:recv 1<-0``.

    The peer is a global rank if the ranks of the group are known. The result is -1 if the name does not contain a peer.
    """
    match = _PEER.search(name) if op in (Op.SEND, Op.RECV) else None
    if match is None:
        return -1
    number = int(match[1])
    return ranks[number] if number < len(ranks) else number


def _call_site(frames: Any) -> str | None:
    """Return the first frame outside of torch, in the form of commprof's call sites."""
    for frame in frames if isinstance(frames, list) else ():
        file = str(frame.get("filename", ""))
        if "/torch/" not in file and file:
            return f"{file}:{frame.get('line')} {frame.get('name')}"
    return None


def _notes(
    dumps: Mapping[int, tuple[Path, Mapping[str, Any]]], ranks: Sequence[ImportedRank], unread: int
) -> Iterable[str]:
    if any(each.backend == "gloo" for rank in ranks for each in rank.collectives):
        yield (
            "gloo's entries name the executed operation, not the issued one: a reduce_scatter is an all_reduce "
            "there, and sends and "
            "receives are not listed"
        )
    yield "the Flight Recorder has only the newest entries, and neither roots nor steps"
    issued = sum(_is_retired_at_issue(entry) for _, dump in dumps.values() for entry in dump["entries"])
    if issued:
        yield (
            f"whether {issued} entries ended is not known: their backend does not report completion, so torch retires them "
            "when they are issued, and they are listed as ended"
        )
    first = [
        rank
        for rank, (_, dump) in dumps.items()
        if min((e.get("record_id", 0) for e in dump["entries"] if isinstance(e, dict)), default=0) > 0
    ]
    if first:
        yield f"the oldest entries of rank(s) {', '.join(map(str, sorted(first)))} had been overwritten before the dump"
    unsized = sum(_is_unsized(row) for rank in ranks for row in rank.flight)
    if unsized:
        yield f"{unsized} entries have no size, or an element type of unknown size: they count as 0 bytes"
    if unread:
        yield f"{unread} entries are not of the form that torch writes (version 2 of its dump) and were left out"
