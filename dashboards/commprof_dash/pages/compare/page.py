"""The page Compare: the effects of the settings of several runs, especially on the gradient reduction."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

import dash
import pandas as pd
from dash import ALL, ClientsideFunction, Input, Output, State, dcc, html
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate

from commprof.analysis import api
from commprof_dash import address, ids
from commprof_dash.address import Query
from commprof_dash.charts import loss_chart, traffic
from commprof_dash.charts.labels import on_screen
from commprof_dash.charts.series import is_reducing
from commprof_dash.components import cards, controls, messages, pending
from commprof_dash.components.folds import fold_of_cards
from commprof_dash.components.tables import Cell, Field, Order
from commprof_dash.data import Runs, Selection, reason
from commprof_dash.measures import MEASURES, WIRE, Measure
from commprof_dash.pages.compare import cards as compare_cards
from commprof_dash.pages.compare import data as compare_data
from commprof_dash.pages.compare.choice import OF, Choice, choices
from commprof_dash.pages.page import Drawing, Page
from commprof_dash.theme import Scheme, scheme_of

LEVELS: Final = "levels"
_SORT: Final = "sort"  # in the address: a column, with "-" in front for descending order
_VIEW: Final = "view"
_GRID: Final = "grid"
_VIEWS: Final = {"rows": "One chart", _GRID: "Grid of the two keys"}
_MOST_OFFERED: Final = 4  # the largest number of other choices of runs in the line above the answer


def render(runs: Runs, query: Query, scheme: Scheme) -> Drawing:
    """Return the page for the runs and the measure in ``query``."""
    names = runs.names()
    if not names:
        return Drawing([], [messages.no_runs(str(runs.directory))])
    is_named = address.RUN in query or address.TICK in query
    chosen = address.runs_in(query)
    offered: list[Choice] = []
    if not is_named:
        offered = choices(runs, key=next(iter(query.get(OF, ())), ""))
        chosen = offered[0].names if offered else tuple(names)
    elif len(chosen) == 1:
        offered = choices(runs, about=chosen)
    measure = MEASURES[address.one(query, address.MEASURE, MEASURES, WIRE.key)]
    selection = runs.select(chosen)
    shown = [controls.runs_select(names, chosen), controls.measure_select(measure)]
    if not selection.readable:
        empty = messages.message("Nothing to compare", "Choose at least one run above that can be read.")
        return Drawing(shown, [*_warnings(runs, selection), empty])
    view = address.one(query, _VIEW, _VIEWS, "rows")
    if compare_data.grid(runs.comparison(selection.readable)):
        shown.append(controls.segmented(_VIEW, "View", _VIEWS, view))
    asked = _Asked(selection.readable, view == _GRID, _order(query))
    return Drawing(
        shown,
        [
            *_warnings(runs, selection),
            *_chosen(query, offered, chosen if is_named else ()),
            *_answers(runs, asked, measure, scheme),
        ],
        follows=runs.is_going(selection.readable),
        kept=None if is_named or not offered else (OF, offered[0].key),
    )


def _chosen(query: Query, offered: Sequence[Choice], named: Sequence[str]) -> list[Component]:
    """Return a line that names the compared runs if the address does not name several, with links to other choices."""
    others = [choice for choice in offered if choice.names != tuple(named)][0 if named else 1 :]
    if not offered or (named and not others):
        return []
    rest = {key: value for key, value in query.items() if key not in (address.RUN, address.TICK, OF)}
    links = [
        part
        for choice in others[:_MOST_OFFERED]
        for part in (
            dcc.Link(_of(choice), href=address.link("/compare", **rest, of=choice.key)),
            ", ",
        )
    ][:-1]
    if named:
        begin = [f"One run is chosen, {named[0]}. Compare it with others: "]
    else:
        begin = [f"Compared: {_of(offered[0])}.", " Others: " if links else ""]
    return [html.P([*begin, *links, "." if links else ""], className="compared muted")]


def _of(choice: Choice) -> str:
    number = len(choice.names)
    return f"{choice.text} ({number:,} run{'' if number == 1 else 's'})"


class _Asked(NamedTuple):
    """The content of the chart: the runs, whether it is a grid, and the order of its rows.

    In JSON, this is a list.
    """

    names: Sequence[str]
    as_grid: bool
    order: Order


def _order(query: Query) -> Order:
    value = next(iter(query.get(_SORT, ())), "")
    column = value.removeprefix("-")
    known = {field.column for field in compare_cards.SETTING_FIELDS}
    return Order(column, value.startswith("-")) if column in known else Order(None)


def _warnings(runs: Runs, selection: Selection) -> list[Component]:
    notices = [messages.broken_run(name, why) for name, why in selection.broken.items()]
    if selection.unknown:
        notices.append(messages.unknown_runs(selection.unknown, str(runs.directory)))
    return notices


def _answers(runs: Runs, asked: _Asked, measure: Measure, scheme: Scheme) -> list[Component]:
    names = asked.names
    compared = compare_data.compared(runs, names)
    settings = compare_data.ordered(
        compare_data.settings(runs, names, compare_data.levels_if_ready(runs, names)), asked.order
    )
    labels = [str(label) for label in settings["label"]]
    return [
        *compare_cards.answer(compared.advice, compare_data.reason(settings, compared.advice)),
        *_trainings(runs, names),
        _levels(runs, asked, scheme),
        compare_cards.settings_table(compare_data.with_unrun(runs, names, settings), asked.order),
        compare_cards.advice(compared.advice, _findings(settings)),
        html.Div(_folds(runs, settings, labels, measure, scheme), className="folds"),
    ]


def _trainings(runs: Runs, names: Sequence[str]) -> list[Component]:
    """Return a line for each run with several trainings. The setting of such a run has one mean over its trainings."""
    trainings = [(name, runs.several_trainings(name)) for name in names]
    return [
        messages.line("Several trainings", f"{name}: {text}.", "warning") for name, text in trainings if text
    ]


def _folds(
    runs: Runs, settings: pd.DataFrame, labels: list[str], measure: Measure, scheme: Scheme
) -> list[Component]:
    """Return the details of the comparison, each in a fold with a title."""
    names = [name for row in settings["runs"] for name in compare_cards.run_names(row)]
    compared = compare_data.compared(runs, names)
    frame = runs.traffic_by_setting(names)
    groups, unnamed = compare_cards.groups(compared.groups), _unnamed_keys(settings)
    return [
        fold_of_cards(
            "More columns",
            [compare_cards.more_columns(settings, unnamed)],
            is_open=bool(unnamed),
        ),
        fold_of_cards("Evidence of the recommendation", [compare_cards.weighed(compared.advice)]),
        fold_of_cards(
            "Traffic by operation",
            [_reducing(frame, labels, measure, scheme), _others(frame, labels, measure, scheme)],
            is_open=measure != WIRE,
        ),
        *([] if groups is None else [fold_of_cards("Traffic by group", [groups])]),
        fold_of_cards("Bytes of each rank", [compare_cards.ranks(compared.ranks, labels, scheme)]),
        fold_of_cards("Loss", [_loss(runs, settings, scheme)]),
        fold_of_cards(
            "Samples per second and memory",
            [
                compare_cards.samples(_in_order(compared.resources, labels), scheme),
                compare_cards.memory(_in_order(compared.resources, labels), scheme),
            ],
        ),
    ]


def _in_order(frame: pd.DataFrame, labels: Sequence[str]) -> pd.DataFrame:
    return frame.set_index("label").loc[list(labels)].reset_index()


def _levels(runs: Runs, asked: _Asked, scheme: Scheme) -> Component:
    if compare_data.are_large(runs, asked.names) and runs.is_going(asked.names):
        return compare_cards.levels_to_come(going=True)
    card = _drawn_levels(runs, asked, scheme)
    return card or pending.pending(LEVELS, compare_cards.levels_to_come(going=False), list(asked))


def _drawn_levels(runs: Runs, asked: _Asked, scheme: Scheme) -> Component | None:
    """Return the card of the four levels; None while they are being computed."""
    levels = compare_data.levels(runs, asked.names)
    if levels is None:
        return None
    settings = compare_data.ordered(compare_data.settings(runs, asked.names, levels), asked.order)
    cells = compare_data.grid(settings) if asked.as_grid else []
    shown = settings if cells else compare_data.with_unrun(runs, asked.names, settings)
    return compare_cards.levels(levels, shown, cells, scheme)


def _findings(settings: pd.DataFrame) -> list[str]:
    return [text for row in settings.to_dict("records") if (text := _finding(row)) is not None]


def _finding(row: dict[Hashable, Any]) -> str | None:
    """Return the difference between the requested and the issued communication of one setting.

    Return None if they agree, or if either is unknown.
    """
    requested, issued, meant, reason = (
        row.get(name) for name in ("requested_op", "issued_op", "intended_op", "issued_reason")
    )
    if pd.isna(requested) or pd.isna(issued):
        return None
    if pd.isna(reason):
        met = requested == (issued if pd.isna(meant) else meant)
        remark = ""
    else:
        # Without purposes, only the presence of the operation can be checked.
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


def _unnamed_keys(settings: pd.DataFrame) -> list[str]:
    """Return the keys that differ but are missing in the label of a setting that has the key.

    If there are many keys, labels contain only a few of them.
    """
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
    shown = {str(row.label): compare_cards.run_names(row.runs)[0] for row in settings.itertuples()}
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


def register(app: dash.Dash, runs: Runs) -> None:
    """Add the callbacks of levels that were not ready when the page was drawn, and of headings that sort."""
    app.clientside_callback(
        ClientsideFunction("compare", "sort"),
        Input(ids.sorting(ALL), "n_clicks"),
        prevent_initial_call=True,
    )

    @app.callback(
        Output(pending.place(LEVELS), "children"),
        Output(pending.clock(LEVELS), "disabled"),
        Input(pending.clock(LEVELS), "n_intervals"),
        State(pending.about(LEVELS), "data"),
        State(ids.SCHEME, "data"),
        prevent_initial_call=True,
    )
    def waited(_: int, shown: list[Any], scheme: str | None) -> tuple[Any, bool]:
        names, as_grid, order = shown
        try:
            with on_screen(scheme):
                card = _drawn_levels(runs, _Asked(names, as_grid, Order(*order)), scheme_of(scheme))
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
    order=30,
    render=render,
    register=register,
)
