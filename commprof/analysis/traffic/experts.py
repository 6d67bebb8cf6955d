"""The load of experts: how many tokens chose each, how uneven that is, and how many were dropped.

The load of an expert in a training step is the number of tokens of all ranks and micro-batches that chose it, before any
were dropped. The imbalance of a layer is the largest load over the mean load of its experts.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import pandas as pd

from commprof.analysis.columns.expert_answers import EXPERT_IMBALANCE, EXPERT_RANKS, EXPERTS
from commprof.analysis.columns.frames import as_declared
from commprof.analysis.relations.engine import ask
from commprof.analysis.storage.answer_cache import answer_cache
from commprof.trace.reader import Run, Scan

_LAYER: Final = ["attempt", "step", "layer"]
# Columns of the table that say how a layer is set, in the order in which they are shown.
SETTING: Final = (
    *("num_experts", "ep_size", "k", "capacity_factor", "eval_capacity_factor", "min_capacity"),
    *("drop_tokens", "hidden"),
)


class Worst(NamedTuple):
    """The training step with the largest imbalance of a layer."""

    attempt: int
    step: int
    layer: str
    expert: int
    imbalance: float


class Summary(NamedTuple):
    """The experts of a run in a few values. Medians are over training steps and layers.

    Attributes:
        layers: names of the layers that ran.
        settings: the settings of the layers (:data:`SETTING`), each once.
        steps: training steps.
        imbalance: median of the largest load over the mean.
        worst: where it is largest; None if no token chose any expert.
        dropped_share: dropped over chosen, of the whole run.
        highest: the least capacity_factor with which nothing would have been dropped; None if it is not known.
    """

    layers: tuple[str, ...]
    settings: tuple[dict[str, Any], ...]
    steps: int
    imbalance: float | None
    worst: Worst | None
    dropped_share: float | None
    highest: float | None


def has_loads(run: Run) -> bool:
    """Whether layers of experts published their loads."""
    rows = run.scan("expert_loads")
    return isinstance(rows, Scan) or len(rows) > 0


def sums(run: Run) -> pd.DataFrame:
    """Tokens by step, layer, expert and the rank that has it; see ``queries/expert_sums.sql``."""

    def answer() -> pd.DataFrame:
        tables = {"expert_loads": run.scan("expert_loads"), "expert_layers": run.table("expert_layers")}
        frame: pd.DataFrame = ask("expert_sums", tables).to_pandas()
        return frame

    return answer_cache.get(run.state, "expert_sums", answer)


def experts(run: Run) -> pd.DataFrame:
    """See :func:`commprof.analysis.api.experts`."""
    rows = sums(run)
    known = rows[rows["holder"].notna()].astype({"holder": "int64"}).astype({"holder": "string"})
    key = [*_LAYER, "expert"]
    loads = rows.groupby(key)[["tokens", "dropped"]].sum()
    loads["ranks"] = known.groupby(key)["holder"].agg(",".join)
    return as_declared(_with_load(loads.reset_index()), EXPERTS.columns)


def ranks(run: Run) -> pd.DataFrame:
    """See :func:`commprof.analysis.api.expert_ranks`."""
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
    """See :func:`commprof.analysis.api.expert_imbalance`."""
    rows = sums(run)
    of_expert, of_rank = experts(run), ranks(run)
    by_layer = of_expert.groupby(_LAYER)
    answer = by_layer[["tokens", "dropped"]].sum()
    answer["num_experts"] = by_layer["expert"].nunique()
    # Each row of an expert counts all tokens of its passes, so those of the layer are seen once for each expert.
    answer["seen"] = rows.groupby([*_LAYER, "expert"])["seen"].sum().groupby(_LAYER).max()
    answer["highest"] = rows.groupby(_LAYER)["highest"].max()
    answer["dropped_share"] = (answer["dropped"] / answer["tokens"]).where(answer["tokens"] > 0)
    for loads, name, measure in ((of_expert, "expert", "imbalance"), (of_rank, "rank", "rank_imbalance")):
        largest = _largest(loads, name)
        answer[measure], answer[name] = largest["load"], largest[name]
    return as_declared(answer.reset_index(), EXPERT_IMBALANCE.columns)


def _largest(loads: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows with the largest load of each layer and step; of equal ones the first by ``name``."""
    known = loads[loads["load"].notna()].sort_values([*_LAYER, name])
    at = known.groupby(_LAYER)["load"].idxmax()
    return known.loc[at].set_index(_LAYER)


def summary(run: Run) -> Summary | None:
    """See :func:`commprof.analysis.api.expert_summary`."""
    if not has_loads(run):
        return None
    rows = imbalance(run)
    settings = {
        tuple(row[name] for name in SETTING): None
        for row in run.table("expert_layers").to_pylist()
        if row["layer"] in set(rows["layer"])
    }
    known = rows[rows["imbalance"].notna()]
    tokens = int(rows["tokens"].sum())
    highest = rows["highest"].max()
    return Summary(
        tuple(dict.fromkeys(rows["layer"])),
        tuple(dict(zip(SETTING, values, strict=True)) for values in settings),
        int(rows[["attempt", "step"]].drop_duplicates().shape[0]),
        float(known["imbalance"].median()) if len(known) else None,
        _worst(known),
        int(rows["dropped"].sum()) / tokens if tokens else None,
        None if pd.isna(highest) else float(highest),
    )


def _worst(rows: pd.DataFrame) -> Worst | None:
    if rows.empty:
        return None
    (row,) = rows[rows["imbalance"] == rows["imbalance"].max()].head(1).itertuples(index=False)
    return Worst(int(row.attempt), int(row.step), str(row.layer), int(row.expert), float(row.imbalance))
