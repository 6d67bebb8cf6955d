"""Builds the cards of the page Compare: four levels, table, advice, ranks, memory, samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pandas as pd
from dash import dcc, html
from dash.development.base_component import Component

from commprof.analysis import api
from commprof_dash import address
from commprof_dash.charts import setting_charts
from commprof_dash.components import cards, messages
from commprof_dash.components.folds import fold
from commprof_dash.components.grid import GridCell, grid_card
from commprof_dash.components.tables import Cell, Field, Order, csv_link, table
from commprof_dash.measures import COUNT
from commprof_dash.pages.compare import data as compare_data
from commprof_dash.theme import Scheme

_ANSWERS: Final = {
    "recommended": ("Recommendation", "good"),
    "no measurable difference": ("No measurable difference", "note"),
    "cannot tell": ("Cannot tell", "note"),
}
_LEVELS: Final = "Requested, issued, executed, moved, and step time"
_HOW_TO_READ: Final = (
    "Wire bytes are modelled: bytes that a rank sends in a step, mean over all ranks. Requested: what the config "
    "asks for, without traffic that no rule predicts, such as metrics. Issued: what the program called. Executed: "
    "what the backend ran for it. Moved: measured by the interface counters of all hosts, for all programs, "
    "divided by the ranks; an open mark is for the whole run, including start-up; an arrow is for a value beyond "
    "the axis. Step time: median without the first step, with its 95 % interval. Hollow bars were predicted before "
    "the sweep ran, with the 80 % interval; a setting that the sweep did not run has only these."
)
_TIMES: Final = {
    "step_time_low_ns": "Step, low (95 %)",
    "step_time_high_ns": "Step, high (95 %)",
    "predicted_ns": "Predicted step",
    "predicted_low_ns": "Low (80 %)",
    "predicted_high_ns": "High (80 %)",
}
_MOST_PAIRS: Final = 60
_MOST_ROWS: Final = 300
_WIRE: Final = "wire_bytes_per_step"
_NAMED: Final = 3  # the largest number of settings that a sentence names


def answer(advised: api.Advice, reason: str | None) -> list[Component]:
    """Return the recommended setting in one line, and the differences between the settings in a second line."""
    chip, severity = _ANSWERS[advised.answer]
    sentence = advised.sentences[0].removeprefix(f"{chip}: ")
    first = messages.line(chip, sentence[:1].upper() + sentence[1:], severity)
    return [first] if reason is None else [first, messages.line("What differs", reason, "note")]


def advice(advised: api.Advice, findings: Sequence[str]) -> Component:
    """Return the reasons of the recommendation, and where requested and issued communication differ.

    The recommendation itself is the first line of the page.
    """
    sentences = [text for text in advised.sentences[1:] if not text.startswith("Warning:")]
    return cards.text_card(
        "advice",
        "What to set and why",
        "",
        [
            html.Ul(
                [html.Li(text) for text in [advised.sentences[0], *sentences, *findings]],
                className="sentences",
            )
        ],
    )


def weighed(evidence: api.Advice) -> Component:
    """Return the evidence of the advice: the settings, and comparisons of pairs of step times."""
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
            fold(
                f"Step times, pairs of settings ({len(evidence.pairs):,} pairs)",
                [
                    html.P(
                        [f"95 % intervals of the difference.{cut} ", csv_link("pairs", evidence.pairs)],
                        className="muted",
                    ),
                    pairs,
                ],
            )
            if len(evidence.pairs)
            else None,
        ],
        evidence.settings,
    )


def levels_to_come(going: bool) -> Component:
    """Return a placeholder for the four levels of large runs.

    It is shown while another process closes their ledgers, or until the runs end.
    """
    text = "Closing the ledgers of these runs in the background. The levels appear here when done."
    if going:
        text = "The ledgers of large runs are closed here after the runs end. To verify one now: commprof verify RUN."
    return cards.empty_card("levels", _LEVELS, text)


def levels(
    frame: pd.DataFrame, settings: pd.DataFrame, cells: Sequence[Sequence[compare_data.Cell]], scheme: Scheme
) -> Component:
    """Return a row per setting: the four levels and the step time.

    Args:
        frame: The result of :func:`compare_data.levels`.
        settings: The result of :func:`compare_data.settings`, in the order to draw.
        cells: The cells of the grid by two keys; empty for one chart of all settings.
    """
    if frame["wire_bytes_per_step"].isna().all() and settings["step_time_ns"].isna().all():
        reasons = sorted(set(frame["reason"].dropna()))
        return cards.empty_card(
            "levels", _LEVELS, f"None of these values is known per training step: {'; '.join(reasons)}."
        )
    runs = int(settings["repeats"].sum())
    unrun = int((settings["repeats"] == 0).sum())
    title = f"{_LEVELS}: {_count(len(settings) - unrun, 'setting')}, {_count(runs, 'run')}"
    title += f", {unrun:,} predicted only" if unrun else ""
    subtitle = "Bytes of a step and rank, by operation; median step time with its 95 % interval."
    fields = [
        Field("label", "Setting"),
        Field("level", "Level"),
        Field("series", "Operation"),
        Field("wire_bytes_per_step", "Wire bytes per step", api.format_bytes, numeric=True),
        Field("between_hosts_bytes_per_step", "Between hosts", api.format_bytes, numeric=True),
        Field("padding_bytes_per_step", "Padding", api.format_bytes, numeric=True),
        Field("moved_bytes", "Moved, all hosts", api.format_bytes, numeric=True),
        Field("moved_over", "In a"),
        Field("state", "Ledger"),
        Field("reason", "Remark"),
    ]
    ends = setting_charts.ends_of(frame, settings)
    how = cards.how_to_read(_HOW_TO_READ)
    if not cells:
        drawn = setting_charts.levels(frame, settings, _names(settings), ends, scheme)
        return cards.figure_card("levels", title, subtitle, drawn, frame, fields, how=how)
    drawn_cells = [
        [
            GridCell(
                f"{cell.row}, {cell.column}",
                setting_charts.levels(
                    frame, settings, dict(cell.settings), ends, scheme, setting_charts.CELL_CHARACTERS
                ),
            )
            for cell in row
        ]
        for row in cells
    ]
    return grid_card("levels", title, subtitle, drawn_cells, frame, fields, how=how)


def _names(settings: pd.DataFrame) -> dict[str, str]:
    """Return the name of each setting in the chart: the keys that differ, and the number of repeats."""
    return {
        str(row["label"]): str(row["label"])
        + (f" (x{row['repeats']})" if row["repeats"] > 1 else "")
        + (", predicted, not run" if row["repeats"] == 0 else "")
        + (", recommended" if row["recommended"] is True else "")
        for row in settings.to_dict("records")
    }


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def settings_table(settings: pd.DataFrame, order: Order) -> Component:
    """Return the settings as a table. A click on a heading sorts the table and the chart."""
    heading, remark = _wire_heading(settings)
    fields = [each._replace(heading=heading) if each.column == _WIRE else each for each in SETTING_FIELDS]
    return cards.body_card(
        "settings",
        "Settings",
        f"Means of a step; exposed also as a share of the step.{remark} Click a heading to sort the rows and the "
        "chart.",
        [table(settings, fields, "Settings", order)],
        settings.drop(columns=["exposed", "reduction", "setting"]),
    )


def _wire_heading(settings: pd.DataFrame) -> tuple[str, str]:
    """Return the heading of the wire bytes, and a remark.

    The remark states if the bytes are not those of the operations that the backend executed.
    """
    sent = settings[settings[_WIRE].notna()]
    issued = sent.loc[sent[f"executed_{_WIRE}"].isna(), "label"]
    if issued.empty:
        return "Executed", ""
    if len(issued) == len(sent):
        return "Wire bytes, as issued", " What the backends ran is not known."
    more = f" and {len(issued) - _NAMED} more" if len(issued) > _NAMED else ""
    return (
        "Executed, or as issued",
        f" What the backend ran is not known for {', '.join(issued[:_NAMED])}{more}.",
    )


def more_columns(settings: pd.DataFrame, unnamed: Sequence[str]) -> Component:
    """Return the columns that do not fit the table of the settings.

    Args:
        unnamed: The keys that differ and that are missing in some label.
    """
    also = (
        " Labels name the keys that distinguish the settings; the last columns have the other keys."
        if unnamed
        else ""
    )
    return cards.table_card(
        "more-columns",
        "More columns of the settings",
        f"Means of a step. Bytes are modelled; step times have 95 % intervals, predictions 80 %.{also}",
        settings.drop(columns=["exposed", "reduction", "setting"]),
        [
            Field("label", "Setting"),
            Field("issued_wire_bytes_per_step", "Wire bytes as issued", api.format_bytes, numeric=True),
            Field("between_hosts_bytes_per_step", "Between hosts", api.format_bytes, numeric=True),
            Field("payload_bytes_per_step", "Payload", api.format_bytes, numeric=True),
            Field("padding_bytes_per_step", "Padding", api.format_bytes, numeric=True),
            Field("collectives_per_step", "Count", COUNT.format, numeric=True),
            *(Field(column, name, api.format_ns, numeric=True) for column, name in _TIMES.items()),
            *(Field(key, key) for key in unnamed),
        ],
    )


def ranks(frame: pd.DataFrame, labels: Sequence[str], scheme: Scheme) -> Component:
    """Return the card of the bytes that each rank sends and receives."""
    title = "Bytes of each rank"
    shown = [label for label in labels if label in set(frame["label"])]
    if not shown:
        reasons = sorted(set(frame.attrs.get("reasons", {}).values()))
        return cards.empty_card(
            "ranks", title, "; ".join(reasons) or "These runs sent nothing in a complete training step."
        )
    left_out = [label for label in labels if label not in shown]
    missing = f" Not known for {len(left_out)} of {len(labels)} settings." if left_out else ""
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
    """Return the card of the traffic of each kind of group; None if every setting has only one kind."""
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
    """Return the card of resident and device memory."""
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
    """Return the card of samples per second."""
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


def _reduction(value: str) -> Cell:
    """Return ``reduce_scatter -> all_reduce`` in two parts, between which the line may break."""
    requested, arrow, issued = value.partition(" -> ")
    return html.Span([_op(requested), *([" \u2192 ", _op(issued)] if arrow else [])], className="reduction")


def _setting(value: tuple[str, str]) -> Cell:
    """Return the setting with links to its runs; repeats are collapsed in one chip."""
    if isinstance(value, compare_data.Unrun):
        return html.Span([value.label, html.Span(f" predicted {value.step}, not run", className="muted")])
    label, names = value[0], run_names(value[1])
    links = [
        dcc.Link(f"run {number}", href=address.link("/overview", run=name), title=name)
        for number, name in enumerate(names, start=1)
    ]
    if len(names) == 1:
        return dcc.Link(label, href=address.link("/overview", run=names[0]), title=names[0])
    chip = [html.Summary(f"x{len(names)}"), html.Span(links, className="run-links")]
    return html.Span([label, html.Details(chip, className="repeats")])


def run_names(value: Any) -> list[str]:
    """Return the names of the runs of a setting from their cell."""
    return [str(name) for name in (value.split(", ") if isinstance(value, str) else value)]


def _yes(value: Any) -> Cell:
    return "yes" if value else "no"


def _probability(value: float) -> str:
    return f"{100 * value:.2g} %" if value >= 0.0001 else "< 0.01 %"


SETTING_FIELDS: Final = [
    Field("setting", "Setting", _setting),
    Field("reduction", "Gradient reduction", _reduction),
    Field(_WIRE, "Executed", api.format_bytes, numeric=True),
    Field("moved_bytes_of_rank", "Moved", api.format_bytes, numeric=True),
    Field("step_time_ns", "Step time", api.format_ns, numeric=True),
    Field("exposed", "Exposed", str, numeric=True),
    Field("memory_bytes", "Memory", api.format_bytes, numeric=True),
    Field("samples_per_second", "Samples/s", "{:.4g}".format, numeric=True),
    Field("final_loss", "Final loss", "{:.6g}".format, numeric=True),
]
