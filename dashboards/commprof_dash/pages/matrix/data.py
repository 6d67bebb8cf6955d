"""The frames of the Traffic matrix page: cached calls to commprof.analysis.api."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pandas as pd

from commprof.analysis import api
from commprof_dash.data import Runs

MOST_RANKS: Final = 64  # rows of the matrix: more cells are neither told apart nor read as a table

Steps = tuple[int, int] | None


def kinds(runs: Runs, name: str) -> pd.DataFrame:
    """Operations and purposes of a run: op, purpose (``untagged`` where it has none), and its traffic."""
    frame: pd.DataFrame = runs.of_run("kinds", name, _kinds)
    return frame


def _kinds(path: Path) -> pd.DataFrame:
    frame = api.traffic(path, by=("op", "purpose"))
    frame = frame[frame["wire_bytes"] > 0]
    return frame.assign(purpose=frame["purpose"].fillna("untagged").astype("str"))


def matrix(runs: Runs, name: str, steps: Steps, op: str | None, purpose: str | None) -> pd.DataFrame:
    """Bytes between ranks: see ``api.matrix``."""
    frame: pd.DataFrame = runs.of_run(
        f"matrix {steps} {op} {purpose}",
        name,
        lambda path: api.matrix(path, steps=steps, op=op, purpose=purpose, most_ranks=MOST_RANKS),
    )
    return frame


def steps_taken(runs: Runs, name: str) -> tuple[list[int], int | None]:
    """The training steps in order, a repeated one several times, and the last that ended; None if none did."""
    times = runs.step_times(name)
    ended = times.loc[times["duration_ns"].notna(), "step"]
    return sorted(map(int, times["step"])), int(ended.max()) if len(ended) else None


def owners(runs: Runs, name: str, steps: Steps) -> pd.DataFrame:
    """What each rank owns of reduces: see ``api.owners``."""
    frame: pd.DataFrame = runs.of_run(f"owners {steps}", name, lambda path: api.owners(path, steps))
    return frame


def moved(runs: Runs, name: str) -> pd.DataFrame:
    """What the counters of each host moved: see ``api.moved``."""
    return runs.moved(name)


def expert_layers(runs: Runs, name: str) -> list[str]:
    """The layers of experts of a run, the one with the largest imbalance first; empty without experts."""
    frame = expert_imbalance(runs, name)
    if frame.empty:
        return []
    typical = frame.groupby("layer", sort=False)["imbalance"].median().fillna(0.0)
    return [str(layer) for layer in typical.sort_values(ascending=False, kind="stable").index]


def experts(runs: Runs, name: str) -> pd.DataFrame:
    """The load of each expert by step and layer: see ``api.experts``."""
    frame: pd.DataFrame = runs.of_run("experts", name, api.experts)
    return frame


def expert_imbalance(runs: Runs, name: str) -> pd.DataFrame:
    """Imbalance and dropped tokens by step and layer: see ``api.expert_imbalance``."""
    frame: pd.DataFrame = runs.of_run("expert_imbalance", name, api.expert_imbalance)
    return frame


def exchanges(runs: Runs, name: str, purpose: str | None = None, of_experts: bool = False) -> pd.DataFrame:
    """What the ranks receive in all_to_alls by step: see ``api.exchange_imbalance``."""
    frame: pd.DataFrame = runs.of_run(
        f"exchanges {purpose} {of_experts}",
        name,
        lambda path: api.exchange_imbalance(path, purpose, of_experts),
    )
    return frame


def largest(frame: pd.DataFrame) -> dict[str, Any]:
    """The row of ``frame`` with the largest ``imbalance``, the first of equal ones."""
    rows = frame[frame["imbalance"] == frame["imbalance"].max()].head(1).to_dict("records")
    return {str(name): value for name, value in rows[0].items()}
