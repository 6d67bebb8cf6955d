"""Totals of a run that most answers use: summed operations, and the exposed time and duration of each step.

The sources are, in this order: a valid index, the summaries in the run directory, the files of the hosts, and the
records. Answers are stored in the cache (:mod:`commprof.analysis.storage.answer_cache`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.analysis.columns.detailed_answers import BUCKET_FLUSHES as FLUSHES
from commprof.analysis.columns.detailed_answers import BUCKET_MEANS as MEANS
from commprof.analysis.columns.detailed_answers import BUCKET_STEPS
from commprof.analysis.columns.frames import from_arrow, from_rows
from commprof.analysis.relations.sql_engine import ask, query_text
from commprof.analysis.storage import host_files, summaries
from commprof.analysis.storage.answer_cache import answer_cache
from commprof.analysis.storage.index import by_index
from commprof.analysis.storage.index_sums import EXPOSURES, STEP_TIMES, exposure_tables
from commprof.analysis.storage.index_totals import BUCKET_FLUSHES, BUCKET_MEANS, OPERATIONS, SUMS, rows_of
from commprof.analysis.storage.index_totals import HELD_COLUMNS as HELD_COLUMNS
from commprof.analysis.stragglers import arrival_sample
from commprof.analysis.stragglers.arrival_sample import Sample
from commprof.analysis.time import exposure as exposure_module
from commprof.analysis.time import training_steps
from commprof.analysis.time.warm_steps import warm_steps
from commprof.analysis.traffic import buckets, operation_totals
from commprof.analysis.traffic.steady_steps import EXECUTED
from commprof.errors import CommprofError
from commprof.ledger.records.backends import GLOO, NCCL
from commprof.ledger.records.executed import executed_factors
from commprof.schema import OPS
from commprof.trace.directory import elsewhere
from commprof.trace.fingerprint import fingerprint
from commprof.trace.reader import Run, Scan, open_run

_FEWEST_SCANNED: Final = 100_000  # the engine reads tables with more rows from their files
# The columns by which a summary of operations is summed.
SUMMARISED: Final = tuple(dict.fromkeys((*HELD_COLUMNS, *buckets.COLUMNS)))
_STEP: Final = ("attempt", "step")
_LOWEST_RANK: Final = "cast(regexp_extract(group_ranks, '[0-9]+') as bigint) nulls first"


def operations(run: Run, columns: Sequence[str]) -> pa.Table:
    """Return the operations of ``run``, summed by ``columns`` and possibly by more columns.

    The caller may sum the rows further. The executed operations of NCCL come from the stored alignment of the run with
    its log.
    """
    return _with_nccl(run, _operations(run, tuple(dict.fromkeys((*columns, "op", "backend")))))


def _with_nccl(run: Run, operations: pa.Table) -> pa.Table:
    unknown = pc.and_kleene(pc.greater(operations["unexecuted"], 0), pc.equal(operations["backend"], NCCL))
    if not pc.any(unknown).as_py():
        return operations
    factors = _executed_factors(run)
    factor = pa.array((factors.get(op) for op in operations["op"].to_pylist()), pa.float64())
    known = pc.and_kleene(unknown, pc.is_valid(factor))
    for name, value in (
        ("executed_share", pc.multiply(pc.cast(operations["wire_share"], pa.float64(), safe=False), factor)),
        ("unexecuted", pa.scalar(0, pa.int64())),
    ):
        at = operations.column_names.index(name)
        cast = pc.cast(value, operations[name].type)
        operations = operations.set_column(at, name, pc.if_else(known, cast, operations[name]))
    return operations


def _executed_factors(run: Run) -> dict[str, float]:
    return answer_cache.get(run.state, "executed_factors", lambda: executed_factors(run))


def _operations(run: Run, wanted: tuple[str, ...]) -> pa.Table:
    """Return the operations, summed by ``wanted`` and possibly by more columns, without the alignment."""
    if not set(wanted) <= set(HELD_COLUMNS):
        return _from_files(run, (OPERATIONS, *wanted))
    by = ", ".join((*sorted(wanted), "wire_ranks"))
    text, key = f"select {by}, {SUMS} from {OPERATIONS} group by {by}", (OPERATIONS, *HELD_COLUMNS)
    return by_index(run, lambda index: index.ask(text), lambda: _from_files(run, key), question=text)


def _from_files(run: Run, key: tuple[str, ...]) -> pa.Table:
    """Return the summary of ``run`` with the name and the columns in ``key``.

    A stored summary may have more columns. If none is stored, the summary is evaluated.
    """
    name, *columns = key
    present = _summaries(run)
    for other, *stored_columns in sorted(present, key=len):
        if other == name and set(columns) <= set(stored_columns):
            return present[other, *stored_columns]
    return answer_cache.get(run.state, key, lambda: _evaluated(run, key))


def _summaries(run: Run) -> dict[tuple[str, ...], pa.Table]:
    return answer_cache.get(
        run.state, "summaries", lambda: summaries.read(run.path) or host_files.answers(run)
    )


def _evaluated(run: Run, key: tuple[str, ...]) -> pa.Table:
    name, *columns = key
    if name == OPERATIONS:
        tables = {"collectives": run.scan("collectives", _FEWEST_SCANNED)}
        tables |= {name: run.table(name) for name in ("aggregates", "groups")}
        return operation_totals.operations(tables, columns)
    if name == STEP_TIMES:
        exposed = exposure_rows(run, _STEP)
        return training_steps.answer(run.table("steps"), exposed, operations(run, training_steps.COLUMNS))
    if name == BUCKET_FLUSHES:
        return _flushes(run, lambda: _operations(run, (*buckets.COLUMNS, "backend")))
    by = next(by for by, exposed in EXPOSURES.items() if exposed == name)
    steps, stalls, outside_steps = (run.table(table) for table in ("steps", "stalls", "outside_steps"))
    return exposure_module.answer(run.scan("collectives"), steps, by, stalls, outside_steps=outside_steps)


def summarise(path: Path) -> bool:
    """Evaluate the summaries of the run at ``path``, which most answers use, and write them into the run directory.

    Returns:
        Whether the summaries were written. They are not written for a large run of a short job, which gets an index on
        demand instead. They are also not written if the run has no records, still runs, or cannot be read or written.
    """
    try:
        run, stamp = open_run(path), fingerprint(path).inputs
        records = run.health.records + run.health.summed
        if run.pending or not records or not summaries.is_affordable(records, run.health.wall_ns or 0):
            return False
        summaries.keep(path, summary_tables(run), stamp)
    except (CommprofError, OSError):
        return False
    return True


def summary_tables(
    run: Run, evaluated: Mapping[tuple[str, ...], pa.Table] | None = None
) -> dict[tuple[str, ...], pa.Table]:
    """Return the summaries of ``run`` by name and columns.

    Args:
        evaluated: The summaries that another engine evaluated from the records. Default: the stored summaries, or else
            those from the files of hosts. Missing summaries are evaluated.

    Raises:
        TraceError: A file of the run is damaged.
    """
    tables = dict(evaluated or _summaries(run))
    summed = next((rows for key, rows in tables.items() if set(key) >= {OPERATIONS, *SUMMARISED}), None)
    if summed is None:
        summed = _evaluated(run, (OPERATIONS, *SUMMARISED))
    if not all((name,) in tables for name in EXPOSURES.values()):
        tables |= {(name,): rows for name, rows in exposure_tables(run).items()}
    if (STEP_TIMES,) not in tables:
        exposed = tables[EXPOSURES[_STEP],]
        tables[STEP_TIMES,] = training_steps.answer(run.table("steps"), exposed, _with_nccl(run, summed))
    if (BUCKET_FLUSHES,) not in tables:
        tables[BUCKET_FLUSHES,] = _flushes(run, lambda: summed)
    names = (*EXPOSURES.values(), STEP_TIMES, BUCKET_FLUSHES)
    return {(OPERATIONS, *SUMMARISED): summed} | {(name,): tables[name,] for name in names}


def step_times(run: Run) -> pd.DataFrame:
    """Return the training steps of ``run`` (see :func:`commprof.analysis.api.step_times`)."""
    return training_steps.as_frame(_step_times(run))


def has_exposed_times(run: Run) -> bool:
    """Return whether ``run`` has warm steps and the exposed time of each warm step is known."""
    rows = _step_times(run).select(["attempt", "step", "duration_ns", "exposed_ns"])
    warm = warm_steps(rows.to_pandas())
    return bool(len(warm) and warm["exposed_ns"].notna().all())


def _step_times(run: Run) -> pa.Table:
    key = (STEP_TIMES,)
    text = f"select * from {STEP_TIMES} order by attempt, step"
    return by_index(run, lambda index: index.ask(text), lambda: _from_files(run, key), key)


def exposure(run: Run, by: Sequence[str]) -> pd.DataFrame:
    """Return exposed and overlapped time of ``run`` (see :func:`commprof.analysis.api.exposure`)."""
    wanted = tuple(dict.fromkeys(by))
    if wanted not in EXPOSURES:
        steps, stalls, outside_steps = (run.table(table) for table in ("steps", "stalls", "outside_steps"))
        return exposure_module.exposure(run.scan("collectives"), steps, wanted, stalls, outside_steps)
    return exposure_module.as_frame(exposure_rows(run, wanted), wanted)


def exposure_rows(run: Run, by: tuple[str, ...]) -> pa.Table:
    """Return exposed and overlapped time by the columns ``by``, which must be a key of :data:`EXPOSURES`."""
    key = (EXPOSURES[by],)
    text = f"select * from {EXPOSURES[by]} order by {', '.join(by)}"
    return by_index(run, lambda index: index.ask(text), lambda: _from_files(run, key), key)


def sample_of_arrivals(run: Run) -> Sample | None:
    """Return the sampled arrivals from the files of the hosts of ``run``, or None if there are no such files."""
    key, known = (host_files.SAMPLE,), _summaries(run)
    rows = known[key] if key in known else host_files.sample(run)
    return arrival_sample.of_table(rows) if rows is not None and len(rows) else None


def exposure_per_step(run: Run) -> pd.DataFrame:
    """Return the exposed time per training step (see :func:`commprof.analysis.api.exposure_per_step`)."""
    step_key = ("attempt", "step")
    return exposure_module.per_step(
        exposure(run, (*step_key, "purpose")), exposure(run, step_key), step_times(run)
    )


def bucket_flushes(run: Run, only: Mapping[str, int | str | None]) -> pd.DataFrame:
    """Return the gradient buckets of ``run`` (see :func:`commprof.analysis.api.bucket_flushes`).

    Args:
        only: The values that the rows must have, by column. None allows any value.
    """
    wanted = {name: value for name, value in only.items() if value is not None}
    which = " and ".join(("true", *(f"{name} = ?" for name in wanted)))
    text = f"select * from {BUCKET_FLUSHES} where {which} order by attempt, step, micro_step, bucket, {_LOWEST_RANK}"

    rows = by_index(
        run,
        lambda index: index.ask(text, list(wanted.values())),
        lambda: _from_files(run, (BUCKET_FLUSHES,)),
    )
    frame = from_arrow(rows, FLUSHES.columns)
    for name, value in wanted.items():
        frame = frame[frame[name] == value]
    return _with_executed(run, frame.reset_index(drop=True))


def _nccl_factors(run: Run) -> dict[str, float]:
    """Return :func:`_executed_factors` if all groups of ``run`` use gloo or NCCL and at least one uses NCCL.

    In such a run, every operation that gloo did not run is an operation of NCCL. For other runs, the result is empty.
    """
    names = set(run.table("groups")["backend"].to_pylist())
    return _executed_factors(run) if NCCL in names and names <= {GLOO, NCCL} else {}


def _with_executed(run: Run, buckets_found: pd.DataFrame) -> pd.DataFrame:
    """Return the buckets with their executed bytes.

    For NCCL, these come from the stored alignment with its log. For gloo, they are already known.
    """
    if not buckets_found[EXECUTED].isna().any():
        return buckets_found
    factors = buckets_found["op"].map(_nccl_factors(run)).astype("float64")
    return buckets_found.assign(
        **{EXECUTED: buckets_found[EXECUTED].fillna(buckets_found["wire_bytes"] * factors)}
    )


def _flushes(run: Run, summed: Callable[[], pa.Table]) -> pa.Table:
    """Return all buckets of a run. The operations are computed only if the run has buckets."""
    rows = run.scan("buckets", _FEWEST_SCANNED)
    if isinstance(rows, Scan) or len(rows):
        return buckets.bucket_flushes(run, summed())
    return rows_of(from_rows([], FLUSHES.columns))


def bucket_steps(run: Run) -> pd.DataFrame:
    """Return the sums of the buckets of each step of ``run`` (see :func:`commprof.analysis.api.bucket_steps`)."""
    return from_arrow(_bucket_steps(run, ""), BUCKET_STEPS.columns)


def buckets_per_step(run: Run) -> pd.DataFrame:
    """Return the buckets per step of ``run`` (see :func:`commprof.analysis.api.buckets_per_step`)."""
    return buckets.per_step(_bucket_steps(run, "attempt, ").to_pandas(), step_times(run))


def _bucket_steps(run: Run, by: str) -> pa.Table:
    cases = "".join(
        f" when '{op}' then {factor!r} * wire_bytes" for op, factor in _nccl_factors(run).items() if op in OPS
    )
    executed = f"coalesce({EXECUTED}, case op{cases} end)" if cases else EXECUTED
    clauses = {"by": by, "executed": executed}
    return by_index(
        run,
        lambda index: index.ask(query_text("bucket_steps").format(**clauses)),
        lambda: ask("bucket_steps", {BUCKET_FLUSHES: _from_files(run, (BUCKET_FLUSHES,))}, **clauses),
    )


def bucket_means(run: Run) -> pd.DataFrame:
    """Return the buckets of a mean step of ``run`` (see :func:`commprof.analysis.api.bucket_means`)."""
    text = f"select * from {BUCKET_MEANS} order by micro_step, bucket, {_LOWEST_RANK}"
    return by_index(
        run,
        lambda index: _with_executed(run, from_arrow(index.ask(text), MEANS.columns)),
        lambda: buckets.bucket_means(bucket_flushes(run, {})),
    )


def reducing(run: Run, bucket: pd.Series[Any]) -> pa.Table | Scan:
    """Return records of ``run`` that include the records of the collectives that reduced ``bucket``.

    With an index, the result contains exactly the records with the number, step, micro-step and attempt of the bucket.
    If the records are not on this machine, the result has no rows, so the operations of the bucket are not listed.
    """
    here = run if elsewhere(run.path) is None else run.without_records()
    text = (
        "select r.*, k.* exclude (kind) from records r join kinds k using (kind) "
        "where k.bucket = ? and r.step = ? and r.micro_step = ? and r.attempt = ?"
    )
    values = [int(bucket[name]) for name in ("bucket", "step", "micro_step", "attempt")]
    return by_index(run, lambda index: index.ask(text, values), lambda: here.scan("collectives"))
