"""The page Buckets: the content, fill, flush reason, reduction and duration of each gradient bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import dash
import pandas as pd
from dash import ClientsideFunction, Input, dcc, html
from dash.development.base_component import Component

from commprof.analysis import api
from commprof_dash import address, ids
from commprof_dash.address import Query
from commprof_dash.charts import bucket_charts
from commprof_dash.components import cards, controls, messages
from commprof_dash.components.tables import Cell, Field
from commprof_dash.data import Runs
from commprof_dash.measures import format_count
from commprof_dash.pages.buckets import data as buckets_data
from commprof_dash.pages.index_wait import builds, waiting_for_index
from commprof_dash.pages.one_run import draw_run
from commprof_dash.pages.page import Drawing, Page
from commprof_dash.pages.timeline.data import path_of
from commprof_dash.theme import Scheme

STEP: Final = "step"
GROUP: Final = "group"
BUCKET: Final = "bucket"
MEAN: Final = "mean"

_DRAWN: Final = 400
_BUTTONS: Final = 16
_TABLE_ROWS: Final = 300
_LINKED: Final = 24
_NAMED: Final = 8  # the largest number of buckets that a sentence names
_NOT_SAID: Final = "not said"
# These are the values of flush_reason in schema.py.
_REASONS: Final = {
    "full": "because the next gradient did not fit",
    "end_of_backward": "at the end of the backward pass",
    "oversized": "alone: its gradient is larger than a bucket",
}
_SHORT_REASONS: Final = {
    "full": "next gradient did not fit",
    "end_of_backward": "end of the backward pass",
    "oversized": "gradient larger than a bucket",
}
_NO_RECORD: Final = "No record has the number of this bucket."
_ONLY_SUMS: Final = (
    "Not known: only sums per step were recorded (--aggregate, or --max-size was reached), which have no bucket numbers and "
    "no times."
)
_MEAN_RULE: Final = (
    "Bytes, fill and counts are means over the steps; times are medians over the steps after the first."
)
_STEP_RULE: Final = "Bytes, fill and counts are those of this step; times are means over the ranks."


def render(runs: Runs, query: Query, scheme: Scheme) -> Drawing:
    """Return the page for the run, the step (or the mean of all steps) and the bucket in ``query``."""

    def answers(name: str) -> tuple[Sequence[Component], Sequence[Component]]:
        waiting = builds.wait_for(path_of(runs, name))
        if waiting is not None:
            return [], waiting_for_index(waiting, name)
        view = buckets_data.shown(runs, name, next(iter(query.get(STEP, ())), None))
        if view.frame.empty:
            return [], [_no_buckets()]
        groups = view.groups
        group = buckets_data.group_with(groups, next(iter(query.get(GROUP, ())), None))
        frame = view.of_group(group)
        steps = [str(step) for step in view.of_steps["step"].drop_duplicates()]
        mean = view.step is None
        step = MEAN if view.step is None else str(view.step)
        labels = list(dict.fromkeys(frame["label"]))
        chosen = _label(next(iter(query.get(BUCKET, ())), ""), labels)
        controls_shown = [
            controls.select(STEP, "Step", [MEAN, *steps], step, labels={MEAN: "all steps"}),
            # A few buckets can be selected with one click. If there are many, a click on a bar selects a
            # bucket.
            controls.segmented(BUCKET, "Bucket", dict(zip(labels, labels, strict=True)), chosen)
            if len(labels) <= _BUTTONS
            else controls.select(BUCKET, "Bucket", labels, chosen),
        ]
        if len(groups) > 1:
            controls_shown.insert(0, controls.select(GROUP, "Ranks that reduce it", groups, group))
        bucket = frame[frame["label"] == chosen].iloc[-1]
        return controls_shown, [
            _told(bucket, mean),
            *(_unlike_ranks(view.of_steps)),
            *(_unlike_steps(frame) if mean else []),
            _table(frame, name, step, group if len(groups) > 1 else None, chosen),
            cards.columns([_sizes(frame, mean, scheme), _times(frame, mean, scheme, view.only_sums)]),
            _tiles(view, group, len(groups)),
            *_one(runs, name, bucket, view),
        ]

    return draw_run(runs, query, answers)


def _label(wanted: str, labels: Sequence[str]) -> str:
    """Return the label that equals ``wanted``, with or without its micro-batch, or else the first label."""
    names = (wanted, wanted.partition(".")[2], f"0.{wanted}")
    return next((name for name in names if name in labels), labels[0])


def _no_buckets() -> Component:
    return messages.message(
        "No gradient buckets",
        "This run has no buckets: its runtime does not publish them (zero_runtime, DeepSpeed, DDP and FSDP do), it "
        "ended before the first was sent, or it was imported from a tool that does not record them. Your own runtime can "
        "call commprof.hooks.describe_bucket(...) for each. Record a run with buckets:",
        ["commprof run train.py --config ds.json"],
    )


def _told(bucket: pd.Series[Any], mean: bool) -> Component:
    """Return one line about the selected bucket: its content, why it was sent, and how."""
    numel = f"{format_count(bucket['numel'])} elements"
    if pd.isna(bucket["parameters"]):
        holds = f"{numel}; its runtime reports no parameters"
    else:
        names = str(bucket["parameters"]).split(",")
        between = " to " if len(names) > 2 else " and "
        ends = between.join(dict.fromkeys((names[0], names[-1])))
        holds = f"{ends} ({_of('parameter', len(names))}, {numel})"
    size = api.format_bytes(bucket["bytes"])
    fill = "" if pd.isna(bucket["fill"]) else f", {100 * bucket['fill']:.0f} % of its capacity"
    why = " or ".join(_REASONS.get(one, one) for one in _reasons_in(bucket["flush_reason"]))
    sent = [f"It was sent {why}" if why else "It was sent (its runtime does not report why)"]
    if pd.notna(bucket["collectives"]) and bucket["collectives"]:
        sent.append(f"reduced by {_of(str(bucket['series']), bucket['collectives'])}")
    if pd.notna(bucket["exposed_ns"]):
        over = "median of the steps after the first" if mean else "mean of the ranks"
        sent.append(f"exposed for {api.format_ns(bucket['exposed_ns'])} ({over})")
    return messages.line(f"Bucket {bucket['label']}", f"{holds}: {size}{fill}. {', '.join(sent)}.")


def _reasons_in(value: Any) -> list[str]:
    """Return the flush reasons of a bucket: several if its steps differ; none if its runtime reports none."""
    return [] if pd.isna(value) else str(value).split(", ")


def _short_reasons(value: Any) -> Cell:
    return " or ".join(_SHORT_REASONS.get(one, one) for one in _reasons_in(value))


def _of(noun: str, count: float) -> str:
    return f"{count:.4g} {noun}" + ("" if count == 1 else "s")


def _unlike_ranks(of_steps: pd.DataFrame) -> list[Component]:
    """Return a notice of buckets whose elements or parameters differ between ranks.

    A correct run has no such buckets.
    """
    unlike = of_steps["unlike"].sum()
    if not unlike:
        return []
    return [
        messages.line(
            "Ranks differ",
            f"The elements or parameters of {format_count(unlike)} buckets of the run are not the same on all ranks that "
            "reduce them. This page shows those of the lowest rank.",
            severity="warning",
        )
    ]


def _unlike_steps(frame: pd.DataFrame) -> list[Component]:
    """Return a notice of buckets whose mean excludes some steps, because their content was different in these steps."""
    changed = [str(label) for label in frame.loc[~frame["steady"].astype(bool), "label"]]
    if not changed:
        return []
    more = f" and {len(changed) - _NAMED:,} more" if len(changed) > _NAMED else ""
    which = f"Bucket {changed[0]}" if len(changed) == 1 else f"Buckets {', '.join(changed[:_NAMED])}{more}"
    return [
        messages.message(
            "Not the same buckets in every step",
            f"{which} held other parameters in some steps; DDP, for example, rebuilds its buckets after the first step. "
            "Each row below covers the steps with the most frequent content; choose a step above to see another.",
        )
    ]


def _tiles(view: buckets_data.Shown, group: str, groups: int) -> Component:
    mean, rows = view.step is None, view.of_step
    per_step, sent = rows["buckets"].sum(), bool(rows["collectives"].any())
    fill = view.of_group(group)["fill"].mean()
    together = f", of {groups} groups of ranks" if groups > 1 else ""
    filled = rows.assign(flush_reason=rows["flush_reason"].fillna(_NOT_SAID))
    reasons = filled.groupby("flush_reason")["buckets"].sum().sort_values(ascending=False, kind="stable")
    return cards.tiles(
        [
            cards.tile(
                "Buckets of the step",
                f"{per_step:.4g}" if per_step % 1 else format_count(per_step),
                f"{api.format_bytes(rows['bytes'].sum())} as they travel{together}"
                + (", mean of the steps" if mean else ""),
            ),
            cards.tile(
                "Fill",
                "not known" if pd.isna(fill) else f"{100 * fill:.0f} %",
                "its runtime names no capacity"
                if pd.isna(fill)
                else "elements over capacity, mean of the buckets above",
            ),
            cards.tile(
                "Wire bytes of the step",
                api.format_bytes(_wire(rows)) if sent else "not known",
                f"modelled for {_wire_of(rows)}: bytes that a rank of a group sends{_as_issued(rows)}"
                + (f", added up over {groups} groups" if groups > 1 else "")
                if sent
                else "only sums were recorded, without bucket numbers"
                if view.only_sums
                else "no record has a bucket number",
            ),
            cards.tile(
                "Why they were sent",
                _SHORT_REASONS.get(str(reasons.index[0]), str(reasons.index[0]))
                if len(reasons)
                else _NOT_SAID,
                "its runtime reports no reason"
                if list(reasons.index) == [_NOT_SAID]
                else ", ".join(
                    f"{_SHORT_REASONS.get(str(reason), reason)}: {count:.4g}"
                    for reason, count in reasons.items()
                )
                + (" (buckets of a mean step)" if mean else " (buckets)"),
            ),
        ]
    )


def _wire(rows: pd.DataFrame) -> float:
    """Return the sum of the executed wire bytes of ``rows``, or of the issued wire bytes if these are unknown."""
    executed = rows["executed_wire_bytes"]
    return float((rows["wire_bytes"] if executed.isna().any() else executed).sum())


def _wire_of(rows: pd.DataFrame) -> str:
    return "the issued operation" if rows["executed_wire_bytes"].isna().any() else "the executed operation"


def _as_issued(rows: pd.DataFrame) -> str:
    """Return the issued wire bytes as text, if they differ from :func:`_wire`."""
    shown, issued = api.format_bytes(_wire(rows)), api.format_bytes(rows["wire_bytes"].sum())
    return "" if shown == issued else f"; {issued} as issued"


def _drawn(frame: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    if len(frame) <= _DRAWN:
        return frame, ""
    return frame.head(_DRAWN), f" The first {_DRAWN} of {len(frame):,}."


def _capacity_told(drawn: pd.DataFrame) -> str:
    capacities = bucket_charts.capacities(drawn).dropna()
    if capacities.empty:
        return ""
    if bucket_charts.are_drawn(drawn):
        return "; dashes: its capacity"
    return f"; its capacity, {api.format_bytes(capacities.min())}, is far above what is drawn"


def _sizes(frame: pd.DataFrame, mean: bool, scheme: Scheme) -> Component:
    drawn, cut = _drawn(frame)
    over = "Mean over the steps: b" if mean else "B"
    full = _capacity_told(drawn)
    return cards.figure_card(
        "bucket-sizes",
        "What each bucket holds",
        f"{over}ytes of each bucket as sent, by the operation that reduced it{full}. A click above or on "
        f"a bar chooses its bucket.{cut}",
        bucket_charts.sizes(drawn, scheme),
        frame.drop(columns="parameters"),
        [
            Field("label", "Bucket"),
            Field("bytes", "Bytes", api.format_bytes, numeric=True),
            Field("fill", "Fill", "{:.0%}".format, numeric=True),
            Field("series", "Reduced by"),
        ],
        most_rows=_TABLE_ROWS,
    )


def _times(frame: pd.DataFrame, mean: bool, scheme: Scheme, only_sums: bool) -> Component:
    title = "How long each took"
    if frame["duration_ns"].isna().all():
        why = _ONLY_SUMS if only_sums else "No record has the number of one of these buckets."
        return cards.empty_card("bucket-times", title, why)
    drawn, cut = _drawn(frame)
    over = "Median over the steps after the first" if mean else "Mean over the ranks"
    return cards.figure_card(
        "bucket-times",
        title,
        f"{over}: from the first collective of the bucket to its last known end. Exposed: the program was "
        f"blocked on them.{cut}",
        bucket_charts.times(drawn, scheme),
        frame[["label", "duration_ns", "exposed_ns"]],
        [
            Field("label", "Bucket"),
            Field("duration_ns", "Issue to completion", api.format_ns, numeric=True),
            Field("exposed_ns", "Exposed", api.format_ns, numeric=True),
        ],
        most_rows=_TABLE_ROWS,
    )


def _table(frame: pd.DataFrame, name: str, step: str, group: str | None, chosen: str) -> Component:
    of_group = {} if group is None else {GROUP: group}

    def link(label: Any) -> Cell:
        href = address.link("/buckets", run=name, **of_group, step=step, bucket=str(label))
        # dcc.Link has no aria-current, but the line above the table names the selected bucket.
        looks = "run-links chosen" if label == chosen else "run-links"
        return html.Span(dcc.Link(str(label), href=href), className=looks)

    def short(names: Any) -> Cell:
        listed = str(names).split(",")
        more = "" if len(listed) <= 2 else f" and {len(listed) - 2:,} more"
        return ", ".join(one[:60] for one in listed[:2]) + more

    took, exposed = ("Took, median", "Exposed, median") if step == MEAN else ("Took", "Exposed")
    any_record = bool(frame["op"].notna().any())
    reduced = [
        Field("series", "Reduced by"),
        Field("duration_ns", took, api.format_ns, numeric=True),
        Field("exposed_ns", exposed, api.format_ns, numeric=True),
    ]
    sent = [
        Field("collectives", "Collectives", format_count, numeric=True),
        Field("executed_wire_bytes", "Wire bytes", api.format_bytes, numeric=True),
        Field("wire_bytes", "As issued", api.format_bytes, numeric=True),
        Field("between_hosts_bytes", "Between hosts", api.format_bytes, numeric=True),
        Field("padding_bytes", "Padding", api.format_bytes, numeric=True),
    ]
    return cards.table_card(
        "buckets",
        "The buckets of all steps" if step == MEAN else f"The buckets of step {step}",
        f"{'' if group is None else f'Only the buckets that ranks {group} reduce. '}"
        f"{_MEAN_RULE if step == MEAN else _STEP_RULE}",
        frame,
        [
            # Links in many rows would keep the browser busy for a second, and the control above selects
            # buckets, too.
            Field("label", "Bucket", link if len(frame) <= _LINKED else str),
            Field("parameters", "Parameters", short),
            Field("fill", "Fill", "{:.0%}".format, numeric=True),
            Field("flush_reason", "Sent because", _short_reasons),
            Field("bytes", "Bytes", api.format_bytes, numeric=True),
            *(reduced if any_record else []),
            Field("numel", "Elements", format_count, numeric=True),
            Field("owners", "Owners", _owners),
            *(sent if any_record else []),
        ],
        most_rows=_TABLE_ROWS,
    )


def _owners(value: Any) -> Cell:
    owners = str(value).split(",")
    more = "" if len(owners) <= 8 else f", ... ({len(owners):,})"
    return ", ".join(owners[:8]) + more


def _one(runs: Runs, name: str, bucket: pd.Series[Any], view: buckets_data.Shown) -> list[Component]:
    """Return the parameters and records of one bucket.

    They are those of the view's step, or of the last step that has a bucket with this number.
    """
    selected = buckets_data.chosen(runs, name, bucket, view.step)
    if selected is None:
        return []
    which = "" if view.step is not None else ", the last step with this bucket"
    where = f"Bucket {bucket['label']} of step {selected.step}{which}"
    return [
        _operations(where, name, selected.content.operations, view.only_sums),
        _parameters(where, selected.content.parameters),
    ]


def _parameters(where: str, frame: pd.DataFrame) -> Component:
    title = f"{where}: its parameters"
    if frame.empty:
        return cards.empty_card("bucket-parameters", title, "The runtime did not report its parameters.")
    return cards.table_card(
        "bucket-parameters",
        title,
        "In their order in the bucket.",
        frame,
        [
            Field("first_element", "From element", format_count, numeric=True),
            Field("name", "Parameter"),
            Field("shape", "Shape"),
            Field("numel", "Elements", format_count, numeric=True),
            Field("dtype", "Type"),
        ],
        most_rows=_TABLE_ROWS,
    )


def _operations(where: str, name: str, frame: pd.DataFrame, only_sums: bool) -> Component:
    title = f"{where}: how it was reduced"
    if frame.empty:
        return cards.empty_card("bucket-operations", title, _ONLY_SUMS if only_sums else _NO_RECORD)
    rank = int(frame["rank"].iloc[0])

    def link(seq: Any) -> Cell:
        href = address.link("/records", run=name, filter=[f"rank:=:{rank}", f"seq:=:{seq}"])
        shown = dcc.Link(f"{seq}", href=href, title=f"Record {seq} of rank {rank}")
        return html.Span(shown, className="run-links")

    return cards.table_card(
        "bucket-operations",
        title,
        f"The records of rank {rank}, in order of issue"
        + ("." if frame["owner"].isna().all() else "; each part of the bucket goes to its owner."),
        frame,
        [
            Field("seq", "Record", link, numeric=True),
            Field("op", "Operation"),
            Field("intended_op", "Meant"),
            *([] if frame["module"].isna().all() else [Field("module", "Module")]),
            Field("owner", "Owner", str, numeric=True),
            Field("first_element", "From element", format_count, numeric=True),
            Field("numel", "Elements", format_count, numeric=True),
            Field("payload_bytes", "Payload bytes", api.format_bytes, numeric=True),
            Field("duration_ns", "Took", api.format_ns, numeric=True),
            Field("exposed_ns", "Exposed", api.format_ns, numeric=True),
        ],
        most_rows=_TABLE_ROWS,
    )


def register(app: dash.Dash, runs: Runs) -> None:
    """Add the callbacks that select a bucket after a click on its bar.

    Each figure has its own callback, because Dash does not call a callback with a missing input.
    """
    for name in ("bucket-sizes", "bucket-times"):
        app.clientside_callback(
            ClientsideFunction("buckets", "choose"),
            Input(ids.graph(name), "clickData"),
            prevent_initial_call=True,
        )


PAGE: Final = Page(
    "/buckets",
    "Buckets",
    "What does each gradient bucket hold, why was it sent, and how was it reduced?",
    order=70,
    render=render,
    register=register,
)
