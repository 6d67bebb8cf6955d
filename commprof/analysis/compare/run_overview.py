"""The overview of one run as plain values: software, traffic, times, and what is missing."""

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

# Columns of the operations that overview needs, and those that a report of the run needs next.
COLUMNS: Final = ("attempt", "step", "op", "backend", "purpose", "intended_op", "group_ranks")


def group_backends(groups: pa.Table) -> str | None:
    """The backends of the process groups, joined by ",". A group's text names one per device: ``cpu:gloo,cuda:nccl``."""
    texts = (text or "" for text in pc.unique(groups["backend"]).to_pylist())
    return _joined(part.rpartition(":")[2] for text in texts for part in text.split(","))


def used_backends(operations: pa.Table) -> str | None:
    """The backends that collectives went to, joined by ","."""
    return _joined(name or "" for name in pc.unique(operations["backend"]).to_pylist())


def _joined(names: Iterable[str]) -> str | None:
    return ",".join(sorted({name for name in names if name})) or None


def wall_ns(run: Run) -> int | None:
    """How long the run lasted by the real-time clock: from its manifest, else between two clock readings."""
    began, ended = run.manifest.started_realtime_ns, run.manifest.ended_realtime_ns
    if began and ended and ended > began:
        return ended - began
    readings = pc.min_max(run.table("clocks")["realtime_ns"]).as_py()
    if readings["min"] is None or readings["max"] == readings["min"]:
        return None
    return int(readings["max"]) - int(readings["min"])


def recorder_ns(run: Run) -> int | None:
    """Time that a rank spent in the recorder, mean over the ranks that recorded it."""
    spent = [entry.get("recorder_ns") for entry in run.manifest.ranks]
    known = [value for value in spent if value is not None]
    return round(sum(known) / len(known)) if known else None


def overview(
    run: Run, operations: pa.Table, times: pd.DataFrame, totals: pd.DataFrame, moved: pd.DataFrame
) -> dict[str, Any]:
    """The facts of ``run``; see ``docs/analysis.md`` for each key.

    Args:
        run: the run.
        operations: its deduplicated collectives.
        times: its step_times.
        totals: its traffic in one row.
        moved: its moved bytes.
    """
    # Values that need a computation come first; the dictionary below only names them.
    manifest, health = run.manifest, run.health
    time, wall, spent = over_steps(durations_after_first(times)), wall_ns(run), recorder_ns(run)
    # With a reason, the counters miss a part of the run or a host: a sum over the hosts would be too small, so it is null.
    reason = moved.attrs.get("reason")
    idle = idle_shares(run.table("metrics"))
    requested = requested_reduction(run)
    # Taken column by column, because a row of a frame converts integers to floats.
    sums = {name: totals[name].iloc[0] for name in totals.columns}
    # These measures are null, not 0, if no source knows them.
    executed, between, padding = (
        None if pd.isna(sums[name]) else float(sums[name]) for name in (*PARTLY_KNOWN, PADDING)
    )
    return {
        # What ran, and how it ended.
        "name": run.path.name,
        "path": str(run.path),
        "state": health.state,
        "script": manifest.script,
        "command": list(manifest.command),
        "started_realtime_ns": manifest.started_realtime_ns,
        "wall_ns": wall,
        "exit_code": manifest.exit_code,
        "first_failed_rank": manifest.first_failed_rank,
        # Figures of the ranks are means over the recorded ones, so a reader must see which ones are missing.
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
        # The setting and the requested level come from the manifest alone, so a run without records has them too.
        "setting": settings_of([manifest], [run.path.name])[0].label,
        "requested_op": requested.op,
        "requested_reason": requested.reason,
        # Times per step leave out the first step; counts include it.
        "steps": len(times),
        "whole_steps": int(times["duration_ns"].notna().sum()),
        "step_time_ns": time.center,
        "step_time_low_ns": time.low,
        "step_time_high_ns": time.high,
        "interval_over": time.over,
        "final_loss": final_loss(times),
        # Empty for a single training.
        "trainings": [each._asdict() for each in trainings(run, times)],
        "pipeline_idle": idle.measured,
        "pipeline_idle_expected": idle.expected,
        # The three byte measures of the whole run, initialization included; they never mix.
        "collectives": int(sums["collectives"]),
        "payload_bytes": int(sums["payload_bytes"]),
        "padding_bytes": None if padding is None else int(padding),
        "wire_bytes": float(sums["wire_bytes"]),
        "executed_wire_bytes": executed,
        "between_hosts_bytes": between,
        "moved_sent_bytes": None if reason else int(moved["sent_bytes"].sum()),
        "moved_received_bytes": None if reason else int(moved["received_bytes"].sum()),
        "moved_reason": reason,
        # What is missing, so that every reader can judge the figures above.
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
    """The script as lists of runs show it."""
    return None if script is None else PurePath(script).name
