"""What most questions about a run begin with: its operations added up, and how long its steps stood still.

Each is worked out once for an opened run and kept with it; where the run's index is there and holds, it is read from that
and kept with that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.analysis import arrival_sample, host_files, steps, summaries, traffic
from commprof.analysis import buckets as buckets_module
from commprof.analysis import exposure as exposure_module
from commprof.analysis.arrival_sample import Sample
from commprof.analysis.detailed_answers import BUCKET_FLUSHES as FLUSHES
from commprof.analysis.detailed_answers import BUCKET_MEANS as MEANS
from commprof.analysis.detailed_answers import BUCKET_STEPS
from commprof.analysis.engine import ask, query_text
from commprof.analysis.fingerprint import fingerprint
from commprof.analysis.frames import from_arrow, from_rows
from commprof.analysis.index import Index, index_if_there
from commprof.analysis.index_sums import EXPOSURES, standing
from commprof.analysis.steady import EXECUTED
from commprof.analysis.sum_tables import BUCKET_FLUSHES, BUCKET_MEANS, HELD_COLUMNS, OPERATIONS, SUMS, rows_of
from commprof.errors import CommprofError
from commprof.ledger.backends import GLOO, NCCL
from commprof.ledger.executed import executed_factors
from commprof.schema import OPS
from commprof.trace.directory import elsewhere
from commprof.trace.reader import Run, Scan, open_run

__all__ = [
    "HELD_COLUMNS",
    "bucket_flushes",
    "bucket_means",
    "bucket_steps",
    "buckets_per_step",
    "exposure",
    "exposure_per_step",
    "operations",
    "reducing",
    "sample_of_arrivals",
    "step_times",
]
_FEWEST_SCANNED: Final = 100_000  # records that the engine reads from the files; fewer are held anyway
SUMMARISED: Final = tuple(
    dict.fromkeys((*HELD_COLUMNS, *buckets_module.COLUMNS))
)  # of a summary of operations
_MOST_KEPT: Final = 16  # answers with one index
_LOWEST_RANK: Final = "cast(regexp_extract(group_ranks, '[0-9]+') as bigint) nulls first"


def operations(run: Run, columns: Sequence[str]) -> pa.Table:
    """The operations of ``run``, added up by ``columns`` at least: rows of it are sums, and sums of them hold.

    What NCCL ran for them is taken from the alignment with its log that the run keeps.
    """
    found = _operations(run, tuple(dict.fromkeys((*columns, "op", "backend"))))
    unknown = pc.and_kleene(pc.greater(found["unexecuted"], 0), pc.equal(found["backend"], NCCL))
    if not pc.any(unknown).as_py():
        return found
    factors = _executed_factors(run)
    factor = pa.array((factors.get(op) for op in found["op"].to_pylist()), pa.float64())
    known = pc.and_kleene(unknown, pc.is_valid(factor))
    for name, value in (
        ("executed_share", pc.multiply(pc.cast(found["wire_share"], pa.float64(), safe=False), factor)),
        ("unexecuted", pa.scalar(0, pa.int64())),
    ):
        at = found.column_names.index(name)
        cast = pc.cast(value, found[name].type)
        found = found.set_column(at, name, pc.if_else(known, cast, found[name]))
    return found


def _executed_factors(run: Run) -> dict[str, float]:
    """What :func:`commprof.ledger.executed.executed_factors` says, worked out once for an opened run."""
    key = ("executed_factors",)
    kept = _kept(run, None)
    if key not in kept:
        factors = executed_factors(run)
        kept[key] = pa.table({"op": list(factors), "factor": pa.array(factors.values(), pa.float64())})
    return dict(zip(*(column.to_pylist() for column in kept[key].columns), strict=True))


def _operations(run: Run, wanted: tuple[str, ...]) -> pa.Table:
    """The operations by the columns ``wanted`` at least, as the records alone tell."""
    index = index_if_there(run.path) if set(wanted) <= set(HELD_COLUMNS) else None
    kept = _kept(run, index)
    for name, *held in sorted(kept, key=len):
        if name == OPERATIONS and set(wanted) <= set(held):
            return kept[name, *held]
    if index is not None:
        by = ", ".join((*wanted, "wire_ranks"))
        found = index.ask(f"select {by}, {SUMS} from {OPERATIONS} group by {by}")
    else:
        collectives = run.scan("collectives", _FEWEST_SCANNED)
        if isinstance(collectives, Scan):  # gone through once for all that may be asked next
            wanted = tuple(dict.fromkeys((*wanted, *HELD_COLUMNS)))
        tables = {"collectives": collectives} | {name: run.table(name) for name in ("aggregates", "groups")}
        found = traffic.operations(tables, wanted)
    kept[OPERATIONS, *wanted] = found
    return found


def _kept(run: Run, index: Index | None) -> dict[tuple[str, ...], pa.Table]:
    """Where what is found is kept: with the opened run, or with its index, which other questions find open as well."""
    if index is None:
        if not run.kept:
            run.kept.update(summaries.read(run.path) or host_files.answers(run))
        return run.kept
    if len(index.sums) > _MOST_KEPT:
        index.sums.clear()
    return index.sums


def summarise(path: Path) -> bool:
    """Evaluate what most answers about the run at ``path`` begin with, and keep it beside the records.

    Returns:
        Whether that was done: a large run of a short job gets none (it gets an index on demand), and neither does one that
        still works, or cannot be read or written.
    """
    try:
        run, stamp = open_run(path), fingerprint(path)
        records = run.health.records + run.health.summed
        if run.pending or not records or not summaries.is_affordable(records, run.health.wall_ns or 0):
            return False
        tables = summary_tables(run)
        summaries.keep(path, tables, stamp)
    except (CommprofError, OSError):
        return False
    return True


def summary_tables(run: Run) -> dict[tuple[str, ...], pa.Table]:
    """The summaries of ``run`` by name and columns; those that ``run.kept`` has are taken from there.

    Raises:
        TraceError: a file of the run is damaged.
    """
    tables = {(OPERATIONS, *SUMMARISED): _operations(run, SUMMARISED)}
    if not all((name,) in run.kept for name in EXPOSURES.values()):
        run.kept |= {(name,): rows for name, rows in standing(run).items()}
    run.kept |= tables
    step_times(run)
    tables |= {(name,): run.kept[name,] for name in (*EXPOSURES.values(), "step_times")}
    return tables | {(BUCKET_FLUSHES,): _flushed(run)}


def step_times(run: Run) -> pd.DataFrame:
    """The training steps of ``run``: see :func:`commprof.analysis.api.step_times`."""
    key, index = ("step_times",), index_if_there(run.path)
    kept = _kept(run, index)
    if key not in kept:
        kept[key] = steps.answer(
            run.table("steps"), exposure_rows(run, ("attempt", "step")), operations(run, steps.COLUMNS)
        )
    return steps.as_frame(kept[key])


def exposure(run: Run, by: Sequence[str]) -> pd.DataFrame:
    """What collectives cost ``run`` in time: see :func:`commprof.analysis.api.exposure`."""
    wanted = tuple(dict.fromkeys(by))
    if wanted not in EXPOSURES:
        return exposure_module.exposure(
            run.scan("collectives"), run.table("steps"), wanted, run.table("stalls")
        )
    return exposure_module.as_frame(exposure_rows(run, wanted), wanted)


def exposure_rows(run: Run, by: tuple[str, ...]) -> pa.Table:
    """What collectives cost by one of :data:`EXPOSURES`."""
    name = EXPOSURES[by]
    key, index = (name,), index_if_there(run.path)
    kept = _kept(run, index)
    if key not in kept:
        if index is not None:
            kept[key] = index.ask(f"select * from {name} order by {', '.join(by)}")
        else:
            kept[key] = exposure_module.answer(
                run.scan("collectives"), run.table("steps"), by, run.table("stalls")
            )
    return kept[key]


def sample_of_arrivals(run: Run) -> Sample | None:
    """The arrivals of some steps that the files of the hosts of ``run`` have; None without any."""
    key, kept = (host_files.SAMPLE,), _kept(run, None)
    rows = kept[key] if key in kept else host_files.sample(run)
    return arrival_sample.of_table(rows) if rows is not None and len(rows) else None


def exposure_per_step(run: Run) -> pd.DataFrame:
    """The exposed time of a training step of ``run``: see :func:`commprof.analysis.api.exposure_per_step`."""
    whole = ("attempt", "step")
    return exposure_module.per_step(exposure(run, (*whole, "purpose")), exposure(run, whole), step_times(run))


def bucket_flushes(run: Run, only: Mapping[str, int | str | None]) -> pd.DataFrame:
    """The gradient buckets of ``run``: see :func:`commprof.analysis.api.bucket_flushes`.

    Args:
        only: values of columns that the rows must have; None: any.
    """
    wanted = {name: value for name, value in only.items() if value is not None}
    index = index_if_there(run.path)
    if index is not None:
        which = " and ".join(("true", *(f"{name} = ?" for name in wanted)))
        found = index.ask(
            f"select * from {BUCKET_FLUSHES} where {which} order by attempt, step, micro_step, bucket, {_LOWEST_RANK}",
            list(wanted.values()),
        )
        return _with_executed(run, from_arrow(found, FLUSHES.columns))
    frame = from_arrow(_flushed(run), FLUSHES.columns)
    for name, value in wanted.items():
        frame = frame[frame[name] == value]
    return _with_executed(run, frame.reset_index(drop=True))


def _nccl_factors(run: Run) -> dict[str, float]:
    """:func:`_executed_factors`, where all groups of ``run`` are of gloo or NCCL, so that what is not of gloo is of NCCL."""
    names = set(run.table("groups")["backend"].to_pylist())
    return _executed_factors(run) if NCCL in names and names <= {GLOO, NCCL} else {}


def _with_executed(run: Run, buckets_found: pd.DataFrame) -> pd.DataFrame:
    """Buckets with what NCCL ran for them, by the alignment with its log that the run keeps; of gloo it is known."""
    if not buckets_found[EXECUTED].isna().any():
        return buckets_found
    factors = buckets_found["op"].map(_nccl_factors(run)).astype("float64")
    return buckets_found.assign(
        **{EXECUTED: buckets_found[EXECUTED].fillna(buckets_found["wire_bytes"] * factors)}
    )


def _flushed(run: Run) -> pa.Table:
    """All buckets of a run without an index, worked out once and kept with it."""
    key, kept = (BUCKET_FLUSHES,), _kept(run, None)
    if key not in kept:
        rows = run.scan("buckets", _FEWEST_SCANNED)
        if isinstance(rows, Scan) or len(rows):
            sent = _operations(run, (*buckets_module.COLUMNS, "backend"))
            kept[key] = buckets_module.bucket_flushes(run, sent)
        else:
            kept[key] = rows_of(from_rows([], FLUSHES.columns))
    return kept[key]


def bucket_steps(run: Run) -> pd.DataFrame:
    """The buckets of each step of ``run`` added up: see :func:`commprof.analysis.api.bucket_steps`."""
    return from_arrow(_bucket_steps(run, ""), BUCKET_STEPS.columns)


def buckets_per_step(run: Run) -> pd.DataFrame:
    """What a step of ``run`` has of buckets: see :func:`commprof.analysis.api.buckets_per_step`."""
    return buckets_module.per_step(_bucket_steps(run, "attempt, ").to_pandas(), step_times(run))


def _bucket_steps(run: Run, by: str) -> pa.Table:
    cases = "".join(
        f" when '{op}' then {factor!r} * wire_bytes" for op, factor in _nccl_factors(run).items() if op in OPS
    )
    executed = f"coalesce({EXECUTED}, case op{cases} end)" if cases else EXECUTED
    index = index_if_there(run.path)
    if index is not None:
        return index.ask(query_text("bucket_steps").format(by=by, executed=executed))
    return ask("bucket_steps", {BUCKET_FLUSHES: _flushed(run)}, by=by, executed=executed)


def bucket_means(run: Run) -> pd.DataFrame:
    """The buckets of a mean step of ``run``: see :func:`commprof.analysis.api.bucket_means`."""
    index = index_if_there(run.path)
    if index is None:
        return buckets_module.bucket_means(bucket_flushes(run, {}))
    order = f"micro_step, bucket, {_LOWEST_RANK}"
    means = index.ask(f"select * from {BUCKET_MEANS} order by {order}")
    return _with_executed(run, from_arrow(means, MEANS.columns))


def reducing(run: Run, bucket: pd.Series[Any]) -> pa.Table | Scan:
    """The records of ``run`` among which are those that reduced ``bucket``; of an index no others.

    None where the records lie elsewhere: the operations of the bucket are not listed then.
    """
    index = index_if_there(run.path)
    if index is None:
        return (run if elsewhere(run.path) is None else run.without_records()).scan("collectives")
    return index.ask(
        "select r.*, k.* exclude (kind) from records r join kinds k using (kind) "
        "where k.bucket = ? and r.step = ? and r.micro_step = ? and r.attempt = ?",
        [int(bucket[name]) for name in ("bucket", "step", "micro_step", "attempt")],
    )
