"""The four levels of reducing gradients, by setting, out of the ledgers of the runs. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.analysis.frames import from_rows
from commprof.analysis.setting_answers import REDUCTION_LEVELS
from commprof.exit_codes import State
from commprof.ledger.levels import STEPS, LedgerRow, Verdict
from commprof.schema import Op, Purpose

NOTHING_ISSUED: Final = "nothing was issued to reduce gradients in a training step"
NOT_REQUESTED: Final = "what the config asks for is not known"
NOT_EXECUTED: Final = "what the backend ran is not known"
COLUMNS: Final = ("purpose", "op", "intended_op", "step", "group_size")


class Ledger(NamedTuple):
    """The ledger of one run.

    ``meant``: for the operations that stand for another, which one; ``shares``: what :func:`job_shares` says.
    """

    label: str
    verdict: Verdict
    meant: Mapping[str, str]
    shares: Mapping[str, float]


def meant_ops(operations: pa.Table) -> dict[str, str]:
    """What the runtime meant by the operations that it issued to reduce gradients in the place of others.

    Args:
        operations: :func:`commprof.analysis.sums.operations` by :data:`COLUMNS` at least.
    """
    stand_ins = operations.filter(
        pc.and_(
            pc.equal(operations["purpose"], Purpose.GRADIENT_REDUCE), pc.is_valid(operations["intended_op"])
        )
    )
    pairs = stand_ins.group_by(["op", "intended_op"]).aggregate([]).to_pylist()
    return {pair["op"]: pair["intended_op"] for pair in pairs if pair["op"] != pair["intended_op"]}


def job_shares(operations: pa.Table, world_size: int | None) -> dict[str, float]:
    """By operation, what a rank of the job sends to reduce gradients of what a ledger adds up over the groups.

    It is the number of ranks that send over those of the job, the mean over groups by their wire bytes: 1 where the group is
    the job, and 1/2 where two groups of half of the ranks reduce half of the model each.

    Args:
        operations: :func:`commprof.analysis.sums.operations` by :data:`COLUMNS` at least.
        world_size: ranks of the job; None: as many as the largest group has.
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
    """One row per setting, level and operation (:data:`setting_answers.REDUCTION_LEVELS`).

    Args:
        ledgers: that of each run, repeats one after the other or not.
    """
    of_label: dict[str, list[Ledger]] = defaultdict(list)
    for ledger in ledgers:
        of_label[ledger.label].append(ledger)
    rows: list[dict[str, Any]] = []
    for label, repeats in of_label.items():
        verdicts = [ledger.verdict for ledger in repeats]
        shares = {op: share for ledger in repeats for op, share in ledger.shares.items()}
        meant = {op: wanted for ledger in repeats for op, wanted in ledger.meant.items()}
        states = {verdict.state for verdict in verdicts}
        state = next(s for s in (State.MISMATCH, State.UNKNOWN, State.CLOSED) if s in states)
        rows += [{"label": label, "state": str(state), **row} for row in _of_setting(verdicts, meant, shares)]
    return from_rows(rows, REDUCTION_LEVELS.columns)


def _of_setting(
    verdicts: Sequence[Verdict], meant: Mapping[str, str], shares: Mapping[str, float]
) -> list[dict[str, Any]]:
    gradients = [
        row
        for verdict in verdicts
        for row in verdict.rows
        if row.when == STEPS and row.purpose == Purpose.GRADIENT_REDUCE
    ]
    steps = sum(
        max((row.steps for row in verdict.rows if row.when == STEPS), default=0) for verdict in verdicts
    )
    reason = next((verdict.request_reason for verdict in verdicts if verdict.request_reason), None)
    return [
        *_level("requested", gradients, steps, {}, shares, reason or NOT_REQUESTED),
        *_level("issued", gradients, steps, meant, shares, NOTHING_ISSUED),
        *_level("executed", gradients, steps, meant, shares, NOT_EXECUTED),
        _moved(verdicts),
    ]


def _level(
    level: str,
    gradients: Sequence[LedgerRow],
    steps: int,
    meant: Mapping[str, str],
    shares: Mapping[str, float],
    reason: str,
) -> list[dict[str, Any]]:
    known = [row for row in gradients if _wire(row, level) is not None and getattr(row, f"{level}_op")]
    sums: dict[tuple[str, str | None], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in known:
        if level != "requested" and not row.issued_count:
            continue
        op = getattr(row, f"{level}_op")
        total = sums[op, meant.get(op)]
        total[0] += row.expected_payload_bytes or 0 if level == "requested" else row.issued_payload_bytes
        total[1] += (_wire(row, level) or 0.0) * shares.get(row.issued_op or "", 1.0)
    if not sums or not steps:
        return [{"level": level, "reason": reason}]
    return [
        {
            "level": level,
            "op": op,
            "intended_op": wanted,
            "payload_bytes_per_step": payload / steps,
            "wire_bytes_per_step": wire / steps,
        }
        for (op, wanted), (payload, wire) in sums.items()
    ]


def _wire(row: LedgerRow, level: str) -> float | None:
    return {
        "requested": row.requested_wire_bytes,
        "issued": row.issued_wire_bytes,
        "executed": row.executed_wire_bytes,
    }[level]


def _moved(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Mean over the repeats of what all hosts sent; of a step where all were read at steps, else of the run.

    What a step sent is without what evaluations and checkpoints between the readings sent by the model.
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
    said = f"without {round(left_out):,} bytes that are modelled outside of the steps" if left_out else None
    return {
        "level": "moved",
        "moved_bytes": sum(sent) / len(sent),
        "moved_over": "step" if by_step else "run",
        "reason": _joined([said, *(row.reason for rows in counted for row in rows)]),
    }


def _joined(reasons: Iterable[str | None]) -> str | None:
    return "; ".join(dict.fromkeys(reason for reason in reasons if reason)) or None
