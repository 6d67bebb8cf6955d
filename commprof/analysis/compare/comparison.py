"""The comparison of settings by requested and issued operations, bytes and times, with one row per setting.

The repeats of a setting are merged into its row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final, NamedTuple

import pandas as pd

from commprof.analysis.columns.answers import COMPARISON, TRAFFIC_BY_GROUP, TRAFFIC_BY_SETTING, WIRE_OPS
from commprof.analysis.columns.byte_columns import PADDING
from commprof.analysis.columns.frames import from_rows
from commprof.analysis.compare.run_resources import Usage
from commprof.analysis.compare.settings import Setting
from commprof.analysis.time.intervals import over_repeats
from commprof.analysis.time.training_steps import StepTotals
from commprof.analysis.traffic.requested_traffic import Requested
from commprof.analysis.traffic.steady_steps import PARTLY_KNOWN
from commprof.schema import Column, Op, Purpose

_MEASURES: Final = ("collectives", "payload_bytes", "wire_bytes", *PARTLY_KNOWN, PADDING)
_PURPOSE_KEY: Final = ("op", "intended_op", "purpose")
_GROUP_KEY: Final = ("group_desc", "group_size", "op", "intended_op")
_NO_PURPOSES: Final = (
    "no collective has the purpose gradient_reduce, so this lists all collectives of a step without a purpose"
)


class Measured(NamedTuple):
    """The values of one run that a comparison needs.

    ``durations`` are the durations in ns of the steps after the first. ``shape`` is the result of
    :func:`model_sharding.shape`. ``moved_bytes`` are the bytes that all hosts sent in the run, divided by the number of
    steps that ended. ``failed`` is True if the run failed or was killed.
    """

    name: str
    setting: Setting
    step_totals: StepTotals
    durations: Sequence[int]
    final_loss: float | None
    requested: Requested
    usage: Usage
    shape: str
    moved_bytes: float | None = None
    failed: bool = False


def by_label(runs: Sequence[Measured]) -> dict[str, list[Measured]]:
    """Return the runs of each setting by label, in the order in which the settings first appear."""
    settings: dict[str, list[Measured]] = {}
    for run in runs:
        settings.setdefault(run.setting.label, []).append(run)
    return settings


def _merged(runs: Sequence[Measured], key: Sequence[str] = _PURPOSE_KEY) -> StepTotals:
    """Return the totals of all repeats by ``key``. Each repeat is weighted by its number of steps."""
    totals = pd.concat([run.step_totals.totals for run in runs], ignore_index=True)
    by = totals.groupby(list(key), dropna=False, as_index=False, sort=False)
    sums: dict[str, Any] = {"groups": "max", **dict.fromkeys(_MEASURES, "sum")}
    merged = by.agg(sums | dict.fromkeys(PARTLY_KNOWN, _if_all_known) | {PADDING: _known})
    return StepTotals(sum(run.step_totals.steps for run in runs), merged)


def _if_all_known(values: pd.Series[Any]) -> float | None:
    return None if values.isna().any() else float(values.sum())


def _known(values: pd.Series[Any]) -> float | None:
    """Return the sum of the known values, or None if there are values and all are unknown."""
    return None if len(values) and values.isna().all() else float(values.sum())


def _per_step(totals: pd.DataFrame, measure: str, steps: int) -> float | None:
    total = (_known if measure == PADDING else _if_all_known)(totals[measure])
    return total / steps if steps and total is not None else None


def _listed(gradients: pd.DataFrame, column: str) -> str | None:
    """Return the operations of ``column``, joined by ",", in order of wire bytes and then payload, largest first."""
    sums = gradients.dropna(subset=[column]).groupby(column)[["wire_bytes", "payload_bytes"]].sum()
    ordered = sums.sort_values(["wire_bytes", "payload_bytes"], ascending=False)
    return ", ".join(ordered.index) or None


def _row(label: str, runs: Sequence[Measured]) -> dict[str, Any]:
    steps, totals, _ = _merged(runs)
    gradients = totals[totals["purpose"] == Purpose.GRADIENT_REDUCE]
    # If a program does not tag its gradient reductions, the row lists all collectives without a purpose instead.
    nameless = totals[totals["purpose"].isna() & (totals["op"] != Op.BARRIER)]
    untagged = not len(gradients) and len(nameless) > 0
    issued = nameless if untagged else gradients
    requested = next((run.requested for run in runs if run.requested.op), runs[0].requested)
    time = over_repeats([run.durations for run in runs])
    losses = [run.final_loss for run in runs if run.final_loss is not None]
    return {
        "label": label,
        **runs[0].setting.values,
        "requested_op": requested.op,
        "requested_reason": requested.reason,
        "issued_op": _listed(issued, "op"),
        "issued_reason": _NO_PURPOSES if untagged else None,
        "intended_op": _listed(issued, "intended_op"),
        **{f"{measure}_per_step": _per_step(totals, measure, steps) for measure in _MEASURES},
        "gradient_payload_bytes_per_step": None if untagged else _per_step(gradients, "payload_bytes", steps),
        "gradient_wire_bytes_per_step": None if untagged else _per_step(gradients, "wire_bytes", steps),
        **{f"wire_{op}": _per_step(totals[totals["op"] == op], "wire_bytes", steps) for op in WIRE_OPS},
        "step_time_ns": time.center,
        "step_time_low_ns": time.low,
        "step_time_high_ns": time.high,
        "interval_over": time.over,
        "final_loss": fmean(losses) if losses else None,
        "steps": steps,
        "repeats": len(runs),
        "runs": ", ".join(run.name for run in runs),
    }


def _columns(values: Mapping[str, str]) -> tuple[Column, ...]:
    keys = (Column(key, "string", f"value of {key}") for key in values)
    label, *rest = COMPARISON.columns
    return (label, *keys, *rest)


def rows(runs: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return the rows of :func:`compare` as plain values."""
    return [_row(label, repeats) for label, repeats in by_label(runs).items()]


def compare(runs: Sequence[Measured]) -> pd.DataFrame:
    """Return one row per setting (:data:`answers.COMPARISON`). The keys that differ follow the label."""
    return framed(rows(runs), runs)


def framed(rows: Sequence[Mapping[str, Any]], runs: Sequence[Measured]) -> pd.DataFrame:
    """Convert the :func:`rows` of ``runs`` to the frame of :func:`compare`."""
    return from_rows(rows, _columns(runs[0].setting.values if runs else {}))


def traffic_by_setting(runs: Sequence[Measured]) -> pd.DataFrame:
    """Return the traffic of the settings in long form for charts.

    There is one row per setting, operation, intended operation and purpose. A run in which no step ended has no rows.
    """
    return from_rows(_long(runs, _PURPOSE_KEY), TRAFFIC_BY_SETTING.columns)


def traffic_by_group(runs: Sequence[Measured]) -> pd.DataFrame:
    """Return one row per setting, kind of group and operation.

    The wire bytes of a setting add up to its wire bytes in :func:`compare`.
    """
    rows = _long(runs, _GROUP_KEY)
    order = {label: place for place, label in enumerate(by_label(runs))}
    rows.sort(key=lambda row: (order[row["label"]], *(str(row[name] or "") for name in _GROUP_KEY)))
    return from_rows(rows, TRAFFIC_BY_GROUP.columns)


def _long(runs: Sequence[Measured], key: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for label, repeats in by_label(runs).items():
        steps, totals, _ = _merged(repeats, key)
        rows += [
            {"label": label, "groups": row["groups"]}
            | {name: None if pd.isna(row[name]) else row[name] for name in key}
            | {
                f"{measure}_per_step": None if pd.isna(row[measure]) else row[measure] / steps
                for measure in _MEASURES
            }
            for row in totals.to_dict("records")
        ]
    return rows
