"""Provides the frames of the page Bandwidth through cached calls to commprof.analysis.api."""

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
    """Return the calibrations below the directory of the runs (see ``api.calibrations``)."""
    return api.calibrations(runs.directory)


def nearest(listed: pd.DataFrame, run: str) -> str | None:
    """Return the calibration that belongs to the run ``run``, or None if there is none.

    A calibration in the directory of the run comes first, then one beside this directory, then one beside a
    parent directory. If there are several, the newest is returned. A calibration elsewhere may be from another
    machine.
    """
    readable = listed[listed["note"].isna()]
    for parent in (PurePosixPath(run), *PurePosixPath(run).parents):
        siblings = [name for name in readable["name"] if PurePosixPath(name).parent == parent]
        if siblings:
            return str(siblings[0])
    return None


def calibration_of(runs: Runs, run: str, hosts: Sequence[str]) -> Path | None:
    """Return the calibration that belongs to a run, if it was measured on the hosts of the run and on CPU."""
    listed = calibrations(runs)
    fitting = listed[(listed["hosts"] == ", ".join(hosts)) & (listed["device"] == "cpu")]
    name = nearest(fitting, run)
    return None if name is None else runs.directory / name


def recent_steps(runs: Runs, run: str) -> Steps:
    """Return the last steps of a run with many records, or None if all steps can be used.

    The number of steps is limited so that the answer does not take too long for a waiting user.
    """
    listing = runs.listing()
    recorded = listing.loc[listing["name"] == run, "records"].iloc[0]
    records = 0 if pd.isna(recorded) else int(recorded)
    known = runs.step_numbers(run) if records > MOST_RECORDS else []
    if len(known) < 2:
        return None
    newest = known[-max(1, MOST_RECORDS * len(known) // records) :]
    return newest[0], newest[-1]


def bandwidths(runs: Runs, run: str, calibration: Path | None, steps: Steps = None) -> api.Bandwidths:
    """Return the bandwidths that the collectives of a run reached (see ``api.bandwidth_both``)."""
    measured: api.Bandwidths = runs.of_run(
        f"bandwidth {calibration} {stamp(calibration)} {steps}",
        run,
        lambda path: api.bandwidth_both(path, calibration, steps),
    )
    return measured


def curve(calibration: Path, sizes: pd.DataFrame) -> pd.DataFrame:
    """Return the ceilings in ``calibration`` for the operations, group sizes and payloads of ``sizes``.

    See ``api.ceiling``.
    """
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
    """Return the modification time in ns and the size of ``file``, which invalidate cached answers when they change."""
    if file is None:
        return 0, 0
    status = file.stat()
    return status.st_mtime_ns, status.st_size
