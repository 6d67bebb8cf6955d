"""The tables of an export. For several runs each table of the schema has an additional column ``run``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

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
RUNS: Final = "runs"
EXPOSURE: Final = "exposure_per_step"
ONE_OFFS: Final = "one_offs"
_OF_SETTINGS: Final = (COMPARISON, "traffic_by_setting", "traffic_by_group")
EXPERTS: Final = "expert_imbalance"
COMPARISONS: Final = (*_OF_SETTINGS, RUNS, EXPOSURE, ONE_OFFS, EXPERTS)  # each covers all runs
_MOVED: Final = "moved_bytes_per_step"
_EXPOSED: Final = ("exposed_ns", "exposed_low_ns", "exposed_high_ns", "exposed_share")
_MEMORY: Final = ("rss_bytes", "rss_peak_bytes", "device_bytes", "device_peak_bytes")
_RESOURCES: Final = (*_EXPOSED, *_MEMORY, "samples_per_second")
# These columns are left out, because they can change while the recorded data stays the same.
_NOT_OF_RUN: Final = ("name", "path", "finalised")
_MEASURED: Final = (
    "requested_op",
    "issued_op",
    "intended_op",
    "collectives_per_step",
    "payload_bytes_per_step",
    "wire_bytes_per_step",
    "executed_wire_bytes_per_step",
    "step_time_ns",
    "step_time_low_ns",
    "step_time_high_ns",
    "final_loss",
)
_RUN_COLUMNS: Final = {
    "run": RUN_COLUMN,
    "label": replace(RUN_COLUMN, name="label", doc="its setting in comparison"),
}
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

    Attributes:
        name: The name of the table.
        columns: The declarations of the columns.
        schema: The Arrow schema of every batch.
        batches: A function that returns a new iterator over all rows of the table, in batches.
    """

    name: str
    columns: Sequence[Column]
    schema: pa.Schema
    batches: Callable[[], Iterator[pa.Table]]

    @classmethod
    def of_rows(cls, name: str, columns: Sequence[Column], rows: pa.Table) -> ExportedTable:
        """Return a table whose rows are in memory."""
        return cls(name, columns, rows.schema, lambda: iter([rows]))

    def has_rows(self) -> bool:
        """Return whether the table has a row. Reads no further than the first batch with rows."""
        return any(len(rows) for rows in self.batches())


def table_names(tables: Sequence[str] | None) -> list[str]:
    """Return the names of the tables to export: ``tables``, or all tables of the schema if ``tables`` is None.

    Raises:
        UsageError: The schema has no table with one of the names.
    """
    names = list(dict.fromkeys(TABLES if tables is None else tables))
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        raise UsageError(
            f"there is no table {', '.join(map(repr, unknown))}; the tables are: {', '.join(TABLES)}"
        )
    return names


def opened_runs(run: AnyRun | Sequence[AnyRun]) -> list[Run]:
    """Open the runs and return them as a list. A single run is accepted as well."""
    runs = [run] if isinstance(run, str | Path) or not isinstance(run, Sequence) else list(run)
    return [open_run(each) if isinstance(each, str | Path) else each for each in runs]


def tables_of(runs: Sequence[Run], names: Sequence[str]) -> Iterator[ExportedTable]:
    """Yield the tables ``names`` of the runs. For several runs each table begins with the column ``run``."""
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


def exported_tables(
    runs: Sequence[Run], tables: Sequence[str] | None, empty: bool
) -> Iterator[ExportedTable]:
    """Yield the tables of an export of ``runs``.

    Args:
        runs: The runs.
        tables: The names of tables of the schema to export. None for all tables of the schema and of the comparison.
        empty: Whether to include tables without rows if ``tables`` is None.
    """
    every = tables_of(runs, table_names(tables))
    if tables is not None:
        yield from every
        return
    yield from (table for table in chain(every, comparison_of(runs)) if empty or table.has_rows())


def comparison_of(runs: Sequence[Run]) -> Iterator[ExportedTable]:
    """Yield the tables of the comparison of ``runs``, as in ``commprof compare``.

    The tables are the settings, the traffic by setting, the traffic by group, the runs, the exposed time per step, the
    one-offs and the imbalance of experts.
    """
    both = api.compare_both(runs, ranks=False)
    answers = ("compare", "traffic_by_setting", "traffic_by_group")
    for name, frame, answer in zip(
        _OF_SETTINGS, (with_resources(both), both.traffic, both.groups), answers, strict=True
    ):
        declared = _described(answer)
        columns = [declared.get(column) or _setting_column(column) for column in frame.columns]
        yield _of_frame(name, frame, columns)
    yield _runs(runs)
    yield _of_each(runs, EXPOSURE, api.exposure_per_step)
    yield _of_each(runs, ONE_OFFS, api.one_offs)
    yield _of_each(runs, EXPERTS, api.expert_imbalance)


def with_resources(compared: api.Comparison) -> pd.DataFrame:
    """Return the settings of a comparison with moved bytes, exposed time and memory.

    If a setting lacks a configuration key, the value of the key is null.
    """
    of_settings = compared.settings
    keys = [name for name in of_settings.columns if name not in api.describe_columns("compare")]
    settings = of_settings.assign(
        **{key: of_settings[key].where(of_settings[key] != api.ABSENT, None) for key in keys}
    )
    for other, names in ((compared.advice.settings, (_MOVED,)), (compared.resources, _RESOURCES)):
        settings = settings.merge(other[["label", *names]], on="label", how="left", validate="one_to_one")
    return settings


def _runs(runs: Sequence[Run]) -> ExportedTable:
    """Return the table with one row per run.

    Its columns are the columns of the list of runs, and the measured values of a comparison of this run alone.
    """
    labels = api.settings(runs)["label"]
    rows: list[dict[str, Any]] = []
    listed = [name for name in api.describe_columns("find_runs") if name not in _NOT_OF_RUN]
    measured = [name for name in (*_MEASURED, _MOVED, *_RESOURCES) if name not in listed]
    for run, name, label in zip(runs, api.run_names(runs), labels, strict=True):
        row = api.find_runs(run.path)[listed].iloc[[0]].reset_index(drop=True)
        answer = with_resources(api.compare_both([run], ranks=False))[measured]
        values = {**_values(row), **_values(answer)}
        rows.append({"run": name, "label": label, **values})
    names = ("run", "label", *listed, *measured)
    columns = [_RUN_COLUMNS.get(name) or _described("find_runs", "compare")[name] for name in names]
    return _of_frame(RUNS, pd.DataFrame(rows, columns=[*names], dtype=object), columns)


def _values(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the only row of ``frame`` as a dict.

    The row is read column by column, because pandas converts integers of a whole row to floats.
    """
    return {name: frame[name].iloc[0] for name in frame.columns}


def _described(*answers: str) -> dict[str, Column]:
    """Return the declared columns of ``answers``, and the columns that :func:`with_resources` adds."""
    extra = api.describe_columns("advice"), api.describe_columns("resources")
    return {
        name: column
        for declared in (*extra, *map(api.describe_columns, answers))
        for name, column in declared.items()
    }


def _of_frame(name: str, frame: pd.DataFrame, columns: Sequence[Column]) -> ExportedTable:
    arrays = [
        pa.array(frame[column.name].tolist(), _ARROW[column.type], from_pandas=True) for column in columns
    ]
    return ExportedTable.of_rows(name, columns, pa.table(arrays, names=[column.name for column in columns]))


def _of_each(runs: Sequence[Run], name: str, answer: Callable[[Run], pd.DataFrame]) -> ExportedTable:
    """Return a table with the concatenated results of ``answer`` for each run.

    ``answer`` is a function of :mod:`commprof.analysis.api`, so the numbers equal those in the report of the run.
    """
    columns = (RUN_COLUMN, *api.describe_columns(name).values())
    frames = [answer(run).assign(run=called) for run, called in zip(runs, api.run_names(runs), strict=True)]
    rows = [
        row for frame in frames for row in zip(*(frame[one.name].tolist() for one in columns), strict=True)
    ]
    return _of_frame(name, pd.DataFrame(rows, columns=[one.name for one in columns], dtype=object), columns)


def _setting_column(name: str) -> Column:
    return replace(
        RUN_COLUMN,
        name=name,
        doc="a key of the config whose values are not the same in all runs",
        nullable=True,
    )
