"""Measures the report of a generated run of 1,250 hosts with 8 ranks each and 1,000 steps, from its files of hosts.

The generator of spark_scale.py creates the records of one host. The other hosts get the sums of this host with their
own rank numbers. The waits of host i are longer by i ns, per rank and step. In the samples of arrivals, one rank
arrives 18 ms after the other ranks once per step. All record files are links to one file. Only their sizes and times
are used, because the report does not read them.

The benchmark checks the exposed time, the bytes of the run and the rank that is reported as late. It compares the time
of the report with the time of a separate process that reads all files of hosts in sequence with
`pyarrow.parquet.read_table`.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from results import arguments, publish
from spark_scale import of_rank

from commprof.analysis.storage import host_files
from commprof.analysis.stragglers import arrival_sample
from commprof.schema import TABLES
from commprof.trace.directory import COLLECTIVES_DIRECTORY, HOSTS_DIRECTORY
from commprof.trace.manifest import COMPLETE, Manifest, write_manifest
from commprof.trace.tables import arrow_schema, empty_table, write_parquet, write_table

EACH: Final = 8  # ranks per host
PER_STEP: Final = 4  # collectives per step
STEP_NS: Final = 120_000
LATE_NS: Final = 20_000_000
CALL_NS: Final = 2_000_000


def steps_of(rank: int, count: int) -> pa.Table:
    """Return ``count`` consecutive steps of a rank, as a table."""
    begin = np.arange(count) * STEP_NS
    known: dict[str, Any] = {
        "step": np.arange(count), "begin_ns": begin, "end_ns": begin + STEP_NS, "loss": 3.0 - np.arange(count) / count,
    }  # fmt: skip
    constant = {"rank": rank, "pid": 1000 + rank, "micro_steps": 1, "samples": 4}
    columns = []
    for column, field in zip(TABLES["steps"].columns, arrow_schema("steps"), strict=True):
        if column.name in known:
            columns.append(pa.array(known[column.name]).cast(field.type))
        elif column.nullable and column.name not in constant:
            columns.append(pa.nulls(count, field.type))
        else:
            columns.append(pa.repeat(pa.scalar(constant.get(column.name, 0), field.type), count))
    return pa.table(columns, schema=arrow_schema("steps"))


def plant(run: Path, hosts: int, steps: int) -> int:
    """Write a run of ``hosts`` hosts and ``steps`` steps: manifest, groups, links instead of records, files of hosts.

    Returns:
        The number of steps in which the waits of a host are longer by the number of the host.
    """
    world = hosts * EACH
    folder = run / COLLECTIVES_DIRECTORY
    folder.mkdir(parents=True)
    records = [of_rank(rank, world, steps * PER_STEP, PER_STEP) for rank in range(EACH)]
    first = run / "records.parquet"
    write_parquet(first, records[0])
    tables = host_files.tables_of(
        pa.concat_tables(records),
        [
            pa.concat_tables([steps_of(rank, steps) for rank in range(EACH)]),
            empty_table("stalls"),
            empty_table("outside_steps"),
        ],
        EACH,
        world,
    )
    samples = {
        late: arrival_sample.of_host(
            pa.concat_tables([timed(rows, rank, late) for rank, rows in enumerate(records)]), EACH, world
        )
        for late in (False, True)
    }
    entries: list[dict[str, Any]] = []
    for rank in range(world):
        stem = f"rank-{rank:05}-0-{1000 + rank}"
        os.link(first, folder / f"{stem}.parquet")
        entries.append(
            {
                "rank": rank, "attempt": 0, "pid": 1000 + rank, "part": 1, "host": f"node-{rank // EACH:04}", "ended": True,
                "world_size": world, "records": steps * PER_STEP, "lost": 0, "unseen": 0, "file": stem,
            }
        )  # fmt: skip
    present = host_files.record_files(run)
    for host in range(hosts):
        mine = entries[host * EACH : (host + 1) * EACH]
        stems = {entry["file"]: present[entry["file"]] for entry in mine}
        tables[host_files.SAMPLE] = samples[host == hosts // 2]
        host_files.write(host_files.file_of(run, stems), mine[0]["host"], stems, _of_host(tables, host))
    first.unlink()
    group = {
        "pg": "0",
        "group_ranks": f"0-{world - 1}",
        "group_size": world,
        "backend": "nccl",
        "unseen": 0,
        "attempt": 0,
    }
    names = arrow_schema("groups").names
    rows = [
        group
        | {"rank": entry["rank"], "pid": entry["pid"], "host": entry["host"], "group_rank": entry["rank"]}
        for entry in entries
    ]
    filled = [{name: row.get(name) for name in names} for row in rows]
    write_table(run, "groups", pa.Table.from_pylist(filled, schema=arrow_schema("groups")))
    _write_clocks(run, entries)
    manifest = Manifest(
        script="train.py", started_realtime_ns=1, ended_realtime_ns=1 + STEP_NS * steps, state=COMPLETE, exit_code=0,
        world_size=world, hosts=sorted({entry["host"] for entry in entries}), ranks=entries,
    )  # fmt: skip
    write_manifest(run, manifest)
    waits = tables["exposure_of_steps"]["blocked_ns"]
    return len(waits) - waits.null_count


def timed(records: pa.Table, rank: int, late: bool) -> pa.Table:
    """Return ``records`` of a rank with the times of a job whose ranks wait for each other.

    If ``late``, the rank with number 2 on its host is late.
    """
    number = np.arange(len(records))
    step, place = number // PER_STEP, number % PER_STEP
    done = step * (LATE_NS + (PER_STEP + 2) * CALL_NS) + LATE_NS + place * CALL_NS
    issue = done - np.where(place == 0, LATE_NS, CALL_NS // 2) + (number * 7919 + rank * 104729) % 20_000
    issue += np.where((place == 0) & late & (rank == 2), LATE_NS - CALL_NS, 0)
    values = {"issue_ns": issue, "return_ns": done, "wait_end_ns": None, "exposed_ns": None}
    for name, times in values.items():
        column = pa.nulls(len(records), pa.int64()) if times is None else pa.array(times, pa.int64())
        records = records.set_column(records.column_names.index(name), name, column)
    return records


def _write_clocks(run: Path, entries: list[dict[str, Any]]) -> None:
    """Write the tables of clocks. Each host has its own clock, which was compared with the first host's clock once."""
    known = {"monotonic_ns": 0, "realtime_ns": 0, "uncertainty_ns": 0, "reference_rank": 0, "time_ns": 0}
    known |= {"offset_ns": 0, "error_ns": 1000, "exchanges": 30}
    for table, every in (("clocks", 1), ("clock_offsets", EACH)):
        schema = arrow_schema(table)
        rows = [known | entry | {"clock": entry["host"]} for entry in entries[::every]]
        filled = [{name: row.get(name) for name in schema.names} for row in rows]
        write_table(run, table, pa.Table.from_pylist(filled, schema=schema))


def _of_host(tables: dict[str, pa.Table], host: int) -> dict[str, pa.Table]:
    found = {}
    for name, rows in tables.items():
        for place, column in enumerate(rows.column_names):
            added = dict.fromkeys(("rank", "pid", "blocked_ns"), host * EACH).get(column)
            if added:
                field = rows.schema.field(place)
                rows = rows.set_column(place, field, pc.add(rows[column], added).cast(field.type))
        found[name] = rows
    return found


def child(*words: str) -> tuple[float, int, str]:
    """Run Python with ``words`` in a new process; return the seconds, the peak memory in bytes, and the output."""
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([sys.executable, *words], stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        output.seek(0)
        text = output.read()
    assert status == 0, text
    return time.perf_counter() - begin, usage.ru_maxrss << 10, text


def main() -> None:
    if sys.argv[1:2] == ["read"]:
        for file in sorted(Path(sys.argv[2]).iterdir()):
            pq.read_table(file, partitioning=None)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return
    parser = arguments(__doc__ or "")
    parser.add_argument("--hosts", type=int, default=1250)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="host-files-") as directory:
        run = Path(directory) / "run"
        longer = plant(run, options.hosts, options.steps)
        folder = run / HOSTS_DIRECTORY
        size = sum(file.stat().st_size for file in folder.iterdir())
        os.environ["XDG_CACHE_HOME"] = str(Path(directory) / "cache")
        table, raw = [], []
        for number in range(options.repeats):
            read_s, read_bytes, _ = child(__file__, "read", str(folder))
            os.environ["XDG_CACHE_HOME"] = str(Path(directory) / f"cache-{number}")
            report_s, report_bytes, text = child("-m", "commprof", "report", str(run), "--json")
            _check(json.loads(text), options.hosts, options.steps, longer)
            raw.append({"read_s": read_s, "report_s": report_s, "report_bytes": report_bytes})
            table.append(
                (f"{read_s:.1f}", f"{read_bytes / 2**20:.0f}", f"{report_s:.1f}", f"{report_s / read_s:.2f}",
                 f"{report_bytes / 2**20:.0f}")
            )  # fmt: skip
    headings = ("read, s", "read, MiB", "report, s", "report / read", "report, MiB")
    title = (
        f"Report of {options.hosts:,} hosts x {EACH} ranks x {options.steps:,} steps from {options.hosts:,} files, "
        f"{size / 2**20:.0f} MiB"
    )
    publish(options, title, headings, table, raw)


def _check(found: dict[str, Any], hosts: int, steps: int, longer: int) -> None:
    """Check that the report contains the generated values: collectives, bytes, the late rank and the exposed time."""
    assert len(found["steps"]) == steps and found["overview"]["ranks_recorded"] == hosts * EACH
    assert sum(row["collectives"] for row in found["traffic"]) == steps * PER_STEP
    late = max(found["stragglers"], key=lambda row: row["others_waited_own_ns"] or 0)
    sampled = found["stragglers_sample"]["steps"]
    assert late["rank"] == hosts // 2 * EACH + 2 and late["stands_out"] and 3 <= sampled <= steps, late
    assert abs(late["others_waited_own_ns"] / sampled - LATE_NS + CALL_NS) < 100_000, late
    world = hosts * EACH
    ranks = [of_rank(rank, world, steps * PER_STEP, PER_STEP) for rank in range(EACH)]
    sent = pc.sum(ranks[0]["payload_bytes"]).as_py()
    assert sum(row["payload_bytes"] for row in found["traffic"]) == sent
    assert all(row["ranks"] == world for row in found["exposure"])
    waited = sum(map(_blocked, ranks)) / EACH + longer * (hosts - 1) / 2
    total = sum(row["exposed_ns"] or 0 for row in found["exposure"])
    assert abs(total - waited) <= len(found["exposure"]), (total, waited)


def _blocked(records: pa.Table) -> int:
    """Return the time in ns in which a rank was blocked. Concurrent waits count once."""
    total, until = 0, 0
    for begin, end in zip(records["issue_ns"].to_pylist(), records["wait_end_ns"].to_pylist(), strict=True):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


if __name__ == "__main__":
    main()
