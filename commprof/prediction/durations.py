"""Determine the time of a message from the messages of a run, or from a calibration if the run has none of its size.

The time of a message starts when all of its ranks have issued it and the previous message of its group has ended. So
it includes neither the wait for a late rank nor the wait in the queue.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from commprof.calibration.bandwidths import bus_factor, calibrated_op
from commprof.calibration.results import Calibration
from commprof.errors import UsageError
from commprof.prediction.program import Floats, Groups, Message
from commprof.prediction.recorded import Recorded
from commprof.printable import command_line
from commprof.schema import Op

REACH: Final = 2.0  # a size is still predicted if it is beyond the measured sizes by at most this factor
WITH_CALIBRATION: Final = "give the file with --calibration"  # the advice for a setting with unknown messages
_NEAR: Final = 1.2
# The transfer of this many bytes takes about as long as the latency of a message.
_LATENCY_BYTES: Final = 65_536
_SMALL: Final = 4096  # up to this many bytes, the lower decile of the times of messages is their latency
_LEAST: Final = 0.1
_FILLS_LINK: Final = 2**20  # from this many bytes on, the time of a message is transfer rather than latency
# gloo's other operations leave a link idle for part of their time.
_FILLING: Final = (
    str(Op.ALL_REDUCE),
    str(Op.REDUCE),
    str(Op.BROADCAST),
)
# The usable fraction of a link's rate: 1448 bytes of payload in a frame of 1514 (TCP over Ethernet).
_GOODPUT: Final = 0.95
_FEW: Final = 5  # with fewer measured times, the times of other sizes give a better spread
# The maximum distance between comparable messages: the logarithm of the ratio of their sizes, plus 3 for a different
# kind. At a larger distance, latency dominates one time and transfer the other.
_COMPARABLE: Final = 9.0
# The fixed cost of a copy by one rank, expressed in bytes: about 0.25 ms at the 4 GB/s of a processor.
_COPY_OVERHEAD_BYTES: Final = 1_000_000


class Kind(NamedTuple):
    """A kind of messages whose times depend only on their size.

    Attributes:
        op: A value of schema.Op.
        ranks: The number of ranks of the group.
        dtype: The type of the elements that the backend sums. Empty for other operations.
    """

    op: str
    ranks: int
    dtype: str = ""


Times = Mapping[tuple[Kind, int], Floats]  # times in ns by kind and size of message: (times, ranks)


class Sample(NamedTuple):
    """The times that a message may take on each rank of its group, and the source of these times.

    Attributes:
        times: Times in ns that were measured, or scaled from those of other sizes: (times, ranks). One rank may have
            its result long before a different rank.
        source: ``run`` or ``calibration``.
    """

    times: Floats
    source: str


class Link(NamedTuple):
    """A change of the links.

    Attributes:
        factor: The factor of the bandwidth, such as 4.0 for links that are four times as fast.
        rate: The rate of a rank's link in bytes per second, instead of a factor.
        added_ns: The time that is added to the latency of each message, in ns.
        cpu_per_byte: The processor time for a byte of payload in ns. A transfer takes at least this time on any link.
    """

    factor: float = 1.0
    rate: float | None = None
    added_ns: float = 0.0
    cpu_per_byte: float = 0.0


UNCHANGED: Final = Link()


def message_times(recorded: Recorded, steps: Sequence[int] | None = None) -> dict[tuple[Kind, int], Floats]:
    """Return the observed times of messages by kind and payload bytes: ns, (times, ranks).

    Args:
        recorded: The steps of the run.
        steps: The positions in ``recorded.steps`` that are used. By default, all steps are used.
    """
    times: dict[tuple[Kind, int], list[Floats]] = defaultdict(list)
    queues: dict[Groups, list[int]] = defaultdict(list)
    for index, message in enumerate(recorded.program.messages):
        queues[message.groups].append(index)
    for place in range(len(recorded.steps)) if steps is None else steps:
        for groups, queue in queues.items():
            for number in range(len(groups)):
                _times_of_queue(recorded, place, queue, number, times)
    return {key: np.array(each) for key, each in times.items()}


def _times_of_queue(
    recorded: Recorded,
    place: int,
    queue: Sequence[int],
    number: int,
    times: dict[tuple[Kind, int], list[Floats]],
) -> None:
    """Add the times of the messages of group ``number`` in one step.

    A backend may run several messages of a group concurrently (gloo has two threads). So a message that is issued
    before the previous messages have ended shares the time of all of these messages, in proportion to their bytes.
    """
    together: list[_Issued] = []
    ended, seen_to = -np.inf, 0  # the number of these messages that had ended when the last end was observed
    ranks = list(recorded.program.messages[queue[0]].groups[number])
    ends: Floats = np.zeros(len(ranks))
    for index in queue:
        arrived = float(recorded.arrivals[place, index, ranks].max())
        if together and arrived >= ended:
            _share_time(together[:seen_to], ends, times)
            together, seen_to = [], 0
        if not together:
            arrived = max(arrived, ended)
        seen = recorded.finishes[place, index, ranks]
        known = bool((~np.isnan(seen)).any())
        message = recorded.program.messages[index].in_step(place, number)
        together.append(_Issued(message, arrived, message.payload_bytes + _LATENCY_BYTES, known))
        if known:
            seen_to = len(together)
            # A rank that does not wait long enough does not observe the end. It is assumed to have the result when
            # the first of the other ranks has it.
            ends = np.where(np.isnan(seen), np.nanmin(seen), seen)
            ended = float(ends.max())
        else:  # the message had already ended when a rank began to wait for it
            waits = recorded.waits[place, index, ranks]
            ended = float(waits[~np.isnan(waits)].min(initial=np.inf))
    _share_time(together[:seen_to], ends, times)


class _Issued(NamedTuple):
    message: Message
    arrived: float
    weight: int
    is_seen: bool  # whether the end of the message was observed


def _share_time(
    together: Sequence[_Issued], ends: Floats, times: dict[tuple[Kind, int], list[Floats]]
) -> None:
    """Share the time until ``ends`` among the last messages of ``together``. Without messages, do nothing.

    The end of some messages is not known. At the rate of the messages after it, such a message may have ended before
    the next message was issued. In this case it and all messages before it have no part in this time.
    """
    if not together:
        return
    first = len(together) - 1
    end = float(ends.max())
    while first > 0:
        before, begins = together[first - 1], together[first].arrived
        rate = (end - begins) / sum(each.weight for each in together[first:])
        if not before.is_seen and before.arrived + rate * before.weight <= begins:
            break
        first -= 1
    shared = together[first:]
    taken = np.maximum(ends - shared[0].arrived, 0.0)
    total = sum(each.weight for each in shared)
    for each in shared:
        times[_kind_of(each.message), each.message.payload_bytes].append(taken * (each.weight / total))


def _kind_of(message: Message) -> Kind:
    return Kind(message.op, message.group_size, message.dtype)


class Durations:
    """The times of messages of any size.

    Args:
        times: The times that :func:`message_times` returns.
        calibration: A calibration of the machine, for operations and sizes that the run does not have, or None.
        link: The change of the links.
    """

    def __init__(self, times: Times, calibration: Calibration | None = None, link: Link = UNCHANGED) -> None:
        self._sizes: dict[Kind, dict[int, Floats]] = defaultdict(dict)
        for (kind, size), each in times.items():
            self._sizes[kind][size] = each
        self._calibration = calibration
        self._link = link
        self.bound_by_cpu = False  # whether links became so fast that processors limit a message
        self._known: dict[tuple[Kind, int], Sample] = {}

    def of(self, message: Message) -> Sample:
        """Return the times that ``message`` may take.

        Times of messages with the same element type are preferred. Without any, times of messages with a different
        element type are used.

        Raises:
            UsageError: Neither the run nor the calibration has such messages. The message says what to calibrate.
        """
        kind, size = _kind_of(message), message.payload_bytes
        if (kind, size) not in self._known:
            sample = self._of_kind(kind, size)
            for other in self._of_other_dtypes(kind):
                sample = sample or self._of_kind(other, size)
            if sample is None:
                raise UsageError(self._refusal(kind, size))
            self._known[kind, size] = sample._replace(times=self._on_links(sample.times, kind, size))
        return self._known[kind, size]

    def _of_kind(self, kind: Kind, size: int) -> Sample | None:
        if kind.ranks == 1:
            return self._measured(kind, size) or self._copied(size)
        return (
            self._measured(kind, size)
            or self._from_run(kind, size, least_points=2)
            or self._from_calibration(kind, size)
            or self._from_run(kind, size, least_points=1)
        )

    def _of_other_dtypes(self, kind: Kind) -> list[Kind]:
        others = [each for each in self._sizes if each[:2] == kind[:2] and each != kind]
        if self._calibration is not None and kind.dtype:
            others.append(kind._replace(dtype=self._calibration.dtype))
        return others

    def _measured(self, kind: Kind, size: int) -> Sample | None:
        times = self._sizes.get(kind, {}).get(size)
        return Sample(times, "run") if times is not None and len(times) >= _FEW else None

    def _from_run(self, kind: Kind, size: int, least_points: int) -> Sample | None:
        """Return times for a size between or slightly beyond the sizes of the run, or None.

        The spread is that of the nearest size.
        """
        sizes = {each: times for each, times in self._sizes.get(kind, {}).items() if each > 0}
        if not sizes or not size or not min(sizes) / REACH <= size <= max(sizes) * REACH:
            return None
        medians = {each: typical(times) for each, times in sizes.items()}
        if len(points_of(medians)) < least_points:
            return None
        nearest = min(sizes, key=lambda each: (abs(np.log(each / size)), each))
        time = interpolated(medians, size)
        return Sample(sizes[nearest] * (time / medians[nearest]), "run")

    def _copied(self, size: int) -> Sample:
        """Return the times of a message in a group of one rank, which only copies.

        They are those of the copy in the run with the nearest size, scaled in proportion to the bytes plus a fixed
        part. The time is 0 if the run has no copies, because a calibration does not measure a single rank.
        """
        copies = {
            each: times
            for kind, sizes in self._sizes.items()
            if kind.ranks == 1
            for each, times in sizes.items()
            if each
        }
        if not copies or not size:
            return Sample(np.zeros((1, 1)), "run")
        nearest = min(copies, key=lambda each: (abs(np.log(each / size)), each))
        scale = (size + _COPY_OVERHEAD_BYTES) / (nearest + _COPY_OVERHEAD_BYTES)
        return Sample(copies[nearest] * scale, "run")

    def _from_calibration(self, kind: Kind, size: int) -> Sample | None:
        """Return the calibrated time at the same bus bandwidth, scaled to the run.

        The factor is the ratio of measured times in the run to calibrated times. The result is None for an element
        type that neither the calibration nor the run has.
        """
        if self._calibration is None:
            return None
        if kind.dtype not in ("", self._calibration.dtype, *(other.dtype for other in self._sizes)):
            return None
        time = self._calibrated(kind, size)
        return (
            None if time is None else Sample(time * self._slower_than_calibrated(kind, size), "calibration")
        )

    def _calibrated(self, kind: Kind, size: int) -> float | None:
        assert self._calibration is not None
        name = calibrated_op(kind.op)
        timings = self._calibration.timings.get(name, ())
        known, wanted = bus_factor(name, self._calibration.world_size), bus_factor(name, kind.ranks)
        if not timings or known is None or wanted is None or not size:
            return None
        of_size = size * wanted / known
        medians = {each.payload_bytes: float(each.time_ns) for each in timings}
        if not min(medians) / REACH <= max(of_size, min(medians) / REACH) <= max(medians) * REACH:
            return None
        return interpolated(medians, of_size)

    def _slower_than_calibrated(self, kind: Kind, size: int) -> Floats:
        """Return the ratio of measured to calibrated time for the nearest message of the run.

        Messages of the same kind and of similar size are nearest. The ratio is 1 if no message of the run is near
        enough. Elements of 16 bits are summed more slowly, so the ratio of such messages does not apply to other types.
        """
        assert self._calibration is not None
        comparable = (kind.dtype, self._calibration.dtype, "")
        ratios: list[tuple[float, Floats]] = []
        for other, sizes in self._sizes.items():
            for each, times in sizes.items():
                calibrated = self._calibrated(other, each) if other.dtype in comparable else None
                if calibrated:
                    apart = abs(np.log(each / size)) + (0.0 if other == kind else 3.0)
                    ratios.append((apart, times / calibrated))
        nearest = min(ratios, key=lambda each: each[0], default=(np.inf, np.ones((1, kind.ranks))))
        return nearest[1] if nearest[0] <= _COMPARABLE else np.ones((1, kind.ranks))

    def _on_links(self, times: Floats, kind: Kind, size: int) -> Floats:
        """Return ``times`` on the changed links.

        The time of the smallest messages is taken as latency, and the rest as transfer.
        """
        link = self._link
        if link == UNCHANGED or kind.ranks == 1:
            return times
        latency = min(self._latency(kind), typical(times))
        transfer = typical(times) - latency
        changed = transfer / self._link_factor()
        floor = min(transfer, link.cpu_per_byte * size)
        self.bound_by_cpu |= floor > changed
        changed = max(changed, floor)
        return np.maximum(0.0, times - transfer + changed + link.added_ns)

    def _link_factor(self) -> float:
        """Return the rate of the changed links relative to the links of the run.

        The fastest message of the run is assumed to have filled its link.

        Raises:
            UsageError: No message of the run is large enough to fill a link.
        """
        if self._link.rate is None:
            return self._link.factor
        rates = [
            size * (bus_factor(calibrated_op(kind.op), kind.ranks) or 0.0) / (typical(times) / 1e9)
            for kind, sizes in self._sizes.items()
            for size, times in sizes.items()
            if size >= _FILLS_LINK and kind.op in _FILLING
        ]
        if not rates:
            raise UsageError(
                f"--bandwidth as a rate needs an all_reduce, reduce or broadcast of {_FILLS_LINK:,} bytes or more in the "
                "run, to know the rate of its links; give a factor, such as x4"
            )
        return self._link.rate * _GOODPUT / max(rates)

    def _latency(self, kind: Kind) -> float:
        """Return the lower decile of the times of the smallest messages in groups of this size, in ns.

        The median would be too long, because on slow links a message waits for the last bytes of the previous transfer.
        """
        small = [
            float(np.quantile(times.max(axis=1), _LEAST))
            for other, each in self._sizes.items()
            if other.ranks == kind.ranks
            for size, times in each.items()
            if size <= _SMALL
        ]
        return min(small, default=0.0)

    def _refusal(self, kind: Kind, size: int) -> str:
        op, ranks = kind.op, kind.ranks
        sizes = sorted(
            {each for other, sizes in self._sizes.items() if other[:2] == kind[:2] for each in sizes if each}
        )
        run = (
            f"the run has {op} messages of {sizes[0]:,} to {sizes[-1]:,} bytes"
            if sizes
            else "the run has no such message whose result a rank waited for"
        )
        command = command_line(
            "calibrate",
            "--nproc",
            ranks,
            "--ops",
            calibrated_op(op),
            "--sizes",
            _sizes_around(size),
            "--out",
            "calibration.json",
        )
        have = "" if self._calibration is None else ", and the calibration has none of that size"
        return (
            f"how long {op} of {size:,} bytes takes among {ranks} ranks is not known: {run}{have}. Measure it on the same "
            f"hosts, and {WITH_CALIBRATION}: {command}"
        )


def typical(times: Floats) -> float:
    """Return the median over messages of the time until the last rank has its result.

    ``times`` has the shape (messages, ranks).
    """
    return float(np.median(times.max(axis=1)))


def _sizes_around(size: int) -> str:
    return f"{max(1, size // 4)}:{size * 2}:2"


def points_of(medians: Mapping[int, float]) -> list[tuple[float, float]]:
    """Return sizes and times in ascending order.

    Sizes that differ by at most a fifth become one point, because a line through them would follow their noise.

    >>> points_of({10: 5.0, 11: 7.0, 20: 8.0})
    [(10.5, 6.0), (20.0, 8.0)]
    """
    points: list[list[int]] = []
    for size in sorted(medians):
        if points and size <= _NEAR * points[-1][0]:
            points[-1].append(size)
        else:
            points.append([size])
    return [(float(np.mean(each)), float(np.mean([medians[size] for size in each]))) for each in points]


def interpolated(medians: Mapping[int, float], size: float) -> float:
    """Return the time of ``size`` bytes by linear interpolation, or by extrapolation from the nearest two sizes.

    Below the smallest known size s, the time is at least (size + L) / (s + L) of the time of s. L is the number of
    bytes whose transfer takes about as long as the latency. The line may be far below this limit, or even negative,
    because times of small messages are noisy. If only one size is known, the time is in proportion to the bytes.

    >>> interpolated({10: 5.0, 20: 7.0}, 15), interpolated({10: 5.0}, 5)
    (6.0, 2.5)
    """
    points = points_of(medians)
    if len(points) == 1:
        return points[0][1] * size / points[0][0]
    sizes, times = ([point[column] for point in points] for column in (0, 1))
    place = int(np.clip(np.searchsorted(sizes, size), 1, len(sizes) - 1))
    slope = (times[place] - times[place - 1]) / (sizes[place] - sizes[place - 1])
    line = times[place - 1] + slope * (size - sizes[place - 1])
    return max(line, times[0] * min(1.0, (size + _LATENCY_BYTES) / (sizes[0] + _LATENCY_BYTES)))
