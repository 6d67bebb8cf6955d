"""Analysis directories, which contain the summaries, the small tables and the provenance of a run.

An analysis directory can be opened like the run. The records are not copied. ``collectives`` is a link to the records
of the run, for the answers that need every record.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from commprof.analysis.storage import summaries
from commprof.analysis.storage.index_sums import exposures_from, process_times
from commprof.analysis.storage.index_totals import BUCKET_FLUSHES, OPERATIONS
from commprof.analysis.storage.run_totals import SUMMARISED, summary_tables
from commprof.analysis.time.stalls import COLUMNS as STALL_COLUMNS
from commprof.analysis.time.stalls import training_parts
from commprof.analysis.traffic import buckets
from commprof.errors import TraceError, UsageError
from commprof.trace.directory import COLLECTIVES_DIRECTORY, MANIFEST_NAME
from commprof.trace.fingerprint import fingerprint
from commprof.trace.reader import Run, open_run
from commprof.version import __version__

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROVENANCE: Final = "analysis.json"


def check_target(out: Path, force: bool) -> None:
    """Check that ``out`` does not exist, or that it is an earlier analysis and ``force`` is set.

    Raises:
        UsageError: ``out`` exists and must not be replaced.
    """
    if not out.exists():
        return
    if not (out / PROVENANCE).is_file():
        raise UsageError(f"{out} exists already and is not an analysis; choose another --out")
    if not force:
        raise UsageError(f"{out} exists already; give --force to replace it, or another --out")


def analyse_place(place: str, out: Path, session: SparkSession, force: bool = False) -> dict[str, int]:
    """Evaluate the summaries of a run that only Spark can read (see :func:`analyse`).

    The records stay at ``place``. An answer that needs every record fails, and its message contains ``place``.

    Args:
        place: The URL of the run (``s3a://...``).

    Raises:
        UsageError: ``out`` exists and must not be replaced.
        TraceError: There is no finalized run at ``place``, a file of the run is damaged, or ``out`` cannot be written.
    """
    from commprof.analysis.relations import spark_store

    with tempfile.TemporaryDirectory(prefix="commprof-fetched-") as folder:
        fetched = Path(folder) / "run"
        spark_store.fetch(session, place, fetched)
        return analyse(open_run(fetched), out, session, force, place)


def analyse(
    run: Run, out: Path, session: SparkSession | None = None, force: bool = False, place: str | None = None
) -> dict[str, int]:
    """Evaluate the summaries of ``run`` and write them, with the small tables of the run, into directory ``out``.

    Either the complete directory is written, or nothing.

    Args:
        session: A Spark session (:func:`commprof.analysis.relations.spark.start`) that evaluates the summaries.
            Default: DuckDB evaluates the summaries.
        force: Whether to replace an earlier analysis.
        place: The location of the run. Default: the path of the run.

    Returns:
        The number of rows of each summary.

    Raises:
        UsageError: ``out`` exists and must not be replaced.
        TraceError: The run still runs, a file of the run is damaged, or ``out`` cannot be written.
    """
    check_target(out, force)
    if run.pending:
        raise TraceError(f"{run.path} still works, and its records change; analyse it when it has ended")
    before = fingerprint(run.path).inputs
    tables = summary_tables(run, None if session is None else _on_spark(session, run))
    rows = {key[0]: len(table) for key, table in tables.items()}
    engine = f"spark {session.version}" if session is not None else f"duckdb {_duckdb_version()}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
            staging = Path(folder) / "run"
            _copy(run.path, staging)
            summaries.keep(staging, tables, fingerprint(staging).inputs)
            facts = {
                "analysed_by": f"commprof {__version__}",
                "engine": engine,
                "run": place or str(run.path.absolute()),
                "fingerprint": before,
                "rows": rows,
            }
            (staging / PROVENANCE).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
            if out.exists():
                shutil.rmtree(out)
            staging.rename(out)
    except OSError as error:
        raise TraceError(
            f"{error.filename or out} cannot be written: {error.strerror or error}; choose another --out, or make room there"
        ) from None
    return rows


def _on_spark(session: SparkSession, run: Run) -> dict[tuple[str, ...], pa.Table]:
    """Return the summaries that need records, evaluated by Spark, by key.

    The other summaries follow from these.
    """
    from commprof.analysis.relations.spark import relations_of

    relations = relations_of(session, run)
    operations = relations.table("operations", SUMMARISED)
    steps, stalls = run.table("steps"), run.table("stalls")
    parts = training_parts(steps, run.table("outside_steps"))
    times = relations.of_processes(STALL_COLUMNS, {"steps": parts, "stalls": stalls}, process_times)
    tables = {(OPERATIONS, *SUMMARISED): operations}
    tables |= {(name,): rows for name, rows in exposures_from(times, steps, stalls).items()}
    if len(run.table("buckets")):
        flushes = relations.table(BUCKET_FLUSHES, known={OPERATIONS: operations})
        tables[BUCKET_FLUSHES,] = buckets.in_order(flushes)
    return tables


def _copy(path: Path, target: Path) -> None:
    """Copy the manifest and the small tables of the run at ``path``, and link its records."""
    target.mkdir()
    for file in sorted(path.iterdir()):
        if (
            file.is_file()
            and (file.suffix == ".parquet" or file.suffix == ".json")
            and file.name != PROVENANCE
        ):
            shutil.copy2(file, target / file.name)
    if not (target / MANIFEST_NAME).exists():
        raise TraceError(f"{path} has no {MANIFEST_NAME}; analyse a run that commprof recorded or imported")
    records = path / COLLECTIVES_DIRECTORY
    if records.is_dir():
        (target / COLLECTIVES_DIRECTORY).symlink_to(records.resolve())


def _duckdb_version() -> str:
    import duckdb

    return str(duckdb.__version__)
