"""The columns of the answers about experts and about who receives the bytes of all_to_alls: see ``answers.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from commprof import schema
from commprof.analysis.columns.byte_columns import between_pairs
from commprof.schema import Column, Table


def _of(name: str, **changes: Any) -> Column:
    return replace(schema.EXPERT_LOADS.column(name), **changes)


_STEP: Final = tuple(_of(name) for name in ("attempt", "step", "layer"))
_IMBALANCE: Final = "largest over mean, 1 is even; null if there is none"

# One column, one line.
# fmt: off
EXPERTS: Final = Table(
    "experts",
    "How many tokens chose each expert in each training step, over all ranks and micro-batches.",
    (
        *_STEP,
        _of("expert"),
        Column(
            "ranks",
            "string",
            "global ranks that have the expert, joined by ','; null if no rank published layers",
            True,
        ),
        Column("tokens", "int64", "tokens that chose the expert, before any were dropped"),
        Column("dropped", "int64", "of these, tokens beyond the capacity"),
        Column(
            "load",
            "float64",
            "tokens divided by the mean of the layer's experts; null if no token chose any",
            True,
        ),
    ),
    key=("attempt", "step", "layer", "expert"),
)

EXPERT_RANKS: Final = Table(
    "expert_ranks",
    "How many tokens chose the experts of each rank in each training step.",
    (
        *_STEP,
        _of("rank", doc="global rank that has the experts"),
        Column("experts", "int64", "experts of the layer that the rank has"),
        Column(
            "tokens",
            "int64",
            "tokens that chose these experts, from all ranks of the group, before any were dropped",
        ),
        Column("dropped", "int64", "of these, tokens beyond the capacity"),
        Column("load", "float64", "tokens divided by the mean of the ranks; null if no token chose any", True),
    ),
    key=("attempt", "step", "layer", "rank"),
)

EXPERT_IMBALANCE: Final = Table(
    "expert_imbalance",
    "Load of the experts of each layer in each training step: imbalance and dropped tokens.",
    (
        *_STEP,
        Column("num_experts", "int64", "experts of the layer"),
        Column("seen", "int64", "tokens that the gates of all ranks saw"),
        Column("tokens", "int64", "choices of the gates: k for each token"),
        Column("dropped", "int64", "choices beyond the capacity of their experts"),
        Column("dropped_share", "float64", "dropped divided by tokens; null if there are no tokens", True),
        Column("imbalance", "float64", f"load of an expert: {_IMBALANCE}", True),
        Column("expert", "int64", "the expert with the largest load, the lowest of equal ones", True),
        Column("rank_imbalance", "float64", f"load of the experts of a rank: {_IMBALANCE}, or not known", True),
        Column("rank", "int64", "the rank with the largest load", True),
        Column("highest", "float64", "the least capacity_factor that drops nothing; null if k is not known", True),
    ),
    key=("attempt", "step", "layer"),
)

EXCHANGE_IMBALANCE: Final = Table(
    "exchange_imbalance",
    "The all_to_alls of each training step: which rank receives how much from the others, by the splits of the records.",
    (
        Column("step", "int32", "training step"),
        Column("ranks", "int64", "ranks of the groups of these all_to_alls"),
        Column("wire_bytes", "float64", "bytes that all ranks together send to other ranks", unit="bytes"),
        between_pairs("wire_bytes"),
        Column(
            "received_bytes",
            "float64",
            "mean bytes that a rank receives from others; null if some splits are not known",
            True,
            "bytes",
        ),
        Column("most_received_bytes", "float64", "the most bytes that a rank receives", True, "bytes"),
        Column("imbalance", "float64", f"received bytes of a rank: {_IMBALANCE}", True),
        Column("rank", "int64", "the rank that receives the most, the lowest of equal ones", True),
    ),
    key=("step",),
)
# fmt: on

EXPERT_ANSWERS: Final[dict[str, Table]] = {
    "experts": EXPERTS,
    "expert_ranks": EXPERT_RANKS,
    "expert_imbalance": EXPERT_IMBALANCE,
    "exchange_imbalance": EXCHANGE_IMBALANCE,
}
