"""The moved level: the counters of each host, beside the model of what its ranks sent over the same time.

The counters see the whole host, other processes included. They can be laid beside the model where every byte that a rank
sends passes one of them: all ranks on one host under gloo (the loopback interface), or one rank on each host (the others).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from commprof.ledger import backends
from commprof.ledger.issue import Issued, Message
from commprof.ledger.levels import PART, Moved
from commprof.schema import Op, wire_bytes

LOOPBACK: Final = "lo"
ALL_DEVICES: Final = "all but lo"
TOLERANCE: Final = 0.02
# Headers of packets, barriers and connections: below this a model says nothing of counters.
LEAST_BYTES: Final = 1_000_000
NO_READINGS: Final = "no counters were read during the run"
SEVERAL_RANKS: Final = (
    "several ranks share a host, and what they send each other crosses no interface that another host sees"
)
NOT_GLOO: Final = "on one host only gloo's traffic passes the loopback interface"


class Sent(NamedTuple):
    """Modelled bytes that all ranks together send; ``least`` where they are a lower bound."""

    total: float
    least: bool


def modelled(steps: Sequence[Mapping[Message, int]]) -> Sent:
    """What the ranks of all groups together send for the messages of ``steps``, as executed."""
    total, least = 0.0, False
    for messages in steps:
        for message, count in messages.items():
            size = 1 if message.op in (Op.SEND, Op.RECV) else message.group_size
            if backends.known(message.backend):
                run = backends.execution(message.op, message.payload_bytes, message.group_size)
                total += run.wire_bytes * size * count
                least |= run.least
            else:
                total += wire_bytes(message.op, message.payload_bytes, message.group_size) * size * count
    return Sent(total, least)


def moved(
    wire: pa.Table, issued: Issued, hosts: Sequence[str], uncovered: Mapping[str, str]
) -> tuple[Moved, ...]:
    """What each host moved: over the training steps where readings were taken at steps, else over the run.

    Args:
        wire: the ``wire`` table.
        issued: the messages of each step.
        hosts: the host of every rank.
        uncovered: host -> what its readings leave out of the run.
    """
    rows = [row for row in wire.to_pylist() if row["kind"] == "interface"]
    by_device: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_device[row["host"], row["device"]].append(row)
    ranks = Counter(hosts)
    reason = _why_not_comparable(ranks, issued)
    wants_loopback = len(ranks) == 1
    found = []
    for host in sorted({host for host, _ in by_device}):
        devices = [
            device for name, device in by_device if name == host and (device == LOOPBACK) == wants_loopback
        ]
        readings = [by_device[host, device] for device in devices]
        if not readings:
            continue
        label = LOOPBACK if wants_loopback else devices[0] if len(devices) == 1 else ALL_DEVICES
        row = _of_host(host, label, readings, issued, 1 if wants_loopback else len(hosts), reason)
        left_out = uncovered.get(host) if row.when == "run" else None
        found.append(
            row if left_out is None else row._replace(when=PART, expected_bytes=None, reason=left_out)
        )
    return tuple(found)


def _why_not_comparable(ranks: Mapping[str, int], issued: Issued) -> str | None:
    if not ranks:
        return "the hosts of the ranks are not known"
    if len(ranks) > 1:
        return SEVERAL_RANKS if max(ranks.values()) > 1 else None
    used = {message.backend for messages in issued.values() for message in messages}
    return None if used <= {backends.GLOO} else NOT_GLOO


def _of_host(
    host: str,
    device: str,
    readings: Sequence[Sequence[Mapping[str, Any]]],
    issued: Issued,
    shares: int,
    reason: str | None,
) -> Moved:
    """``shares``: hosts that the bytes of all ranks are spread over."""
    spans = [_step_span(rows) for rows in readings]
    if all(span is not None for span in spans):
        first = min(span[0]["step"] for span in spans if span is not None)
        last = max(span[1]["step"] for span in spans if span is not None)
        steps = [messages for key, messages in issued.items() if first < key.step <= last]
        when, number = "steps", last - first
    else:
        spans = [(rows[0], rows[-1]) for rows in (sorted(r, key=lambda x: x["time_ns"]) for r in readings)]
        steps, when, number = list(issued.values()), "run", 0
    sent = sum(_difference(span, "sent_bytes") for span in spans if span is not None)
    received = sum(_difference(span, "received_bytes") for span in spans if span is not None)
    model = modelled(steps)
    if reason is None and model.total / shares < LEAST_BYTES:
        reason = f"too little to compare: the model has {round(model.total / shares):,} bytes, of which headers are no part"
    if reason is None and model.least:
        reason = "gloo sends more for a reduce of more than 2n MiB than its model, which is a lower bound"
    expected = None if reason else model.total / shares
    return Moved(host, device, when, number, sent, received, expected, reason)


def _step_span(rows: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """The readings at the end of the first and of the last step that have one; None for less than two."""
    at_steps = sorted((row for row in rows if row.get("step") is not None), key=lambda row: row["time_ns"])
    if len(at_steps) < 2 or at_steps[0]["step"] >= at_steps[-1]["step"]:
        return None
    return at_steps[0], at_steps[-1]


def _difference(span: tuple[Mapping[str, Any], Mapping[str, Any]], name: str) -> int:
    before, after = int(span[0][name]), int(span[1][name])
    return after - before if after >= before else after


def agrees(row: Moved) -> bool | None:
    """Whether counters and model are within 2 %; None where they cannot be compared."""
    if row.expected_bytes is None:
        return None
    return abs(row.sent_bytes - row.expected_bytes) <= TOLERANCE * row.expected_bytes
