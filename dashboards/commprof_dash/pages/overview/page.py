"""The page Overview: the step, traffic, ledger and environment of one run, and the cost of recording."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import dash
import pandas as pd
from dash import Input, Output, State, html
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate

from commprof.analysis import api
from commprof_dash import address, ids
from commprof_dash.address import Query
from commprof_dash.charts import time_charts, traffic
from commprof_dash.components import cards, controls, messages, pending, tables
from commprof_dash.components.expert_line import expert_line
from commprof_dash.components.tables import Field
from commprof_dash.data import Runs, reason
from commprof_dash.measures import MEASURES, WIRE, Measure, format_count
from commprof_dash.pages.one_run import draw_run
from commprof_dash.pages.overview import cards as overview_cards
from commprof_dash.pages.overview import data as overview_data
from commprof_dash.pages.page import Drawing, Page
from commprof_dash.text_columns import text_column
from commprof_dash.theme import Scheme, scheme_of

VERDICT: Final = "verdict"
SUMMARY: Final = "overview-summary"
REST: Final = "overview-rest"
PROMISING: Final = overview_cards.PROMISING
# More rows slow down server and browser. The CSV file contains all rows.
_TABLE_ROWS: Final = 300


def render(runs: Runs, query: Query, scheme: Scheme) -> Drawing:
    """Return the page for the run and the measure in ``query``."""
    measure = MEASURES[address.one(query, address.MEASURE, MEASURES, WIRE.key)]

    def answers(name: str) -> tuple[Sequence[Component], Sequence[Component]]:
        return [controls.measure_select(measure)], _answers(runs, name, measure, scheme)

    return draw_run(runs, query, answers)


def _answers(runs: Runs, name: str, measure: Measure, scheme: Scheme) -> list[Component]:
    facts = runs.overview(name)
    is_large = facts["records"] > overview_data.MOST_RECORDS and not runs.is_going([name])
    # For a large run, times are requested after the page is drawn.
    summary = (
        pending.at_once(SUMMARY, _summary(runs, name, facts), name)
        if is_large
        else _timed_summary(runs, name)
    )
    below = cards.empty_card("rest", "Time, cost and what ran", "On its way.")
    return [
        _health(facts),
        summary,
        *_trainings(runs, name),
        *expert_line(runs, name, link=True),
        _verdict(runs, name, facts),
        *_traffic(runs, name, facts, measure, scheme),
        *_promising(runs, name),
        *_one_offs(runs.one_offs(name)),
        *([pending.at_once(REST, below, name)] if is_large else rest(runs, name, scheme)),
    ]


def _trainings(runs: Runs, name: str) -> list[Component]:
    """Return a line about a run of several trainings; empty for a single training."""
    sentence = runs.several_trainings(name)
    return [messages.line("Several trainings", f"{sentence}.", "warning")] if sentence else []


def _traffic(
    runs: Runs, name: str, facts: Mapping[str, Any], measure: Measure, scheme: Scheme
) -> list[Component]:
    """Return the charts over the steps, or a line instead of them if no step has ended."""
    if not facts["whole_steps"]:
        why = "No training step of this run ended."
        if not facts["steps"]:
            why = overview_cards.no_steps(facts)
        frame = runs.traffic_by_step(name)
        shown = [] if frame.empty else [_by_step(frame, measure, scheme)]
        return [messages.line("No values per step", why, "note"), *shown]
    return [
        _by_step(runs.traffic_by_step(name), measure, scheme),
        cards.columns(
            [
                _by_purpose(runs.traffic_by_purpose(name), measure, scheme),
                _times(overview_data.last_times(runs.step_times(name)), scheme),
            ]
        ),
    ]


def rest(runs: Runs, name: str, scheme: Scheme) -> list[Component]:
    """Return the lower half of the page: exposed time by purpose, resources of the run, and how it was recorded."""
    facts = runs.overview(name)
    outside = _outside_steps(runs.traffic_outside_steps(name), facts["steps"])
    exposed = overview_cards.exposure(overview_data.exposure(runs, name), facts, scheme)
    return [
        cards.columns([exposed, outside] if facts["whole_steps"] else [outside]),
        *(
            [overview_cards.resources(overview_data.resources(runs, name), scheme)]
            if facts["whole_steps"]
            else []
        ),
        cards.columns([_what_ran(facts), overview_cards.cost(facts)]),
        cards.columns([_groups(runs.groups(name)), _moved(runs.moved(name), facts["moved_reason"])]),
    ]


def _timed_summary(runs: Runs, name: str) -> Component:
    facts = runs.overview(name)
    return _summary(
        runs,
        name,
        facts,
        overview_data.exposure(runs, name),
        overview_data.lateness(runs, name, facts["records"]),
    )


def _summary(
    runs: Runs,
    name: str,
    facts: Mapping[str, Any],
    exposure: pd.DataFrame | None = None,
    ranks: pd.DataFrame | None = None,
) -> Component:
    """Return the values of a step, and the straggler if there is one.

    If no step has ended, return only the straggler.

    Args:
        exposure: The exposed communication; None while it is not known.
        ranks: The result of :func:`overview_data.lateness`; None if there is none.
    """
    straggler = None if ranks is None or ranks.empty else overview_cards.straggler(ranks)
    sent = runs.traffic_by_purpose(name)
    tiles = [
        cards.tile("Step time", _or_none(facts["step_time_ns"], api.format_ns), _interval(facts)),
        cards.tile("Exposed communication", "...", "on its way")
        if exposure is None
        else overview_cards.exposed_tile(exposure, facts),
        cards.tile(
            "Wire bytes per step",
            api.format_bytes(sent["wire_bytes_per_step"].sum()) if len(sent) else "none",
            "mean over all ranks of the job"
            if sent["executed_wire_bytes_per_step"].notna().all()
            else "as issued, mean over all ranks",
        ),
        cards.tile("Final loss", _or_none(facts["final_loss"], "{:.5g}".format), "last step that has one"),
        *_pipeline(facts),
    ]
    shown = [cards.tiles(tiles)] if facts["whole_steps"] else []
    return html.Div([*shown, *([] if straggler is None else [straggler])], className="lines")


def _verdict(runs: Runs, name: str, facts: Mapping[str, Any]) -> Component:
    is_early = facts["state"] == "running" and not facts["whole_steps"]
    if is_early or (facts["records"] > overview_data.MOST_RECORDS and runs.is_going([name])):
        return overview_cards.verdict_of_no_end(facts)
    ledger = overview_data.verdict(runs, name, facts["records"])
    if ledger is None:
        return pending.pending(VERDICT, overview_cards.verdict_to_come(facts), name)
    return overview_cards.verdict(ledger, facts)


def _promising(runs: Runs, name: str) -> list[Component]:
    """Return the placeholder of the changes worth trying, which a callback fills.

    Return nothing while the run is recorded.
    """
    if runs.is_going([name]):
        return []
    return [pending.pending(PROMISING, overview_cards.promising_to_come(), name)]


def _pipeline(facts: Mapping[str, Any]) -> list[Component]:
    """Return the tile of a pipeline; empty for other runs."""
    idle, expected = facts["pipeline_idle"], facts["pipeline_idle_expected"]
    if idle is None or expected is None:
        return []
    return [cards.tile("Pipeline idle", f"{idle:.1%}", f"first stage; {expected:.1%} by the schedule")]


def _ended(facts: Mapping[str, Any]) -> str:
    code = facts["exit_code"]
    rank = facts["first_failed_rank"]
    if code is None:
        return "no exit code known"
    return f"exit code {code}" + (f", rank {rank} first" if rank is not None else "")


def _ranks(facts: Mapping[str, Any]) -> str:
    world = facts["world_size"] or facts["ranks_expected"]
    recorded = facts["ranks_recorded"]
    return f"{recorded}" if recorded == world or world is None else f"{recorded} of {world}"


def _interval(facts: Mapping[str, Any]) -> str:
    low, high = facts["step_time_low_ns"], facts["step_time_high_ns"]
    if low is None or high is None:
        return "median without the first step"
    return f"median; 95 %: {api.format_ns(low)} to {api.format_ns(high)}"


def _or_none(value: Any, write: Callable[[Any], str]) -> str:
    return "none" if value is None or pd.isna(value) else write(value)


def _health(facts: Mapping[str, Any]) -> Component:
    """Return the state of the run and of its records in one line."""
    if not facts["records"] and not facts["summed"] and facts["state"] != "running":
        return messages.line(
            "No records",
            f"{facts['state'].capitalize()}, {_ended(facts)}. It ended before its first collective, does not use "
            "torch.distributed, or never reached a step to record.",
            "warning",
        )
    if not facts["records"] and not facts["summed"]:
        return messages.line(
            "No records yet", "Running; the first collective appears here as soon as it is issued."
        )
    ranks = "its one rank" if _ranks(facts) == "1" else f"{_ranks(facts)} ranks"
    steps = f"{format_count(facts['steps'])} step{'' if facts['steps'] == 1 else 's'}"
    summary = f"{facts['state'].capitalize()}, {_ended(facts)}; {steps}"
    if facts["notes"]:
        missing = "; ".join(facts["notes"])
        return messages.line("What is missing", f"{missing[:1].upper()}{missing[1:]}. {summary}.", "warning")
    return messages.line("Nothing is missing", f"{summary}; every record of {ranks} is there.", "good")


def _what_ran(facts: Mapping[str, Any]) -> Component:
    values: dict[str, Any] = {
        "Command": html.Code(shlex.join(map(str, facts["command"]))) if facts["command"] else "not known",
        "Started": _moment(facts["started_realtime_ns"]),
        "Duration": "not known" if facts["wall_ns"] is None else api.format_ns(facts["wall_ns"]),
        "Ranks": f"{_ranks(facts)}, {facts['backends'] or 'no backend'}",
        "Steps": f"{format_count(facts['steps'])}, {facts['whole_steps']:,} whole",
        "Wire bytes of the whole run": _whole_wire(facts),
        "Setting": facts["setting"] or "none",
        "Requested to reduce gradients": facts["requested_op"] or f"not known: {facts['requested_reason']}",
        "Config": facts["config_path"] or "none",
        "Hosts": ", ".join(map(str, facts["hosts"])) or "not known",
        "Versions": _versions(facts),
        "Directory": facts["path"],
    }
    return cards.text_card("what-ran", "What ran", "", [tables.facts(values)])


def _whole_wire(facts: Mapping[str, Any]) -> str:
    executed = facts["executed_wire_bytes"]
    if executed is None:
        return f"{api.format_bytes(facts['wire_bytes'])} as issued, per member, all groups"
    return f"{api.format_bytes(executed)}, per member, all groups"


def _versions(facts: Mapping[str, Any]) -> str:
    named = (("Python", "python"), ("torch", "torch"), ("commprof", "commprof_version"))
    return ", ".join(f"{name} {facts[key]}" for name, key in named if facts[key]) or "not known"


def _moment(realtime_ns: int | None) -> str:
    if not realtime_ns:
        return "not known"
    return datetime.fromtimestamp(realtime_ns / 1e9).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def _by_step(frame: pd.DataFrame, measure: Measure, scheme: Scheme) -> Component:
    title = "Traffic per step, by operation"
    if frame.empty:
        return cards.empty_card("by-step", title, "This run issued no collectives in a training step.")
    each = int(frame["steps"].max())
    means = "" if each == 1 else f" Each bar is the mean of {each} steps."
    return cards.figure_card(
        "by-step",
        title,
        f"{measure.name} per step{', modelled' if measure == WIRE else ''}.{means}",
        traffic.by_step(frame, measure, scheme),
        frame,
        [
            Field("step", "Step", str, numeric=True),
            *([Field("steps", "Steps", str, numeric=True)] if each > 1 else []),
            Field("series", "Operation"),
            *_measure_fields(),
        ],
        most_rows=_TABLE_ROWS,
        how=cards.how_to_read(f"{measure.name}: {measure.definition}."),
    )


def _by_purpose(frame: pd.DataFrame, measure: Measure, scheme: Scheme) -> Component:
    title = "Traffic by purpose"
    if frame.empty:
        return cards.empty_card(
            "by-purpose", title, "No training step of this run is complete, so there is no mean step."
        )
    return cards.figure_card(
        "by-purpose",
        title,
        f"{measure.name} of a mean training step. The runtime reports the purpose; the operation is the issued one.",
        traffic.by_purpose(frame, measure, scheme),
        frame,
        [Field("purpose", "Purpose"), Field("series", "Operation"), *_measure_fields()],
    )


def _times(frame: pd.DataFrame, scheme: Scheme) -> Component:
    title = "Step time and exposed communication"
    columns = ["step", "duration_ns", "exposed_ns", "exposed_low_ns", "exposed_high_ns", "cpu_ns", "loss"]
    if frame["duration_ns"].isna().all():
        return cards.empty_card("step-time", title, "No training step of this run ended.")
    return cards.figure_card(
        "step-time",
        title,
        "Exposed: the program was blocked on a collective. The first step warms up.",
        time_charts.over_steps(frame, scheme),
        frame[columns].assign(exposed=text_column(frame, api.exposed_time)),
        [
            Field("step", "Step", str, numeric=True),
            Field("duration_ns", "Step time", api.format_ns, numeric=True),
            Field("exposed", "Exposed", str, numeric=True),
            Field("cpu_ns", "CPU time", api.format_ns, numeric=True),
            Field("loss", "Loss", "{:.6g}".format, numeric=True),
        ],
        most_rows=_TABLE_ROWS,
    )


def _one_offs(frame: pd.DataFrame) -> list[Component]:
    """Return the card of one-off traffic; empty if there is none."""
    if frame.empty:
        return []
    card = cards.table_card(
        "one-offs",
        "One-off traffic, in no mean step",
        "Traffic of single steps that does not recur, such as a checkpoint or a bucket rebuild. Totals; means per step do "
        "not include them.",
        frame,
        [
            Field("when", "When"),
            Field("purpose", "Purpose"),
            Field("series", "Operation"),
            *[Field(one.column, one.name, one.format, numeric=True) for one in MEASURES.values()],
        ],
        most_rows=_TABLE_ROWS,
    )
    return [card]


def _outside_steps(frame: pd.DataFrame, steps: int) -> Component:
    title = "Outside of the training steps" if steps else "The whole run, which has no training steps"
    if frame.empty:
        return cards.empty_card("outside-steps", title, "Nothing was issued outside of the training steps.")
    return cards.table_card(
        "outside-steps",
        title,
        "Totals; means per step do not include them." if steps else "Totals.",
        frame,
        [
            *([Field("when", "When")] if steps else []),
            Field("purpose", "Purpose"),
            Field("series", "Operation"),
            *[Field(one.column, one.name, one.format, numeric=True) for one in MEASURES.values()],
        ],
    )


def _groups(frame: pd.DataFrame) -> Component:
    title = "Process groups"
    if frame.empty:
        return cards.empty_card("groups", title, "This run recorded no process group.")
    return cards.table_card(
        "groups",
        title,
        "Unseen: collectives that the group counted and that no record shows.",
        frame,
        [
            Field("pg", "Group"),
            Field("group_desc", "Description"),
            Field("group_ranks", "Ranks"),
            Field("group_size", "Size", str, numeric=True),
            Field("backend", "Backend"),
            Field("unseen", "Unseen", format_count, numeric=True),
        ],
    )


def _moved(frame: pd.DataFrame, why: str | None) -> Component:
    title = "Moved, by the machine's counters"
    if frame.empty:
        return cards.empty_card("moved", title, why or "No counters were read.")
    return cards.table_card(
        "moved",
        title,
        "Moved bytes of the whole host and all its processes over the run, from its interfaces; no formula."
        + (f" Not the complete run: {why}." if why else ""),
        frame,
        [
            Field("host", "Host"),
            Field("device", "Interface"),
            Field("sent_bytes", "Sent", api.format_bytes, numeric=True),
            Field("received_bytes", "Received", api.format_bytes, numeric=True),
            Field("seconds", "Seconds", "{:.1f}".format, numeric=True),
        ],
    )


def _measure_fields() -> list[Field]:
    return [
        Field(one.per_step, f"{one.name} per step", one.format, numeric=True) for one in MEASURES.values()
    ]


def register(app: dash.Dash, runs: Runs) -> None:
    """Add the callbacks of content that was not ready when the page was drawn.

    These are times, the verdict, the changes, and the lower half.
    """

    _register_changes(app, runs)

    @app.callback(Output(pending.place(SUMMARY), "children"), Input(pending.about(SUMMARY), "data"))
    def timed(name: str) -> Component:
        try:
            return _timed_summary(runs, name)
        except KeyError:
            return messages.unknown_runs([name], str(runs.directory))
        except Exception as error:
            return messages.broken_page(reason(error))

    @app.callback(
        Output(pending.place(REST), "children"),
        Input(pending.about(REST), "data"),
        State(ids.SCHEME, "data"),
    )
    def below(name: str, scheme: str | None) -> list[Component]:
        try:
            return rest(runs, name, scheme_of(scheme))
        except KeyError:
            return [messages.unknown_runs([name], str(runs.directory))]
        except Exception as error:
            return [messages.broken_page(reason(error))]

    @app.callback(
        Output(pending.place(VERDICT), "children"),
        Output(pending.clock(VERDICT), "disabled"),
        Input(pending.clock(VERDICT), "n_intervals"),
        State(pending.about(VERDICT), "data"),
        prevent_initial_call=True,
    )
    def waited(_: int, name: str) -> tuple[Any, bool]:
        try:
            facts = runs.overview(name)
            ledger = overview_data.verdict(runs, name, facts["records"])
        except KeyError:
            return messages.unknown_runs([name], str(runs.directory)), True
        except Exception as error:
            return messages.message("The ledger cannot be closed", reason(error), severity="error"), True
        if ledger is None:
            raise PreventUpdate
        return overview_cards.verdict(ledger, facts), True


def _register_changes(app: dash.Dash, runs: Runs) -> None:
    """Add the callback of the changes worth trying."""

    @app.callback(
        Output(pending.place(PROMISING), "children"),
        Output(pending.clock(PROMISING), "disabled"),
        Input(pending.clock(PROMISING), "n_intervals"),
        Input(pending.about(PROMISING), "data"),
    )
    def promising(_: int | None, name: str) -> tuple[Any, bool]:
        try:
            facts = runs.overview(name)
            advised = overview_data.promising(runs, name, facts["hosts"])
        except KeyError:
            return [], True  # the page shows that the run does not exist
        except Exception as error:
            return overview_cards.not_promising(f"No change can be predicted: {reason(error)}"), True
        if advised is None:
            raise PreventUpdate
        return overview_cards.promising(advised, Path(facts["path"])), True


PAGE: Final = Page(
    "/overview",
    "Overview",
    "What did one run send, what did it cost, and how well was it recorded?",
    order=20,
    render=render,
    register=register,
)
