"""The part of ``commprof report`` about experts, and about all_to_alls whose ranks receive unequal bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from commprof.analysis.columns.defaults import NOTABLE_DROPS, UNEVEN_LOAD
from commprof.cli import rendering
from commprof.cli.rendering import Heading, Rows

_EVEN: Final = 1.05  # an imbalance below this value is not reported
_HEADINGS: Final = (
    Heading("layer"),
    Heading("experts", number=True),
    Heading("imbalance, median", number=True),
    Heading("worst", number=True),
    Heading("in step", number=True),
    Heading("expert", number=True),
    Heading("rank, median", number=True),
    Heading("dropped", number=True),
)
_MOST_LAYERS: Final = 12
_LEGEND: Final = (
    "imbalance: the largest number of tokens that chose one expert over the mean of the experts, in a training step over "
    "all ranks; 1 is even. rank: the largest number of tokens for the experts of one rank over the mean of ranks. "
    "dropped: tokens beyond the capacity."
)


def expert_parts(answers: Mapping[str, Any]) -> list[Rows | str]:
    """Return the section about experts and all_to_alls.

    The section is empty for a run that has no experts and whose all_to_alls are even.

    Args:
        answers: The answers ``experts`` (:meth:`commprof.analysis.traffic.experts.Summary.as_json`, or None) and
            ``exchange_imbalance`` of :mod:`commprof.analysis.api`.
    """
    summary = answers["experts"]
    exchanged = answers["exchange_imbalance"]
    if summary is None:
        return _exchange_parts(exchanged)
    layers = summary["layers"]
    cells = [_cells(layer) for layer in layers[:_MOST_LAYERS]]
    if layers[_MOST_LAYERS:]:
        cells.append((f"and {len(layers) - _MOST_LAYERS} more", *[""] * (len(_HEADINGS) - 1)))
    title = f"Experts: load in {rendering.count(summary['steps'])} training steps"
    hints = [_traffic(exchanged), *_advice(summary, exchanged)]
    return [
        Rows(_HEADINGS, cells, title=title),
        *(f"{rendering.paragraph(text)}\n" for text in [_LEGEND, *hints] if text),
        *_exchange_parts(exchanged),
    ]


def _cells(layer: Mapping[str, Any]) -> tuple[str, ...]:
    worst = layer["worst"]
    return (
        layer["layer"],
        rendering.count(layer["num_experts"]),
        _ratio(layer["imbalance"]),
        _ratio(None if worst is None else worst["imbalance"]),
        rendering.MISSING if worst is None else str(worst["step"]),
        rendering.MISSING if worst is None else str(worst["expert"]),
        _ratio(layer["rank_imbalance"]),
        rendering.MISSING if layer["dropped_share"] is None else f"{layer['dropped_share']:.1%}",
    )


def _ratio(value: float | None) -> str:
    return rendering.MISSING if value is None else f"{value:.2f}"


def _traffic(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence about the bytes that the all_to_alls send; empty if there are none."""
    if not rows:
        return ""
    sent = median([row["wire_bytes"] for row in rows])
    text = f"The all_to_alls of a step send {rendering.number_of_bytes(sent)} between ranks (median, all ranks together)"
    between = [row["between_hosts_bytes"] for row in rows]
    if any(map(rendering.is_missing, between)):
        return f"{text}; how much of it is between hosts is not known."
    share = median(between)
    return f"{text}, {rendering.number_of_bytes(share)} of it between hosts." if share else f"{text}."


def _advice(summary: Mapping[str, Any], exchanged: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the recommendations that apply to the run."""
    hints = []
    layers, dropped = summary["layers"], summary["dropped_share"]
    if dropped is not None and dropped >= NOTABLE_DROPS:
        factors = [layer["highest"] for layer in layers if layer["highest"] is not None]
        factor = f"; with {max(factors):.2f} nothing would have been dropped" if factors else ""
        hints.append(
            f"{dropped:.1%} of the choices were dropped. Try a larger capacity_factor{factor}. The bytes of the all_to_alls "
            "grow with it."
        )
    if layers and (layers[0]["imbalance"] or 0.0) >= UNEVEN_LOAD:
        hints.append(
            f"In {layers[0]['layer']} the most loaded expert gets {layers[0]['imbalance']:.2f} times the mean load (median "
            "of the steps). Try a larger coefficient of the load-balancing loss (l_aux)."
        )
    sizes = [setting["ep_size"] for setting in summary["settings"]]
    between = [row["between_hosts_bytes"] for row in exchanged]
    if any(not rendering.is_missing(each) and each > 0 for each in between) and max(sizes, default=1) > 1:
        hints.append(
            f"Tokens cross hosts. Try an ep_size (now {max(sizes)}) of at most the number of ranks per host: tokens "
            "then stay on their host, and each rank has more experts."
        )
    return hints


def _exchange_parts(rows: Sequence[Mapping[str, Any]]) -> list[Rows | str]:
    """Return a sentence about unequal splits; empty if the ranks receive nearly equal numbers of bytes."""
    known = [row for row in rows if not rendering.is_missing(row["imbalance"])]
    worst = max(known, key=lambda row: row["imbalance"], default=None)
    if worst is None or worst["imbalance"] < _EVEN:
        return []
    typical = median([row["imbalance"] for row in known])
    text = (
        f"All_to_alls: the rank that receives the most gets {typical:.2f} times the mean of the ranks (median of "
        f"{len(known):,} steps); {worst['imbalance']:.2f} times in step {worst['step']}, rank {worst['rank']} "
        f"({rendering.number_of_bytes(worst['most_received_bytes'])} from other ranks; "
        f"the mean of the ranks is {rendering.number_of_bytes(worst['received_bytes'])})."
    )
    return [f"{rendering.paragraph(text)}\n"]
