"""The page Traffic matrix: how much each rank sends to each other rank, by operation, purpose and step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import pandas as pd
from dash import html
from dash.development.base_component import Component

from commprof.analysis import api
from commprof.schema import OPS, PURPOSES, Op
from commprof_dash import address
from commprof_dash.address import Query
from commprof_dash.charts import matrix_chart
from commprof_dash.components import cards, controls, messages
from commprof_dash.components.expert_line import expert_line
from commprof_dash.components.tables import Field
from commprof_dash.data import Runs
from commprof_dash.measures import Measure, format_count
from commprof_dash.pages.matrix import data as matrix_data
from commprof_dash.pages.matrix.data import Steps
from commprof_dash.pages.matrix.experts import LAYER, balance_sentence, expert_cards
from commprof_dash.pages.one_run import draw_run
from commprof_dash.pages.page import Drawing, Page
from commprof_dash.pages.timeline.data import hosts_of, path_of
from commprof_dash.theme import Scheme

ALL: Final = "all"
OP: Final = "op"
PURPOSE: Final = "purpose"
STEPS: Final = "steps"
UNTAGGED: Final = "untagged"
PER: Final = "per"  # in the address: whether the bytes are per step or a total
STEP: Final = "step"
TOTAL: Final = "total"
_PER: Final = {STEP: "Per step", TOTAL: "Total"}

EXECUTED: Final = Measure(
    "wire",
    "executed_wire_bytes",
    "Wire bytes",
    "bytes",
    "modelled for the executed operations: bytes that each rank sends to each other rank",
)
ISSUED: Final = Measure(
    "issued",
    "wire_bytes",
    "Wire bytes, as issued",
    "bytes",
    "modelled for the issued operations: bytes that each rank sends to each other rank; rows and columns add up to the "
    "wire bytes of the ranks",
)
MESSAGES: Final = Measure(
    "messages",
    "message_bytes",
    "Point to point",
    "bytes",
    "exact: the payload of each send, recorded at the sender",
)
COUNTERS: Final = Measure(
    "counters",
    "sent_bytes",
    "Counters",
    "bytes",
    "moved: the interface counters of each host, all programs included",
)
MEASURES: Final = {one.key: one for one in (EXECUTED, ISSUED, MESSAGES, COUNTERS)}

_STEP_RANGE: Final = re.compile(r"\s*(-?\d{1,9})\s*(?:(?:-|to|\.\.)\s*(-?\d{1,9})\s*)?")
_TABLE_ROWS: Final = 500


def render(runs: Runs, query: Query, scheme: Scheme) -> Drawing:
    """Return the page for the run, measure, operation, purpose and steps in ``query``."""

    def answers(name: str) -> tuple[Sequence[Component], Sequence[Component]]:
        kinds = matrix_data.kinds(runs, name)
        measure = MEASURES[address.one(query, address.MEASURE, MEASURES, EXECUTED.key)]
        op = address.one(query, OP, OPS, ALL)
        purpose = address.one(query, PURPOSE, (*PURPOSES, UNTAGGED), ALL)
        # Other pages link to this page with their step.
        written = next(iter(query.get(STEPS, query.get(STEP, ()))), "")[:40]
        known = runs.step_numbers(name)
        steps, wrong = parse_steps(written, known)
        per = address.one(query, PER, _PER, STEP if known else TOTAL)
        dead = measure is COUNTERS  # The counters do not distinguish operations, purposes and steps.
        controls_shown = [
            controls.measure_select(measure, MEASURES),
            controls.segmented(PER, "Bytes", _PER, per),
            controls.select(OP, "Operation", _choices(kinds["op"], op), op, dead),
            controls.select(PURPOSE, "Purpose", _choices(kinds["purpose"], purpose), purpose, dead),
            controls.text(STEPS, "Steps", written, "all, 3 or 2-9", wrong, dead),
        ]
        layers = matrix_data.expert_layers(runs, name)
        layer = address.one(query, LAYER, layers, layers[0] if layers else "")
        if len(layers) > 1:
            controls_shown.append(controls.select(LAYER, "Experts of", layers, layer, dead))
        if measure is COUNTERS:
            return controls_shown, [_counters(matrix_data.moved(runs, name))]
        chosen, kind = (None if op == ALL else op), (None if purpose == ALL else purpose)
        experts = expert_cards(runs, name, layer, steps, scheme) if layers else []
        steps, count = steps_shown(steps, *matrix_data.steps_taken(runs, name), per)
        frame = matrix_data.matrix(runs, name, steps, chosen, kind)
        when = "of the chosen steps together" if per == TOTAL else _mean_over(steps, count)
        hosts = hosts_of(path_of(runs, name))
        balance = _balance(runs, name, steps, chosen, kind, measure)
        return controls_shown, [
            *expert_line(runs, name, link=False),
            _matrix(_per_step(frame, count), measure, chosen, hosts, when, balance, scheme),
            *experts,
            _owners(matrix_data.owners(runs, name, steps), _together(steps), scheme),
            _model(frame, measure, count),
        ]

    return draw_run(runs, query, answers)


def parse_steps(written: str, known: Sequence[int] = ()) -> tuple[Steps, str | None]:
    """Return the first and the last step of ``3`` or ``2-9`` (None for all steps), and an error message about the text.

    Args:
        known: The training steps of the run. A range without any of them is an error. Empty: not checked.

    >>> parse_steps("3"), parse_steps("2-9"), parse_steps(" ")
    (((3, 3), None), ((2, 9), None), (None, None))
    """
    if written.strip().lower() in ("", ALL):
        return None, None
    match = _STEP_RANGE.fullmatch(written)
    if not match:
        return None, "Write one step, as 3, or a range, as 2-9. All steps are shown."
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if last < first:
        return None, f"Write the first step before the last, as {last}-{first}. All steps are shown."
    if known and not any(first <= step <= last for step in (-1, *known)):
        return None, f"The run has the steps {known[0]} to {known[-1]}. All steps are shown."
    return (first, last), None


def steps_shown(steps: Steps, known: Sequence[int], last: int | None, per: str) -> tuple[Steps, int]:
    """Return the range of steps of the matrix, and the number of steps that its bytes are divided by.

    A mean over all steps excludes the first step, in which the ranks start up, unless it is the only step.

    Args:
        known: The training steps. A step that was repeated after a restart occurs several times.
        last: The last step that ended, which is the last step of a mean over all steps.
    """
    if per == TOTAL:
        return steps, 1
    numbers = list(dict.fromkeys(known))
    if steps is None and numbers:
        steps = numbers[min(1, len(numbers) - 1)], numbers[-1] if last is None else last
        if steps[1] < steps[0]:  # only the first step has ended
            steps = steps[1], steps[1]
    first, until = steps or (0, 0)
    return (first, until), max(1, sum(1 for step in known if first <= step <= until))


def _mean_over(steps: Steps, count: int) -> str:
    assert steps is not None
    return (
        f"of step {steps[0]}"
        if count == 1
        else f"per step, mean of the {count:,} steps {steps[0]} to {steps[1]}"
    )


def _per_step(frame: pd.DataFrame, count: int) -> pd.DataFrame:
    if count == 1:
        return frame
    values = ["executed_wire_bytes", "wire_bytes", "message_bytes", "between_hosts_bytes"]
    divided = frame.assign(**{name: frame[name] / count for name in values})
    divided.attrs = frame.attrs
    return divided


def _choices(present: pd.Series[Any], chosen: str) -> list[str]:
    return [ALL, *dict.fromkeys([*sorted(set(present)), *([] if chosen == ALL else [chosen])])]


def _balance(
    runs: Runs, name: str, steps: Steps, op: str | None, purpose: str | None, measure: Measure
) -> str:
    """Return a sentence about how evenly the ranks receive the displayed bytes of all_to_alls.

    The sentence begins with a blank. It is empty if there are no such bytes.
    """
    if measure is MESSAGES or op not in (None, Op.ALL_TO_ALL):
        return ""
    frame = matrix_data.exchanges(runs, name, purpose)
    if steps is not None:
        frame = frame[frame["step"].between(*steps)]
    sentence = balance_sentence(frame)
    return f" {sentence}" if sentence else ""


def _matrix(
    frame: pd.DataFrame,
    measure: Measure,
    op: str | None,
    hosts: dict[int, str],
    when: str,
    balance: str,
    scheme: Scheme,
) -> Component:
    title = "Bytes from rank to rank"
    reason = frame.attrs["executed_reason"] if measure is EXECUTED else None
    if reason:
        measure = ISSUED
    drawn = frame[frame[measure.column] > 0]
    drawn.attrs = frame.attrs
    if drawn.empty:
        return cards.empty_card("matrix", title, _why_empty(frame, measure))
    width, ranks = int(frame.attrs["ranks_per_cell"]), int(frame.attrs["ranks"])

    def rank(first: int) -> str:
        return matrix_chart.rank_text(first, width, ranks)

    most = drawn.sort_values(measure.column, ascending=False, kind="stable").iloc[0]
    blocks = (
        "" if width == 1 else f" Each row and column is {width} neighboring ranks together, of {ranks:,}."
    )
    return cards.figure_card(
        "matrix",
        title,
        f"Most: {api.format_bytes(most[measure.column])} from rank {rank(int(most['sender']))} to "
        f"{rank(int(most['receiver']))}. "
        f"{measure.name} {when} ({measure.definition})."
        + (f" Shown as issued: {reason}." if reason else "")
        + blocks
        + (" A frame is a host." if len(set(hosts.values())) > 1 else "")
        + balance,
        matrix_chart.heat(drawn, measure.column, measure.name, op, scheme, hosts),
        drawn.sort_values(measure.column, ascending=False, kind="stable"),
        [
            Field("sender", "From rank", rank, numeric=True),
            Field("receiver", "To rank", rank, numeric=True),
            Field(EXECUTED.column, EXECUTED.name, api.format_bytes, numeric=True),
            Field(ISSUED.column, "As issued", api.format_bytes, numeric=True),
            Field("message_bytes", "of these sends", api.format_bytes, numeric=True),
            Field("between_hosts_bytes", "Between hosts", api.format_bytes, numeric=True),
        ],
        most_rows=_TABLE_ROWS,
    )


def _why_empty(frame: pd.DataFrame, measure: Measure) -> str:
    if not frame.attrs["ranks"]:
        return "No traffic between ranks was recorded."
    if int(frame.attrs["ranks"]) < 2:
        return "This run has one rank, so there is no traffic between ranks."
    if measure is MESSAGES:
        return "The selection has no send. Choose the measure Wire bytes for collectives."
    if frame.attrs[_unplaced(measure)]:
        return "The senders and receivers of these bytes are not known: see below."
    return "The selection has no traffic. Choose other steps, operations or purposes above."


def _together(steps: Steps) -> str:
    """Return the text that names the steps of a total."""
    if steps is None:
        return "in the whole run"
    return (
        f"in step {steps[0]}" if steps[0] == steps[1] else f"in the steps {steps[0]} to {steps[1]} together"
    )


def _owners(frame: pd.DataFrame, when: str, scheme: Scheme) -> Component:
    title = "Balance of the owners"
    imbalance = frame.attrs["imbalance"]
    if imbalance is None:
        return cards.empty_card(
            "owners", title, "These steps have no reduce to an owner, so no owner receives more than others."
        )
    return cards.figure_card(
        "owners",
        title,
        f"Wire bytes, as issued, that each rank receives as the root of reduces {when}. The largest is "
        f"{imbalance:.3g} times the mean.",
        matrix_chart.received_by_owner(frame, scheme),
        frame,
        [
            Field("rank", "Rank", str, numeric=True),
            Field("collectives", "Reduces to it", format_count, numeric=True),
            Field("payload_bytes", "Payload bytes", api.format_bytes, numeric=True),
            Field("padding_bytes", "Padding", api.format_bytes, numeric=True),
            Field("received_bytes", "Wire bytes received", api.format_bytes, numeric=True),
            Field("between_hosts_bytes", "Between hosts", api.format_bytes, numeric=True),
        ],
        most_rows=_TABLE_ROWS,
    )


def _unplaced(measure: Measure) -> str:
    return "executed_unplaced_bytes" if measure is EXECUTED else "unplaced_bytes"


def _model(frame: pd.DataFrame, measure: Measure, count: int) -> Component:
    """Return the card of the senders and receivers in the model, and of the bytes that are in no cell.

    These bytes are the mean of ``count`` steps, as in the matrix.
    """
    if measure is EXECUTED and frame.attrs["executed_reason"]:
        measure = ISSUED
    models = frame.attrs["executed_models" if measure is EXECUTED else "models"]
    lines = [html.Li(f"{op}: {model}.") for op, model in models.items()]
    unplaced = frame.attrs[_unplaced(measure)]
    if unplaced:
        lines.append(
            html.Li(
                f"{api.format_bytes(unplaced / count)}{' per step' if count > 1 else ''} are in no cell: their root or "
                "receiver is not known."
            )
        )
    if not lines:
        return messages.message("No model", "The selection sends no bytes.")
    return cards.text_card(
        "model",
        "Senders and receivers in the model",
        "gloo's algorithms, from its sources and measured."
        if measure is EXECUTED
        else "A trace does not show the links that a backend uses; the page Alignment shows NCCL's rings and trees.",
        [html.Ul(lines, className="sentences")],
    )


def _counters(frame: pd.DataFrame) -> Component:
    title = "Moved, by the counters of the hosts"
    reason = frame.attrs.get("reason")
    if frame.empty:
        return messages.message(
            title,
            f"{reason or 'No counters were read.'} Read them at each step with:",
            ["commprof run --wire train.py"],
        )
    return cards.table_card(
        "moved",
        title,
        "Moved bytes per host and interface over the whole run: counters do not distinguish ranks, operations or steps."
        + (f" Not the complete run: {reason}." if reason else ""),
        frame,
        [
            Field("host", "Host"),
            Field("device", "Interface"),
            Field("sent_bytes", "Sent", api.format_bytes, numeric=True),
            Field("received_bytes", "Received", api.format_bytes, numeric=True),
            Field("seconds", "Seconds", "{:.1f}".format, numeric=True),
        ],
    )


PAGE: Final = Page(
    "/matrix", "Traffic matrix", "Which rank sends how much to which?", order=60, render=render
)
