"""Compute the load of experts: how many tokens chose each expert, the imbalance, and the dropped tokens.

The load of an expert in a training step is the number of tokens of all ranks and micro-batches that chose the
expert, before any tokens were dropped. The imbalance of a layer is the largest load divided by the mean load
of its experts.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import pandas as pd

from commprof.analysis.columns.expert_answers import EXPERT_IMBALANCE, EXPERT_RANKS, EXPERTS
from commprof.analysis.columns.frames import as_declared, from_rows
from commprof.analysis.relations.sql_engine import ask
from commprof.analysis.storage.answer_cache import answer_cache
from commprof.trace.reader import Run, Scan

_LAYER: Final = ["attempt", "step", "layer"]
# The columns of the table that contain the settings of a layer, in the order in which they are shown.
SETTING: Final = (
    "num_experts",
    "ep_size",
    "k",
    "capacity_factor",
    "eval_capacity_factor",
    "min_capacity",
    "drop_tokens",
    "hidden",
)


class Worst(NamedTuple):
    """The training step with the largest imbalance of a layer."""

    attempt: int
    step: int
    expert: int
    imbalance: float


class Layer(NamedTuple):
    """The experts of one layer over all training steps. Medians are over the steps.

    Attributes:
        imbalance: The median of the largest load divided by the mean load.
        worst: The step with the largest imbalance. None if no token chose any expert.
        rank_imbalance: The median of the largest load of a rank divided by the mean. None if no rank
            published its layers.
        dropped_share: The number of dropped tokens divided by the number of chosen tokens.
        highest: The lowest capacity_factor with which no tokens are dropped. None if k is not known.
    """

    layer: str
    num_experts: int
    imbalance: float | None
    worst: Worst | None
    rank_imbalance: float | None
    dropped_share: float | None
    highest: float | None


class Summary(NamedTuple):
    """The experts of a run in a few values.

    Attributes:
        steps: The number of training steps.
        layers: The layers that ran, the layer with the largest median imbalance first.
        settings: The settings of the layers (:data:`SETTING`), without duplicates.
        dropped_share: The number of dropped tokens divided by the number of chosen tokens, in the whole run.
    """

    steps: int
    layers: tuple[Layer, ...]
    settings: tuple[dict[str, Any], ...]
    dropped_share: float | None

    def as_json(self) -> dict[str, Any]:
        """Return all values as mappings and lists."""
        layers = [
            layer._asdict() | {"worst": None if layer.worst is None else layer.worst._asdict()}
            for layer in self.layers
        ]
        return self._asdict() | {"layers": layers, "settings": list(self.settings)}


def has_loads(run: Run) -> bool:
    """Return whether layers of experts published their loads."""
    rows = run.scan("expert_loads")
    return isinstance(rows, Scan) or len(rows) > 0


def sums(run: Run) -> pd.DataFrame:
    """Return tokens by step, layer, expert and the rank that stores the expert. See ``queries/expert_sums.sql``."""

    def answer() -> pd.DataFrame:
        tables = {"expert_loads": run.scan("expert_loads"), "expert_layers": run.table("expert_layers")}
        frame: pd.DataFrame = ask("expert_sums", tables).to_pandas()
        return frame

    return answer_cache.get(run.state, "expert_sums", answer)


def experts(run: Run) -> pd.DataFrame:
    """Return the load of each expert: see :func:`commprof.analysis.api.experts`."""
    rows = sums(run)
    known = rows[rows["holder"].notna()].astype({"holder": "int64"}).astype({"holder": "string"})
    key = [*_LAYER, "expert"]
    loads = rows.groupby(key)[["tokens", "dropped"]].sum()
    loads["ranks"] = known.groupby(key)["holder"].agg(",".join)
    return as_declared(_with_load(loads.reset_index()), EXPERTS.columns)


def ranks(run: Run) -> pd.DataFrame:
    """Return the load of each rank: see :func:`commprof.analysis.api.expert_ranks`."""
    rows = sums(run)
    rows = rows[rows["holder"].notna()].rename(columns={"holder": "rank"})
    by_rank = rows.groupby([*_LAYER, "rank"])
    loads = by_rank[["tokens", "dropped"]].sum()
    loads["experts"] = by_rank["expert"].nunique()
    return as_declared(_with_load(loads.reset_index()), EXPERT_RANKS.columns)


def _with_load(loads: pd.DataFrame) -> pd.DataFrame:
    mean = loads.groupby(_LAYER)["tokens"].transform("mean")
    return loads.assign(load=(loads["tokens"] / mean).where(mean > 0))


def imbalance(run: Run) -> pd.DataFrame:
    """Return the imbalance of each layer and step: see :func:`commprof.analysis.api.expert_imbalance`."""
    if not has_loads(run):
        return from_rows([], EXPERT_IMBALANCE.columns)
    rows = sums(run)
    of_expert, of_rank = experts(run), ranks(run)
    by_layer = of_expert.groupby(_LAYER)
    answer = by_layer[["tokens", "dropped"]].sum()
    answer["num_experts"] = by_layer["expert"].nunique()
    # Each row of an expert counts all tokens of its passes, so each token of the layer is counted once for each expert.
    answer["seen"] = rows.groupby([*_LAYER, "expert"])["seen"].sum().groupby(_LAYER).max()
    answer["highest"] = rows.groupby(_LAYER)["highest"].max()
    answer["dropped_share"] = (answer["dropped"] / answer["tokens"]).where(answer["tokens"] > 0)
    for loads, name, measure in ((of_expert, "expert", "imbalance"), (of_rank, "rank", "rank_imbalance")):
        largest = _largest(loads, name)
        answer[measure], answer[name] = largest["load"], largest[name]
    return as_declared(answer.reset_index(), EXPERT_IMBALANCE.columns)


def _largest(loads: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the row with the largest load of each layer and step.

    Among equal loads, the first row in the order of ``name`` is returned.
    """
    known = loads[loads["load"].notna()].sort_values([*_LAYER, name])
    at = known.groupby(_LAYER)["load"].idxmax()
    return known.loc[at].set_index(_LAYER)


def summary(run: Run) -> Summary | None:
    """Return a summary of the experts of a run: see :func:`commprof.analysis.api.expert_summary`."""
    if not has_loads(run):
        return None
    rows = imbalance(run)
    layers = [_layer(str(name), of_layer) for name, of_layer in rows.groupby("layer", sort=False)]
    settings = {
        tuple(row[name] for name in SETTING): None
        for row in run.table("expert_layers").to_pylist()
        if row["layer"] in {layer.layer for layer in layers}
    }
    return Summary(
        len(rows[["attempt", "step"]].drop_duplicates()),
        tuple(sorted(layers, key=lambda layer: -(layer.imbalance or 0.0))),
        tuple(dict(zip(SETTING, values, strict=True)) for values in settings),
        _share(rows),
    )


def _layer(name: str, rows: pd.DataFrame) -> Layer:
    return Layer(
        name,
        int(rows["num_experts"].max()),
        _number(rows["imbalance"].median()),
        _worst(rows),
        _number(rows["rank_imbalance"].median()),
        _share(rows),
        _number(rows["highest"].max()),
    )


def _number(value: float) -> float | None:
    return None if pd.isna(value) else float(value)


def _share(rows: pd.DataFrame) -> float | None:
    tokens = int(rows["tokens"].sum())
    return int(rows["dropped"].sum()) / tokens if tokens else None


def _worst(rows: pd.DataFrame) -> Worst | None:
    for row in rows[rows["imbalance"] == rows["imbalance"].max()].head(1).itertuples(index=False):
        return Worst(int(row.attempt), int(row.step), int(row.expert), float(row.imbalance))
    return None
