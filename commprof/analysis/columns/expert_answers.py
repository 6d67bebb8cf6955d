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
_IMBALANCE: Final = "1 means that all are equal"

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
            "global ranks that have the expert, joined by ','; null if no rank published its experts",
            True,
        ),
        Column("tokens", "int64", "tokens that chose the expert, including those that were dropped later"),
        Column(
            "dropped",
            "int64",
            "how many of these tokens were dropped, because they exceeded the capacity of the expert",
        ),
        Column(
            "load",
            "float64",
            "tokens of this expert divided by the average over the experts of the layer; null if no token "
            "chose any of these experts",
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
        Column("experts", "int64", "number of experts of the layer that this rank has"),
        Column(
            "tokens",
            "int64",
            "tokens from all ranks of the group that chose the experts of this rank, including tokens that "
            "were dropped later",
        ),
        Column(
            "dropped",
            "int64",
            "how many of these tokens were dropped, because they exceeded the capacity of their expert",
        ),
        Column(
            "load",
            "float64",
            "tokens of this rank's experts divided by the average over all ranks; null if no token chose "
            "any expert",
            True,
        ),
    ),
    key=("attempt", "step", "layer", "rank"),
)

EXPERT_IMBALANCE: Final = Table(
    "expert_imbalance",
    "How evenly the tokens are distributed over the experts of each layer in each training step, and how "
    "many tokens are dropped.",
    (
        *_STEP,
        Column("num_experts", "int64", "number of experts in the layer"),
        Column("seen", "int64", "number of tokens that reached the gate of the layer, summed over the ranks"),
        Column("tokens", "int64", "number of choices that the gates made: k for each token"),
        Column("dropped", "int64", "number of choices that exceeded the capacity of the chosen expert"),
        Column("dropped_share", "float64", "dropped divided by tokens; null if there are no tokens", True),
        Column(
            "imbalance",
            "float64",
            f"largest load of an expert, divided by the mean load of the experts; {_IMBALANCE}; null if no "
            "token chose any expert",
            True,
        ),
        Column(
            "expert",
            "int64",
            "expert with the largest load; the lowest number if several experts have this load",
            True,
        ),
        Column(
            "rank_imbalance",
            "float64",
            f"largest load of the experts of one rank, divided by the mean over the ranks; {_IMBALANCE}; "
            "null if no token chose any expert, or if it is not known which rank has which expert",
            True,
        ),
        Column("rank", "int64", "rank whose experts together have the largest load", True),
        Column(
            "highest",
            "float64",
            "smallest capacity_factor with which no token is dropped; null if k is not known",
            True,
        ),
    ),
    key=("attempt", "step", "layer"),
)

EXCHANGE_IMBALANCE: Final = Table(
    "exchange_imbalance",
    "The all_to_alls of each training step: how many bytes each rank receives from the other ranks, "
    "computed from the splits of the records.",
    (
        Column("step", "int32", "training step"),
        Column("ranks", "int64", "number of ranks in the groups of these all_to_alls"),
        Column("wire_bytes", "float64", "bytes that all ranks together send to other ranks", unit="bytes"),
        between_pairs("wire_bytes"),
        Column(
            "received_bytes",
            "float64",
            "mean number of bytes that a rank receives from other ranks; null if some splits are not known",
            True,
            "bytes",
        ),
        Column(
            "most_received_bytes",
            "float64",
            "largest number of bytes that a rank receives from other ranks",
            True,
            "bytes",
        ),
        Column(
            "imbalance",
            "float64",
            f"most_received_bytes divided by received_bytes; {_IMBALANCE}; null if some splits are not known",
            True,
        ),
        Column(
            "rank",
            "int64",
            "rank that receives the most bytes; the lowest number if several ranks receive this many",
            True,
        ),
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
