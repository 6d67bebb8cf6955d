"""The overview of one run as plain values: software, traffic, times, and missing data."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath
from typing import Any, Final

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.analysis.columns.byte_columns import PADDING
from commprof.analysis.compare.settings import settings_of
from commprof.analysis.time.intervals import over_steps
from commprof.analysis.time.pipeline_idle import idle_shares
from commprof.analysis.time.training_steps import durations_after_first, final_loss
from commprof.analysis.time.trainings import trainings
from commprof.analysis.traffic.requested_traffic import requested_reduction
from commprof.analysis.traffic.steady_steps import PARTLY_KNOWN
from commprof.trace.reader import Run

# The columns of the operations that the overview needs, and those that a report of the run needs next.
COLUMNS: Final = ("attempt", "step", "op", "backend", "purpose", "intended_op", "group_ranks")


def group_backends(groups: pa.Table) -> str | None:
    """Return the backends of the process groups, joined by ",".

    The text of a group can name one backend for each device: ``cpu:gloo,cuda:nccl``.
    """
    texts = (text or "" for text in pc.unique(groups["backend"]).to_pylist())
    return _joined(part.rpartition(":")[2] for text in texts for part in text.split(","))


def used_backends(operations: pa.Table) -> str | None:
    """Return the backends that ran the collectives, joined by ","."""
    return _joined(name or "" for name in pc.unique(operations["backend"]).to_pylist())


def _joined(names: Iterable[str]) -> str | None:
    return ",".join(sorted({name for name in names if name})) or None


def wall_ns(run: Run) -> int | None:
    """Return the duration of the run in ns by the real-time clock, from the manifest or else from clock readings."""
    began, ended = run.manifest.started_realtime_ns, run.manifest.ended_realtime_ns
    if began and ended and ended > began:
        return ended - began
    readings = pc.min_max(run.table("clocks")["realtime_ns"]).as_py()
    if readings["min"] is None or readings["max"] == readings["min"]:
        return None
    return int(readings["max"]) - int(readings["min"])


def recorder_ns(run: Run) -> int | None:
    """Return the mean time in ns that a rank spent in the recorder, over the ranks that recorded this time."""
    spent = [entry.get("recorder_ns") for entry in run.manifest.ranks]
    known = [value for value in spent if value is not None]
    return round(sum(known) / len(known)) if known else None


def overview(
    run: Run, operations: pa.Table, times: pd.DataFrame, totals: pd.DataFrame, moved: pd.DataFrame
) -> dict[str, Any]:
    """Return the facts about ``run``. ``docs/analysis.md`` describes each key.

    Args:
        run: The run.
        operations: The deduplicated collectives of the run.
        times: The step times of the run.
        totals: The traffic of the run in one row.
        moved: The moved bytes of the run.
    """
    # Values that need a computation are computed first. The dictionary below only names them.
    manifest, health = run.manifest, run.health
    time, wall, spent = over_steps(durations_after_first(times)), wall_ns(run), recorder_ns(run)
    # If there is a reason, the counters miss a part of the run or a host. A sum over the hosts would be too small, so
    # the moved bytes are null.
    reason = moved.attrs.get("reason")
    idle = idle_shares(run.table("metrics"))
    requested = requested_reduction(run)
    # The totals are read column by column, because a row of a frame converts integers to floats.
    sums = {name: totals[name].iloc[0] for name in totals.columns}
    # These measures are null, not 0, if they are not known.
    executed, between, padding = (
        None if pd.isna(sums[name]) else float(sums[name]) for name in (*PARTLY_KNOWN, PADDING)
    )
    return {
        # The program, and how the run ended.
        "name": run.path.name,
        "path": str(run.path),
        "state": health.state,
        "script": manifest.script,
        "command": list(manifest.command),
        "started_realtime_ns": manifest.started_realtime_ns,
        "wall_ns": wall,
        "exit_code": manifest.exit_code,
        "first_failed_rank": manifest.first_failed_rank,
        # Values per rank are means over the recorded ranks, so a reader must see which ranks are missing.
        "world_size": manifest.world_size,
        "ranks_expected": health.ranks_expected,
        "ranks_recorded": health.ranks_recorded,
        "missing_ranks": list(health.missing_ranks),
        "attempts": len({entry["attempt"] for entry in manifest.ranks}),
        "hosts": list(manifest.hosts),
        # The groups name their backends even if a run issued no collective.
        "backends": used_backends(operations) or group_backends(run.table("groups")),
        "python": manifest.python,
        "torch": manifest.torch,
        "commprof_version": manifest.commprof_version,
        "config_path": manifest.config_path,
        # A run without records has the setting and the requested level too, because they need no records.
        "setting": settings_of([manifest], [run.path.name])[0].label,
        "requested_op": requested.op,
        "requested_reason": requested.reason,
        # Times per step exclude the first step. Counts of steps include it.
        "steps": len(times),
        "whole_steps": int(times["duration_ns"].notna().sum()),
        "step_time_ns": time.center,
        "step_time_low_ns": time.low,
        "step_time_high_ns": time.high,
        "interval_over": time.over,
        "final_loss": final_loss(times),
        # The list is empty if the run has a single training.
        "trainings": [each._asdict() for each in trainings(run, times)],
        "pipeline_idle": idle.measured,
        "pipeline_idle_expected": idle.expected,
        # The three byte measures of the whole run, including initialization. They are never added to each other.
        "collectives": int(sums["collectives"]),
        "payload_bytes": int(sums["payload_bytes"]),
        "padding_bytes": None if padding is None else int(padding),
        "wire_bytes": float(sums["wire_bytes"]),
        "executed_wire_bytes": executed,
        "between_hosts_bytes": between,
        "moved_sent_bytes": None if reason else int(moved["sent_bytes"].sum()),
        "moved_received_bytes": None if reason else int(moved["received_bytes"].sum()),
        "moved_reason": reason,
        # Counts of missing data, so that every reader can judge the values above.
        "records": health.records,
        "lost": health.lost,
        "unseen": health.unseen,
        "torn": health.torn,
        "raised": health.raised,
        "incomplete": health.incomplete,
        "summed": health.summed,
        "outside": health.outside,
        # The cost of recording, relative to the duration of the run.
        "recorder_ns": spent,
        "recorder_share": spent / wall if spent is not None and wall else None,
        "notes": list(health.notes),
    }


def script_name(script: str | None) -> str | None:
    """Return the file name of the script, which lists of runs show."""
    return None if script is None else PurePath(script).name
