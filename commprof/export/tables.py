"""The tables of an export: of one run as they are, of several runs with a column for the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from commprof.analysis import api
from commprof.analysis.api import AnyRun, Run, open_run
from commprof.errors import UsageError
from commprof.schema import TABLES, Column
from commprof.trace.tables import arrow_schema

RUN_COLUMN: Final = Column("run", "string", "name of the run")
COMPARISON: Final = "comparison"
EXPOSURE: Final = "exposure_per_step"
ONE_OFFS: Final = "one_offs"
_OF_SETTINGS: Final = (COMPARISON, "traffic_by_setting", "traffic_by_group")
COMPARISONS: Final = (*_OF_SETTINGS, EXPOSURE, ONE_OFFS)  # tables of all runs together
_ARROW: Final = {
    "int8": pa.int8(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "string": pa.string(),
}


class ExportedTable(NamedTuple):
    """One table of an export with its columns.

    ``batches`` iterates over its rows from the start each time it is called; each batch has ``schema``.
    """

    name: str
    columns: Sequence[Column]
    schema: pa.Schema
    batches: Callable[[], Iterator[pa.Table]]

    @classmethod
    def of_rows(cls, name: str, columns: Sequence[Column], rows: pa.Table) -> ExportedTable:
        """A table in memory."""
        return cls(name, columns, rows.schema, lambda: iter([rows]))


def table_names(tables: Sequence[str] | None) -> list[str]:
    """The names of the tables to export: those given, or all.

    Raises:
        UsageError: the schema has no table of such a name.
    """
    names = list(dict.fromkeys(TABLES if tables is None else tables))
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        raise UsageError(
            f"there is no table {', '.join(map(repr, unknown))}; the tables are: {', '.join(TABLES)}"
        )
    return names


def opened_runs(run: AnyRun | Sequence[AnyRun]) -> list[Run]:
    """The opened runs; a single run is accepted as well."""
    runs = [run] if isinstance(run, str | Path) or not isinstance(run, Sequence) else list(run)
    return [open_run(each) if isinstance(each, str | Path) else each for each in runs]


def tables_of(runs: Sequence[Run], names: Sequence[str]) -> Iterator[ExportedTable]:
    """Tables ``names`` of the runs. For several runs each table begins with the column ``run``."""
    if len(runs) == 1:
        for name in names:
            yield ExportedTable(name, TABLES[name].columns, arrow_schema(name), partial(runs[0].parts, name))
        return
    called = api.run_names(runs)
    first = pa.field("run", pa.string(), nullable=False)
    for name in names:
        schema = pa.schema([first, *arrow_schema(name)])
        batches = partial(_named_parts, list(zip(runs, called, strict=True)), name, schema)
        yield ExportedTable(name, (RUN_COLUMN, *TABLES[name].columns), schema, batches)


def _named_parts(runs: Sequence[tuple[Run, str]], name: str, schema: pa.Schema) -> Iterator[pa.Table]:
    for run, label in runs:
        for rows in run.parts(name):
            labels = pa.array([label], pa.string()).take(pa.array(np.zeros(len(rows), np.int64)))
            yield pa.Table.from_arrays([labels, *rows.columns], schema=schema)


def comparison_of(runs: Sequence[Run]) -> Iterator[ExportedTable]:
    """``commprof compare`` of the runs: settings, traffic by operation and by group; exposed time, and one-off traffic."""
    both = api.compare_both(runs)
    answers = ("compare", "traffic_by_setting", "traffic_by_group")
    for name, frame, answer in zip(
        _OF_SETTINGS, (both.settings, both.traffic, both.groups), answers, strict=True
    ):
        declared = api.describe_columns(answer)
        columns = [declared.get(column) or _setting_column(column) for column in frame.columns]
        arrays = [
            pa.array(frame[column.name].tolist(), _ARROW[column.type], from_pandas=True) for column in columns
        ]
        rows = pa.table(arrays, names=[column.name for column in columns])
        yield ExportedTable.of_rows(name, columns, rows)
    yield _of_each(runs, EXPOSURE, api.exposure_per_step)
    yield _of_each(runs, ONE_OFFS, api.one_offs)


def _of_each(runs: Sequence[Run], name: str, answer: Callable[[Run], pd.DataFrame]) -> ExportedTable:
    """The concatenated ``answer`` of :mod:`commprof.analysis.api` about each run: the numbers of its report."""
    columns = (RUN_COLUMN, *api.describe_columns(name).values())
    frames = [answer(run).assign(run=called) for run, called in zip(runs, api.run_names(runs), strict=True)]
    arrays = [
        pa.array(
            [value for frame in frames for value in frame[column.name].tolist()],
            _ARROW[column.type],
            from_pandas=True,
        )
        for column in columns
    ]
    return ExportedTable.of_rows(name, columns, pa.table(arrays, names=[column.name for column in columns]))


def _setting_column(name: str) -> Column:
    return replace(
        RUN_COLUMN,
        name=name,
        doc="a key of the config whose values are not the same in all runs",
        nullable=True,
    )
