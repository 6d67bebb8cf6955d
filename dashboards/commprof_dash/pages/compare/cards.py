"""The cards of the Compare page about settings: recommendation, the four levels, ranks, memory, samples per second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pandas as pd
from dash import html
from dash.development.base_component import Component

from commprof.analysis import api
from commprof_dash.charts import setting_charts
from commprof_dash.components import cards, messages
from commprof_dash.components.grid import GridCell, grid_card
from commprof_dash.components.tables import Cell, Field, csv_link, facts, table
from commprof_dash.measures import COUNT
from commprof_dash.pages.compare import data as compare_data
from commprof_dash.theme import Scheme

_ANSWERS: Final = {
    "recommended": ("Recommendation", "good"),
    "no measurable difference": ("No measurable difference", "note"),
    "cannot tell": ("Recommendation: cannot tell", "note"),
}
_REDUCING: Final = "Gradient reduction: requested, issued, executed, moved"
_MOST_PAIRS: Final = 60
_MOST_ROWS: Final = 300


def advice(answer: api.Advice) -> Component:
    """The recommended setting and the reasons, in sentences; differences of requested and issued have their own notice."""
    title, severity = _ANSWERS[answer.answer]
    sentences = [text for text in answer.sentences if not text.startswith("Warning:")]
    return messages.sentences(title, sentences, severity=severity)


def weighed(evidence: api.Advice) -> Component:
    """The evidence of the advice: the settings, and each two step times."""
    settings = table(
        evidence.settings,
        [
            Field("label", "Setting"),
            Field("recommended", "To be set", _yes),
            Field("wire_bytes_per_step", "Wire bytes", api.format_bytes, numeric=True),
            Field("least_bytes", "Least", _yes),
            Field("not_slower", "None is faster", _yes),
            Field("repeats", "Repeats", str, numeric=True),
            Field("left_out", "Left out"),
        ],
        "Evidence of the recommendation",
    )
    pairs = table(
        evidence.pairs.head(_MOST_PAIRS),
        [
            Field("label", "Setting"),
            Field("other", "Beside it"),
            Field("difference_ns", "Takes longer by", api.format_ns, numeric=True),
            Field("low_ns", "Low", api.format_ns, numeric=True),
            Field("high_ns", "High", api.format_ns, numeric=True),
            Field("probability", "By chance", _probability, numeric=True),
            Field("verdict", "Its step is"),
        ],
        "Step times, pairs of settings",
    )
    cut = (
        ""
        if len(evidence.pairs) <= _MOST_PAIRS
        else f" The first {_MOST_PAIRS} of them; the CSV file has all."
    )
    return cards.body_card(
        "weighed",
        "Why: evidence of the recommendation",
        "Least wire bytes at equal loss; a step time differs where Welch's t over the repeats says so (95 %, Holm's "
        "correction over all pairs). None is faster: no other setting has a measurably shorter step.",
        [
            settings,
            html.Details(
                [
                    html.Summary(f"Step times, pairs of settings ({len(evidence.pairs):,} pairs)"),
                    html.P(
                        [f"95 % intervals of the difference.{cut} ", csv_link("pairs", evidence.pairs)],
                        className="muted",
                    ),
                    pairs,
                ],
                className="card-table",
            )
            if len(evidence.pairs)
            else None,
        ],
        evidence.settings,
    )


def levels_to_come(going: bool) -> Component:
    """Placeholder for the four levels of large runs, while another process closes their ledgers, or until they end."""
    text = "Closing the ledgers of these runs in the background. The levels appear here when done."
    if going:
        text = "The ledgers of large runs are closed here once the runs have ended. For one run so far: commprof verify RUN."
    return cards.empty_card("levels", _REDUCING, text)


def levels(frame: pd.DataFrame, settings: pd.DataFrame, resources: pd.DataFrame, scheme: Scheme) -> Component:
    """The four levels, in a grid of the two keys where the runs differ in one of them, with what each setting cost."""
    if frame["wire_bytes_per_step"].isna().all():
        reasons = sorted(set(frame["reason"].dropna()))
        return cards.empty_card(
            "levels", _REDUCING, f"None of it is known per training step: {'; '.join(reasons)}."
        )
    subtitle = (
        "Wire bytes per step (modelled: bytes that a rank sends, mean over all ranks) from the ledger of each run; one "
        "axis for all. Moved: bytes sent by the interface counters, all traffic; a different measure, so no bar."
    )
    fields = [
        Field("label", "Setting"),
        Field("level", "Level"),
        Field("series", "Operation"),
        Field("wire_bytes_per_step", "Wire bytes per step", api.format_bytes, numeric=True),
        Field("between_hosts_bytes_per_step", "Between hosts", api.format_bytes, numeric=True),
        Field("padding_bytes_per_step", "Padding", api.format_bytes, numeric=True),
        Field("moved_bytes", "Moved", api.format_bytes, numeric=True),
        Field("moved_over", "In a"),
        Field("state", "Ledger"),
        Field("reason", "Remark"),
    ]
    highest = setting_charts.highest_level(frame)
    cells = compare_data.grid(settings)
    if not cells:
        labels = {str(label): str(label) for label in settings["label"]}
        drawn = setting_charts.levels(frame, labels, highest, scheme)
        return cards.figure_card("levels", _REDUCING, subtitle, drawn, frame, fields)
    costs = compare_data.costs(settings, resources)
    drawn_cells = [
        [
            GridCell(
                ", ".join(words for words in (cell.row, cell.column) if words),
                setting_charts.levels(
                    frame, dict(cell.settings), highest, scheme, setting_charts.CELL_CHARACTERS
                )
                if cell.settings
                else None,
                _costs(cell.settings, costs),
            )
            for cell in row
        ]
        for row in cells
    ]
    subtitle += " Below: cost per step, and the final loss."
    return grid_card("levels", _REDUCING, subtitle, drawn_cells, frame, fields)


def _costs(settings: Sequence[tuple[str, str]], costs: Mapping[str, compare_data.Cost]) -> list[Component]:
    """Of each setting in a cell of the grid: step time, exposed time, loss, memory, samples per second."""
    children: list[Component] = []
    for label, heading in settings:
        cost = costs[label]
        if len(settings) > 1:
            children.append(html.H4(heading[:200]))
        children.append(
            facts(
                {
                    "Step time": _interval(cost.step_time_ns, cost.low_ns, cost.high_ns),
                    "Exposed": cost.exposed or "not known",
                    "Final loss": _or_unknown(cost.final_loss, "{:.6g}".format),
                    "Memory": _or_unknown(cost.memory_bytes, api.format_bytes),
                    "Samples/s": _or_unknown(cost.samples_per_second, "{:.4g}".format),
                }
            )
        )
    return children


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "not known"
    if low is None or high is None:
        return api.format_ns(value)
    return f"{api.format_ns(value)} (95 %: {api.format_ns(low)} to {api.format_ns(high)})"


def _or_unknown(value: float | None, write: Callable[[float], str]) -> str:
    return "not known" if value is None else write(value)


def ranks(frame: pd.DataFrame, labels: Sequence[str], scheme: Scheme) -> Component:
    """What each rank sends and receives."""
    title = "Bytes of each rank"
    shown = [label for label in labels if label in set(frame["label"])]
    if not shown:
        reasons = sorted(set(frame.attrs.get("reasons", {}).values()))
        return cards.empty_card(
            "ranks", title, "; ".join(reasons) or "These runs sent nothing in a complete training step."
        )
    left_out = [label for label in labels if label not in shown]
    missing = f" Not known of {len(left_out)} of {len(labels)} settings." if left_out else ""
    executed = bool(frame["executed_sent_bytes_per_step"].notna().all())
    of = "the executed operations" if executed else "the issued operations"
    kinds = (("executed_", ""), ("", ", as issued")) if executed else (("", ", as issued"),)
    return cards.figure_card(
        "ranks",
        title,
        f"Wire bytes per step, modelled for {of}, by source and destination of the data: "
        "a reduce to an owner loads that rank, a "
        f"ring loads all equally. One point per rank; the number is the largest over the mean.{missing}",
        setting_charts.ranks(frame, shown, scheme, executed),
        frame,
        [
            Field("label", "Setting"),
            Field("rank", "Rank", str, numeric=True),
            *(
                Field(
                    f"{prefix}{name}_bytes_per_step",
                    f"{name.title()}{suffix}",
                    api.format_bytes,
                    numeric=True,
                )
                for prefix, suffix in kinds
                for name in ("sent", "received")
            ),
            *(
                Field(
                    f"{name}_between_hosts_bytes_per_step",
                    f"{name.title()} between hosts",
                    api.format_bytes,
                    numeric=True,
                )
                for name in ("sent", "received")
            ),
            *(
                Field(f"{kinds[0][0]}{name}_of_mean", f"{name.title()} / mean", "{:.2f}".format, numeric=True)
                for name in ("sent", "received")
            ),
        ],
    )


def groups(frame: pd.DataFrame) -> Component | None:
    """What each kind of group carries; nothing where every setting has one kind only."""
    kinds = frame.drop_duplicates(["label", "group_desc", "group_size"])
    if not kinds["label"].duplicated().any():
        return None
    return cards.table_card(
        "groups",
        "By group",
        "Traffic per step of the groups of each name and size: each axis of ranks has its own links and its own cost. "
        "Wire bytes are per rank of the job, as above, and add up to those of the setting.",
        frame,
        [
            Field("label", "Setting"),
            Field("group_desc", "Group"),
            Field("group_size", "Ranks", str, numeric=True),
            Field("groups", "Groups", str, numeric=True),
            Field("op", "Issued", _op),
            Field("intended_op", "Standing for", _op),
            Field("wire_bytes_per_step", "Wire bytes", api.format_bytes, numeric=True),
            Field("between_hosts_bytes_per_step", "Between hosts", api.format_bytes, numeric=True),
            Field("payload_bytes_per_step", "Payload", api.format_bytes, numeric=True),
            Field("padding_bytes_per_step", "Padding", api.format_bytes, numeric=True),
            Field("collectives_per_step", "Count", COUNT.format, numeric=True),
        ],
        most_rows=_MOST_ROWS,
    )


def memory(frame: pd.DataFrame, scheme: Scheme) -> Component:
    """Resident and device memory."""
    title = "Memory"
    columns = ["label", "rss_bytes", "rss_peak_bytes", "device_bytes", "device_peak_bytes"]
    if frame[columns[1:]].isna().all(axis=None):
        return cards.empty_card("memory", title, "None of these runs recorded the memory of its steps.")
    return cards.figure_card(
        "memory",
        title,
        "The largest rank: bar for the median over the steps, line for the maximum.",
        setting_charts.memory(frame, scheme),
        frame[columns],
        [
            Field("label", "Setting"),
            Field("rss_bytes", "Resident", api.format_bytes, numeric=True),
            Field("rss_peak_bytes", "Largest", api.format_bytes, numeric=True),
            Field("device_bytes", "Device", api.format_bytes, numeric=True),
            Field("device_peak_bytes", "Largest", api.format_bytes, numeric=True),
        ],
    )


def samples(frame: pd.DataFrame, scheme: Scheme) -> Component:
    """Samples per second."""
    title = "Samples per second"
    columns = ["label", "samples_per_second", "samples_low", "samples_high", "samples_from"]
    if frame["samples_per_second"].isna().all():
        text = (
            "The samples per step are not known: neither a metric nor a batch size in the config. Call "
            "commprof.metric('samples', count)."
        )
        return cards.empty_card("samples", title, text)
    return cards.figure_card(
        "samples",
        title,
        "Samples of a step over its time: median of the steps, with the 95 % interval over repeats. In brackets: the "
        "source of the samples, the program's metric or the batch size of the config.",
        setting_charts.samples(frame, scheme),
        frame[columns],
        [
            Field("label", "Setting"),
            Field("samples_per_second", "Samples per second", "{:.4g}".format, numeric=True),
            Field("samples_low", "Low", "{:.4g}".format, numeric=True),
            Field("samples_high", "High", "{:.4g}".format, numeric=True),
            Field("samples_from", "Samples from"),
        ],
    )


def _op(value: Any) -> Cell:
    return html.Code(str(value), className="op")


def _yes(value: Any) -> Cell:
    return "yes" if value else "no"


def _probability(value: float) -> str:
    return f"{100 * value:.2g} %" if value >= 0.0001 else "< 0.01 %"
