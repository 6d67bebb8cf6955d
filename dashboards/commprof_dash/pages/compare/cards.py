"""The cards of the Compare page about settings: what to set, the four levels, ranks, memory, samples per second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pandas as pd
from dash import html
from dash.development.base_component import Component

from commprof.analysis import api
from commprof_dash.charts import settings as charts
from commprof_dash.components import cards, messages
from commprof_dash.components.grid import GridCell, grid_card
from commprof_dash.components.tables import Cell, Field, csv_link, facts, table
from commprof_dash.measures import COUNT
from commprof_dash.pages.compare import data as settings_data
from commprof_dash.theme import Scheme

_ANSWERS: Final = {
    "recommended": ("What to set", "good"),
    "no measurable difference": ("No measurable difference", "note"),
    "cannot tell": ("What to set: cannot tell", "note"),
}
_REDUCING: Final = "Asked for, issued, executed, moved to reduce gradients"
_MOST_PAIRS: Final = 60
_MOST_ROWS: Final = 300


def advice(found: api.Advice) -> Component:
    """What to set, and why, in sentences; what was asked for and not issued stands in a notice of its own."""
    title, severity = _ANSWERS[found.answer]
    told = [text for text in found.sentences if not text.startswith("Warning:")]
    return messages.sentences(title, told, severity=severity)


def weighed(found: api.Advice) -> Component:
    """The evidence of the advice: the settings, and each two step times."""
    settings = table(
        found.settings,
        [
            Field("label", "Setting"),
            Field("recommended", "To be set", _yes),
            Field("wire_bytes_per_step", "Wire bytes", api.format_bytes, numeric=True),
            Field("least_bytes", "Least", _yes),
            Field("not_slower", "None is faster", _yes),
            Field("repeats", "Repeats", str, numeric=True),
            Field("left_out", "Left out"),
        ],
        "What the advice weighs",
    )
    pairs = table(
        found.pairs.head(_MOST_PAIRS),
        [
            Field("label", "Setting"),
            Field("other", "Beside it"),
            Field("difference_ns", "Takes longer by", api.format_ns, numeric=True),
            Field("low_ns", "Low", api.format_ns, numeric=True),
            Field("high_ns", "High", api.format_ns, numeric=True),
            Field("probability", "By chance", _probability, numeric=True),
            Field("verdict", "Its step is"),
        ],
        "Step times, each two settings",
    )
    cut = (
        "" if len(found.pairs) <= _MOST_PAIRS else f" The first {_MOST_PAIRS} of them; the CSV file has all."
    )
    return cards.body_card(
        "weighed",
        "Why: what the advice weighs",
        "Least wire bytes at equal loss; a step time differs where Welch's t over the repeats says so (95 %, Holm's "
        "correction over all pairs). None is faster: no other setting has a measurably shorter step.",
        [
            settings,
            html.Details(
                [
                    html.Summary(f"Step times, each two settings ({len(found.pairs):,} pairs)"),
                    html.P(
                        [f"95 % intervals of the difference.{cut} ", csv_link("pairs", found.pairs)],
                        className="muted",
                    ),
                    pairs,
                ],
                className="card-table",
            )
            if len(found.pairs)
            else None,
        ],
        found.settings,
    )


def levels_to_come(going: bool) -> Component:
    """In the place of the four levels of large runs: while another process closes their ledgers, or until they end."""
    text = "Another process goes through the records of these runs to close their ledgers; the levels appear here."
    if going:
        text = "The ledgers of large runs are closed here once they have ended. Of one run so far: commprof verify RUN."
    return cards.empty_card("levels", _REDUCING, text)


def levels(frame: pd.DataFrame, settings: pd.DataFrame, resources: pd.DataFrame, scheme: Scheme) -> Component:
    """The four levels, in a grid of the two keys where the runs differ in one of them, with what each setting cost."""
    if frame["wire_bytes_per_step"].isna().all():
        reasons = sorted(set(frame["reason"].dropna()))
        return cards.empty_card(
            "levels", _REDUCING, f"None of it is known per training step: {'; '.join(reasons)}."
        )
    subtitle = (
        "Wire bytes per step (modelled: what a rank of the job sends, mean over all), out of the ledger of each run; one "
        "axis for all. Moved: what the counters of the hosts sent, all traffic, another measure and so no bar."
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
    highest = charts.highest_level(frame)
    cells = settings_data.grid(settings)
    if not cells:
        labels = {str(label): str(label) for label in settings["label"]}
        drawn = charts.levels(frame, labels, highest, scheme)
        return cards.figure_card("levels", _REDUCING, subtitle, drawn, frame, fields)
    costs = settings_data.costs(settings, resources)
    drawn_cells = [
        [
            GridCell(
                ", ".join(words for words in (cell.row, cell.column) if words),
                charts.levels(frame, dict(cell.settings), highest, scheme, charts.CELL_CHARACTERS)
                if cell.settings
                else None,
                _costs(cell.settings, costs),
            )
            for cell in row
        ]
        for row in cells
    ]
    subtitle += " Below: what a step of the setting cost, and the loss at its end."
    return grid_card("levels", _REDUCING, subtitle, drawn_cells, frame, fields)


def _costs(settings: Sequence[tuple[str, str]], costs: Mapping[str, settings_data.Cost]) -> list[Component]:
    """Of each setting in a cell of the grid: step time, exposed time, loss, memory, samples per second."""
    found: list[Component] = []
    for label, told in settings:
        cost = costs[label]
        if len(settings) > 1:
            found.append(html.H4(told[:200]))
        found.append(
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
    return found


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
            "ranks", title, "; ".join(reasons) or "These runs sent nothing in a whole training step."
        )
    left_out = [label for label in labels if label not in shown]
    missing = f" Not known of {len(left_out)} of {len(labels)} settings." if left_out else ""
    executed = bool(frame["executed_sent_bytes_per_step"].notna().all())
    of = "what the backend runs" if executed else "the operations as issued"
    kinds = (("executed_", ""), ("", ", as issued")) if executed else (("", ", as issued"),)
    return cards.figure_card(
        "ranks",
        title,
        f"Wire bytes per step, modelled for {of}, by where the data comes from and goes to: "
        "a reduce to an owner loads that rank, a "
        f"ring loads all alike. One point per rank; the number is the largest in means.{missing}",
        charts.ranks(frame, shown, scheme, executed),
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
        "What the groups of each name and size carry in a step: each axis along which the ranks are divided has links and a "
        "cost of its own. Wire bytes are of a rank of the job, as above, and add up to those of the setting.",
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
        "Of the largest rank: a bar for the median over the steps, a line for the largest of all.",
        charts.memory(frame, scheme),
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
            "Neither a metric nor a batch size in the config says how many samples a step has: "
            "commprof.metric('samples', count)."
        )
        return cards.empty_card("samples", title, text)
    return cards.figure_card(
        "samples",
        title,
        "Samples of a step over its time: median of the steps, with the 95 % interval over repeats. In brackets where the "
        "samples are from: the program's metric, or the batch size of the config.",
        charts.samples(frame, scheme),
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
