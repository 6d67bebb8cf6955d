"""Compare: what the settings of several runs changed, first in gradient reduction."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final

import dash
import pandas as pd
from dash import Input, Output, State, dcc, html
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate

from commprof.analysis import api
from commprof_dash import address, ids
from commprof_dash.address import Query
from commprof_dash.charts import loss_chart, time_charts, traffic
from commprof_dash.charts.series import is_reducing
from commprof_dash.components import cards, controls, messages, pending
from commprof_dash.components.tables import Cell, Field
from commprof_dash.data import Runs, Selection, reason
from commprof_dash.measures import COUNT, MEASURES, WIRE, Measure
from commprof_dash.pages.compare import cards as compare_cards
from commprof_dash.pages.compare import data as compare_data
from commprof_dash.pages.page import Drawing, Page
from commprof_dash.text_columns import text_column
from commprof_dash.theme import Scheme, scheme_of

LEVELS: Final = "levels"
_PREDICTED: Final = (
    " Hollow bars: predicted before the sweep ran, with the 80 % interval. Predictions are the mean over ranks, and "
    "measured steps those of the slowest rank."
)
_DEFAULT_RUNS: Final = 24  # the newest, where the address names none


def render(runs: Runs, query: Query, scheme: Scheme) -> Drawing:
    """The page for the runs and the measure in ``query``."""
    names = runs.names()
    if not names:
        return Drawing([], [messages.no_runs(str(runs.directory))])
    # The oldest first, as a sweep went through its settings.
    chosen = query.get(address.RUN, tuple(reversed(names[:_DEFAULT_RUNS])))
    measure = MEASURES[address.one(query, address.MEASURE, MEASURES, WIRE.key)]
    selection = runs.select(chosen)
    return Drawing(
        [controls.runs_select(names, chosen), controls.measure_select(measure)],
        [*_warnings(runs, selection), *_answers(runs, selection.readable, measure, scheme)],
        follows=runs.is_going(selection.readable),
    )


def _warnings(runs: Runs, selection: Selection) -> list[Component]:
    notices = [messages.broken_run(name, why) for name, why in selection.broken.items()]
    if selection.unknown:
        notices.append(messages.unknown_runs(selection.unknown, str(runs.directory)))
    return notices


def _answers(runs: Runs, names: Sequence[str], measure: Measure, scheme: Scheme) -> list[Component]:
    if not names:
        return [messages.message("Nothing to compare", "Choose at least one run above that can be read.")]
    settings = runs.comparison(names)
    frame = runs.traffic_by_setting(names)
    compared = compare_data.compared(runs, names)
    labels = [str(label) for label in settings["label"]]
    return [
        compare_cards.advice(compared.advice),
        *_findings(settings),
        _levels(runs, names, scheme),
        _reducing(frame, labels, measure, scheme),
        cards.columns(
            [
                _others(frame, labels, measure, scheme),
                _step_time(compare_data.with_predictions(runs, names, settings), scheme),
            ]
        ),
        _settings_table(settings.merge(compared.resources, on="label", how="left")),
        *filter(None, [compare_cards.groups(compared.groups)]),
        compare_cards.weighed(compared.advice),
        cards.columns([_loss(runs, settings, scheme), compare_cards.ranks(compared.ranks, labels, scheme)]),
        cards.columns(
            [
                compare_cards.samples(compared.resources, scheme),
                compare_cards.memory(compared.resources, scheme),
            ]
        ),
    ]


def _levels(runs: Runs, names: Sequence[str], scheme: Scheme) -> Component:
    if compare_data.are_large(runs, names) and runs.is_going(names):
        return compare_cards.levels_to_come(going=True)
    card = _drawn_levels(runs, names, scheme)
    return card or pending.pending(LEVELS, compare_cards.levels_to_come(going=False), list(names))


def _drawn_levels(runs: Runs, names: Sequence[str], scheme: Scheme) -> Component | None:
    """The card of the four levels; None while they are being computed."""
    levels = compare_data.levels(runs, names)
    if levels is None:
        return None
    resources = compare_data.compared(runs, names).resources
    return compare_cards.levels(levels, runs.comparison(names), resources, scheme)


def _findings(settings: pd.DataFrame) -> list[Component]:
    sentences = [text for row in settings.to_dict("records") if (text := _finding(row)) is not None]
    if not sentences:
        return []
    title = "Requested one collective to reduce the gradients, issued another"
    return [messages.sentences(title, sentences, severity="warning")]


def _finding(row: dict[Hashable, Any]) -> str | None:
    """The difference of requested and issued of one setting; None if they agree, or if either is unknown."""
    requested, issued, meant, reason = (
        row.get(name) for name in ("requested_op", "issued_op", "intended_op", "issued_reason")
    )
    if pd.isna(requested) or pd.isna(issued):
        return None
    if pd.isna(reason):
        met = requested == (issued if pd.isna(meant) else meant)
        remark = ""
    else:
        # Without purposes all that can be told is whether the operation was issued at all.
        met = requested in str(issued).split(", ")
        remark = f" ({reason})"
    return None if met else f"{row['label']}: requested {requested}, issued {issued}{remark}."


def _reducing(frame: pd.DataFrame, labels: list[str], measure: Measure, scheme: Scheme) -> Component:
    part = frame[frame["series"].map(is_reducing).astype(bool)]
    title = "All-reduce against reduce and reduce-scatter"
    subtitle = f"{measure.name} per step and setting ({measure.definition})."
    if part.empty:
        return cards.empty_card("reducing", title, "None of these runs reduced anything in a training step.")
    return cards.figure_card(
        "reducing",
        title,
        subtitle,
        traffic.by_setting(part, labels, measure, scheme),
        part,
        _traffic_fields(),
    )


def _others(frame: pd.DataFrame, labels: list[str], measure: Measure, scheme: Scheme) -> Component:
    part = frame[~frame["series"].map(is_reducing).astype(bool)]
    title = "Other collectives"
    subtitle = f"{measure.name} per step of collectives that do not reduce."
    if part.empty:
        return cards.empty_card("others", title, "These runs issued no other collective in a training step.")
    return cards.figure_card(
        "others", title, subtitle, traffic.by_setting(part, labels, measure, scheme), part, _traffic_fields()
    )


def _step_time(settings: pd.DataFrame, scheme: Scheme) -> Component:
    title = "Step time"
    columns = ["label", "step_time_ns", "step_time_low_ns", "step_time_high_ns", "interval_over", "repeats"]
    predicted = ["predicted_ns", "predicted_low_ns", "predicted_high_ns"]
    is_predicted = bool(settings["predicted_ns"].notna().any())
    part = settings[[*columns, *(predicted if is_predicted else ())]]
    if part["step_time_ns"].isna().all():
        return cards.empty_card("step-time", title, "None of these runs finished two training steps.")
    return cards.figure_card(
        "step-time",
        title,
        f"Median per step and its 95 % interval over {_over(part)}, without the first step. The recommendation lists "
        f"measurable differences.{_PREDICTED if is_predicted else ''}",
        time_charts.by_setting(part, scheme),
        part,
        [
            Field("label", "Setting"),
            Field("step_time_ns", "Median", api.format_ns, numeric=True),
            Field("step_time_low_ns", "Low", api.format_ns, numeric=True),
            Field("step_time_high_ns", "High", api.format_ns, numeric=True),
            Field("repeats", "Repeats", str, numeric=True),
            *(
                Field(column, name, api.format_ns, numeric=True)
                for column, name in zip(predicted, ("Predicted", "Low (80 %)", "High (80 %)"), strict=True)
                if is_predicted
            ),
        ],
    )


def _over(settings: pd.DataFrame) -> str:
    return " or ".join(sorted(settings["interval_over"].dropna().unique())) or "steps"


def _settings_table(settings: pd.DataFrame) -> Component:
    unnamed = _unnamed_keys(settings)
    also = (
        " Labels name the keys that tell the settings apart; the others that differ follow."
        if unnamed
        else ""
    )
    return cards.table_card(
        "settings",
        "Settings",
        f"The gradient reduction that each config requests, the issued one, and its cost per step.{also}",
        settings.assign(exposed=text_column(settings, compare_data.exposed_text)),
        [
            Field("label", "Setting"),
            Field("requested_op", "Requested", _op),
            Field("issued_op", "Issued", _op),
            Field("intended_op", "Standing for", _op),
            Field("wire_bytes_per_step", "Wire bytes", api.format_bytes, numeric=True),
            Field("issued_wire_bytes_per_step", "As issued", api.format_bytes, numeric=True),
            Field("between_hosts_bytes_per_step", "Between hosts", api.format_bytes, numeric=True),
            Field("payload_bytes_per_step", "Payload", api.format_bytes, numeric=True),
            Field("padding_bytes_per_step", "Padding", api.format_bytes, numeric=True),
            Field("collectives_per_step", "Count", COUNT.format, numeric=True),
            Field("step_time_ns", "Step time", api.format_ns, numeric=True),
            Field("exposed", "Exposed", str, numeric=True),
            Field("final_loss", "Final loss", "{:.6g}".format, numeric=True),
            Field("rss_bytes", "Memory", api.format_bytes, numeric=True),
            Field("samples_per_second", "Samples/s", "{:.4g}".format, numeric=True),
            *(Field(key, key) for key in unnamed),
            Field("runs", "Runs", _run_links),
        ],
    )


def _unnamed_keys(settings: pd.DataFrame) -> list[str]:
    """The keys that differ, but that some label of a setting that has them does not name: labels name few of many."""
    columns = [str(name) for name in settings.columns]
    return [
        key
        for key in columns[1 : columns.index("requested_op")]
        if any(
            f"{key.rpartition('.')[2]}={value}" not in label
            for label, value in zip(settings["label"], settings[key], strict=True)
            if value != api.ABSENT
        )
    ]


def _loss(runs: Runs, settings: pd.DataFrame, scheme: Scheme) -> Component:
    title = "Loss"
    shown = {str(row.label): _run_names(row.runs)[0] for row in settings.itertuples() if _run_names(row.runs)}
    part = runs.loss_curves(shown)
    if part.empty:
        return cards.empty_card(
            "loss", title, "None of these runs published a loss. Call commprof.metric('loss', value)."
        )
    return cards.figure_card(
        "loss",
        title,
        "Training loss against step, the first run of each setting.",
        loss_chart.curves(part, [label for label in shown if label in set(part["label"])], scheme),
        part[["label", "step", "loss"]],
        [
            Field("label", "Setting"),
            Field("step", "Step", str, numeric=True),
            Field("loss", "Loss", "{:.6g}".format, numeric=True),
        ],
    )


def _traffic_fields() -> list[Field]:
    return [
        Field("label", "Setting"),
        Field("op", "Issued", _op),
        Field("intended_op", "Standing for", _op),
        Field("purpose", "Purpose"),
        *[Field(one.per_step, f"{one.name} per step", one.format, numeric=True) for one in MEASURES.values()],
    ]


def _op(value: Any) -> Cell:
    return html.Code(str(value), className="op")


def _run_names(value: Any) -> list[str]:
    return [str(name) for name in (value.split(", ") if isinstance(value, str) else value)]


def _run_links(value: Any) -> Cell:
    links = [
        dcc.Link(str(number), href=address.link("/overview", run=name), title=name)
        for number, name in enumerate(_run_names(value), start=1)
    ]
    return html.Span(links, className="run-links")


def register(app: dash.Dash, runs: Runs) -> None:
    """The callback of levels that were not there when the page was drawn."""

    @app.callback(
        Output(pending.place(LEVELS), "children"),
        Output(pending.clock(LEVELS), "disabled"),
        Input(pending.clock(LEVELS), "n_intervals"),
        State(pending.about(LEVELS), "data"),
        State(ids.SCHEME, "data"),
        prevent_initial_call=True,
    )
    def waited(_: int, names: list[str], scheme: str | None) -> tuple[Any, bool]:
        try:
            card = _drawn_levels(runs, names, scheme_of(scheme))
        except KeyError:
            return messages.unknown_runs(names, str(runs.directory)), True
        except Exception as error:
            return messages.message("The ledgers cannot be closed", reason(error), severity="error"), True
        if card is None:
            raise PreventUpdate
        return card, True


PAGE: Final = Page(
    "/compare",
    "Compare",
    "What did the settings change on the wire, in step time, memory and loss, and which one should you use?",
    render,
    register,
)
