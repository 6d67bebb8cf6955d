"""The executed level: what the backend ran for each collective, from its log, its own list, or its known behaviour."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from commprof.errors import CommprofError
from commprof.ledger import backends
from commprof.ledger.request import RecordedRun
from commprof.schema import Op

NCCL: Final = "nccl"
_P2P: Final = frozenset({Op.SEND, Op.RECV})


class Executed(NamedTuple):
    """What the backend ran.

    Attributes:
        ops: for each row of ``once_per_collective``, the operation that ran; null where that is not known.
        source: where that is from, or why it is not known.
        problems: sentences about what contradicts the records.
        doubts: sentences about what cannot be told.
    """

    ops: pa.Array
    source: str
    problems: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def executed(run: RecordedRun, once: pa.Table) -> Executed:
    """What ran for each row of ``once``."""
    used = Counter(once["backend"].to_pylist())
    names = {str(name) for name in used if name}
    if NCCL in names:
        return _from_log(run, once)
    ops = pa.array(
        [
            backends.execution(op, 0, 2).op if backends.known(backend) else None
            for op, backend in zip(once["op"].to_pylist(), once["backend"].to_pylist(), strict=True)
        ],
        pa.string(),
    )
    unknown = sorted(name for name in names if not backends.known(name))
    if unknown:
        return Executed(ops, f"not known: {', '.join(unknown)} keeps no log that commprof reads")
    if not names:
        return Executed(ops, "not known: no record names its backend")
    agreed, of, problems = _beside_flight(run.table("flight"), run.table("collectives"))
    source = "the known behaviour of gloo"
    if of:
        source += f"; torch's Flight Recorder agrees on {agreed:,} of {of:,}"
    return Executed(ops, source, problems=problems)


def _from_log(run: RecordedRun, once: pa.Table) -> Executed:
    matches, lines, notes = _alignment(run)
    if matches is None or not matches.num_rows:
        return Executed(pa.nulls(once.num_rows, pa.string()), f"not known: {notes}")
    printed: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for file, line, op in zip(*(lines[name].to_pylist() for name in ("file", "line", "op")), strict=True):
        printed[file, line].add(op)
    found: dict[tuple[int, int, int, int], list[str]] = defaultdict(list)
    states: Counter[str] = Counter()
    for row in matches.to_pylist():
        states[row["state"]] += 1
        if row["state"] == "matched":
            ops = printed.get((row["file"], row["line"])) or {row["op"]}
            key = (row["rank"], row["attempt"], row["record_pid"], row["seq"])
            found[key].append(row["op"] if row["op"] in ops else min(ops))
    keys = zip(*(once[name].to_pylist() for name in ("rank", "attempt", "pid", "seq")), strict=True)
    ops_run = pa.array([_together(found.get(key)) for key in keys], pa.string())
    problems, doubts = [], []
    if states["extra"]:
        problems.append(f"{states['extra']:,} lines of the NCCL log have no record")
    unclear = states["missing"] + states["ambiguous"] + states["torn"]
    if unclear:
        doubts.append(
            f"{unclear:,} lines of the NCCL log are missing, ambiguous or torn, so what ran there is not known"
        )
    source = f"the NCCL log: {states['matched']:,} lines matched with records"
    return Executed(ops_run, source, tuple(problems), tuple(doubts))


def _alignment(run: RecordedRun) -> tuple[pa.Table | None, pa.Table, str]:
    """``matches`` and ``nccl_ops`` of the run, aligned now where it only holds the logs."""
    matches, lines = run.table("matches"), run.table("nccl_ops")
    if matches.num_rows:
        return matches, lines, ""
    from commprof.align import matching
    from commprof.nccl.parser import parse_logs

    try:
        parsed = parse_logs([matching.logs_of(run.path)])
        report = matching.align(run, parsed.ops, parsed.tables.get("nccl_communicators"))
    except CommprofError as error:
        return None, lines, str(error).rstrip(".")
    return report.matches, parsed.ops, ""


def _together(ops: Sequence[str] | None) -> str | None:
    if not ops:
        return None
    distinct = sorted(set(ops))
    return distinct[0] if len(distinct) == 1 else "+".join(distinct)


def _beside_flight(flight: pa.Table, collectives: pa.Table) -> tuple[int, int, tuple[str, ...]]:
    """How many of the newest collectives of each rank and group gloo lists as it is known to, of how many compared."""
    if not flight.num_rows:
        return 0, 0, ()
    entries: dict[tuple[Any, ...], list[tuple[int, str]]] = defaultdict(list)
    for row in flight.to_pylist():
        if not row["is_p2p"] and row["op"] is not None:
            order = row["op_id"] if row["op_id"] is not None else row["seq"]
            entries[row["rank"], row["attempt"], row["pid"], row["pg"]].append((order, row["op"]))
    columns = ("rank", "attempt", "pid", "pg", "seq", "op", "backend", "backend_method", "group_size")
    records: dict[tuple[Any, ...], list[tuple[int, str, int]]] = defaultdict(list)
    for record in collectives.select(columns).to_pylist():
        if record["op"] not in _P2P and record["backend"] == backends.GLOO:
            key = (record["rank"], record["attempt"], record["pid"], record["pg"])
            records[key].append((record["seq"], *_listed(record)))
    agreed = of = 0
    problems = []
    for key in sorted(entries.keys() & records.keys()):
        listed = [op for _, op in sorted(entries[key])]
        expected = [op for _, op, times in sorted(records[key]) for _ in range(times)]
        same, compared, problem = _compare_newest(listed, expected)
        agreed, of = agreed + same, of + compared
        if problem:
            problems.append(f"rank {key[0]}, group {key[3]}: {problem}")
    return agreed, of, tuple(problems[:3])


def _listed(record: Mapping[str, Any]) -> tuple[str, int]:
    """How gloo lists a record: the operation, and how often: a list reduce_scatter is an all_reduce for each rank."""
    op = backends.execution(record["op"], 0, 2).op
    is_list = record["op"] == Op.REDUCE_SCATTER and record["backend_method"] == "reduce_scatter"
    return op, record["group_size"] if is_list else 1


def _compare_newest(listed: Sequence[str], expected: Sequence[str]) -> tuple[int, int, str | None]:
    length = min(len(listed), len(expected))
    newest, records = listed[-length:], expected[-length:]
    same = sum(a == b for a, b in zip(newest, records, strict=True))
    if same == length:
        return same, length, None
    at = next(i for i, (a, b) in enumerate(zip(newest, records, strict=True)) if a != b)
    return (
        same,
        length,
        f"the Flight Recorder lists {newest[at]} where {records[at]} is known to run ({same} of {length} agree)",
    )
