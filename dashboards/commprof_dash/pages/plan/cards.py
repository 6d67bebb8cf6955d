"""Builds the cards of the page Plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd
from dash import html
from dash.development.base_component import Component

from commprof.analysis import api
from commprof.plan import api as plan_api
from commprof.plan.api import Row
from commprof_dash.components import cards, messages
from commprof_dash.components.tables import Cell, Field
from commprof_dash.measures import format_count
from commprof_dash.pages.plan import charts
from commprof_dash.pages.plan.data import FRAMEWORKS, Curves, Planned
from commprof_dash.text_columns import text_column
from commprof_dash.theme import Scheme


def advice(answer: Planned, row: Row, command: str) -> Component:
    """Return the setting to use with the reason, the unknown values, and the equivalent command."""
    plan = answer.plan
    sentences = [
        answer.sentence,
        f"{plan.model.source}; {plan.job.world:,} rank{'s' * (plan.job.world > 1)} on {plan.job.backend}, {plan.hosts}; "
        f"rings connect ranks in rank order; messages are those of {FRAMEWORKS[plan.job.framework]}. The memory "
        "does not include the program and libraries.",
        *(f"{name} is refused: {_sentence(reason)}" for name, reason in plan.refused),
        *_once(_sentence(each) for row in answer.rows for each in row.prediction.decisions),
        *_once(
            f"{row.label}: {_sentence(row.prediction.note)}" for row in answer.rows if row.prediction.note
        ),
        *_once(
            f"Activations are not counted: {_sentence(row.prediction.uncounted)}"
            for row in answer.rows
            if row.prediction.uncounted
        ),
        *_times(answer),
        *(f"{row.label}: {sentence}" for sentence in plan_api.latency_sentences(answer.plan, row.prediction)),
        *(_sentence(remark) for remark in plan.remarks),
    ]
    title = "Recommendation" if answer.chosen is not None else "No recommendation"
    severity = "good" if answer.chosen is not None else "note"
    return messages.sentences(title, sentences, severity=severity, commands=[command])


def _times(answer: Planned) -> list[str]:
    source = answer.plan.timing.source
    if source is None:
        return [f"Times of messages are not known: {_sentence(answer.plan.timing.missing)}"]
    missing = [
        f"Times of messages are not known: {_sentence(row.timed)}"
        for row in answer.rows
        if isinstance(row.timed, str) and row.timed != row.prediction.note
    ]
    recorded = answer.plan.timing.recorded
    narrowed = (
        [] if recorded is None else [f"The bounds of a step are narrowed by {_sentence(recorded.text)}"]
    )
    return [*_once(missing), f"Times are from {_sentence(source.text)}", *narrowed]


def _once(sentences: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(sentences))


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def settings(frame: pd.DataFrame) -> Component:
    """Return the card that compares all settings."""
    fields = [
        Field("setting", "Setting"),
        Field("recommended", "Advice", _mark),
        Field("rank_bytes", "Sent by a rank", _bytes, numeric=True),
        Field("host_bytes", "Sent by a host", _bytes, numeric=True),
        Field("device_bytes", "Device memory", _bytes, numeric=True),
        Field("host_memory_bytes", "Host memory", _bytes, numeric=True),
        Field("messages", "Messages", format_count, numeric=True),
        Field("median_message_bytes", "Median size", _bytes, numeric=True),
        Field("communication_ns", "Communication", api.format_ns, numeric=True),
        Field("step", "Step", numeric=True),
        Field("refused", "Refused"),
    ]
    shown = frame.assign(step=text_column(frame, _bounds))
    known = [field for field in fields if field.column in shown and _says_something(shown[field.column])]
    return cards.table_card(
        "settings",
        "Settings",
        "Wire bytes, messages and time per step, and memory per rank, at the number of ranks above. A host sends to other "
        "hosts. Device memory is the peak, or the sum of all kinds where activations are not counted.",
        shown,
        known,
        download=frame,
    )


def _bounds(row: Any) -> str | None:
    least, most = row["step_least_ns"], row["step_most_ns"]
    if pd.isna(least) or pd.isna(most):
        return None
    return " to ".join(dict.fromkeys([api.format_ns(least), api.format_ns(most)]))


def _says_something(column: pd.Series[Any]) -> bool:
    """Return whether a column has values other than 0."""
    return bool((column.notna() & (column != 0)).any())


def _mark(value: Any) -> Cell:
    return html.Strong("use") if value else ""


def _bytes(value: float) -> str:
    return api.format_bytes(float(value))


def traffic(curves: Curves, label: str, world: int, scheme: Scheme) -> Component:
    """Return the card of wire bytes by purpose over the number of ranks."""
    title = "Traffic by purpose"
    if curves.traffic.empty:
        return cards.empty_card("plan-traffic", title, _why_nothing(curves, "No messages can be predicted."))
    return cards.figure_card(
        "plan-traffic",
        title,
        f"{label}: wire bytes that a rank sends per step (modelled), from 1 to 16,384 ranks. The dotted line is at "
        f"{world:,}.{_batch(curves)}{_gaps(curves)}",
        charts.traffic_over_worlds(curves.traffic, world, scheme),
        curves.traffic,
        [
            Field("world", "Ranks", format_count, numeric=True),
            Field("purpose", "Purpose"),
            Field("wire_bytes", "Wire bytes per rank", _bytes, numeric=True),
        ],
    )


def memory(curves: Curves, label: str, world: int, capacity: int | None, scheme: Scheme) -> Component:
    """Return the card of device memory by kind over the number of ranks."""
    title = "Memory by kind"
    if curves.memory.empty:
        return cards.empty_card("plan-memory", title, _why_nothing(curves, "No memory can be predicted."))
    known = curves.memory["peak_bytes"].notna().any()
    at_once = (
        "Not all kinds are alive at once: the peak is their largest sum."
        if known
        else "Not all may be alive at once."
    )
    away = curves.memory[["host_bytes", "disk_bytes"]].to_numpy().any()
    elsewhere = " The table also has host memory and files." if away else ""
    return cards.figure_card(
        "plan-memory",
        title,
        f"{label}: bytes on the device of a rank, from 1 to 16,384 ranks. {at_once}{elsewhere}"
        f"{_batch(curves)}{_gaps(curves)}",
        charts.memory_over_worlds(curves.memory, world, capacity, scheme),
        curves.memory,
        [
            Field("world", "Ranks", format_count, numeric=True),
            Field("kind", "Kind"),
            Field("device_bytes", "Device", _bytes, numeric=True),
            Field("host_bytes", "Host memory", _bytes, numeric=True),
            Field("disk_bytes", "Files", _bytes, numeric=True),
            Field("peak_bytes", "Peak", _bytes, numeric=True),
            Field("peak_phase", "Peak in the"),
        ],
    )


def times(curves: Curves, label: str, world: int, is_narrowed: bool, scheme: Scheme) -> Component | None:
    """Return the card of message time and step bounds over the number of ranks; None if no time is known.

    Args:
        is_narrowed: Whether a recorded run has narrowed the bounds.
    """
    if curves.times.empty:
        return None
    return cards.figure_card(
        "plan-times",
        "Time of a step",
        f"{label}: the messages of the slowest rank, one after another; with a time of computation also the bounds of the "
        f"step{', narrowed by the recorded run' * is_narrowed}.{_batch(curves)}",
        charts.times_over_worlds(curves.times, world, is_narrowed, scheme),
        curves.times,
        [
            Field("world", "Ranks", format_count, numeric=True),
            Field("communication_ns", "Communication", api.format_ns, numeric=True),
            Field("step_least_ns", "Step, least", api.format_ns, numeric=True),
            Field("step_most_ns", "Step, most", api.format_ns, numeric=True),
        ],
    )


def sizes(frame: pd.DataFrame, label: str, world: int, scheme: Scheme) -> Component:
    """Return the card of the message sizes of a step."""
    title = "Message sizes"
    if frame.empty:
        return cards.empty_card(
            "plan-sizes", title, "The sizes of messages are not known, or there are none."
        )
    return cards.figure_card(
        "plan-sizes",
        title,
        f"{label}: messages of a step at {world:,} rank{'s' * (world > 1)} by the payload of each.",
        charts.by_size(frame, scheme),
        frame,
        [
            Field("from_bytes", "From", _bytes, numeric=True),
            Field("to_bytes", "To less than", _bytes, numeric=True),
            Field("messages", "Messages", format_count, numeric=True),
        ],
    )


def sent(frame: pd.DataFrame, label: str, world: int) -> Component:
    """Return the card of the messages of a step by purpose and operation."""
    title = "Messages of a step"
    if frame.empty:
        return cards.empty_card("plan-messages", title, "No rank sends anything to another.")
    inexact = not frame["exact"].all()
    about = " About: the number depends on the order of gradients or modules." if inexact else ""
    return cards.table_card(
        "plan-messages",
        title,
        f"{label}, at {world:,} rank{'s' * (world > 1)}.{about}",
        frame.assign(
            group=[f"{n} x {size}" for n, size in zip(frame["groups"], frame["group_size"], strict=True)]
        ),
        [
            Field("purpose", "Purpose"),
            Field("op", "Issued"),
            Field("group", "Groups x ranks", numeric=True),
            Field("messages", "Messages", format_count, numeric=True),
            Field("payload_bytes", "Payload", _bytes, numeric=True),
            Field("padding_bytes", "Of it padding", _bytes, numeric=True),
            Field("wire_bytes_per_rank", "Sent by each rank", _bytes, numeric=True),
            Field("between_hosts_bytes", "Of it to other hosts", _bytes, numeric=True),
            *([Field("exact", "Count is", _about)] if inexact else []),
        ],
        download=frame,
    )


def _about(exact: Any) -> str:
    return "exact" if exact else "about"


def _batch(curves: Curves) -> str:
    """Return the assumption of the figures about the batch size.

    It applies to a config whose batch sizes are consistent at only one number of ranks.
    """
    grows = " train_batch_size grows with the ranks: micro-batch and accumulation are those of the config."
    return grows * curves.batch_follows_ranks


def _gaps(curves: Curves) -> str:
    """Return which numbers of ranks are missing, and why the first of them is missing."""
    if not curves.gaps:
        return ""
    worlds = ", ".join(f"{world:,}" for world in curves.gaps)
    return (
        f" No values at {worlds} rank{'s' * (worlds != '1')}: {_sentence(next(iter(curves.gaps.values())))}"
    )


def _why_nothing(curves: Curves, otherwise: str) -> str:
    return _gaps(curves).strip() or otherwise
