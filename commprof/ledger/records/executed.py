"""The executed level: the operation that the backend ran for each collective.

The operation is known from the log of the backend, or from the known behavior of the backend.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks.collectives import has_raised
from commprof.errors import CommprofError
from commprof.ledger.records import backends
from commprof.ledger.records.issued import Executed as Ops
from commprof.ledger.records.log_lines import LINE_COLUMNS, MATCH_COLUMNS, LogLines, Writer
from commprof.ledger.records.row_index import combinations, each_for, numbers_of, where
from commprof.ledger.requests.request import RecordedRun
from commprof.schema import Op, wire_bytes

NCCL: Final = "nccl"
_MOST_NAMED: Final = 4
_PROBED_BYTES: Final = 1024  # any size, since the model is proportional to the size
_P2P: Final = frozenset({Op.SEND, Op.RECV})
# The Flight Recorder has one list of collectives for each combination of these columns.
_LISTING: Final = ("rank", "attempt", "pid", "pg")
_LISTED: Final = (*_LISTING, "seq", "pg_seq", "op", "backend", "backend_method", "group_size", "num_tensors")


class Executed(NamedTuple):
    """The operations that the backend ran.

    Attributes:
        ops: A function that returns the executed operation of each record of a table, null if not known.
        source: The source of the executed operations, or the reason why they are not known.
        problems: Clauses about contradictions with the records.
        doubts: Clauses about operations that are not known.
    """

    ops: Ops
    source: str
    problems: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def executed(run: RecordedRun, names: Iterable[str]) -> Executed:
    """Return the operations that ran for the records of ``run``, whose backends are ``names``."""
    names = sorted(names)
    if NCCL in names:
        return _from_log(run)
    unknown = [name for name in names if not backends.known(name)]
    if unknown:
        return Executed(_as_known, f"not known: {', '.join(unknown)} keeps no log that commprof reads")
    if not names:
        return Executed(_as_known, "not known: no record names its backend")
    agreed, of, problems = _compare_flight(run)
    source = "the known behavior of gloo"
    if of:
        source += f"; torch's Flight Recorder agrees on {agreed:,} of {of:,}"
    return Executed(_as_known, source, problems=problems)


def _as_known(rows: pa.Table) -> pa.Array:
    """Return the operation that the backend runs for each record according to its known behavior."""

    def ran(op: str, backend: str | None) -> str | None:
        return backends.execution(op, 0, 2).op if backends.known(backend) else None

    return each_for(rows, ["op", "backend"], ran)


def _nothing(rows: pa.Table) -> pa.Array:
    return pa.nulls(len(rows), pa.string())


def _from_log(run: RecordedRun) -> Executed:
    try:
        lines = _lines_of(run)
    except CommprofError as error:
        return Executed(_nothing, f"not known: {str(error).rstrip('.')}")
    states, problems, doubts = lines.states, [], []
    foreign = _foreign_writers(run, lines)
    if foreign and len(foreign) == len(lines.writers):
        text = f"the NCCL log is not of this run: it is of {_named(foreign)}; the run has {_processes(run)}"
        return Executed(_nothing, f"not known: {text}", doubts=(text,))
    if foreign:
        doubts.append(f"the NCCL log has lines of other processes than the run's: {_named(foreign)}")
    extra = sum(count["extra"] for writer, count in lines.writers.items() if writer not in foreign)
    extra += lines.ambiguous_extra
    if extra:
        problems.append(
            f"{extra:,} line{'s' * (extra > 1)} of the NCCL log {'have' if extra > 1 else 'has'} no record"
        )
    unclear = states["missing"] + states["ambiguous"] + states["torn"]
    if unclear:
        doubts.append(
            f"{unclear:,} lines of the NCCL log are missing, ambiguous or truncated, so what ran there is not known"
        )
    source = f"the NCCL log: {states['matched']:,} lines matched with records"
    return Executed(lines.executed_ops, source, tuple(problems), tuple(doubts))


def executed_factors(run: RecordedRun) -> dict[str, float]:
    """Return for each operation issued to NCCL the modeled bytes of the executed operation divided by the issued bytes.

    The alignment that is stored in the run is used. An operation is left out if one of its records has no log line, or
    if its records ran as operations of different cost. The result is empty if there is no alignment, if the log has
    lines of other processes, or if the run aggregated its records.
    """
    lines = _stored_alignment(run)
    if not lines.states or _foreign_writers(run, lines) or len(run.table("aggregates")):
        return {}
    factors: dict[str, set[float | None]] = defaultdict(set)
    for part in run.parts("collectives", ("rank", "attempt", "pid", "seq", "op", "backend")):
        rows = part.filter(pa.array(where(part, ["backend"], lambda name: name == NCCL)))
        pairs = pa.table({"op": rows["op"], "ran": lines.executed_ops(rows)})
        for (op, ran), _ in combinations(pairs, ["op", "ran"]):
            factors[op].add(None if ran is None else _factor(op, ran))
    return {op: one for op, (one, *more) in factors.items() if one is not None and not more}


def _factor(op: str, ran: str) -> float:
    """Return the modeled bytes of operation ``ran`` divided by those of ``op``.

    The factor is 1 for messages and for a line with several operations, which send the issued bytes.
    """
    if "+" in ran or ran in _P2P or op in _P2P:
        return 1.0
    issued = wire_bytes(op, _PROBED_BYTES, 2)
    return wire_bytes(ran, _PROBED_BYTES, 2) / issued if issued else 1.0


def _ambiguous_extra(comm_matches: pa.Table) -> int:
    """Return the smallest possible number of ambiguous lines without a record."""
    return int(pc.sum(comm_matches["ambiguous_extra"]).as_py() or 0)


def _foreign_writers(run: RecordedRun, lines: LogLines) -> set[Writer]:
    """Return the processes of the log that do not belong to the run.

    Processes are compared by process id, and also by host if the run recorded the host.
    """
    own: dict[int, set[str | None]] = defaultdict(set)
    for entry in run.manifest.ranks:
        host = entry.get("host")
        own[entry["pid"]].add(None if host is None else host.partition(".")[0])
    foreign = set()
    for writer in lines.writers:
        hosts = own.get(writer.pid, set())
        known = None in hosts or writer.host is None or writer.host.partition(".")[0] in hosts
        if not (hosts and known):
            foreign.add(writer)
    foreign |= {writer for _, pid, writer in lines.pairs if pid != writer.pid}
    return foreign


def _named(writers: Iterable[Writer]) -> str:
    listed = sorted(writers, key=str)
    named = ", ".join(f"{each.host or 'an unknown host'}:{each.pid}" for each in listed[:_MOST_NAMED])
    rest = len(listed) - _MOST_NAMED
    return f"process{'es' * (len(listed) > 1)} {named}" + (f" and {rest} more" if rest > 0 else "")


def _processes(run: RecordedRun) -> str:
    return _named({Writer(entry.get("host"), entry["pid"]) for entry in run.manifest.ranks})


def _lines_of(run: RecordedRun) -> LogLines:
    """Return the stored lines and alignment of the run. If the run has only logs, they are parsed and aligned now.

    Raises:
        CommprofError: There are no logs, or they cannot be read.
    """
    lines = _stored_alignment(run)
    if lines.states:
        lines.ambiguous_extra = _ambiguous_extra(run.table("comm_matches"))
        return lines
    from commprof.align import matching
    from commprof.nccl.parser import parse_logs

    parsed = parse_logs([matching.logs_of(run.path)])
    report = matching.align(
        run, parsed.ops, parsed.tables.get("nccl_communicators"), generated=parsed.generated
    )
    lines = LogLines()
    lines.add_printed(parsed.ops)
    lines.add_matches(report.matches)
    lines.ambiguous_extra = _ambiguous_extra(report.comm_matches)
    return lines


def _stored_alignment(run: RecordedRun) -> LogLines:
    """Return the stored lines and alignment of the run. ``states`` is empty if no alignment is stored."""
    lines = LogLines()
    for part in run.parts("nccl_ops", LINE_COLUMNS):
        lines.add_printed(part)
    for part in run.parts("matches", MATCH_COLUMNS):
        lines.add_matches(part)
    return lines


def _compare_flight(run: RecordedRun) -> tuple[int, int, tuple[str, ...]]:
    """Compare the newest collectives of each rank and group with the list of the Flight Recorder.

    Returns:
        The number of entries that are listed as expected, the number of compared entries, and at most three problems.
    """
    entries: dict[tuple[Any, ...], list[tuple[int, str]]] = defaultdict(list)
    for row in run.table("flight").to_pylist():
        if not row["is_p2p"] and row["op"] is not None:
            order = row["op_id"] if row["op_id"] is not None else row["seq"]
            entries[tuple(row[name] for name in _LISTING)].append((order, row["op"]))
    if not entries:
        return 0, 0, ()
    newest = _newest(run, {key: len(listed) for key, listed in entries.items()})
    agreed = of = 0
    problems = []
    for key in sorted(entries.keys() & newest.keys()):
        listed = [op for _, op in sorted(entries[key])]
        expected = [op for record in newest[key] for op in _listed(record)]
        same, compared, problem = _compare_newest(listed, expected)
        agreed, of = agreed + same, of + compared
        if problem:
            problems.append(f"rank {key[0]}, group {key[3]}: {problem}")
    return agreed, of, tuple(problems[:3])


def _newest(
    run: RecordedRun, most: Mapping[tuple[Any, ...], int]
) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Return the last records of collectives on gloo for each rank and group, in order of issue.

    ``most`` gives the largest number of records. Calls that raised are left out, because the Flight Recorder does not
    list calls that gloo refused.
    """
    newest: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for part in run.parts("collectives", _LISTED):
        on_gloo = where(part, ["op", "backend"], lambda op, name: op not in _P2P and name == backends.GLOO)
        rows = part.filter(pc.and_(pa.array(on_gloo), pc.invert(has_raised(part))))
        seq, _ = numbers_of(rows, "seq")
        for key, places in combinations(rows, _LISTING):
            if key in most:
                last = places[np.argsort(seq[places], kind="stable")][-most[key] :]
                newest[key] += rows.take(pa.array(last)).to_pylist()
                newest[key] = sorted(newest[key], key=lambda record: int(record["seq"]))[-most[key] :]
    return newest


def _listed(record: Mapping[str, Any]) -> list[str]:
    """Return the operations that the Flight Recorder lists for one record on gloo.

    A reduce_scatter is listed as one all_reduce for each coalesced tensor, or for each rank if its chunks are a list.
    """
    op = backends.execution(record["op"], 0, 2).op
    if record["op"] != Op.REDUCE_SCATTER:
        return [op]
    if record["backend_method"] == "reduce_scatter":
        return [op] * record["group_size"]
    return [op] * (record["num_tensors"] if "coalesced" in record["backend_method"] else 1)


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
        f"the Flight Recorder lists {newest[at]} where gloo is expected to run {records[at]} ({same} of {length} "
        "agree)",
    )
