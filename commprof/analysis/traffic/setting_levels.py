"""Compute the four levels of a training step by setting, from the ledgers of the runs. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.analysis.columns.byte_columns import BETWEEN_HOSTS, PADDING
from commprof.analysis.columns.frames import from_rows
from commprof.analysis.columns.setting_answers import REDUCTION_LEVELS, TRAFFIC_LEVELS
from commprof.analysis.time.training_steps import StepTotals
from commprof.analysis.traffic.steady_steps import EXECUTED, PARTLY_KNOWN, Step, steady
from commprof.exit_codes import State
from commprof.ledger.levels import STEPS, LedgerRow, Verdict
from commprof.schema import Op, Purpose

NOTHING_ISSUED: Final = "nothing was issued to reduce gradients in a training step"
NOT_REQUESTED: Final = "the operation that the config requests is not known"
NOT_EXECUTED: Final = "the operation that the backend ran is not known"
# A sum is known only if all its terms are known.
_SUMMED: Final = ("payload_bytes", "wire_bytes", *PARTLY_KNOWN)


class Ledger(NamedTuple):
    """The ledger of one run.

    Attributes:
        totals: The traffic of its steps, as in comparisons.
        shares: The result of :func:`job_shares`.
        ended_steps: The attempt and step of the steps that ended.
        ranks: The number of ranks of the job. None if it is not known.
    """

    label: str
    verdict: Verdict
    totals: StepTotals
    shares: Mapping[str, float]
    ended_steps: Sequence[Step]
    ranks: int | None = None


def job_shares(operations: pa.Table, world_size: int | None) -> dict[str, float]:
    """Return by operation the share of the ledger's gradient bytes that one rank of the job sends.

    The gradient bytes of a ledger are summed over groups. The share is the number of sending ranks divided by
    the number of ranks of the job, averaged over groups by wire bytes. The share is 1 if the group is the
    whole job. It is 1/2 if two groups of half of the ranks reduce half of the model each.

    Args:
        operations: The result of :func:`commprof.analysis.storage.run_totals.operations` by at least purpose,
            op, step and group_size.
        world_size: The number of ranks of the job. None: the number of ranks of the largest group.
    """
    ranks = world_size or pc.max(operations["group_size"]).as_py() or 1
    rows = operations.filter(
        pc.and_(
            pc.equal(operations["purpose"], Purpose.GRADIENT_REDUCE),
            pc.greater_equal(operations["step"], 0),
        )
    )
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows.select(["op", "group_size", "wire_share", "wire_ranks"]).to_pylist():
        wire = int(row["wire_share"]) / row["wire_ranks"]
        senders = 1 if row["op"] == Op.SEND else row["group_size"]
        sums[row["op"]][0] += wire * (senders / ranks)
        sums[row["op"]][1] += wire
    return {op: sent / wire for op, (sent, wire) in sums.items() if wire}


def reduction_levels(ledgers: Sequence[Ledger]) -> pd.DataFrame:
    """Return one row per setting, level and operation (:data:`setting_answers.REDUCTION_LEVELS`).

    Args:
        ledgers: The ledger of each run. Repeats of a setting do not have to be adjacent.
    """
    return from_rows(_by_setting(ledgers, _of_reduction), REDUCTION_LEVELS.columns)


def traffic_levels(ledgers: Sequence[Ledger]) -> pd.DataFrame:
    """Return one row per setting, level and operation of all traffic of a step.

    The columns are :data:`setting_answers.TRAFFIC_LEVELS`. The requested level contains what the
    configuration requests. Traffic without a rule, such as metrics, is not included in it.

    Args:
        ledgers: The ledger of each run. Repeats of a setting do not have to be adjacent.
    """
    return from_rows(_by_setting(ledgers, _of_step), TRAFFIC_LEVELS.columns)


def _by_setting(
    ledgers: Sequence[Ledger], of_setting: Callable[[Sequence[Ledger]], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    of_label: dict[str, list[Ledger]] = defaultdict(list)
    for ledger in ledgers:
        of_label[ledger.label].append(ledger)
    rows: list[dict[str, Any]] = []
    for label, repeats in of_label.items():
        states = {ledger.verdict.state for ledger in repeats}
        state = next(s for s in (State.MISMATCH, State.UNKNOWN, State.CLOSED) if s in states)
        rows += [{"label": label, "state": str(state), **row} for row in of_setting(repeats)]
    return rows


def _of_reduction(repeats: Sequence[Ledger]) -> list[dict[str, Any]]:
    """Return the levels of gradient reduction. A level that is not known has a row with the reason."""
    verdicts = [ledger.verdict for ledger in repeats]
    issued = _issued(repeats, reduces=True)
    reason = next((verdict.request_reason for verdict in verdicts if verdict.request_reason), None)
    return [
        *(_requested(repeats) or [{"level": "requested", "reason": reason or NOT_REQUESTED}]),
        *(issued or [{"level": "issued", "reason": NOTHING_ISSUED}]),
        *(_executed(_rows(repeats, reduces=True), issued) or [{"level": "executed", "reason": NOT_EXECUTED}]),
        _moved(verdicts),
    ]


def _of_step(repeats: Sequence[Ledger]) -> list[dict[str, Any]]:
    """Return the levels of gradient reduction, then the levels of all other traffic, if they are known."""
    *reduction, moved = [{"reduces": True, **row} for row in _of_reduction(repeats)]
    others = _issued(repeats, reduces=False)
    if others and not any(row["level"] == "issued" and "op" in row for row in reduction):
        reduction = [row for row in reduction if row["level"] == "requested"]
    ran = _executed(_rows(repeats, reduces=False), others)
    unknown = [] if len(ran) == len(others) else [{"level": "executed", "reason": NOT_EXECUTED}]
    rest = [*_requested_beside(repeats), *others, *ran, *unknown]
    return [
        *reduction,
        *({"reduces": False, **row} for row in rest),
        {**moved, "reduces": None, "moved_bytes_of_rank": _moved_of_rank(repeats, moved)},
    ]


def _rows(repeats: Sequence[Ledger], reduces: bool) -> list[LedgerRow]:
    """Return the ledger rows of training steps about gradient reduction, or about all other traffic."""
    return [
        row
        for ledger in repeats
        for row in ledger.verdict.rows
        if row.when == STEPS and (row.purpose == Purpose.GRADIENT_REDUCE) == reduces
    ]


def _issued(repeats: Sequence[Ledger], reduces: bool) -> list[dict[str, Any]]:
    """Return the gradient reductions of a step, or all other traffic, by operation.

    The values are those of :func:`comparison.traffic_by_setting`. ``executed_wire_bytes_per_step`` contains
    the bytes of the operations that the backend runs, or None if they are not known.
    """
    steps = sum(each.totals.steps for each in repeats)
    sums: dict[tuple[str, str | None], dict[str, float | None]] = {}
    for each in repeats:
        for row in each.totals.totals.to_dict("records"):
            if (row["purpose"] == Purpose.GRADIENT_REDUCE) != reduces or row["op"] == Op.BARRIER:
                continue
            intended = (
                None if pd.isna(row["intended_op"]) or row["intended_op"] == row["op"] else row["intended_op"]
            )
            into = sums.setdefault((row["op"], intended), dict.fromkeys(_SUMMED, 0.0) | {PADDING: None})
            for name in _SUMMED:
                before = into[name]
                into[name] = None if before is None or pd.isna(row[name]) else before + float(row[name])
            if not pd.isna(row[PADDING]):
                into[PADDING] = (into[PADDING] or 0.0) + float(row[PADDING])
    return [
        {"level": "issued", "op": op, "intended_op": intended}
        | {f"{name}_per_step": None if value is None else value / steps for name, value in values.items()}
        for (op, intended), values in sums.items()
    ]


def _executed(ledger: Sequence[LedgerRow], issued: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what the backend ran for ``issued``.

    The operations are from the ledger. The bytes are from the ledger only if ``issued`` does not contain
    them.
    """
    ran = {row.issued_op: row for row in ledger if row.executed_op and row.executed_wire_bytes is not None}
    rows = []
    for level in issued:
        row = ran.get(level["op"])
        if row is None:
            continue
        wire = level[f"{EXECUTED}_per_step"]
        if wire is None:
            factor = (
                (row.executed_wire_bytes or 0.0) / row.issued_wire_bytes if row.issued_wire_bytes else 1.0
            )
            wire = level["wire_bytes_per_step"] * factor
        ran_here = {"op": row.executed_op, "wire_bytes_per_step": wire, f"{BETWEEN_HOSTS}_per_step": None}
        rows.append({**level, "level": "executed", **ran_here})
    return rows


def _requested(repeats: Sequence[Ledger]) -> list[dict[str, Any]]:
    """Return the reductions requested per step, over the same steps and by the same rule as the issued level."""
    steps = sum(len(ledger.ended_steps) for ledger in repeats)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for ledger in repeats:
        rows = [
            {**each._asdict(), "attempt": attempt, "step": step, "collectives": each.count}
            for each in ledger.verdict.requested_reductions
            for attempt, step in each.steps
        ]
        for row in steady(rows, ("requested_op", "op", "group_size"), ledger.ended_steps).per_step:
            total = sums[row["requested_op"]]
            total[0] += row["payload_bytes"] * len(ledger.ended_steps)
            total[1] += row["wire_bytes"] * ledger.shares.get(row["op"], 1.0) * len(ledger.ended_steps)
    return [
        {
            "level": "requested",
            "op": op,
            "payload_bytes_per_step": payload / steps,
            "wire_bytes_per_step": wire / steps,
        }
        for op, (payload, wire) in sums.items()
    ]


def _requested_beside(repeats: Sequence[Ledger]) -> list[dict[str, Any]]:
    """Return what the configuration requests in addition to gradient reductions.

    The values are the issued bytes, multiplied by the ratio of requested to issued bytes in the ledger.
    """
    sums: dict[str, float] = defaultdict(float)
    for ledger in repeats:
        totals = ledger.totals.totals
        for row in _rows([ledger], reduces=False):
            if row.requested_op is None or row.requested_wire_bytes is None or not row.issued_wire_bytes:
                continue
            sent = totals[(totals["purpose"] == row.purpose) & (totals["op"] == row.issued_op)][
                "wire_bytes"
            ].sum()
            sums[row.requested_op] += float(sent) * row.requested_wire_bytes / row.issued_wire_bytes
    steps = sum(each.totals.steps for each in repeats)
    return [
        {"level": "requested", "op": op, "wire_bytes_per_step": wire / steps}
        for op, wire in sums.items()
        if wire
    ]


def _moved_of_rank(repeats: Sequence[Ledger], moved: Mapping[str, Any]) -> float | None:
    """Return the moved bytes of a step and rank.

    Counters over the whole run are divided by the number of steps that ended.
    """
    ranks = repeats[0].ranks
    steps = 1.0 if moved.get("moved_over") == "step" else fmean(len(each.ended_steps) for each in repeats)
    if moved.get("moved_bytes") is None or not ranks or not steps:
        return None
    return float(moved["moved_bytes"]) / steps / ranks


def _moved(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return the mean over the repeats of the bytes that all hosts sent.

    The bytes are per step if all counters were read at steps, and otherwise per run. The bytes of a step
    exclude the modeled bytes of evaluations and checkpoints between the readings.
    """
    counted = [verdict.moved for verdict in verdicts if verdict.moved]
    if not counted:
        reason = next(
            (verdict.sources.get("moved") for verdict in verdicts if verdict.sources.get("moved")), None
        )
        return {"level": "moved", "reason": reason or "no counters were read during the run"}
    by_step = all(
        row.when == STEPS and row.steps and row.outside_bytes is not None for rows in counted for row in rows
    )
    sent = [
        sum(
            (row.sent_bytes - (row.outside_bytes or 0)) / row.steps if by_step else row.sent_bytes
            for row in rows
        )
        for rows in counted
    ]
    left_out = sum(row.outside_bytes or 0 for rows in counted for row in rows) if by_step else 0
    left_out_text = (
        f"without {round(left_out):,} bytes that are modelled outside of the steps" if left_out else None
    )
    return {
        "level": "moved",
        "moved_bytes": sum(sent) / len(sent),
        "moved_over": "step" if by_step else "run",
        "reason": _joined([left_out_text, *(row.reason for rows in counted for row in rows)]),
    }


def _joined(reasons: Iterable[str | None]) -> str | None:
    return "; ".join(dict.fromkeys(reason for reason in reasons if reason)) or None
