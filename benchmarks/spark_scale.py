"""Compares DuckDB and Spark on the same relation over runs of 512 ranks: startup, and seconds per million records.

The runs are generated. Each engine runs in a separate process. The process starts the engine and evaluates the relation
over a small run first, which creates plans and compiled code. It then evaluates the relation over each size. The
marginal cost of a size is the difference between its time and that of the previous size, divided by the difference in
records. The rows of both engines must be equal, except for the two sums of times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import pyarrow as pa
from results import arguments, publish

from commprof.analysis.relations.sql_engine import evaluate
from commprof.schema import TABLES
from commprof.trace.reader import Scan
from commprof.trace.tables import arrow_schema, empty_table, write_parquet

PER_STEP: Final = 100
BY: Final = ("step", "op", "purpose")
SMALL: Final = 20  # records per rank of the warm-up run
ENGINES: Final = ("duckdb", "spark")
_OPS: Final = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_PURPOSES: Final = ("gradient_reduce", "parameter_gather", "gradient_norm", None)


def of_rank(rank: int, world: int, count: int, per_step: int = PER_STEP) -> pa.Table:
    """Return ``count`` records of a rank, with ``per_step`` records in each step.

    The records of all ranks are equal, except for their times and the columns that identify the rank.
    """
    rng = np.random.default_rng(rank)
    place = np.arange(count) % per_step
    kind = place % len(_OPS)
    issue = np.cumsum(rng.integers(5_000, 55_000, count))
    ends = issue + rng.integers(3_000, 20_000, count)
    values: dict[str, Any] = {
        "seq": np.arange(count),
        "step": np.arange(count) // per_step,
        "pg_seq": np.arange(count),
        "payload_bytes": 4096 * (1 + place % 37),
        "issue_ns": issue,
        "return_ns": ends,
        "wait_end_ns": ends + 500,
        "exposed_ns": ends + 500 - issue,
    }
    constant: dict[str, Any] = {
        "rank": rank, "pid": 1000 + rank, "pg": "0", "group_ranks": f"0-{world - 1}", "group_size": world,
        "group_rank": rank, "backend": "nccl", "device": "cpu", "dtype": "float32", "num_tensors": 1, "peer": -1,
        "phase": "backward", "status": "ok", "layer": "process_group",
    }  # fmt: skip
    texts = {"op": (_OPS, kind), "purpose": (_PURPOSES, kind)}
    columns = []
    for column, field in zip(TABLES["collectives"].columns, arrow_schema("collectives"), strict=True):
        if column.name in values:
            columns.append(pa.array(values[column.name]).cast(field.type))
        elif column.name in texts:
            names, which = texts[column.name]
            columns.append(pa.array(names).take(pa.array(which)))
        elif column.nullable and column.name not in constant:
            columns.append(pa.nulls(count, field.type))
        else:
            plain: Any = {"string": "x", "bool": False}.get(column.type, 0)
            columns.append(pa.repeat(pa.scalar(constant.get(column.name, plain), field.type), count))
    return pa.table(columns, schema=arrow_schema("collectives"))


def write(folder: Path, ranks: int, count: int) -> Scan:
    """Write a file for each rank if the file does not exist yet, and return a scan of all files."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        file = folder / f"rank-{rank:05}-0-{1000 + rank}.parquet"
        if not file.exists():
            write_parquet(file, of_rank(rank, ranks, count))
    return scan_of(folder)


def scan_of(folder: Path) -> Scan:
    return Scan(tuple(sorted(folder.glob("*.parquet"))), empty_table("collectives"))


def measure(engine: str, folders: list[str], memory: str) -> dict[str, Any]:
    """Start the engine in this process and evaluate the relation over each of ``folders``.

    Returns:
        The seconds of the start and of each evaluation, the rows without their sums of times, and the peak resident
        memory in bytes.
    """
    os.environ["COMMPROF_MEMORY_LIMIT"] = memory
    others = {name: empty_table(name) for name in ("aggregates", "groups")}
    begin = time.perf_counter()
    session: Any = None
    if engine == "spark":
        from commprof.analysis.relations import spark

        session = spark.start("local[2]", {"spark.sql.shuffle.partitions": "8"})
    started = time.perf_counter() - begin
    times, rows = [], []
    for folder in folders:
        tables = {"collectives": scan_of(Path(folder)), **others}
        begin = time.perf_counter()
        if session is None:
            found = evaluate("operations", tables, BY)
        else:
            found = spark.SparkRelations(session, tables).table("operations", BY)
        times.append(time.perf_counter() - begin)
        exact = found.drop_columns(["host_ns", "exposed_ns"]).sort_by([(name, "ascending") for name in BY])
        rows.append(exact.to_pandas().astype(str).to_csv(index=False))
    processes = [os.getpid()]
    if session is not None:
        processes.append(session.sparkContext._gateway.proc.pid)
    return {"start": started, "seconds": times, "rows": rows, "peak": sum(map(peak_bytes, processes))}


def peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) << 10


def main() -> None:
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[4:], sys.argv[3])))
        return
    parser = arguments(__doc__ or "")
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--records", type=int, default=10_000_000, help="of the largest run")
    parser.add_argument(
        "--sizes", type=int, default=2, help="runs, each of four times the records of the one before"
    )
    parser.add_argument("--memory", default="12GiB")
    parser.add_argument("--runs", type=Path, help="directory that keeps the generated runs, to be used again")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    options = parser.parse_args()
    table = []
    with tempfile.TemporaryDirectory(prefix="spark-scale-") as directory:
        base = options.runs / f"ranks-{options.ranks}" if options.runs else Path(directory)
        sizes = [options.records // 4**place for place in reversed(range(options.sizes))]
        counts = [SMALL, *(size // options.ranks for size in sizes)]
        for count in counts:
            write(base / str(count), options.ranks, count)
        folders = [str(base / str(count)) for count in counts]
        results: dict[str, Any] = {}
        for engine in options.engines:
            command = [sys.executable, __file__, "measure", engine, options.memory, *folders]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            results[engine] = json.loads(done.stdout.splitlines()[-1])
        assert all(found["rows"] == results[options.engines[0]]["rows"] for found in results.values()), (
            "the engines differ"
        )
        for place in range(1, len(counts)):
            for engine, found in results.items():
                seconds, marginal = found["seconds"], ""
                # The first size has no marginal cost, because its time still includes new plans and compilation.
                if place > 1:
                    between = options.ranks * (counts[place] - counts[place - 1])
                    marginal = f"{(seconds[place] - seconds[place - 1]) / between * 1e6:.2f}"
                table.append(
                    (f"{options.ranks * counts[place]:,}", engine, f"{found['start']:.1f}", f"{seconds[place]:.1f}",
                     marginal, f"{found['peak'] / 2**30:.1f}" if place == len(counts) - 1 else "")
                )  # fmt: skip
    headings = (
        "records",
        "engine",
        "start, s",
        "operations, s",
        "marginal, s per million records",
        "peak of all, GiB",
    )
    title = f"Operations by DuckDB and on Spark local[2], {options.ranks} ranks, {options.memory}"
    publish(options, title, headings, table, {name: found["seconds"] for name, found in results.items()})


if __name__ == "__main__":
    main()
