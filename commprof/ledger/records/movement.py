"""The moved level: compares the counters of each host with the modeled bytes that its ranks sent in the same time.

The counters include the traffic of all processes of the host. On a single host with gloo, every byte that a rank sends
passes the loopback interface. On several hosts, the bytes that a rank sends to a different host pass the other
interfaces. Each host is compared with the sum over its own ranks (:func:`backends.flows`). If it is not known how the
bytes of an operation are distributed over the ranks, only the sum over all hosts is compared.

Headers of packets are subtracted if packets were counted. A deficit of up to 2 % of the model is tolerated. A surplus
is tolerated up to 2 % plus the backend's own headers and TCP's retransmissions (``Moved.allowed_bytes``). Bytes in
TCP's send buffers at the first reading were issued before this reading and may be counted after it. Bytes in the send
buffers at the last reading are not counted yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa

from commprof import schema
from commprof.ledger.levels import PART, RUN, STEPS, Moved
from commprof.ledger.records import backends
from commprof.ledger.records.sendings import Sending, Sendings

ALL_DEVICES: Final = "all but lo"
ALL_HOSTS: Final = "all hosts"
TOLERANCE: Final = 0.02
# Below this size, the headers of packets, barriers and connections dominate, and the model is not accurate.
LEAST_BYTES: Final = 1_000_000
NO_READINGS: Final = "no counters were read during the run"
UNKNOWN_HOSTS: Final = "the hosts of the ranks are not known"
SEVERAL_RANKS: Final = "several ranks share a host, and it is not known how much crosses between hosts under "
SEVERAL_ATTEMPTS: Final = (
    "the job ran in {} attempts, and it is not known what the last collectives of a stopped attempt sent"
)
NOT_GLOO: Final = "on one host only gloo's traffic passes the loopback interface"
_HEADER_BYTES: Final = 66  # headers of a packet: Ethernet, IPv4, TCP with timestamps
# Measured bytes for each message: gloo's own header, and the same with packet headers if packets are not counted.
# The last value is the measured number of TCP acknowledgment bytes per received byte.
_WORDS_BYTES: Final = 150
_MESSAGE_BYTES: Final = 300
_ACKNOWLEDGED: Final = 0.0005
_MOST_WORDS: Final = 0.009  # If headers exceed this share of the sent bytes, an excess proves nothing.
_SEGMENT_BYTES: Final = 1514  # the largest frame of a TCP segment on Ethernet
_START_BYTES: Final = 100_000  # traffic of connections and of the store, if the readings cover the whole run

Span: TypeAlias = tuple[Mapping[str, Any], Mapping[str, Any]]


class _Model:
    """The modeled bytes that the ranks of each host send to other hosts, and the total of all hosts.

    Attributes:
        sent, received: The bytes that each host sends and receives.
        messages: The number of messages that each host sends and receives.
        total: The bytes that all hosts send.
        uneven: The reason why the bytes of each host are not known, or None.
        unknown: The reason why even the total is not known, or None.
    """

    def __init__(self, unknown: str | None = None) -> None:
        self.sent: dict[str, float] = defaultdict(float)
        self.received: dict[str, float] = defaultdict(float)
        self.messages: dict[str, int] = defaultdict(int)
        self.total = 0.0
        self.uneven: str | None = None
        self.unknown = unknown

    def add(self, sending: Sending, places: Sequence[str], count: int) -> None:
        """Add ``count`` times ``sending`` between ranks on the hosts ``places``, which has one host per rank."""
        flows = backends.flows(sending.call)
        apart = len(set(places))
        if apart == 1 or flows.total == 0:
            return
        if flows.total is None:
            self.unknown = self.unknown or flows.reason
        elif flows.sent is None:
            self.uneven = self.uneven or flows.reason
            self._add_total(flows.total * count, sending, apart < len(places))
        elif any(receiver == backends.ANY for _, receiver in flows.sent):
            self._add_total(flows.total * count, sending, apart < len(places))
            for (sender, _), size in flows.sent.items():
                self.sent[places[sender]] += size * count
        else:
            self._between(flows, places, count)

    def _add_total(self, total: float, sending: Sending, shared: bool) -> None:
        if shared:
            self.unknown = self.unknown or f"{SEVERAL_RANKS}{sending.call.backend or 'an unknown backend'}"
        self.total += total

    def _between(self, flows: backends.Flows, places: Sequence[str], count: int) -> None:
        for (sender, receiver), size in (flows.sent or {}).items():
            if places[sender] != places[receiver]:
                self.sent[places[sender]] += size * count
                self.received[places[receiver]] += size * count
                self.total += size * count
                for host in (places[sender], places[receiver]):
                    self.messages[host] += flows.messages * count


class Movement(NamedTuple):
    """The comparison of each host with the model, and of all hosts together if some host has no model of its own."""

    hosts: tuple[Moved, ...]
    together: Moved | None = None


def moved(
    wire: pa.Table,
    sendings: Sendings,
    hosts: Mapping[int, str],
    uncovered: Mapping[str, str],
    attempts: int = 1,
) -> Movement:
    """Compare the bytes that each host moved with the model.

    The comparison covers the training steps if readings were taken at steps, and the whole run otherwise.

    Args:
        wire: The ``wire`` table.
        sendings: The operations of each step.
        hosts: The host of every rank.
        uncovered: A clause for each host with the part of the run that its readings do not cover.
        attempts: The number of attempts of the job. The bytes sent by the last collectives of a stopped attempt are not
            known.
    """
    by_device: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in wire.to_pylist():
        if row["kind"] == "interface":
            by_device[row["host"], row["device"]].append(row)
    on_one = len(set(hosts.values())) == 1
    counted = []
    for host in sorted({host for host, _ in by_device}):
        devices = [
            device for name, device in by_device if name == host and (device == schema.LOOPBACK) == on_one
        ]
        if devices:
            label = devices[0] if len(devices) == 1 else ALL_DEVICES
            counted.append(_counted(host, label, [by_device[host, device] for device in devices]))
    modelled = _on_one_host if on_one else _between_hosts
    models = {steps: modelled(sendings.between(steps), hosts) for steps in {one.steps for one in counted}}
    outside = {steps: modelled(sendings.outside(steps), hosts) for steps in models}
    stopped = SEVERAL_ATTEMPTS.format(attempts) if attempts > 1 else None
    rows = [
        _compared(
            one,
            models[one.steps],
            on_one,
            None if one.steps else uncovered.get(one.host),
            None if one.steps else stopped,
        )._replace(outside_bytes=_known(outside[one.steps], one.host))
        for one in counted
    ]
    return Movement(
        tuple(rows), None if on_one else _compared_together(counted, rows, models, set(hosts.values()))
    )


class _Counted(NamedTuple):
    """The differences of the counters of one host between the first and the last reading.

    Attributes:
        host: The name of the host.
        device: The interface.
        steps: The steps at whose ends the first and the last reading were taken. None if the readings cover the run.
        sent, received: The bytes that were sent and received.
        resent: The bytes of retransmitted segments.
        headers: The bytes of packet headers. None if packets were not counted.
        queued: The bytes in TCP's send buffers at the first and at the last reading. None if they were not read.
    """

    host: str
    device: str
    steps: tuple[int, int] | None
    sent: int
    received: int
    resent: int
    headers: int | None
    queued: tuple[int, int | None]


def _counted(host: str, device: str, readings: Sequence[Sequence[Mapping[str, Any]]]) -> _Counted:
    at_steps = [span for span in map(_step_span, readings) if span is not None]
    steps = None
    spans: list[Span] = at_steps
    if len(at_steps) == len(readings):
        steps = min(span[0]["step"] for span in spans), max(span[1]["step"] for span in spans)
    else:
        ordered = (sorted(rows, key=lambda row: row["time_ns"]) for rows in readings)
        spans = [(rows[0], rows[-1]) for rows in ordered]
    sent, received = (
        sum(_difference(span, name) for span in spans) for name in ("sent_bytes", "received_bytes")
    )
    resent = max(_difference(span, "resent_segments") for span in spans)
    packets = None
    if all(reading.get("sent_packets") is not None for span in spans for reading in span):
        packets = sum(_difference(span, "sent_packets") for span in spans)
    headers = None if packets is None else _HEADER_BYTES * packets
    return _Counted(host, device, steps, sent, received, resent * _SEGMENT_BYTES, headers, _queued(spans))


def _queued(spans: Sequence[Span]) -> tuple[int, int | None]:
    """Return the bytes in send buffers at the first and the last reading.

    The last value is not known if the process was killed.
    """
    known = [
        [span[end]["queued_bytes"] for span in spans if span[end].get("queued_bytes") is not None]
        for end in (0, 1)
    ]
    # All interfaces except loopback have the same value. An older trace without the value is compared by counters only.
    first, last = (max(values, default=None) for values in known)
    return first or 0, 0 if first is None and last is None else last


def _step_span(rows: Sequence[Mapping[str, Any]]) -> Span | None:
    """Return the readings at the end of the first and the last step with a reading. None if there are not two."""
    at_steps = sorted((row for row in rows if row.get("step") is not None), key=lambda row: row["time_ns"])
    if len(at_steps) < 2 or at_steps[0]["step"] >= at_steps[-1]["step"]:
        return None
    return at_steps[0], at_steps[-1]


def _difference(span: Span, name: str) -> int:
    before, after = (int(reading.get(name) or 0) for reading in span)
    return after - before if after >= before else after


def _on_one_host(sent: Mapping[Sending, int], hosts: Mapping[int, str]) -> _Model:
    """Return the model of the bytes that pass the loopback interface of a single host: all bytes of ``sent``."""
    model = _Model()
    (host,) = set(hosts.values())
    for sending, count in sent.items():
        flows = backends.flows(sending.call)
        if not backends.known(sending.call.backend):
            model.unknown = NOT_GLOO
        elif flows.total is None:
            model.unknown = model.unknown or flows.reason
        else:
            model.sent[host] += flows.total * count
    return model


def _between_hosts(sent: Mapping[Sending, int], hosts: Mapping[int, str]) -> _Model:
    """Return the model of the bytes of ``sent`` that pass between hosts."""
    model = _Model(None if hosts else UNKNOWN_HOSTS)
    for sending, count in sent.items():
        if set(sending.members) <= hosts.keys():
            model.add(sending, [hosts[rank] for rank in sending.members], count)
        else:
            model.unknown = UNKNOWN_HOSTS
    return model


def _known(model: _Model, host: str) -> float | None:
    return None if model.unknown or model.uneven else model.sent.get(host, 0.0)


def _compared(one: _Counted, model: _Model, on_one: bool, left_out: str | None, stopped: str | None) -> Moved:
    """Compare one host with its model.

    Extra bytes on loopback are not judged, because all programs of the host use this interface.
    """
    if left_out is not None:
        return _row(one, None, None, left_out)._replace(when=PART)
    expected = model.sent.get(one.host, 0.0)
    reason = (
        stopped
        or model.unknown
        or (model.uneven and f"{model.uneven}: only the sum over the hosts is compared")
    )
    if reason is None and expected < LEAST_BYTES:
        reason = f"too little to compare: the model has {round(expected):,} bytes, without headers"
    allowed = None
    if reason is None and not on_one:
        received, messages = model.received.get(one.host, 0.0), model.messages.get(one.host, 0)
        allowed = _allowed(one, expected, received, messages, _START_BYTES)
    return _row(one, None if reason else expected, allowed, reason)


def _allowed(one: _Counted, expected: float, received: float, messages: float, start: int) -> float | None:
    """Return the bytes that may be sent in addition to ``expected``.

    None means that these bytes are so many that an excess proves nothing.
    """
    words = messages * (_WORDS_BYTES if one.headers is not None else _MESSAGE_BYTES)
    if one.headers is None:
        words += _ACKNOWLEDGED * received
    if words > _MOST_WORDS * expected:
        return None
    return words + one.resent + (0 if one.steps else start)


def _row(one: _Counted, expected: float | None, allowed: float | None, reason: str | None) -> Moved:
    return Moved(
        host=one.host,
        device=one.device,
        when=STEPS if one.steps else RUN,
        steps=one.steps[1] - one.steps[0] if one.steps else 0,
        sent_bytes=one.sent,
        received_bytes=one.received,
        expected_bytes=expected,
        reason=reason,
        allowed_bytes=allowed,
        header_bytes=one.headers,
        queued_first_bytes=one.queued[0],
        queued_last_bytes=one.queued[1],
    )


def _compared_together(
    counted: Sequence[_Counted],
    rows: Sequence[Moved],
    models: Mapping[tuple[int, int] | None, _Model],
    hosts: set[str],
) -> Moved | None:
    """Compare the sum over all hosts with the model, and return None if this is not needed or not possible.

    The comparison is made if some host has no model of its own and the readings of all hosts cover the same time.
    """
    spans = {one.steps for one in counted}
    if (
        all(row.expected_bytes is not None for row in rows)
        or len(spans) != 1
        or PART in {row.when for row in rows}
    ):
        return None
    (model,) = (models[span] for span in spans)
    if model.unknown or {one.host for one in counted} != hosts or model.total < LEAST_BYTES * len(hosts):
        return None
    summed = _Counted(
        ALL_HOSTS,
        ALL_DEVICES,
        counted[0].steps,
        sum(one.sent for one in counted),
        sum(one.received for one in counted),
        sum(one.resent for one in counted),
        _sum(one.headers for one in counted),
        (sum(one.queued[0] for one in counted), _sum(one.queued[1] for one in counted)),
    )
    # An unknown algorithm may send more than the best algorithm, so an excess is not judged.
    allowed = None
    if model.uneven is None:
        messages = sum(model.messages.values()) / 2
        allowed = _allowed(summed, model.total, model.total, messages, _START_BYTES * len(hosts))
    return _row(summed, model.total, allowed, None)


def _sum(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value or 0 for value in known)


def is_short(row: Moved) -> bool:
    """Return whether fewer bytes were moved than the executed operations need. False if a deficit is not judged."""
    if row.expected_bytes is None or row.queued_last_bytes is None:
        return False
    return _without_headers(row) + row.queued_last_bytes < row.expected_bytes * (1 - TOLERANCE)


def is_long(row: Moved) -> bool:
    """Return whether more bytes were moved than the executed operations explain. False if an excess is not judged."""
    if row.expected_bytes is None or row.allowed_bytes is None:
        return False
    certain = _without_headers(row) - row.queued_first_bytes
    return certain > row.expected_bytes * (1 + TOLERANCE) + row.allowed_bytes


def _without_headers(row: Moved) -> int:
    return row.sent_bytes - (row.header_bytes or 0)
