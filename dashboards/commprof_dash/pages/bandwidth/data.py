"""The frames of the Bandwidth page: cached calls to commprof.analysis.api."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

import pandas as pd

from commprof.analysis import api
from commprof.schema import Op
from commprof_dash.data import Runs

MOST_RECORDS: Final = 200_000

Steps = tuple[int, int] | None


def calibrations(runs: Runs) -> pd.DataFrame:
    """The calibrations below the directory of the runs: see ``api.calibrations``."""
    return api.calibrations(runs.directory)


def nearest(listed: pd.DataFrame, run: str) -> str | None:
    """The calibration that goes with the run of that name: in it, else beside it, else beside a directory that holds it.

    Of several the newest; None where there is none. One that lies elsewhere is of another machine, for all that is known.
    """
    readable = listed[listed["note"].isna()]
    for parent in (PurePosixPath(run), *PurePosixPath(run).parents):
        siblings = [name for name in readable["name"] if PurePosixPath(name).parent == parent]
        if siblings:
            return str(siblings[0])
    return None


def calibration_of(runs: Runs, run: str, hosts: Sequence[str]) -> Path | None:
    """The calibration that goes with a run, if it was made on its hosts and processors."""
    listed = calibrations(runs)
    fitting = listed[(listed["hosts"] == ", ".join(hosts)) & (listed["device"] == "cpu")]
    name = nearest(fitting, run)
    return None if name is None else runs.directory / name


def recent_steps(runs: Runs, run: str) -> Steps:
    """The last steps of a run with many records, as many as are answered while a person waits; None for all of it."""
    listing = runs.listing()
    recorded = listing.loc[listing["name"] == run, "records"].iloc[0]
    records = 0 if pd.isna(recorded) else int(recorded)
    known = runs.step_numbers(run) if records > MOST_RECORDS else []
    if len(known) < 2:
        return None
    newest = known[-max(1, MOST_RECORDS * len(known) // records) :]
    return newest[0], newest[-1]


def bandwidths(runs: Runs, run: str, calibration: Path | None, steps: Steps = None) -> api.Bandwidths:
    """What the collectives of a run reached: see ``api.bandwidth_both``."""
    measured: api.Bandwidths = runs.of_run(
        f"bandwidth {calibration} {stamp(calibration)} {steps}",
        run,
        lambda path: api.bandwidth_both(path, calibration, steps),
    )
    return measured


def curve(calibration: Path, sizes: pd.DataFrame) -> pd.DataFrame:
    """What ``calibration`` says of the operations, group sizes and payloads of ``sizes``: see ``api.ceiling``."""
    ceilings = []
    for group_size in sorted(set(sizes["group_size"])):
        part = sizes[sizes["group_size"] == group_size]
        payloads = part["payload_bytes"]
        ceiling = api.ceiling(calibration, int(group_size), int(payloads.min()), int(payloads.max()))
        ceilings.append(ceiling[ceiling["op"].isin(part["op"].map(_calibrated))])
    return pd.concat(ceilings, ignore_index=True) if ceilings else pd.DataFrame()


def _calibrated(op: str) -> str:
    return "send_recv" if op == Op.SEND else op


def stamp(file: Path | None) -> tuple[int, int]:
    """Time of change and size of ``file``, so that an answer is not kept beyond them."""
    if file is None:
        return 0, 0
    status = file.stat()
    return status.st_mtime_ns, status.st_size
