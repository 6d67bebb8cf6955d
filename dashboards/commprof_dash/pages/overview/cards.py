"""The cards of the Overview page about judgement and cost: the ledger, exposed time, and what recording cost."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final

import pandas as pd
from dash import html
from dash.development.base_component import Component

from commprof.analysis import api
from commprof_dash.charts import exposure as charts
from commprof_dash.charts import resources as resource_charts
from commprof_dash.components import cards, messages, tables
from commprof_dash.components.tables import Cell, Field
from commprof_dash.measures import format_count
from commprof_dash.text_columns import text_column
from commprof_dash.theme import Scheme

_STATES: Final = {
    "closed": ("The ledger is closed: every byte of training is explained", "good"),
    "mismatch": ("The ledger does not close", "error"),
    "unknown": ("Whether the ledger closes cannot be told", "warning"),
}
_TABLE_ROWS: Final = 300
_EXPOSED: Final = "Exposed and overlapped"


def verdict(found: api.Verdict, facts: Mapping[str, Any]) -> Component:
    """The verdict of ``commprof verify`` in its sentences."""
    title, severity = _STATES[str(found.state)]
    return messages.sentences(title, found.sentences, severity=severity, commands=[_verify(facts)])


def verdict_to_come(facts: Mapping[str, Any]) -> Component:
    """In the place of the verdict, while another process goes through the records."""
    return messages.message(
        "The ledger is being closed",
        f"Another process goes through the {facts['records']:,} records, about ten seconds for ten million. The verdict "
        "appears here. In a terminal:",
        [_verify(facts)],
    )


def verdict_of_no_end(facts: Mapping[str, Any]) -> Component:
    """In the place of the verdict of a large run that is still going."""
    return messages.message(
        "The ledger is not closed yet",
        f"The run is still going and has {facts['records']:,} records so far: its ledger is closed here once it has ended. "
        "Of what is there, in a terminal:",
        [_verify(facts)],
    )


def _verify(facts: Mapping[str, Any]) -> str:
    return shlex.join(["commprof", "verify", str(facts["path"])])


_LATENESS: Final = {
    "late_rank": ("A rank comes late", "warning"),
    "slow_transfer": ("Transfers are slow", "warning"),
    "transfers": ("Transfers take the time", "note"),
    "untold": ("Who is late cannot be told", "note"),
    "nobody": ("No rank stands out", "good"),
}


def lateness(ranks: pd.DataFrame) -> Component:
    """The verdict on late ranks and slow transfers: the sentences of ``commprof report``."""
    title, severity = _LATENESS[ranks.attrs["culprit"]]
    text = ranks.attrs["statement"] or (
        "No rank was the last to come much more often than chance explains, or the others did not wait for it."
    )
    return messages.message(title, text, severity=severity)


def exposure(frame: pd.DataFrame, facts: Mapping[str, Any], scheme: Scheme) -> Component:
    """What a training step stands still for. Unknown is said, and is not 0."""
    known = 0 if frame.empty else int(frame["records"].iloc[-1])
    if not known and facts["summed"]:
        return cards.empty_card(
            "exposure",
            _EXPOSED,
            "Not known: only sums of its collectives were kept (--aggregate), which do not tell when any was under way.",
        )
    if frame.empty:
        why = "No training step of this run ended."
        if facts["steps"] == 0:
            why = "This run has no training steps: commprof.step() tells them where no engine does."
        return cards.empty_card("exposure", _EXPOSED, why)
    whole = {str(name): value for name, value in frame.iloc[-1].items()}
    if not known:
        return cards.empty_card("exposure", _EXPOSED, "Nothing was issued in its training steps.")
    timed = whole["timed"] + whole["bounded"]
    unknown = [f"Of {timed:,} of {whole['records']:,} records the exposed time is known."]
    if timed < whole["records"]:
        unknown = [f"{unknown[0]} So it is at least what is shown."]
    if whole["bounded"]:
        unknown.append(
            f"{whole['bounded']:,} were waited for in C++ (DistributedDataParallel): their exposed time lies between bounds."
        )
    if whole["unwaited"] > whole["bounded"]:
        unknown.append(
            f"For {whole['unwaited'] - whole['bounded']:,} no wait was seen (compiled code waits in C++): what they cost is "
            "not known."
        )
    share = api.exposed_share(whole)
    spent = (
        ""
        if share is None
        else f" {api.exposed_time(whole)}, {share} of the step of {api.format_ns(whole['step_ns'])}."
    )
    table = frame.assign(
        exposed=text_column(frame, api.exposed_time),
        share=text_column(frame, api.exposed_share),
        overlapped=text_column(frame, api.overlapped_time),
    )
    return cards.figure_card(
        "exposure",
        _EXPOSED,
        f"Exposed:{spent} The program was blocked on a collective; mean over the ranks, median of {whole['steps']:,} warm "
        "steps. Overlapped: some were under way and it was blocked on none. A moment counts once; purposes overlap, and all "
        f"is their union, not their sum. {' '.join(unknown)}",
        charts.by_purpose(frame, scheme),
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
    )


def resources(frame: pd.DataFrame, scheme: Scheme) -> Component:
    """What the run used over its steps."""
    title = "Resources over the run"
    columns = ["rss_bytes", "device_bytes", "cores", "gpu_share", "communication_share_low"]
    if frame[columns].isna().all(axis=None):
        return cards.empty_card(
            "resources", title, "No training step of this run ended, or its memory is not known."
        )
    return cards.figure_card(
        "resources",
        title,
        "Memory when a step ended, of the largest rank. Cores busy: CPU time over time. GPUs: as --sample nvml read them.",
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
    """The exposed part of a step of ``api.resource_use`` as text."""
    parts = {f"exposed{end}_ns": row[f"communication_share{end}"] for end in ("", "_low", "_high")}
    return api.exposed_share({**parts, "step_ns": 1})


def cost(facts: Mapping[str, Any]) -> Component:
    """What commprof itself took, and what it left out to take less."""
    spent, share = facts["recorder_ns"], facts["recorder_share"]
    imported = spent is None and facts["records"] > 0
    values: dict[str, Cell] = {
        "Time in the recorder": (
            f"{api.format_ns(spent)} per rank, mean" if spent is not None else "not known"
        ),
        "Of the run's time": "not known" if share is None else share_text(share),
        "Per record": _per_record(facts),
        "Kept as sums only": _or_none(
            facts["summed"], "collectives (--aggregate, or --max-size was reached)"
        ),
        "Outside what was recorded": _or_none(
            facts["outside"], "collectives (--steps, --warmup): not recorded"
        ),
        "Records lost": format_count(facts["lost"]),
    }
    remark = (
        "This run was not recorded by commprof, or its recorder left no account."
        if imported
        else "Its own time in the process, sampled; time that its memory traffic costs elsewhere is not in it."
    )
    return cards.text_card("cost", "What recording cost", remark, [tables.facts(values)])


def share_text(share: float) -> str:
    """A part of the run's time in percent."""
    return f"{100 * share:.2g} %" if share >= 0.0001 else "< 0.01 %"


def _per_record(facts: Mapping[str, Any]) -> Cell:
    ranks, records = facts["ranks_recorded"], facts["records"]
    if facts["recorder_ns"] is None or not ranks or not records:
        return html.Span("not known")
    return f"{api.format_ns(facts['recorder_ns'] * ranks / records)}, start and end of the recording included"


def _or_none(count: int | None, words: str) -> Cell:
    return f"{count:,} {words}" if count else "none"
