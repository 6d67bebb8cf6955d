"""Files of hosts: one small Parquet file for each host, with sums of the operations and wait times of its ranks.

The launcher of each host writes the file of the host into ``RUN/hosts/`` when the ranks of the host have ended. The
first answers about a run of many hosts then read these files instead of all records. The files follow from the records,
so they may be deleted. A file is valid while the files of records from which it was made are unchanged. If a file is
missing, its content is evaluated from the records.

A file contains the rows of several tables. The column ``part`` contains the name of the table. These tables have a row
group each:

- the relation host_operations
- the relation step_sums
- the arrivals of some steps (:mod:`commprof.analysis.stragglers.arrival_sample`)

The other tables share one row group. For each of :data:`EXPOSURES`, they contain the sums of exposed time and the
number of ranks that are included in the sums.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from commprof.align.ranks.cpp_waits import CppWaits
from commprof.analysis.relations.relation_graph import statement
from commprof.analysis.relations.sql_engine import connect, evaluate, register
from commprof.analysis.storage import summaries
from commprof.analysis.storage.index_sums import EXPOSURES, process_times
from commprof.analysis.storage.index_totals import HELD_COLUMNS, OPERATIONS
from commprof.analysis.stragglers import arrival_sample
from commprof.analysis.time import exposure, training_steps
from commprof.analysis.time.stalls import training_parts
from commprof.errors import TraceError
from commprof.trace.directory import COLLECTIVES_DIRECTORY, HOSTS_DIRECTORY
from commprof.trace.finaliser import convert_host
from commprof.trace.fingerprint import VERSION, fingerprint
from commprof.trace.pending_ranks import load_manifest
from commprof.trace.rank_files.layout import rank_files
from commprof.trace.reader import Run, Scan, open_run, scan_of
from commprof.trace.tables import arrow_schema, empty_table, read_parquet

COLUMNS: Final = (*HELD_COLUMNS, "api", "call_site")  # the operations of a host are summed by these columns
_KEY: Final = b"commprof.host"
_PART: Final = "part"
_ISSUED: Final = "host_operations"
_STEPS: Final = "step_sums"
SAMPLE: Final = "arrival_sample"
_RANKS: Final = "ranks_of_"  # prefix of a part; the name of an exposure follows
# Columns of stall_times and their names in a file. In other parts, the original names have other meanings.
_STALL_SUMS: Final = {
    "exposed_ns": "blocked_ns",
    "low_ns": "blocked_low_ns",
    "high_ns": "blocked_high_ns",
    "overlapped_ns": "overlapped_ns",
}
_COUNTS: Final = ("records", "timed", "sampled", "unwaited", "bounded", "ended", "unsampled", "summed_ns")

_OTHERS: Final = ("steps", "stalls", "outside_steps")

Tables = Mapping[str, pa.Table]
T = TypeVar("T")


class HostFile(NamedTuple):
    """A file of a host.

    Attributes:
        path: The path of the file.
        host: The name of the host.
        stems: The size and the time of each file of records from which this file was made, by name without suffix.
        messages: The number of sends and recvs.
        sample: Facts about the sample of arrivals, in addition to its rows.
    """

    path: Path
    host: str
    stems: Mapping[str, Sequence[int]]
    messages: int
    sample: Mapping[str, Any]


def tables_of(
    collectives: pa.Table | Scan, others: Sequence[pa.Table], ranks: int, world: int
) -> dict[str, pa.Table]:
    """Return the tables of the file of a host.

    Args:
        collectives: The records of the ranks of the host.
        others: The rows of these ranks in the other tables (:data:`_OTHERS`).
        ranks: The number of ranks of the host.
        world: The number of ranks of the run.

    Raises:
        TraceError: A file is damaged.
    """
    of_steps, stalls, outside_steps = others
    *stood, counted = process_times(collectives, training_parts(of_steps, outside_steps), stalls)
    tables = {
        _ISSUED: evaluate(_ISSUED, {"collectives": collectives}, COLUMNS),
        _STEPS: evaluate(_STEPS, {"steps": of_steps}),
        SAMPLE: arrival_sample.of_host(collectives, ranks, world, CppWaits(stalls) if len(stalls) else None),
    }
    for (by, name), rows in zip(EXPOSURES.items(), stood, strict=True):
        times = _summed(rows, by, tuple(_STALL_SUMS)).rename_columns([*by, *_STALL_SUMS.values()])
        numbers = _summed(counted, by, _COUNTS)
        tables[name] = pa.concat_tables([numbers, times], promote_options="default")
        partition = [column for column in by if column != "step"]
        members = counted.group_by(partition).aggregate([("member", "count_distinct")])
        tables[_RANKS + name] = members.rename_columns([*partition, "ranks"])
    return tables


def _summed(rows: pa.Table, by: Sequence[str], measures: Sequence[str]) -> pa.Table:
    sums = rows.group_by(list(by)).aggregate([(name, "sum") for name in measures])
    return sums.rename_columns([*by, *measures])


def write(path: Path, host: str, stems: Mapping[str, Sequence[int]], tables: Tables) -> None:
    """Write the file of ``host`` atomically.

    Args:
        path: The path of the file.
        host: The name of the host.
        stems: The files of records from which the file is made (see :func:`record_files`).
        tables: The tables of the file (see :func:`tables_of`).

    Raises:
        OSError: The file cannot be written.
    """
    issued = tables[_ISSUED]
    records = pc.sum(tables[max(EXPOSURES.values())]["records"]).as_py() or 0
    messages = records - (pc.sum(pc.multiply(issued["ranks"], issued["calls"])).as_py() or 0)
    schema = pa.unify_schemas([table.schema for table in tables.values()], promote_options="permissive")
    facts = {"version": VERSION, "host": host, "files": dict(stems), "messages": messages}
    facts["sample"] = arrival_sample.facts_of(tables[SAMPLE])
    schema = schema.insert(0, pa.field(_PART, pa.string())).with_metadata({_KEY: json.dumps(facts).encode()})
    large = (_ISSUED, _STEPS, SAMPLE)
    small = [name for name in tables if name not in large]
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
            for names in (*([name] for name in large), small):
                rows = pa.concat_tables([_as_part(name, tables[name], schema) for name in names])
                if len(rows):
                    writer.write_table(rows, row_group_size=len(rows))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _as_part(name: str, rows: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = [
        pa.repeat(pa.scalar(name), len(rows))
        if field.name == _PART
        else rows[field.name].cast(field.type)
        if field.name in rows.column_names
        else pa.nulls(len(rows), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def record_files(run: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of each file of records of ``run``, by name without suffix."""
    prefix, suffix = f"{COLLECTIVES_DIRECTORY}/", ".parquet"
    return {
        name.removeprefix(prefix).removesuffix(suffix): (size, changed)
        for name, size, _, changed, _ in fingerprint(run).files
        if name.startswith(f"{prefix}rank-") and name.endswith(suffix)
    }


def keep(run: Run, host: str, entries: Iterable[Mapping[str, Any]]) -> None:
    """Write the file of ``host``, whose ranks have ended, into the directory of ``run``.

    Args:
        run: The run.
        host: The name of the host.
        entries: The entries of the manifest for the ranks of the host.

    Raises:
        TraceError: A file of the run is damaged.
        OSError: The file cannot be written.
    """
    entries = list(entries)
    present = record_files(run.path)
    stems = {entry["file"]: present[entry["file"]] for entry in entries if entry.get("file") in present}
    if stems and _read(file_of(run.path, stems), present) is None:
        tables = _of_ranks(run, stems, {entry["rank"] for entry in entries})
        write(file_of(run.path, stems), host, stems, tables)


def keep_host(path: Path, host: str) -> None:
    """Write the file of ``host`` into the run directory ``path`` after the ranks of the host have ended.

    Ranks of other hosts may still run, so the function first converts the records of the ranks of ``host`` to Parquet.
    A run on one host gets no such file. A host with many records of a short job gets no file either, because writing
    the file would delay the end of the job. :func:`keep_missing` writes this file later.

    Raises:
        TraceError: A file of the run is damaged or cannot be written.
        OSError: The file of the host cannot be written.
    """
    traces = convert_host(path, host)
    if traces:
        lasted_ns = time.time_ns() - load_manifest(path).started_realtime_ns
        if not summaries.is_affordable(sum(trace.entry["records"] for trace in traces), lasted_ns):
            return
        stems = {trace.identity.stem for trace in traces}
        present = record_files(path)
        others = [pa.concat_tables([trace.tables[name] for trace in traces]) for name in _OTHERS]
        world = max(trace.entry.get("world_size") or 0 for trace in traces)
        tables = tables_of(_scan(path, stems), others, len(traces), world)
        write(file_of(path, stems), host, {stem: present[stem] for stem in stems}, tables)
    elif not rank_files(path):  # the process that finalizes the job was faster
        run = open_run(path)
        mine = [entry for entry in run.manifest.ranks if entry.get("host") == host]
        records = sum(entry.get("records") or 0 for entry in mine)
        is_affordable = summaries.is_affordable(records, run.health.wall_ns or 0)
        if len(mine) < len(run.manifest.ranks) and is_affordable:
            keep(run, host, mine)


def keep_missing(path: Path) -> int:
    """Write the missing files of the hosts of the run at ``path``, however many records these hosts have.

    Returns:
        The number of files written. No file is written for a run on one host, for a run that still runs, or for a
        host with damaged records.

    Raises:
        TraceError: The run cannot be read.
        OSError: A file cannot be written.
    """
    run = open_run(path)
    if run.pending or len({entry.get("host") for entry in run.manifest.ranks}) < 2:
        return 0
    written = 0
    for host, entries in _without_file(
        run, {stem for file in valid_files(path) for stem in file.stems}
    ).items():
        with suppress(TraceError):
            keep(run, host, entries)
            written += 1
    return written


def file_of(run: Path, stems: Iterable[str]) -> Path:
    """Return the path of the file of a host. It has the name of the first file of records of the host."""
    return run / HOSTS_DIRECTORY / f"{min(stems)}.parquet"


def _of_ranks(run: Run, stems: Iterable[str], ranks: Iterable[int]) -> dict[str, pa.Table]:
    mine = pa.array(sorted(ranks), pa.int32())
    every = (run.table(name) for name in _OTHERS)
    others = [rows.filter(pc.is_in(rows["rank"], mine)) for rows in every]
    world = len({entry["rank"] for entry in run.manifest.ranks})
    return tables_of(_scan(run.path, stems), others, len(mine), world)


def _scan(run: Path, stems: Iterable[str]) -> pa.Table | Scan:
    files = sorted(run / COLLECTIVES_DIRECTORY / f"{stem}.parquet" for stem in stems)
    scan = scan_of(files, "collectives", empty_table("collectives"))
    if scan is None:  # None if an old version wrote a file, which must be converted
        return pa.concat_tables([read_parquet(file, "collectives") for file in files])
    return scan


def valid_files(run: Path) -> list[HostFile]:
    """Return the valid files of hosts of ``run``.

    A file is valid if it is not damaged, if this version wrote it, and if the files of records from which it was made
    are unchanged.
    """
    folder = run / HOSTS_DIRECTORY
    files = sorted(folder.glob("rank-*.parquet")) if folder.is_dir() else []
    if not files:
        return []
    present = record_files(run)
    host_files: list[HostFile] = []
    taken: set[str] = set()
    for file in files:
        this = _read(file, present)
        if this is not None and taken.isdisjoint(this.stems):
            taken.update(this.stems)
            host_files.append(this)
    return host_files


def _read(file: Path, present: Mapping[str, tuple[int, int]]) -> HostFile | None:
    """Return the header of ``file``, or None if ``file`` is not valid for the files of records ``present``."""
    try:
        facts = json.loads((pq.read_schema(file).metadata or {})[_KEY])
        this = HostFile(file, facts["host"], facts["files"], facts["messages"], facts["sample"])
        is_current = facts["version"] == VERSION and all(
            present.get(stem) == tuple(status) for stem, status in this.stems.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException):
        return None
    return this if is_current else None


def answers(run: Run) -> dict[tuple[str, ...], pa.Table]:
    """Return the summaries of ``run`` from the files of its hosts, by key.

    The part of a host without a file is evaluated from the records. The result is empty if no host has a file or the
    run still runs. The result lacks the operations if the ranks disagree about them or sent messages, because messages
    are paired by the order of the records.

    Raises:
        TraceError: The records of a host without a file cannot be read.
    """
    return _of_files(run, partial(_merged, run)) or {}


def sample(run: Run) -> pa.Table | None:
    """Return the arrivals of the steps that the samples of all hosts contain (:func:`arrival_sample.as_table`).

    The result is None if no host has a file or the run still runs.

    Raises:
        TraceError: The records of a host without a file cannot be read.
    """
    return _of_files(run, _sample)


def _of_files(run: Run, ask: Callable[[duckdb.DuckDBPyConnection, Sequence[HostFile]], T]) -> T | None:
    """Return the result of ``ask``, or None if no host has a file or the run still runs.

    Args:
        run: The run.
        ask: A function of an engine, in which the view host_rows contains the rows of all hosts, and of the files of
            the hosts.
    """
    files = valid_files(run.path)
    if not files or run.pending:
        return None
    with tempfile.TemporaryDirectory(prefix="commprof-hosts-") as folder, closing(connect()) as engine:
        files += _missing(run, {stem for file in files for stem in file.stems}, Path(folder))
        paths = ", ".join("'" + str(file.path).replace("'", "''") + "'" for file in files)
        try:
            engine.execute("set preserve_insertion_order = false")
            engine.execute(
                f"create temp view host_rows as select * from read_parquet([{paths}], hive_partitioning = false)"
            )
            return ask(engine, files)
        except duckdb.Error as error:
            first = str(error).strip().partition("\n")[0]
            raise TraceError(
                f"{run.path / HOSTS_DIRECTORY} cannot be read: {first}. Remove it: its files are made from the records"
            ) from None


def _without_file(run: Run, present: set[str]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the manifest entries of the ranks that have records but are in no valid file of a host, by host.

    Args:
        run: The run.
        present: The names without suffix of the files of records that are in valid files of hosts.
    """
    files = record_files(run.path)
    by_host: dict[str, list[Mapping[str, Any]]] = {}
    for entry in run.manifest.ranks:
        stem = entry.get("file")
        if stem in files and stem not in present:
            by_host.setdefault(entry.get("host") or "", []).append(entry)
    return by_host


def _missing(run: Run, present: set[str], folder: Path) -> Iterator[HostFile]:
    """Write the missing files of hosts into ``folder`` and yield them."""
    files = record_files(run.path)
    for number, (host, entries) in enumerate(_without_file(run, present).items()):
        stems = {entry["file"]: files[entry["file"]] for entry in entries}
        path = folder / f"rank-{number}.parquet"
        try:
            write(path, host, stems, _of_ranks(run, stems, {entry["rank"] for entry in entries}))
            facts = json.loads(pq.read_schema(path).metadata[_KEY])
        except (TraceError, OSError) as error:
            ranks = ", ".join(str(entry["rank"]) for entry in entries[:8])
            raise TraceError(
                f"host {host or 'unknown'} is missing (ranks {ranks}): it has no file in {HOSTS_DIRECTORY}/, and its "
                f"records cannot be read: {error}"
            ) from None
        yield HostFile(path, host, stems, facts["messages"], facts["sample"])


def _merged(
    run: Run, engine: duckdb.DuckDBPyConnection, files: Sequence[HostFile]
) -> dict[tuple[str, ...], pa.Table]:
    tables: dict[tuple[str, ...], pa.Table] = {}
    of_steps = _ask(engine, _STEPS, f"select {_listed(_columns(_STEPS))} from {{part}}")
    lengths = _lengths(of_steps)
    for by, name in EXPOSURES.items():
        tables[name,] = _exposure(engine, by, name, lengths)
    tables[SAMPLE,] = _sample(engine, files)
    operations = None if any(file.messages for file in files) else _operations(run, engine)
    if operations is not None:
        tables[OPERATIONS, *COLUMNS] = operations
        tables["step_times",] = training_steps.answer_of_sums(
            of_steps, tables[EXPOSURES["attempt", "step"],], operations
        )
    return tables


def _sample(engine: duckdb.DuckDBPyConnection, files: Sequence[HostFile]) -> pa.Table:
    question = f"select {_listed(arrival_sample.schema().names)} from {{part}}"
    rows = _ask(engine, SAMPLE, question)
    return arrival_sample.as_table(arrival_sample.joined(rows, [file.sample for file in files]))


def _columns(relation: str) -> list[str]:
    tables = (
        {"collectives": empty_table("collectives")}
        if relation == _ISSUED
        else {"steps": empty_table("steps")}
    )
    return list(evaluate(relation, tables, COLUMNS).column_names)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _ask(engine: duckdb.DuckDBPyConnection, part: str, question: str) -> pa.Table:
    rows = f"(select * from host_rows where {_PART} = '{part}')"
    return engine.sql(question.format(part=rows)).to_arrow_table()


def _lengths(sums: pa.Table) -> pa.Table:
    """Return a table of steps with one row for each row of ``sums``.

    It contains the duration of each step, because this is the only value of a step that the exposed time depends on.
    """
    schema = arrow_schema("steps")
    has_ended = pc.equal(sums["ended"], sums["processes"])
    known: dict[str, Any] = {
        "begin_ns": pa.array([0] * len(sums), pa.int64()),
        "end_ns": pc.if_else(has_ended, sums["longest_ns"], None),
        "outside_ns": pa.array([0] * len(sums), pa.int64()),
        **{name: sums[name] for name in ("attempt", "step", "rank")},
    }
    columns = [
        known[field.name].cast(field.type) if field.name in known else pa.nulls(len(sums), field.type)
        for field in schema
    ]
    return pa.table(columns, names=schema.names)


def _exposure(
    engine: duckdb.DuckDBPyConnection, by: tuple[str, ...], name: str, lengths: pa.Table
) -> pa.Table:
    def summed(measures: Mapping[str, str]) -> pa.Table:
        sums = (
            f"cast(sum({column}) as {'decimal(38, 0)' if column == 'summed_ns' else 'bigint'}) as {called}"
            for column, called in measures.items()
        )
        present = next(iter(measures))
        question = f"select {_listed(by)}, {_listed(sums)} from {{part}} where {present} is not null group by {_listed(by)}"
        return _ask(engine, name, question)

    partition = [column for column in by if column != "step"]
    ranks = _ask(
        engine,
        _RANKS + name,
        f"select {_listed(partition)}, sum(ranks) as ranks from {{part}} group by {_listed(partition)}",
    )
    stood = summed({column: called for called, column in _STALL_SUMS.items()})
    counted = summed({column: column for column in _COUNTS})
    unused = empty_table("collectives")
    return exposure.answer(unused, lengths, by, empty_table("stalls"), stood, counted, ranks)


def _operations(run: Run, engine: duckdb.DuckDBPyConnection) -> pa.Table | None:
    """Return the relation operations, evaluated from the rows host_operations of all hosts.

    The result is None if the relation can only be evaluated from the records.
    """
    names = _listed(_columns(_ISSUED))
    engine.execute(f"create temp view issued as select {names} from host_rows where {_PART} = '{_ISSUED}'")
    of_groups = statement("agreement", COLUMNS, known={"rank_operations": "issued"})
    engine.execute(f"create temp table agreed as {of_groups}")
    if engine.sql("select count(*) from agreed where agree = 0").fetchall() != [(0,)]:
        return None
    for name in ("aggregates", "groups"):
        register(engine, name, run.table(name))
    register(engine, "collectives", empty_table("collectives"))
    members = {"group_ranks": pa.string(), "rank": pa.int32(), "position": pa.int32()}
    register(engine, "group_members", pa.schema(list(members.items())).empty_table())
    return engine.sql(statement(OPERATIONS, COLUMNS, known={"agreement": "agreed"})).to_arrow_table()
