"""The comparison of settings: requested, issued, bytes and times, with the repeats of a setting merged into one row."""

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

    ``durations`` are of the steps after the first, in ns; ``shape`` is the answer of
    :func:`model_sharding.shape`; ``moved_bytes`` is what all hosts sent in the run, divided by its steps that ended.
    ``failed``: the run failed or was killed.
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
    """The runs of each setting, in the order in which the settings first appear."""
    settings: dict[str, list[Measured]] = {}
    for run in runs:
        settings.setdefault(run.setting.label, []).append(run)
    return settings


def _merged(runs: Sequence[Measured], key: Sequence[str] = _PURPOSE_KEY) -> StepTotals:
    """The steps of all repeats together by ``key``: each repeat is weighted by its number of steps."""
    totals = pd.concat([run.step_totals.totals for run in runs], ignore_index=True)
    by = totals.groupby(list(key), dropna=False, as_index=False, sort=False)
    sums: dict[str, Any] = {"groups": "max", **dict.fromkeys(_MEASURES, "sum")}
    merged = by.agg(sums | dict.fromkeys(PARTLY_KNOWN, _if_all_known) | {PADDING: _known})
    return StepTotals(sum(run.step_totals.steps for run in runs), merged)


def _if_all_known(values: pd.Series[Any]) -> float | None:
    return None if values.isna().any() else float(values.sum())


def _known(values: pd.Series[Any]) -> float | None:
    """The sum of the known values; None if there are values and none is known."""
    return None if len(values) and values.isna().all() else float(values.sum())


def _per_step(totals: pd.DataFrame, measure: str, steps: int) -> float | None:
    total = (_known if measure == PADDING else _if_all_known)(totals[measure])
    return total / steps if steps and total is not None else None


def _listed(gradients: pd.DataFrame, column: str) -> str | None:
    """The operations of ``column`` in order of wire bytes, largest first; without wire bytes, of payload."""
    sums = gradients.dropna(subset=[column]).groupby(column)[["wire_bytes", "payload_bytes"]].sum()
    ordered = sums.sort_values(["wire_bytes", "payload_bytes"], ascending=False)
    return ", ".join(ordered.index) or None


def _row(label: str, runs: Sequence[Measured]) -> dict[str, Any]:
    steps, totals, _ = _merged(runs)
    gradients = totals[totals["purpose"] == Purpose.GRADIENT_REDUCE]
    # A program that does not tag its gradient reductions still gets an answer, as far as one is possible.
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
    """The rows of :func:`compare` as plain values."""
    return [_row(label, repeats) for label, repeats in by_label(runs).items()]


def compare(runs: Sequence[Measured]) -> pd.DataFrame:
    """One row per setting (:data:`answers.COMPARISON`), with the keys that differ after the label."""
    return framed(rows(runs), runs)


def framed(rows: Sequence[Mapping[str, Any]], runs: Sequence[Measured]) -> pd.DataFrame:
    """The :func:`rows` of ``runs`` as the frame of :func:`compare`."""
    return from_rows(rows, _columns(runs[0].setting.values if runs else {}))


def traffic_by_setting(runs: Sequence[Measured]) -> pd.DataFrame:
    """One row per setting and operation, in long form for charts; a run in which no step ended has none."""
    return from_rows(_long(runs, _PURPOSE_KEY), TRAFFIC_BY_SETTING.columns)


def traffic_by_group(runs: Sequence[Measured]) -> pd.DataFrame:
    """One row per setting, kind of group and operation; the wire bytes of a setting add up to those in :func:`compare`."""
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
