"""Provides the frames of the page Traffic matrix through cached calls to commprof.analysis.api."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pandas as pd

from commprof.analysis import api
from commprof_dash.data import Runs

# The largest number of rows of the matrix. More cells cannot be distinguished, and are too many for a table.
MOST_RANKS: Final = 64

Steps = tuple[int, int] | None


def kinds(runs: Runs, name: str) -> pd.DataFrame:
    """Return the operations and purposes of a run: op, purpose (``untagged`` if there is none), and the traffic."""
    frame: pd.DataFrame = runs.of_run("kinds", name, _kinds)
    return frame


def _kinds(path: Path) -> pd.DataFrame:
    frame = api.traffic(path, by=("op", "purpose"))
    frame = frame[frame["wire_bytes"] > 0]
    return frame.assign(purpose=frame["purpose"].fillna("untagged").astype("str"))


def matrix(runs: Runs, name: str, steps: Steps, op: str | None, purpose: str | None) -> pd.DataFrame:
    """Return the bytes between ranks (see ``api.matrix``)."""
    frame: pd.DataFrame = runs.of_run(
        f"matrix {steps} {op} {purpose}",
        name,
        lambda path: api.matrix(path, steps=steps, op=op, purpose=purpose, most_ranks=MOST_RANKS),
    )
    return frame


def steps_taken(runs: Runs, name: str) -> tuple[list[int], int | None]:
    """Return the training steps in order, and the last step that ended.

    A repeated step occurs several times. The last step is None if no step ended.
    """
    times = runs.step_times(name)
    ended = times.loc[times["duration_ns"].notna(), "step"]
    return sorted(map(int, times["step"])), int(ended.max()) if len(ended) else None


def owners(runs: Runs, name: str, steps: Steps) -> pd.DataFrame:
    """Return the bytes that each rank owns of reduces (see ``api.owners``)."""
    frame: pd.DataFrame = runs.of_run(f"owners {steps}", name, lambda path: api.owners(path, steps))
    return frame


def moved(runs: Runs, name: str) -> pd.DataFrame:
    """Return the bytes that the interface counters of each host counted (see ``api.moved``)."""
    return runs.moved(name)


def expert_layers(runs: Runs, name: str) -> list[str]:
    """Return the layers of experts of a run, the one with the largest median imbalance first; empty without experts."""
    frame = expert_imbalance(runs, name)
    if frame.empty:
        return []
    typical = frame.groupby("layer", sort=False)["imbalance"].median().fillna(0.0)
    return [str(layer) for layer in typical.sort_values(ascending=False, kind="stable").index]


def experts(runs: Runs, name: str) -> pd.DataFrame:
    """Return the load of each expert by step and layer (see ``api.experts``)."""
    frame: pd.DataFrame = runs.of_run("experts", name, api.experts)
    return frame


def expert_imbalance(runs: Runs, name: str) -> pd.DataFrame:
    """Return the imbalance and the dropped tokens by step and layer (see ``api.expert_imbalance``)."""
    frame: pd.DataFrame = runs.of_run("expert_imbalance", name, api.expert_imbalance)
    return frame


def exchanges(runs: Runs, name: str, purpose: str | None = None, of_experts: bool = False) -> pd.DataFrame:
    """Return the bytes that the ranks receive in all_to_alls by step (see ``api.exchange_imbalance``)."""
    frame: pd.DataFrame = runs.of_run(
        f"exchanges {purpose} {of_experts}",
        name,
        lambda path: api.exchange_imbalance(path, purpose, of_experts),
    )
    return frame


def largest(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the row of ``frame`` with the largest ``imbalance``, or the first of several equal rows."""
    rows = frame[frame["imbalance"] == frame["imbalance"].max()].head(1).to_dict("records")
    return {str(name): value for name, value in rows[0].items()}
