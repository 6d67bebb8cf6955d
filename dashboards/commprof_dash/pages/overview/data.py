"""What the Overview page asks of one run beside its plain facts: its ledger, what collectives cost it, what to change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import pandas as pd

from commprof.analysis import api
from commprof.prediction import api as prediction_api
from commprof.schema import Purpose
from commprof_dash.data import Runs
from commprof_dash.pages.bandwidth import data as bandwidth_data
from commprof_dash.pages.timeline.data import path_of

MOST_STEPS: Final = 600  # that a chart has room for
MOST_RECORDS: Final = 200_000  # a ledger goes through every record: about a second for a million


def verdict(runs: Runs, name: str, records: int) -> api.Verdict | None:
    """The ledger of a run; None while another process closes that of a large one."""
    ask = runs.of_run if records <= MOST_RECORDS else runs.run_beside
    ledger: api.Verdict | None = ask("verify", name, api.verify)
    return ledger


class Reduction(NamedTuple):
    """The gradient reduction that was requested, and the issued one: as a chip, and in one sentence with the reason.

    ``remedy``: what to set for the requested one; None where nothing is to be said.
    """

    chip: str
    sentence: str
    remedy: str | None


def reduction(ledger: api.Verdict) -> Reduction | None:
    """What the ledger says of the gradients; None if nothing was requested that it knows, or nothing was issued."""
    rows = [
        row
        for row in ledger.rows
        if row.purpose == Purpose.GRADIENT_REDUCE and row.requested_op and row.issued_op
    ]
    sentence = next((text for text in ledger.sentences if " requested " in text), None)
    if not rows or sentence is None:
        return None
    row = max(rows, key=lambda row: (row.issued_op != row.requested_op, row.issued_payload_bytes))
    chip = (
        row.requested_op
        if row.issued_op == row.requested_op
        else f"{row.requested_op} \u2192 {row.issued_op}"
    )
    return Reduction(str(chip), sentence, ledger.remedy)


def accounted(ledger: api.Verdict) -> str:
    """How much of the issued payload an expectation explains: the last sentence of the ledger, else its first."""
    if ledger.request_reason is not None:
        return f"The requested level is not known: {ledger.request_reason.rstrip('.')}."
    return ledger.sentences[-1] if ledger.sentences else "Nothing was issued."


def exposure(runs: Runs, name: str) -> pd.DataFrame:
    """Exposed communication of a training step by purpose; the last row is the union."""
    frame: pd.DataFrame = runs.of_run("exposure_per_step", name, api.exposure_per_step)
    purposes = frame["purpose"].astype("object").where(frame["purpose"].notna(), "untagged")
    return frame.assign(purpose=purposes.astype("str"))


def lateness(runs: Runs, name: str, records: int) -> pd.DataFrame | None:
    """One row per rank with the verdict on lateness; None without records here, and for a large run without an index."""
    path = path_of(runs, name)
    if (
        not records
        or api.records_place(path) is not None
        or (records > MOST_RECORDS and not api.has_index(path))
    ):
        return None
    straggling: api.Straggling = runs.of_run("straggling", name, api.straggling)
    return straggling.ranks


def last_times(steps: pd.DataFrame) -> pd.DataFrame:
    """The rows of ``steps``; of a step that was repeated after a restart, the last time."""
    return steps.drop_duplicates("step", keep="last").sort_values("step", ignore_index=True)


def resources(runs: Runs, name: str) -> pd.DataFrame:
    """What each training step used; of more than :data:`MOST_STEPS` steps evenly many."""
    frame = last_times(runs.of_run("resource_use", name, api.resource_use))
    return frame.iloc[:: -(-len(frame) // MOST_STEPS) or 1]


class Advised(NamedTuple):
    """Which changes of a run are worth trying, and the calibration that their predictions used."""

    answer: prediction_api.Promising
    calibration: Path | None


def promising(runs: Runs, name: str, hosts: Sequence[str]) -> Advised | None:
    """Which changes of a run are worth trying; None while another process predicts them.

    Args:
        hosts: of the run; a calibration of other hosts is not used.
    """
    file = bandwidth_data.calibration_of(runs, name, hosts)
    question = f"promising {file} {bandwidth_data.stamp(file)}"
    answer = runs.run_beside(question, name, partial(prediction_api.promising, calibration=file))
    return None if answer is None else Advised(answer, file)
