"""Writes the figures and tables for a paper, with provenance, from nothing but the CSV files of an export."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.errors import TraceError, UsageError
from commprof.export import paper_figures, paper_tables
from commprof.export.files import ExportedFile, Progress, staged
from commprof.printable import command_line

SOURCES: Final = "sources.json"
COMPARISON: Final = "comparison.csv"
TRAFFIC: Final = "traffic_by_setting.csv"
STEPS: Final = "steps.csv"
RUNS: Final = "runs.csv"
PARAMETERS: Final = "parameters.csv"
PROVENANCE: Final = "provenance.json"
_ISSUED: Final = "wire_bytes_per_step"
_EXECUTED: Final = "executed_wire_bytes_per_step"
_TRAFFIC_COLUMNS: Final = ("label", "op", "intended_op", "purpose", _ISSUED)

Row = Mapping[str, str]


class Width(StrEnum):
    """The width of a figure in columns of a page."""

    ONE = "one"
    TWO = "two"


class Export(NamedTuple):
    """The rows of the CSV files of an export, and its provenance. An empty field is an empty string."""

    comparison: Sequence[Row]
    traffic: Sequence[Row]
    steps: Sequence[Row]
    runs: Sequence[Row]
    parameters: Sequence[Row]
    provenance: Mapping[str, Any]

    @property
    def level(self) -> tuple[str, str]:
        """The level of the wire bytes in figures, and the name of the column with these bytes.

        The level is ``executed`` if the executed bytes of all traffic are known, and ``issued`` otherwise.
        """
        is_known = self.traffic and all(row.get(_EXECUTED) or not row.get(_ISSUED) for row in self.traffic)
        return ("executed", _EXECUTED) if is_known else ("issued", _ISSUED)


def write_paper(
    directory: Path | str,
    out: Path | str,
    force: bool = False,
    progress: Progress | None = None,
    font: str = paper_figures.SANS,
) -> list[ExportedFile]:
    """Write the figures and tables for the export in ``directory`` into ``out``.

    Figures are PDF and SVG, one and two columns wide. Tables are LaTeX for the package booktabs. The function reads
    only the files of the export, never a run, so anyone with these files can reproduce the figures.

    Raises:
        TraceError: ``directory`` contains no export with a comparison, or cannot be read, or ``out`` cannot be
            written to.
        UsageError: ``directory`` is not a directory, ``out`` is in use, or ``font`` is not installed (see
            :class:`paper_figures.Style`).
        MissingExtraError: matplotlib is not installed.
    """
    directory, out = Path(directory), Path(out)
    export = read_export(directory)
    paper_figures.Style(Width.ONE, font).settings()  # refuses an unknown font before anything is written
    drawings: dict[str, Callable[[paper_figures.Style], Any]] = {
        "traffic": partial(paper_figures.traffic, export.comparison, export.traffic, *export.level),
        "step_time": partial(paper_figures.step_time, export.comparison),
        "loss": partial(paper_figures.loss, export.comparison, export.steps),
    }
    kinds = ("pdf", "svg")
    job = paper_tables.job_of(export.runs, export.parameters, export.provenance)
    tables = {
        "comparison.tex": paper_tables.comparison(export.comparison, job),
        "traffic.tex": paper_tables.traffic(export.comparison, export.traffic, *export.level, job),
    }
    names = [f"{name}_{width}.{kind}" for name in drawings for width in Width for kind in kinds]
    with staged(out, [*names, *tables, SOURCES], force, progress) as staging:
        left_out = []
        for name, draw in drawings.items():
            for width in Width:
                style = paper_figures.Style(width, font)
                figure = draw(style)
                if figure is None:
                    left_out.append(name)
                    break
                for kind in kinds:
                    staging.adopt(f"{name}_{width}.{kind}", partial(paper_figures.save, figure, style))
                paper_figures.close(figure)
        for name, text in tables.items():
            staging.write_text(name, text)
        staging.write_text(
            SOURCES, json.dumps(_sources(directory, export, left_out, staging.files), indent=2) + "\n"
        )
    return staging.files


def read_export(directory: Path) -> Export:
    """Read the files of an export that the figures and tables need.

    Raises:
        UsageError: ``directory`` is not a directory.
        TraceError: A file is missing or damaged, or the comparison has no rows.
    """
    if not directory.is_dir():
        raise UsageError(
            f"{directory} is not a directory; expected the directory of an export in CSV. Make one: "
            f"{command_line('export', 'RUN...', '--out', directory)}"
        )
    comparison = _rows(directory / COMPARISON, paper_tables.NEEDED)
    if not comparison:
        raise TraceError(
            f"{directory / COMPARISON} has no rows: its runs issued nothing, so there is nothing to draw"
        )
    traffic = _rows(directory / TRAFFIC, _TRAFFIC_COLUMNS, is_optional=True)
    steps = _rows(directory / STEPS, ("step", "loss", "rank"), is_optional=True)
    runs = _rows(directory / RUNS, ("run",), is_optional=True)
    parameters = _rows(directory / PARAMETERS, ("name", "numel"), is_optional=True)
    try:
        provenance = json.loads((directory / PROVENANCE).read_text("utf-8"))
    except (OSError, ValueError):
        provenance = {}
    if not isinstance(provenance, dict):
        provenance = {}
    return Export(comparison, traffic, steps, runs, parameters, provenance)


def _rows(file: Path, needed: Sequence[str], is_optional: bool = False) -> list[Row]:
    if is_optional and not file.exists():
        return []  # an export leaves out tables without rows
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            rows: list[Row] = list(reader)
    except FileNotFoundError:
        raise TraceError(
            f"{file} is missing: figures need a complete export in CSV. Make one: "
            f"{command_line('export', 'RUN...', '--out', file.parent)}"
        ) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{file} cannot be read: {error}") from None
    missing = [name for name in needed if name not in (reader.fieldnames or ())]
    if missing:
        raise TraceError(
            f"{file} has no column {', '.join(missing)}; it is not a file of an export, or it was changed"
        )
    return rows


def _sources(
    directory: Path, export: Export, left_out: Sequence[str], files: Sequence[ExportedFile]
) -> dict[str, Any]:
    return {
        "export": directory.name,
        "export_files": export.provenance.get("files", []),
        "runs": [each.get("run", {}).get("name") for each in export.provenance.get("runs", [])],
        "not_drawn": dict.fromkeys(left_out, "the export has no such numbers"),
        "files": [{"name": file.path.name, "bytes": file.bytes, "sha256": file.sha256} for file in files],
    }
