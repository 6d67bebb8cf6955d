"""What the Overview page asks of one run beside its plain facts: its ledger, what collectives cost it, what to change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import pandas as pd

from commprof.analysis import api
from commprof.prediction import api as prediction_api
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


def resources(runs: Runs, name: str) -> pd.DataFrame:
    """What each training step used; of more than :data:`MOST_STEPS` steps evenly many."""
    frame: pd.DataFrame = runs.of_run("resource_use", name, api.resource_use)
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
    file = _calibration(runs, name, hosts)
    question = f"promising {file} {bandwidth_data.stamp(file)}"
    answer = runs.run_beside(question, name, partial(prediction_api.promising, calibration=file))
    return None if answer is None else Advised(answer, file)


def _calibration(runs: Runs, name: str, hosts: Sequence[str]) -> Path | None:
    """The calibration that goes with a run, as on the Bandwidth page, if it was made on its hosts and processors."""
    listed = bandwidth_data.calibrations(runs)
    fitting = listed[(listed["hosts"] == ", ".join(hosts)) & (listed["device"] == "cpu")]
    nearest = bandwidth_data.nearest(fitting, name)
    return None if nearest is None else runs.directory / nearest
