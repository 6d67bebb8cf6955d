"""How long the messages of a step take, and the bounds of the step that follow for a given time of computation.

A rank sends its messages one after another. ``least`` overlaps all messages that can be under way during computation
(:mod:`commprof.plan.overlap`), ``most`` none. The slowest rank decides both.
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

_BEYOND: Final = 2  # times the largest calibrated size, up to which a fit is used
_BARRIER_BYTES: Final = 4  # NCCL has no barrier: torch sums one number


class UnknownTimeError(Exception):
    """The time of a message is not known; the text says what would tell it."""


class TimeSource(Protocol):
    """Tells the times of messages."""

    @property
    def text(self) -> str:
        """What the times are taken from."""

    def cost_of(self, op: str, payload_bytes: float, place: Place) -> Cost:
        """The latency and the transfer of a message. Raises UnknownTimeError."""


class CalibratedTimes:
    """Times by the fits of a calibration.

    Args:
        calibration: of one machine; other numbers of ranks are assumed to have its latency and bus bandwidth.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._calibration, self._fits = calibration, calibration.fits()

    @property
    def text(self) -> str:
        """What the times are taken from."""
        ranks = self._calibration.world_size
        return (
            f"the calibration of {ranks} rank{'s' * (ranks > 1)}, {self._calibration.backend} on "
            f"{self._calibration.device}, whose latency and bus bandwidth other groups are assumed to have"
        )

    def cost_of(self, op: str, payload_bytes: float, place: Place) -> Cost:
        """The latency and the transfer of a message. Raises UnknownTimeError for what was not calibrated."""
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
    """Times by NCCL's model.

    Args:
        links: rates inside a host and between hosts.
    """

    def __init__(self, links: Links) -> None:
        self._links = links

    @property
    def text(self) -> str:
        """What the times are taken from."""
        return SOURCE

    def cost_of(self, op: str, payload_bytes: float, place: Place) -> Cost:
        """The latency and the transfer of a message. Raises UnknownTimeError where a rate is missing."""
        cost = fastest(op, payload_bytes, place, self._links)
        if cost is None:
            missing = "inter" if self._links.inter is None and place.hosts > 1 else "intra"
            raise UnknownTimeError(f"--links has no rate {missing}, which {op} needs; add it")
        return cost


class RowTime(NamedTuple):
    """The time of the messages of one purpose and operation on one rank, in one step.

    Attributes:
        purpose, op, group_size: of the messages.
        time_ns: sum of their times.
        latency_ns: the part of it that messages without payload would take.
        overlapping_ns: the part of it that can overlap computation.
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
        communication_ns: all messages of the rank whose messages take longest.
        latency_ns: the part of it that messages without payload would take.
        overlapping_ns: the part of it that can overlap computation.
        least_ns: of the step, if all of this overlaps; None without a time of computation.
        most_ns: of the step, if nothing overlaps.
        rows: of that rank.
    """

    communication_ns: int
    latency_ns: int
    overlapping_ns: int
    least_ns: int | None
    most_ns: int | None
    rows: list[RowTime]

    @property
    def typical_ns(self) -> float:
        """The middle of the bounds of the step, or the time of its messages where these are not known."""
        if self.least_ns is None or self.most_ns is None:
            return self.communication_ns
        return (self.least_ns + self.most_ns) / 2

    def by_purpose(self) -> dict[str, int]:
        """Return the time of the messages of each purpose in ns, on that rank."""
        sums: Counter[str] = Counter()
        for row in self.rows:
            sums[row.purpose] += row.time_ns  # type: ignore[assignment]  # a Counter of floats
        return {purpose: round(total) for purpose, total in sums.items()}


class Timing(NamedTuple):
    """How the times of settings are found.

    Attributes:
        source: of the times of messages; None where none was given.
        missing: why there is no source; empty with one.
        compute_ns: of a rank, in a step; None where it is not known.
        framework: that issues the messages.
        recorded: a run whose part of communication that overlapped narrows the bounds of a step.
    """

    source: TimeSource | None
    missing: str
    compute_ns: int | None
    framework: Runtime = "zero_runtime"
    recorded: RecordedStep | None = None

    def of(self, prediction: Prediction, hosts: Hosts) -> StepTime | str:
        """Return the time of a step of that setting, or why it is not known."""
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
    """``bounds`` of a step of which such a part of what can overlap does as in the run; never beyond ``bounds``.

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
    """Return how times are found: by a calibration, or else by NCCL's model at the rates of ``links``."""
    if calibration is not None:
        return Timing(CalibratedTimes(calibration), "", compute_ns)
    if backend != "nccl":
        return Timing(None, f"there is no model of {backend}; give --calibration", compute_ns)
    if links is None:
        return Timing(None, "give --calibration, or --links for NCCL's model", compute_ns)
    return Timing(NcclTimes(links), "", compute_ns)


def parse_duration(text: str, name: str) -> int:
    """Return the nanoseconds that ``text`` says: ``900ms``, ``1.5s``.

    Raises:
        UsageError: it says none; ``name`` is the option.
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
        sent: all messages of a step.
        hosts: of all ranks.
        source: of the times of messages.
        exposed: purposes that can overlap, with the messages of each that cannot.
        compute_ns: of a rank, in a step; None where it is not known.

    Raises:
        UnknownTimeError: the time of a message is not known.
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
    """Of the messages of a row: the time of all, the latency in it, and the time of the shortest message."""

    whole: float
    latency: float
    shortest: float


def _times(sent: Expectation, place: Place, source: TimeSource) -> _Times:
    sizes = Counter(sum(each) for each in sent.payloads)
    if sizes.total() != sent.count:
        sizes = Counter({round(sent.payload_bytes / max(1, sent.count)): sent.count})
    if sent.issued_op == Op.BARRIER:
        sizes = Counter({_BARRIER_BYTES: sent.count})
    # A row of messages between neighbours holds those of all ranks; each of them occupies its two ends.
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
    # Which messages are the exposed ones is not known, so as little as possible is: the shortest.
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
