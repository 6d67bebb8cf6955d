"""Compute the time of the messages of a step, and bounds of the step time for a given compute time.

A rank is assumed to send its messages one after another. For the lower bound (``least``), all messages that can
overlap computation do so (:mod:`commprof.plan.overlap`). For the upper bound (``most``), no message does. The
slowest rank determines both bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from commprof.calibration.bandwidths import bus_factor, calibrated_op
from commprof.calibration.results import Calibration
from commprof.errors import UsageError
from commprof.plan.hosts import Hosts, Links, Place, equal_ranks, groups_of, places_of
from commprof.plan.nccl_model import SOURCE, Cost, fastest
from commprof.plan.overlap import exposed_messages
from commprof.plan.predictions import Prediction
from commprof.quantities import duration_ns
from commprof.requested.expectation import Expectation
from commprof.requested.parallel import axis_rules
from commprof.requested.zero.flat_stages import Runtime
from commprof.schema import Op

if TYPE_CHECKING:
    from commprof.plan.recorded_steps import RecordedStep

_BEYOND: Final = 2  # a fit is used up to this multiple of the largest calibrated size
_BARRIER_BYTES: Final = 4  # NCCL has no barrier: torch sums a tensor of one number instead


class UnknownTimeError(Exception):
    """The time of a message is not known. The text names the measurement or option that would provide the time."""


class TimeSource(Protocol):
    """A source of the times of messages."""

    @property
    def text(self) -> str:
        """A description of the source, for reports."""

    def cost_of(self, op: str, payload_bytes: float, place: Place) -> Cost:
        """Return the latency and the transfer time of a message.

        Raises:
            UnknownTimeError: The source does not contain this time.
        """


class CalibratedTimes:
    """The times of messages by the fits of a calibration.

    Args:
        calibration: The calibration of one machine. Its latency and bus bandwidth are assumed to apply to other
            numbers of ranks too.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._calibration, self._fits = calibration, calibration.fits()

    @property
    def text(self) -> str:
        """A description of the calibration, for reports."""
        ranks = self._calibration.world_size
        return (
            f"the calibration of {ranks} rank{'s' * (ranks > 1)}, {self._calibration.backend} on "
            f"{self._calibration.device}, whose latency and bus bandwidth other groups are assumed to have"
        )

    def cost_of(self, op: str, payload_bytes: float, place: Place) -> Cost:
        """Return the latency and the transfer time of a message.

        Raises:
            UnknownTimeError: The calibration does not cover the operation or the size.
        """
        name = calibrated_op(Op.ALL_REDUCE if op == Op.BARRIER else op)
        known, wanted = (bus_factor(name, each) for each in (self._calibration.world_size, place.ranks))
        if name not in self._fits or known is None or wanted is None:
            raise UnknownTimeError(f"the calibration has no times of {name}; measure it with --ops {name}")
        largest = max(each.payload_bytes for each in self._calibration.timings[name])
        if payload_bytes > _BEYOND * largest:
            power = (int(payload_bytes) - 1).bit_length()
            raise UnknownTimeError(
                f"the calibration ends at {name} of {largest:,} bytes, and the step sends one of {int(payload_bytes):,}, "
                f"more than twice as many; measure it with --ops {name} --sizes 1024:{1 << power}:4"
            )
        fitted = self._fits[name]
        return Cost(fitted.alpha_ns, fitted.slope * wanted / known)


class NcclTimes:
    """The times of messages by NCCL's model.

    Args:
        links: The rates inside a host and between hosts.
    """

    def __init__(self, links: Links) -> None:
        self._links = links

    @property
    def text(self) -> str:
        """A description of NCCL's model, for reports."""
        return SOURCE

    def cost_of(self, op: str, payload_bytes: float, place: Place) -> Cost:
        """Return the latency and the transfer time of a message.

        Raises:
            UnknownTimeError: The rate of a link is missing.
        """
        cost = fastest(op, payload_bytes, place, self._links)
        if cost is None:
            missing = "inter" if self._links.inter is None and place.hosts > 1 else "intra"
            raise UnknownTimeError(f"--links has no rate {missing}, which {op} needs; add it")
        return cost


class RowTime(NamedTuple):
    """The time of the messages of one purpose and operation on one rank, in one step.

    Attributes:
        purpose, op, group_size: The purpose, the operation and the group size of the messages.
        time_ns: The sum of the times of the messages.
        latency_ns: The part of ``time_ns`` that messages without payload would take.
        overlapping_ns: The part of ``time_ns`` that can overlap computation.
    """

    purpose: str
    op: str
    group_size: int
    time_ns: float
    latency_ns: float
    overlapping_ns: float


class StepTime(NamedTuple):
    """The time of a step.

    Attributes:
        communication_ns: The time of all messages of the rank whose messages take longest.
        latency_ns: The part of ``communication_ns`` that messages without payload would take.
        overlapping_ns: The part of ``communication_ns`` that can overlap computation.
        least_ns: The time of the step if everything that can overlap does. None without a compute time.
        most_ns: The time of the step if nothing overlaps. None without a compute time.
        rows: The times of the messages of the same rank, by purpose and operation.
    """

    communication_ns: int
    latency_ns: int
    overlapping_ns: int
    least_ns: int | None
    most_ns: int | None
    rows: list[RowTime]

    @property
    def typical_ns(self) -> float:
        """The middle of the bounds of the step, or the time of its messages if the bounds are not known."""
        if self.least_ns is None or self.most_ns is None:
            return self.communication_ns
        return (self.least_ns + self.most_ns) / 2

    def by_purpose(self) -> dict[str, int]:
        """Return the time of the messages of each purpose in ns, on the rank whose messages take longest."""
        sums: Counter[str] = Counter()
        for row in self.rows:
            sums[row.purpose] += row.time_ns  # type: ignore[assignment]  # a Counter of floats
        return {purpose: round(total) for purpose, total in sums.items()}


class Timing(NamedTuple):
    """The inputs from which the times of settings are computed.

    Attributes:
        source: The source of the times of messages, or None if none was given.
        missing: The reason why there is no source. Empty if there is one.
        compute_ns: The compute time of a rank in a step, in ns, or None if it is not known.
        framework: The runtime that issues the messages.
        recorded: The recorded step of a run, or None. Its fraction of overlapped communication narrows the bounds
            of a step.
    """

    source: TimeSource | None
    missing: str
    compute_ns: int | None
    framework: Runtime = "zero_runtime"
    recorded: RecordedStep | None = None

    def of(self, prediction: Prediction, hosts: Hosts) -> StepTime | str:
        """Return the time of a step of the predicted setting, or the reason why it is not known."""
        if self.source is None:
            return self.missing
        if prediction.note:
            return prediction.note
        steps = axis_rules.micro_batches(prediction.config, prediction.axes)
        exposed = exposed_messages(prediction.config, steps, self.framework)
        try:
            bounds = step_time(prediction.sent, hosts, self.source, exposed, self.compute_ns)
        except UnknownTimeError as problem:
            return str(problem)
        return bounds if self.recorded is None else narrowed(bounds, self.recorded)


def narrowed(bounds: StepTime, recorded: RecordedStep) -> StepTime:
    """Return ``bounds`` narrowed by the fraction of communication that overlapped in the recorded run.

    The same fraction of the communication that can overlap is assumed to overlap. The result is within ``bounds``.

    >>> from commprof.plan.recorded_steps import RecordedStep
    >>> run = RecordedStep(None, 100, 0.25, 0.5, ("gradient_reduce",))
    >>> narrowed(StepTime(60, 0, 40, 120, 160, []), run)[3:5]
    (140, 150)
    """
    if bounds.least_ns is None or bounds.most_ns is None:
        return bounds
    ends = [
        round(bounds.most_ns - hidden * bounds.overlapping_ns)
        for hidden in (recorded.most_hidden, recorded.least_hidden)
    ]
    least, most = (min(max(each, bounds.least_ns), bounds.most_ns) for each in ends)
    return bounds._replace(least_ns=least, most_ns=most)


def timing_by(
    calibration: Calibration | None, links: Links | None, backend: str, compute_ns: int | None
) -> Timing:
    """Return a timing by ``calibration``, or without one by NCCL's model at the rates of ``links``."""
    if calibration is not None:
        return Timing(CalibratedTimes(calibration), "", compute_ns)
    if backend != "nccl":
        return Timing(None, f"there is no model of {backend}; give --calibration", compute_ns)
    if links is None:
        return Timing(None, "give --calibration, or --links for NCCL's model", compute_ns)
    return Timing(NcclTimes(links), "", compute_ns)


def parse_duration(text: str, name: str) -> int:
    """Parse a duration such as ``900ms`` or ``1.5s``, and return it in nanoseconds.

    Raises:
        UsageError: The text is not a duration. The message names ``name``, the option.
    """
    ns = duration_ns(text)
    if ns is None:
        raise UsageError(f"{name} is {text!r}; expected a time with its unit, such as 900ms or 1.5s")
    return ns


def step_time(
    sent: Sequence[Expectation],
    hosts: Hosts,
    source: TimeSource,
    exposed: Mapping[str, int],
    compute_ns: int | None,
) -> StepTime:
    """Return the time of a step that sends ``sent``.

    Args:
        sent: All messages of a step.
        hosts: The hosts of all ranks.
        source: The source of the times of messages.
        exposed: The purposes whose messages can overlap, each with the number of its messages that cannot.
        compute_ns: The compute time of a rank in a step, in ns, or None if it is not known.

    Raises:
        UnknownTimeError: The time of a message is not known.
    """
    times: dict[tuple[int, Place], _Times] = {}
    of_group: dict[Sequence[int], list[tuple[int, Place]]] = {}
    placed: dict[tuple[Sequence[int], ...], list[Place]] = {}
    for number, each in enumerate(sent):
        groups = tuple(groups_of(each, hosts))
        if groups not in placed:
            placed[groups] = places_of(groups, hosts)
        for group, place in zip(groups, placed[groups], strict=True):
            if place.ranks < 2:
                continue
            key = number, place
            if key not in times:
                times[key] = _times(each, place, source)
            of_group.setdefault(group, []).append(key)
    steps = [
        _of_rank(sent, messages, times, exposed, compute_ns)
        for messages in sorted(
            sorted(key for group in groups for key in of_group[group])
            for groups in equal_ranks(of_group, hosts)
        )
    ]
    slowest = max(steps, key=lambda each: each.communication_ns)
    return slowest._replace(
        least_ns=None if compute_ns is None else max(each.least_ns or 0 for each in steps),
        most_ns=None if compute_ns is None else max(each.most_ns or 0 for each in steps),
    )


class _Times(NamedTuple):
    """The time of all messages of a row, its latency part, and the time of the shortest message, in ns."""

    whole: float
    latency: float
    shortest: float


def _times(sent: Expectation, place: Place, source: TimeSource) -> _Times:
    sizes = Counter(sum(each) for each in sent.payloads)
    if sizes.total() != sent.count:
        sizes = Counter({round(sent.payload_bytes / max(1, sent.count)): sent.count})
    if sent.issued_op == Op.BARRIER:
        sizes = Counter({_BARRIER_BYTES: sent.count})
    # A row of messages between neighbors contains those of all ranks. Each message occupies two ranks, the sender
    # and the receiver.
    share = min(1.0, 2 / place.ranks) if sent.issued_op in (Op.SEND, Op.RECV) else 1.0
    costs = {size: source.cost_of(sent.issued_op, size, place) for size in sizes}
    return _Times(
        share * sum(costs[size].time_ns(size) * number for size, number in sizes.items()),
        share * sum(costs[size].latency_ns * number for size, number in sizes.items()),
        min((cost.time_ns(size) for size, cost in costs.items()), default=0.0),
    )


def _of_rank(
    sent: Sequence[Expectation],
    messages: Sequence[tuple[int, Place]],
    times: Mapping[tuple[int, Place], _Times],
    exposed: Mapping[str, int],
    compute_ns: int | None,
) -> StepTime:
    shortest: dict[str, float] = {}
    for number, place in messages:
        purpose = sent[number].purpose
        shortest[purpose] = min(times[number, place].shortest, shortest.get(purpose, float("inf")))
    # It is not known which messages are exposed. The shortest ones are assumed, so that as little as possible is
    # exposed.
    left = {purpose: number * shortest.get(purpose, 0.0) for purpose, number in exposed.items()}
    rows = []
    for number, place in messages:
        each, (duration, latency, _) = sent[number], times[number, place]
        overlapping = 0.0
        if each.purpose in exposed:
            overlapping = max(0.0, duration - left[each.purpose])
            left[each.purpose] -= duration - overlapping
        rows.append(RowTime(each.purpose, each.issued_op, place.ranks, duration, latency, overlapping))
    total, overlapping = sum(row.time_ns for row in rows), sum(row.overlapping_ns for row in rows)
    latency = round(sum(row.latency_ns for row in rows))
    least = most = None
    if compute_ns is not None:
        least = round(max(compute_ns, overlapping) + total - overlapping)
        most = round(compute_ns + total)
    return StepTime(round(total), latency, round(overlapping), least, most, rows)
