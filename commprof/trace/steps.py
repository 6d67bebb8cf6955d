"""The ``steps`` table of one rank, from the boundaries and metrics in its events."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from commprof.trace.events import Events
from commprof.trace.layout import RankFile

_STEP_LIMIT: Final = 1 << 31


class StepTable(NamedTuple):
    """The rows of ``steps``, and the steps that turned out to be none, each with the step that it belongs to."""

    rows: list[dict[str, Any]]
    void: dict[int, int]

    def relabel(self, steps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The step of each record, without the steps that were none."""
        if not self.void or not len(steps):
            return steps.copy()
        none = np.array(sorted(self.void), np.int32)
        found = np.searchsorted(none, steps)
        found[found == len(none)] = 0
        instead = np.array([self.void[step] for step in none.tolist()], np.int32)
        relabelled: np.ndarray[Any, Any] = np.where(none[found] == steps, instead[found], steps)
        return relabelled


def build_steps(identity: RankFile, events: Events) -> StepTable:
    """Steps from one boundary to the next.

    Boundaries that the program named replace those that were found by themselves. What follows the last one counts in
    the step that has just ended.
    """
    boundaries = [{"step": None, **row} for row in events.rows["step"] if _is_boundary(row)]
    named = [row for row in boundaries if row["step"] is None or not row.get("automatic")]
    automatic = {row["step"] for row in boundaries if row.get("automatic")}
    void: dict[int, int] = {}
    if any(row["step"] is not None for row in named):
        void = dict.fromkeys(automatic - {row["step"] for row in named}, -1)
        boundaries = named
    begins = [row for row in boundaries if row["step"] is None or row.get("micro_step", 0) == 0]
    micro = _micro_steps(boundaries)
    metrics = _metrics(events.rows["metrics"], void)
    rows = []
    for begin, end in itertools.pairwise([*begins, None]):
        step = None if begin is None else begin["step"]
        if begin is None or step is None or step in void:
            continue
        rows.append(
            {
                "step": step,
                "begin_ns": begin["time_ns"],
                "end_ns": None if end is None else end["time_ns"],
                "micro_steps": micro.get(step, 1),
                **metrics.get(step, {}),
                "rss_bytes": None if end is None else end.get("rss_bytes"),
                "device_bytes": None if end is None else end.get("device_bytes"),
                "cpu_ns": _difference(begin.get("cpu_ns"), None if end is None else end.get("cpu_ns")),
            }
        )
    return StepTable(rows, void)


def _is_boundary(row: Mapping[str, Any]) -> bool:
    step = row.get("step")
    return isinstance(row.get("time_ns"), int) and (
        step is None or (type(step) is int and -_STEP_LIMIT <= step < _STEP_LIMIT)
    )


def _micro_steps(boundaries: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    micro: dict[int, int] = {}
    for row in boundaries:
        number = row.get("micro_step", 0)
        if row["step"] is not None and isinstance(number, int):
            micro[row["step"]] = max(micro.get(row["step"], 1), number + 1)
    return micro


def _difference(begin: Any, end: Any) -> int | None:
    return end - begin if isinstance(begin, int) and isinstance(end, int) else None


def _metrics(rows: Iterable[Mapping[str, Any]], void: Mapping[int, int]) -> dict[int, dict[str, float]]:
    """loss, grad_norm and loss_scale: the last value in the step; samples: their sum."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        name, step = row.get("name"), row.get("step")
        if not isinstance(step, int):
            continue
        try:
            value = float(row.get("value", math.nan))
        except (TypeError, ValueError, OverflowError):
            continue
        values = found.setdefault(void.get(step, step), {})
        if name in ("loss", "grad_norm", "loss_scale"):
            values[name] = value
        elif name == "samples":
            values[name] = values.get(name, 0.0) + value
    return found
