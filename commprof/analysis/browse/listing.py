"""The list of the runs in and below a directory. A run that cannot be read is listed with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import pandas as pd
import pyarrow.compute as pc

from commprof.analysis.columns.answers import RUNS
from commprof.analysis.columns.frames import from_rows
from commprof.analysis.compare.run_overview import group_backends, script_name
from commprof.analysis.compare.settings import settings_of, value_text
from commprof.analysis.storage.answer_cache import answer_cache
from commprof.analysis.storage.opened_runs import opened
from commprof.errors import CommprofError
from commprof.trace.directory import find_runs
from commprof.trace.manifest import COMPLETE, FAILED, KILLED
from commprof.trace.rank_files.layout import rank_files
from commprof.trace.reader import Run

_ZERO_KEYS: Final = (
    "stage",
    "gradient_reduction",
    "reduce_scatter",
    "use_multi_rank_bucket_allreduce",
    "contiguous_gradients",
)


def setting_text(manifest: Any) -> str | None:
    """Return the sweep point of a run, else the ZeRO keys of its configuration, or None if it has neither."""
    if manifest.sweep:
        return settings_of([manifest], [""])[0].label or None
    zero = (manifest.config or {}).get("zero_optimization")
    if not isinstance(zero, Mapping):
        return None
    return ", ".join(f"{key}={value_text(zero[key])}" for key in _ZERO_KEYS if key in zero) or None


def _name(path: Path, directory: Path) -> str:
    relative = path.resolve().relative_to(directory.resolve())
    return relative.as_posix() if relative.parts else path.resolve().name


def _read(path: Path) -> dict[str, Any]:
    run = opened(path)
    manifest, health = run.manifest, run.health
    steps = run.table("steps")
    training = steps.filter(pc.greater_equal(steps["step"], 0))
    return {
        "state": health.state,
        "started_realtime_ns": manifest.started_realtime_ns,
        "script": script_name(manifest.script),
        "world_size": manifest.world_size,
        "backend": group_backends(run.table("groups")),
        "records": health.records,
        "summed": health.summed,
        "lost": health.lost,
        "unseen": health.unseen,
        "steps": training.group_by(["attempt", "step"]).aggregate([]).num_rows,
        "setting": setting_text(manifest),
        "sweep": str(manifest.sweep["name"]) if manifest.sweep and manifest.sweep.get("name") else None,
        "wall_ns": health.wall_ns,
        "finalised": not rank_files(run.path),
        "note": "; ".join(health.notes) or None,
    }


def model_numel(run: Run) -> int | None:
    """Return the number of elements of all parameters that ``run`` published, or None if it published none."""
    numel = run.table("parameters")["numel"]
    return int(pc.sum(numel).as_py()) if len(numel) else None


def _has_ended(row: dict[str, Any]) -> bool:
    """Return whether the row of a run can change only if the files of the run change.

    This is not so for a run that is still running, because it can end without a change of its files.
    """
    return row["state"] in (COMPLETE, FAILED, KILLED)


def runs_below(directory: Path) -> pd.DataFrame:
    """Return one row per run in or below ``directory`` (:data:`answers.RUNS`), newest first.

    The row of a run comes from the cache if the run has ended and its files are unchanged.
    """
    rows = []
    for path in find_runs(directory):
        row: dict[str, Any] = {"name": _name(path, directory), "path": str(path), "finalised": False}
        try:
            facts: dict[str, Any] = answer_cache.of_files([path], "listing", partial(_read, path), _has_ended)
            row |= facts
        except CommprofError as error:
            row |= {"state": "unreadable", "note": str(error)}
        rows.append(row)
    rows.sort(key=lambda row: (-(row.get("started_realtime_ns") or 0), row["name"]))
    return from_rows(rows, RUNS.columns)
