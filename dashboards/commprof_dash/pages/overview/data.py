"""Provides the data of the page Overview besides the basic facts of the run.

These are the ledger, the cost of collectives, and the changes worth trying.
"""

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

MOST_STEPS: Final = 600  # the largest number of steps that fit a chart
# Closing a ledger reads every record, which takes about a second per million records.
MOST_RECORDS: Final = 200_000


def verdict(runs: Runs, name: str, records: int) -> api.Verdict | None:
    """Return the ledger of a run; None while another process closes the ledger of a large run."""
    ask = runs.of_run if records <= MOST_RECORDS else runs.run_beside
    ledger: api.Verdict | None = ask("verify", name, api.verify)
    return ledger


class Reduction(NamedTuple):
    """The requested and the issued gradient reduction, as a chip and in one sentence with the reason.

    ``remedy`` states how to get the requested reduction; None if nothing needs to be changed.
    """

    chip: str
    sentence: str
    remedy: str | None


def reduction(ledger: api.Verdict) -> Reduction | None:
    """Return the gradient reduction according to the ledger.

    Return None if no known reduction was requested, or if none was issued.
    """
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
    """Return a sentence: how much of the issued payload is explained, or why the requested level is not known."""
    if ledger.request_reason is not None:
        return f"The requested level is not known: {ledger.request_reason.rstrip('.')}."
    return ledger.sentences[-1] if ledger.sentences else "Nothing was issued."


def exposure(runs: Runs, name: str) -> pd.DataFrame:
    """Return the exposed communication of a training step by purpose. The last row is the union of all purposes."""
    frame: pd.DataFrame = runs.of_run("exposure_per_step", name, api.exposure_per_step)
    purposes = frame["purpose"].astype("object").where(frame["purpose"].notna(), "untagged")
    return frame.assign(purpose=purposes.astype("str"))


def lateness(runs: Runs, name: str, records: int) -> pd.DataFrame | None:
    """Return one row per rank with the verdict on lateness.

    Return None if the run has no records here, or if the run is large and has no index.
    """
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
    """Return the rows of ``steps``. If a step was repeated after a restart, only its last attempt is included."""
    return steps.drop_duplicates("step", keep="last").sort_values("step", ignore_index=True)


def resources(runs: Runs, name: str) -> pd.DataFrame:
    """Return the resources that each training step used. More than :data:`MOST_STEPS` steps are thinned evenly."""
    frame = last_times(runs.of_run("resource_use", name, api.resource_use))
    return frame.iloc[:: -(-len(frame) // MOST_STEPS) or 1]


class Advised(NamedTuple):
    """The changes of a run that are worth trying, and the calibration that their predictions used."""

    answer: prediction_api.Promising
    calibration: Path | None


def promising(runs: Runs, name: str, hosts: Sequence[str]) -> Advised | None:
    """Return the changes of a run that are worth trying; None while another process predicts them.

    Args:
        hosts: The hosts of the run. A calibration of other hosts is not used.
    """
    file = bandwidth_data.calibration_of(runs, name, hosts)
    question = f"promising {file} {bandwidth_data.stamp(file)}"
    answer = runs.run_beside(question, name, partial(prediction_api.promising, calibration=file))
    return None if answer is None else Advised(answer, file)
