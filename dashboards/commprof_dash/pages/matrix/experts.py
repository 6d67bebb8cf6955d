"""Builds the cards about experts: load by expert and step, imbalance, dropped tokens, and all_to_all bytes."""

from __future__ import annotations

from typing import Any, Final

import pandas as pd
from dash.development.base_component import Component

from commprof.analysis import api
from commprof_dash.charts import expert_charts
from commprof_dash.charts.expert_charts import Line
from commprof_dash.components import cards
from commprof_dash.components.tables import Field
from commprof_dash.data import Runs
from commprof_dash.measures import format_count
from commprof_dash.pages.matrix import data as matrix_data
from commprof_dash.pages.matrix.data import Steps
from commprof_dash.theme import EXPOSED_COLOUR, KIND_COLOURS, Scheme

LAYER: Final = "layer"  # the layer of the experts in the address
_ROWS: Final = 500
_SHARE: Final = "dropped_percent"
_PADDED: Final = (
    "DeepSpeed and zero_runtime send a padded buffer with as many slots for each expert as its capacity. Then every rank "
    "receives the same number of bytes, however uneven the experts are: that shows as dropped tokens and padding. Programs "
    "that send real counts send more bytes to the ranks with more loaded experts."
)
_WITHIN: Final = "within_hosts_bytes"
_BETWEEN: Final = "between_hosts_bytes"


def expert_cards(runs: Runs, name: str, layer: str, steps: Steps, scheme: Scheme) -> list[Component]:
    """Return the cards of ``layer`` in ``steps``, or in all steps."""
    loads = _within(matrix_data.experts(runs, name), steps)
    balance = _within(matrix_data.expert_imbalance(runs, name), steps)
    loads, balance = loads[loads["layer"] == layer], balance[balance["layer"] == layer]
    if loads.empty:
        return [
            cards.empty_card("experts", f"Experts of {layer}", "No experts were recorded in these steps.")
        ]
    exchanged = _within(matrix_data.exchanges(runs, name, of_experts=True), steps)
    return [
        _load(loads, balance, layer, scheme),
        cards.columns([_imbalance(balance, layer, scheme), _drops(balance, layer, scheme)]),
        *([_bytes(exchanged, scheme)] if len(exchanged) else []),
    ]


def _within(frame: pd.DataFrame, steps: Steps) -> pd.DataFrame:
    """Return the rows of the selected steps. If a step was repeated after a restart, only its last attempt counts."""
    if steps is not None:
        frame = frame[frame["step"].between(*steps)]
    if "attempt" not in frame:
        return frame
    return frame[frame["attempt"] == frame.groupby("step")["attempt"].transform("max")]


def _load(loads: pd.DataFrame, balance: pd.DataFrame, layer: str, scheme: Scheme) -> Component:
    first_steps = sorted(loads["step"].unique())
    width = -(-len(first_steps) // expert_charts.MOST_STEPS)
    column = {step: first_steps[place // width * width] for place, step in enumerate(first_steps)}
    summed = loads.assign(column=loads["step"].map(column)).groupby(["expert", "column"])
    tokens, dropped = (summed[name].sum().unstack(fill_value=0) for name in ("tokens", "dropped"))
    together = f" Each column is {width} neighboring steps together." if width > 1 else ""
    return cards.figure_card(
        "experts",
        f"Experts: load of {layer}",
        f"Tokens of all ranks that chose each expert, before any were dropped, over the mean of the experts.{together} "
        f"{_worst(balance)}",
        expert_charts.load(tokens, dropped, scheme),
        loads,
        [
            Field("step", "Step", str, numeric=True),
            Field("expert", "Expert", str, numeric=True),
            Field("ranks", "On ranks", _known),
            Field("tokens", "Tokens", format_count, numeric=True),
            Field("dropped", "Dropped", format_count, numeric=True),
            Field("load", "Load over the mean", _ratio, numeric=True),
        ],
        most_rows=_ROWS,
    )


def _worst(balance: pd.DataFrame) -> str:
    known = balance[balance["imbalance"].notna()]
    if known.empty:
        return "No token chose any expert."
    worst = matrix_data.largest(known)
    return (
        f"Imbalance: {known['imbalance'].median():.2f} (median of {len(known):,} steps); {worst['imbalance']:.2f} in step "
        f"{worst['step']}, expert {worst['expert']}."
    )


def _imbalance(balance: pd.DataFrame, layer: str, scheme: Scheme) -> Component:
    lines = [
        Line("imbalance", "most loaded expert", KIND_COLOURS[1]),
        Line("rank_imbalance", "most loaded rank", KIND_COLOURS[0]),
    ]
    known = [line for line in lines if balance[line.column].notna().any()]
    return cards.figure_card(
        "expert-imbalance",
        "Imbalance over time",
        f"{layer}: the largest load over the mean, by expert, and by rank for all of its experts. 1 is even.",
        expert_charts.over_steps(balance, known, "", "Largest load over the mean", _ratio, scheme),
        balance,
        [
            Field("step", "Step", str, numeric=True),
            Field("imbalance", "Of an expert", _ratio, numeric=True),
            Field("expert", "Expert", _known, numeric=True),
            Field("rank_imbalance", "Of a rank", _ratio, numeric=True),
            Field("rank", "Rank", _known, numeric=True),
        ],
        most_rows=_ROWS,
    )


def _drops(balance: pd.DataFrame, layer: str, scheme: Scheme) -> Component:
    frame = balance.assign(**{_SHARE: 100 * balance["dropped_share"]})
    tokens = int(frame["tokens"].sum())
    share = f"{int(frame['dropped'].sum()) / tokens:.1%}" if tokens else "none"
    return cards.figure_card(
        "expert-drops",
        "Dropped tokens",
        f"{layer}: choices beyond the capacity of their experts, in percent of all choices; {share} in these steps.",
        expert_charts.over_steps(
            frame, [Line(_SHARE, "dropped", EXPOSED_COLOUR)], "", "Dropped, %", "{:.1f} %".format, scheme
        ),
        frame,
        [
            Field("step", "Step", str, numeric=True),
            Field("tokens", "Choices", format_count, numeric=True),
            Field("dropped", "Dropped", format_count, numeric=True),
            Field(_SHARE, "Dropped", "{:.1f} %".format, numeric=True),
            Field("highest", "Factor that drops none", _ratio, numeric=True),
        ],
        most_rows=_ROWS,
    )


def _bytes(exchanged: pd.DataFrame, scheme: Scheme) -> Component:
    frame = exchanged.assign(**{_WITHIN: exchanged["wire_bytes"] - exchanged[_BETWEEN]})
    lines = [
        Line(_WITHIN, "within hosts", KIND_COLOURS[0]),
        Line(_BETWEEN, "between hosts", KIND_COLOURS[1]),
    ]
    if frame[_BETWEEN].isna().all():
        lines = [Line("wire_bytes", "hosts not known", KIND_COLOURS[-1])]
    return cards.figure_card(
        "expert-bytes",
        "Bytes of the token exchange",
        "Wire bytes, as issued, of the all_to_alls of purpose activation among ranks that share experts, all layers "
        f"together, within a host and between hosts. {balance_sentence(exchanged)}",
        expert_charts.over_steps(frame, lines, "bytes", "Wire bytes per step", api.format_bytes, scheme),
        frame,
        [
            Field("step", "Step", str, numeric=True),
            Field(_WITHIN, "Within hosts", _bytes_known, numeric=True),
            Field(_BETWEEN, "Between hosts", _bytes_known, numeric=True),
            Field("imbalance", "Most received over the mean", _ratio, numeric=True),
            Field("rank", "By rank", _known, numeric=True),
        ],
        most_rows=_ROWS,
        how=cards.how_to_read(_PADDED),
    )


def balance_sentence(exchanged: pd.DataFrame) -> str:
    """Return a sentence about how evenly the ranks receive the bytes of the all_to_alls of some steps.

    The sentence is empty if there are no all_to_alls.
    """
    known = exchanged[exchanged["imbalance"].notna()]
    if known.empty:
        return ""
    worst = matrix_data.largest(known)
    if worst["imbalance"] < 1.005:
        return "In the all_to_alls of each step all ranks receive the same."
    typical = "" if len(known) == 1 else f", median {known['imbalance'].median():.2f}"
    return (
        f"In the all_to_alls of step {worst['step']} rank {worst['rank']} receives {worst['imbalance']:.2f} times the mean "
        f"of the ranks (the most of {len(known):,} step{'' if len(known) == 1 else 's'}{typical})."
    )


def _known(value: Any) -> str:
    return "-" if value is None or pd.isna(value) else str(value)


def _ratio(value: float) -> str:
    return "-" if pd.isna(value) else f"{value:.2f}"


def _bytes_known(value: float) -> str:
    return "-" if pd.isna(value) else api.format_bytes(value)
