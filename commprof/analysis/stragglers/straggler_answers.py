"""Answer questions about arrivals and stragglers, from a valid index of the run or else from its partitions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks.rank_arrivals import NEEDED
from commprof.analysis.columns.answers import ARRIVALS, STRAGGLERS
from commprof.analysis.columns.defaults import MOST_LATE
from commprof.analysis.columns.detailed_answers import (
    LATE_COLLECTIVES,
    LATENESS,
    LATENESS_OF_STEPS,
    WAITING_CAUSES,
)
from commprof.analysis.columns.frames import from_arrow
from commprof.analysis.relations.memory import limit_bytes
from commprof.analysis.relations.sql_engine import connect
from commprof.analysis.storage.index import Index, by_index
from commprof.analysis.storage.index_sums import STRAGGLING
from commprof.analysis.storage.index_totals import BANDWIDTH_TIMES
from commprof.analysis.stragglers import arrival_sample
from commprof.analysis.stragglers import arrivals as arrivals_module
from commprof.analysis.stragglers import straggling as straggling_module
from commprof.analysis.stragglers.arrival_sample import Sample
from commprof.analysis.stragglers.arrivals import cpp_waits
from commprof.analysis.stragglers.straggling import Straggling, apart
from commprof.analysis.time import transfers
from commprof.analysis.time.partitions import columns_of, of_scan
from commprof.errors import UsageError
from commprof.trace.reader import Run

_DECLARED: Final = dict(
    zip(
        Straggling._fields,
        (STRAGGLERS, LATENESS, WAITING_CAUSES, LATE_COLLECTIVES, LATENESS_OF_STEPS),
        strict=True,
    )
)
_ROW_BYTES: Final = 400  # bytes of a row in a frame of arrivals and in its source
_ORDER: Final = {
    "ranks": "rank",
    "lateness": "rank",
    "causes": "rank, rowid",
    "collectives": "rowid",
    "steps": "rowid",
}


def arrivals(run: Run, steps: tuple[int, int] | None) -> pd.DataFrame:
    """Return all arrivals of ``run`` in one DataFrame: see :func:`commprof.analysis.api.arrivals`.

    Raises:
        UsageError: The DataFrame would not fit into memory.
    """
    tables = [
        dict(zip(part.column_names, part.columns, strict=True)) for part in _parts_within_limit(run, steps)
    ]
    return pd.DataFrame(
        {
            column.name: from_arrow(
                pa.table({column.name: _joined([part.pop(column.name) for part in tables])}), [column]
            )[column.name]
            for column in ARRIVALS.columns
        }
    )


def arrival_table(run: Run) -> pa.Table:
    """Return all arrivals of ``run``, with the columns of the answer.

    Raises:
        UsageError: The arrivals would not fit into memory.
    """
    tables = [part.select(ARRIVALS.names) for part in _parts_within_limit(run, None)]
    return pa.table({name: _joined([part[name] for part in tables]) for name in ARRIVALS.names})


def _parts_within_limit(run: Run, steps: tuple[int, int] | None) -> Iterator[pa.Table]:
    most = limit_bytes()
    rows = 0
    for part in arrival_parts(run, steps):
        rows += len(part)
        if rows * _ROW_BYTES > most:
            raise UsageError(
                f"the arrivals of {run.path} need more than {rows * _ROW_BYTES >> 20:,} MiB in one frame; commprof "
                f"may use {most >> 20:,} MiB; request some steps, such as steps=(0, 99), or use arrivals_parts"
            )
        yield part


def _joined(columns: list[pa.ChunkedArray]) -> pa.ChunkedArray:
    """Return the concatenated chunks of ``columns``. Dictionary-encoded texts become plain texts."""
    chunks = [chunk for column in columns for chunk in column.chunks]
    if any(pa.types.is_dictionary(chunk.type) for chunk in chunks):
        chunks = [chunk.cast(pa.string()) for chunk in chunks]
    return pa.chunked_array(chunks, columns[0].type if not chunks else None)


def arrival_parts(run: Run, steps: tuple[int, int] | None) -> Iterator[pa.Table]:
    """Yield the arrivals of all records of ``run`` that can be matched with other ranks, by partition.

    Args:
        steps: The first and the last step, or None for all steps.
    """
    align = arrivals_module.aligned(run)
    with connect() as engine:
        collectives = 0
        for part in of_scan(run.scan("collectives"), NEEDED, engine, cpp_waits(run)):
            arrived = align(part)
            place = arrived.column_names.index("collective")
            moved = pc.add(arrived["collective"], pa.scalar(collectives, pa.int64()))
            collectives = max(collectives, (pc.max(moved).as_py() or 0) + 1)
            yield _of_steps(arrived.set_column(place, "collective", moved), steps)


def _of_steps(rows: pa.Table, steps: tuple[int, int] | None) -> pa.Table:
    if steps is None:
        return rows
    step = rows["step"]
    return rows.filter(pc.and_(pc.greater_equal(step, steps[0]), pc.less_equal(step, steps[1])))


def straggling(run: Run, limit: int, first_step: bool = True) -> Straggling:
    """Return the stragglers of ``run``: see :func:`commprof.analysis.api.straggling`."""

    def from_files() -> Straggling:
        with connect() as engine:
            partitions = of_scan(run.scan("collectives"), NEEDED, engine, cpp_waits(run))
            if not first_step:
                partitions = _without_first_step(run, partitions)
            align, hosts = arrivals_module.aligned(run), arrivals_module.hosts_of(run)
            return straggling_module.straggling(partitions, align, limit, hosts)

    if not first_step:
        return from_files()
    return by_index(run, lambda index: _from_index(index, limit) if limit <= MOST_LATE else None, from_files)


def _without_first_step(run: Run, partitions: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield ``partitions`` without the records of the first training step of each attempt.

    Records before the first training step are also removed.
    """
    steps = run.table("steps")
    training = (
        steps.filter(pc.greater_equal(steps["step"], 0)).group_by("attempt").aggregate([("step", "min")])
    )
    firsts = dict(zip(training["attempt"].to_pylist(), training["step_min"].to_pylist(), strict=True))
    for part in partitions:
        later: Any = pa.array([False] * len(part))
        for attempt, first in firsts.items():
            of_attempt = pc.equal(part["attempt"], attempt)
            later = pc.or_(later, pc.and_(of_attempt, pc.greater(part["step"], first)))
        yield part.filter(later)


def sampled_straggling(run: Run, sample: Sample) -> Straggling:
    """Return the stragglers in the steps of ``sample``, which is a part of ``run``.

    See :func:`commprof.analysis.api.straggling`.
    """
    align, hosts = arrivals_module.aligned(run), arrivals_module.hosts_of(run)
    span_ns = round(sample.span_ns * arrival_sample.steps_in(sample) / sample.steps)
    partitions = arrival_sample.parts_of(sample)
    return straggling_module.straggling(partitions, align, MOST_LATE, hosts, span_ns, sample.share)


def _from_index(index: Index, limit: int) -> Straggling:
    frames = {
        field: from_arrow(
            index.ask(f"select * from {STRAGGLING[field]} order by {_ORDER[field]}"), declared.columns
        )
        for field, declared in _DECLARED.items()
    }
    verdict: dict[str, Any] = json.loads(
        index.ask("select value from facts where name = 'straggling'")["value"][0].as_py()
    )
    frames["ranks"].attrs.update(verdict)
    frames["collectives"] = frames["collectives"].head(limit)
    return Straggling(**frames)


def times(run: Run, steps: tuple[int, int] | None) -> pa.Table:
    """Return the durations of the collectives and messages of ``run`` in some steps (``transfers.timed``).

    Args:
        steps: The first and the last step, or None for all steps.
    """
    first, last = (-(1 << 31), 1 << 31) if steps is None else steps
    text = f"select * from {BANDWIDTH_TIMES} where step between ? and ?"
    return by_index(run, lambda index: index.ask(text, [int(first), int(last)]), lambda: _times(run, steps))


def _times(run: Run, steps: tuple[int, int] | None) -> pa.Table:
    align = arrivals_module.aligned(run, transfers.ALSO)
    columns = columns_of(NEEDED, transfers.ALSO)
    with connect() as engine:
        partitions = enumerate(of_scan(run.scan("collectives"), columns, engine))
        timed = pa.concat_tables([transfers.timed(apart(align(part), number)) for number, part in partitions])
    return _of_steps(timed, steps)
