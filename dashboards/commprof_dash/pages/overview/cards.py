"""Builds the cards of the page Overview about the ledger, changes, exposed time, and the cost of recording."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pandas as pd
from dash import html
from dash.development.base_component import Component

from commprof.analysis import api
from commprof.prediction import api as prediction_api
from commprof_dash.charts import exposure_chart, resource_charts
from commprof_dash.components import cards, messages, tables
from commprof_dash.components.folds import fold
from commprof_dash.components.tables import Cell, Field
from commprof_dash.measures import format_count
from commprof_dash.pages.overview import data as overview_data
from commprof_dash.pages.overview.data import Advised
from commprof_dash.text_columns import text_column
from commprof_dash.theme import Scheme

_STATES: Final = {
    "closed": ("Ledger closed", "good"),
    "mismatch": ("Ledger does not close", "error"),
    "unknown": ("Cannot tell whether the ledger closes", "warning"),
}
_TABLE_ROWS: Final = 300
_EXPOSED: Final = "Exposed and overlapped"
PROMISING: Final = "promising"
_CHANGES: Final = "Changes worth trying"


def verdict(ledger: api.Verdict, facts: Mapping[str, Any]) -> Component:
    """Return the state of the ledger in lines: the explained bytes, and the requested and issued reduction.

    A fold contains all sentences.
    """
    chip, severity = _STATES[str(ledger.state)]
    if severity == "error" and facts["state"] == "running":
        # The current step is incomplete but counts in the ledger.
        chip, severity = "Ledger does not close so far", "warning"
    reduction = overview_data.reduction(ledger)
    listed = html.Ul([html.Li(text) for text in ledger.sentences], className="sentences")
    return html.Div(
        [
            messages.line(chip, overview_data.accounted(ledger), severity),
            *([] if reduction is None else _reduction(reduction)),
            fold(
                "Requested, issued, executed and moved in sentences",
                [listed, *messages.commands_to_type([_verify(facts)])],
                is_open=severity == "error",
            ),
        ],
        className="lines",
    )


def _reduction(reduction: overview_data.Reduction) -> list[Component]:
    """Return the requested and the issued reduction, and how to get the requested one."""
    lines = [messages.line(reduction.chip, reduction.sentence, "note")]
    if reduction.remedy is not None:
        lines.append(messages.line("What to set", reduction.remedy, "note"))
    return lines


def verdict_to_come(facts: Mapping[str, Any]) -> Component:
    """Return a placeholder for the verdict while another process closes the ledger."""
    return messages.line(
        "The ledger is being closed",
        f"A background process reads {facts['records']:,} records, about ten seconds for ten million. In a terminal: "
        f"{_verify(facts)}",
    )


def verdict_of_no_end(facts: Mapping[str, Any]) -> Component:
    """Return a placeholder for the verdict of a run that is still being recorded.

    It is used if the run is large or if none of its steps has ended.
    """
    return messages.line(
        "The ledger is not closed yet",
        f"The run is still being recorded and has {facts['records']:,} records so far. For these, in a terminal: "
        f"{_verify(facts)}",
    )


def _verify(facts: Mapping[str, Any]) -> str:
    return shlex.join(["commprof", "verify", str(facts["path"])])


def promising_to_come() -> Component:
    """Return a placeholder for the changes worth trying while another process predicts them."""
    return cards.empty_card(PROMISING, _CHANGES, "Predicting other settings from this run: a few seconds.")


def not_promising(why: str) -> Component:
    """Return a card without changes, with the reason in one line."""
    return cards.empty_card(PROMISING, _CHANGES, why)


def promising(advised: Advised, path: Path) -> Component | None:
    """Return the changes worth trying, with gain, reason and commands.

    If there are none, return a line, or None for a run that is being recorded.
    """
    answer = advised.answer
    if answer.is_running:
        return None
    notes = " ".join(answer.sentences)
    if not answer.changes:
        return not_promising(notes)
    listed = [
        html.Li(
            [
                html.Div(
                    [
                        html.Strong(
                            f"{api.format_ns(each.gain_ns)} less ({each.gain_ns / answer.recorded_ns:.0%})"
                        ),
                        f", 80 % interval {api.format_ns(each.gain_low_ns)} to {api.format_ns(each.gain_high_ns)}: ",
                        html.Code(shlex.join(each.words)),
                    ]
                ),
                html.Div(f"{each.why}.{_more_memory(each)}", className="muted"),
            ]
        )
        for each in answer.changes
    ]
    return cards.body_card(
        PROMISING,
        _CHANGES,
        "Predicted from this run, not measured: by how much the step of "
        f"{api.format_ns(answer.recorded_ns)} (mean over ranks) gets shorter.",
        [
            html.Ol(listed, className="changes"),
            fold("Commands to look further, and to prove it", _commands(advised, path)),
            html.P(notes, className="card-subtitle after-commands"),
        ],
        pd.DataFrame(
            {
                "change": [shlex.join(each.words) for each in answer.changes],
                "recorded_step_ns": [answer.recorded_ns for _ in answer.changes],
                **{
                    name: [getattr(each, name) for each in answer.changes]
                    for name in ("step_ns", "low_ns", "high_ns", "gain_ns", "gain_low_ns", "gain_high_ns")
                },
                "memory_bytes": [each.memory_bytes for each in answer.changes],
                "why": [each.why for each in answer.changes],
            }
        ),
    )


def _commands(advised: Advised, path: Path) -> list[Component]:
    answer, calibration = advised
    looks = [prediction_api.predict_command(path, each, calibration) for each in answer.changes]
    proofs = [prediction_api.sweep_command(path, each, answer, calibration) for each in answer.changes]
    proven = [each for each in proofs if each is not None]
    where = html.P(
        f"In {answer.directory}, to measure both settings and compare:",
        className="card-subtitle after-commands",
    )
    return [
        *messages.commands_to_type(looks),
        *([where, *messages.commands_to_type(proven)] if proven else []),
    ]


def _more_memory(change: prediction_api.Change) -> str:
    if not change.more_memory or change.memory_bytes is None:
        return ""
    needed = api.format_bytes(change.memory_bytes)
    return f" Needs {change.more_memory:.0%} more device memory: {needed} without activations."


_LATENESS: Final = {
    "late_rank": ("There is a straggler", "warning"),
    "slow_transfer": ("Transfers are slow", "warning"),
    "transfers": ("Transfers take most of the time", "note"),
    "untold": ("Why a rank is late is not known", "note"),
    "nobody": ("No rank stands out", "good"),
}


def lateness(ranks: pd.DataFrame) -> Component:
    """Return the verdict on late ranks and slow transfers in one line, with the sentences of ``commprof report``."""
    chip, severity = _LATENESS[ranks.attrs["culprit"]]
    text = ranks.attrs["statement"] or (
        "No rank arrived last much more often than chance explains, or the others did not wait for it."
    )
    return messages.line(chip, text, severity)


def straggler(ranks: pd.DataFrame) -> Component | None:
    """Return the same line as :func:`lateness`, or None if ``ranks`` has no culprit."""
    return None if ranks.attrs["culprit"] == "nobody" else lateness(ranks)


def no_steps(facts: Mapping[str, Any]) -> str:
    """Return the reason why a run has no training steps."""
    if is_imported(facts):
        return "This run has no training steps: the imported files name none."
    return "This run has no training steps. Call commprof.step() if no engine reports them."


def is_imported(facts: Mapping[str, Any]) -> bool:
    """Return whether the records come from another tool than commprof's recorder."""
    return facts["recorder_ns"] is None and facts["records"] > 0


def exposed_tile(frame: pd.DataFrame, facts: Mapping[str, Any]) -> Component:
    """Return the tile of the exposed communication of a step.

    Its value is the last row of ``frame``, which the report and the page Compare show, too.
    """
    union = {} if frame.empty else {str(name): value for name, value in frame.iloc[-1].items()}
    time = api.exposed_time(union) if union else None
    share = api.exposed_share(union) if union else None
    only_sums = facts["summed"] and not facts["records"]
    why = "only sums were recorded, without times" if only_sums else "no step has a recorded wait"
    return cards.tile(
        "Exposed communication",
        time or "not known",
        f"{share} of the step" if share else why,
    )


def exposure(frame: pd.DataFrame, facts: Mapping[str, Any], scheme: Scheme) -> Component:
    """Return the card of the exposed communication of a training step.

    Unknown times have a label and are not shown as 0.
    """
    known = 0 if frame.empty else int(frame["records"].iloc[-1])
    # Each reason for an unknown time has its own sentence, because the remedies differ.
    if not known and facts["summed"]:
        return cards.empty_card(
            "exposure",
            _EXPOSED,
            "Not known: only sums of the collectives were recorded (--aggregate), which have no times.",
        )
    if frame.empty:
        why = "No training step of this run ended."
        if facts["steps"] == 0:
            why = no_steps(facts)
        return cards.empty_card("exposure", _EXPOSED, why)
    union = {str(name): value for name, value in frame.iloc[-1].items()}
    if not known:
        return cards.empty_card("exposure", _EXPOSED, "Nothing was issued in its training steps.")
    timed = union["timed"] + union["bounded"]
    unknown = [f"The exposed time is known for {timed:,} of {union['records']:,} records."]
    if timed < union["records"]:
        unknown = [f"{unknown[0]} So the exposed time shown is a lower bound."]
    if union["bounded"]:
        unknown.append(
            f"{union['bounded']:,} have waits in C++ (DistributedDataParallel): only bounds of their exposed time "
            "are known."
        )
    if union["unwaited"] > union["bounded"]:
        unknown.append(
            f"For {union['unwaited'] - union['bounded']:,} no wait was recorded (compiled code waits in C++): their "
            "exposed time is not known."
        )
    share = api.exposed_share(union)
    spent = (
        ""
        if share is None
        else f" {api.exposed_time(union)}, {share} of the step of {api.format_ns(union['step_ns'])}."
    )
    table = frame.assign(
        exposed=text_column(frame, api.exposed_time),
        share=text_column(frame, api.exposed_share),
        overlapped=text_column(frame, api.overlapped_time),
    )
    return cards.figure_card(
        "exposure",
        _EXPOSED,
        f"Exposed:{spent} {' '.join(unknown)}",
        exposure_chart.by_purpose(frame, scheme),
        table,
        [
            Field("purpose", "Purpose"),
            Field("exposed", "Exposed", str, numeric=True),
            Field("share", "Of the step", str, numeric=True),
            Field("overlapped", "Overlapped", str, numeric=True),
            Field("timed", "Timed", format_count, numeric=True),
            Field("bounded", "Bounded", format_count, numeric=True),
            Field("records", "Records", format_count, numeric=True),
            Field("unwaited", "No wait seen", format_count, numeric=True),
        ],
        how=cards.how_to_read(
            "Exposed: the program was blocked on a collective; mean over the ranks, median of "
            f"{union['steps']:,} warm steps. Overlapped: collectives were under way and it was blocked on none. "
            "Concurrent waits count once; purposes overlap, and all is their union, not their sum."
        ),
    )


def resources(frame: pd.DataFrame, scheme: Scheme) -> Component:
    """Return the card of the resources that the run used over its steps."""
    title = "Resources over the run"
    columns = ["rss_bytes", "device_bytes", "cores", "gpu_share", "communication_share_low"]
    if frame[columns].isna().all(axis=None):
        return cards.empty_card(
            "resources", title, "No training step of this run ended, or its memory is not known."
        )
    return cards.figure_card(
        "resources",
        title,
        "Memory at the end of a step, largest rank. Cores busy: CPU time over time. GPU values: from --sample nvml.",
        resource_charts.over_steps(frame, scheme),
        frame.assign(communication=text_column(frame, _communication_share)),
        [
            Field("step", "Step", str, numeric=True),
            Field("rss_bytes", "Resident memory", api.format_bytes, numeric=True),
            Field("device_bytes", "Device memory", api.format_bytes, numeric=True),
            Field("cores", "Cores busy", "{:.2f}".format, numeric=True),
            Field("gpu_share", "GPU utilisation", "{:.1%}".format, numeric=True),
            Field("communication", "Exposed, of the step", str, numeric=True),
        ],
        most_rows=_TABLE_ROWS,
    )


def _communication_share(row: Mapping[str, Any]) -> str | None:
    """Return the exposed share of a step of ``api.resource_use`` as text."""
    bounds = {f"exposed{end}_ns": row[f"communication_share{end}"] for end in ("", "_low", "_high")}
    return api.exposed_share({**bounds, "step_ns": 1})


def cost(facts: Mapping[str, Any]) -> Component:
    """Return the card of the cost of recording, and of the data that was not recorded to reduce this cost."""
    spent, share = facts["recorder_ns"], facts["recorder_share"]
    values: dict[str, Cell] = {
        "Time in the recorder": (
            f"{api.format_ns(spent)} per rank, mean" if spent is not None else "not known"
        ),
        "Of the run's time": "not known" if share is None else share_text(share),
        "Per record": _per_record(facts),
        "Recorded as sums only": _or_none(
            facts["summed"], "collectives (--aggregate, or --max-size was reached)"
        ),
        "Outside of the recorded steps": _or_none(
            facts["outside"], "collectives (--steps, --warmup): not recorded"
        ),
        "Records": f"{format_count(facts['records'])}; {facts['lost']:,} dropped, {facts['unseen']:,} unseen",
    }
    remark = (
        "This run was not recorded by commprof, or its recorder did not report its cost."
        if is_imported(facts)
        else "CPU time of the recorder in the process, sampled. Indirect costs of its memory traffic are not included."
    )
    return cards.text_card("cost", "What recording cost", remark, [tables.facts(values)])


def share_text(share: float) -> str:
    """Return a share of the run's time in percent."""
    return f"{100 * share:.2g} %" if share >= 0.0001 else "< 0.01 %"


def _per_record(facts: Mapping[str, Any]) -> Cell:
    ranks, records = facts["ranks_recorded"], facts["records"]
    if facts["recorder_ns"] is None or not ranks or not records:
        return html.Span("not known")
    return f"{api.format_ns(facts['recorder_ns'] * ranks / records)}, start and end of the recording included"


def _or_none(count: int | None, words: str) -> Cell:
    return f"{count:,} {words}" if count else "none"
