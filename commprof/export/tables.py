"""The tables of one or more runs, as an export holds them: of one run as they are, of several with the run in front."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from commprof.analysis import api
from commprof.analysis.api import AnyRun, Run, open_run
from commprof.errors import UsageError
from commprof.schema import TABLES, Column

RUN_COLUMN: Final = Column("run", "string", "name of the run")
COMPARISON: Final = "comparison"
TRAFFIC_BY_SETTING: Final = "traffic_by_setting"
_ARROW: Final = {
    "int8": pa.int8(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "string": pa.string(),
}


class ExportedTable(NamedTuple):
    """One table of an export, and what its columns mean."""

    name: str
    columns: Sequence[Column]
    rows: pa.Table


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
    """The runs, opened; one may stand by itself."""
    given = [run] if isinstance(run, str | Path) or not isinstance(run, Sequence) else list(run)
    return [open_run(each) if isinstance(each, str | Path) else each for each in given]


def tables_of(runs: Sequence[Run], names: Sequence[str]) -> Iterator[ExportedTable]:
    """Tables ``names`` of the runs. Of several runs each table begins with the column ``run``."""
    if len(runs) == 1:
        for name in names:
            yield ExportedTable(name, TABLES[name].columns, runs[0].table(name))
        return
    called = api.run_names(runs)
    for name in names:
        parts = []
        for run, label in zip(runs, called, strict=True):
            rows = run.table(name).replace_schema_metadata(None)
            parts.append(
                rows.add_column(
                    0,
                    pa.field("run", pa.string(), nullable=False),
                    pa.array([label] * len(rows), pa.string()),
                )
            )
        yield ExportedTable(name, (RUN_COLUMN, *TABLES[name].columns), pa.concat_tables(parts))


def comparison_of(runs: Sequence[Run]) -> Iterator[ExportedTable]:
    """``commprof compare`` of the runs: one row per setting, and its traffic by operation and purpose."""
    both = api.compare_both(runs)
    for name, frame, answer in (
        (COMPARISON, both.settings, "compare"),
        (TRAFFIC_BY_SETTING, both.traffic, "traffic_by_setting"),
    ):
        declared = api.describe_columns(answer)
        columns = [declared.get(column) or _setting_column(column) for column in frame.columns]
        arrays = [
            pa.array(frame[column.name].tolist(), _ARROW[column.type], from_pandas=True) for column in columns
        ]
        yield ExportedTable(name, columns, pa.table(arrays, names=[column.name for column in columns]))


def _setting_column(name: str) -> Column:
    return replace(
        RUN_COLUMN,
        name=name,
        doc="a key of the config whose values are not the same in all runs",
        nullable=True,
    )
