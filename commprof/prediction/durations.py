"""How long a message takes, from the messages of a run, or from a calibration where the run has none of its size.

The time of a message counts from the moment when all of its ranks have issued it and the one before it in its group has
ended: neither waiting for a late rank nor waiting in the queue belongs to it.
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

REACH: Final = 2.0  # a size this many times beyond the measured ones is still predicted
WITH_CALIBRATION: Final = "give the file with --calibration"  # what to do about a setting of unknown messages
_NEAR: Final = 1.2
_LATENCY_BYTES: Final = 65_536  # whose transfer takes about as long as the latency of a message
_SMALL: Final = 4096  # bytes of a message whose time is latency, in the lower decile of those times
_LEAST: Final = 0.1
_FILLS_LINK: Final = 2**20  # bytes of a message whose time is transfer rather than latency
_FILLING: Final = (
    str(Op.ALL_REDUCE),
    str(Op.REDUCE),
    str(Op.BROADCAST),
)  # gloo's others leave a link idle meanwhile
_GOODPUT: Final = 0.95  # of a link's rate: 1448 bytes of payload in a frame of 1514 (TCP over Ethernet)
_FEW: Final = 5  # times, below which those of other sizes say more about the spread
# Between sizes: the logarithm of their ratio, and 3 for another kind. Further apart, latency decides one and transfer the
# other.
_COMPARABLE: Final = 9.0
# What a copy of one rank takes besides copying, as so many bytes: some 0.25 ms at the 4 GB/s of a processor.
_COPY_OVERHEAD_BYTES: Final = 1_000_000


class Kind(NamedTuple):
    """Messages whose times depend on their size alone.

    Attributes:
        op: a value of schema.Op.
        ranks: of the group.
        dtype: of the elements that the backend sums; empty for other operations.
    """

    op: str
    ranks: int
    dtype: str = ""


Times = Mapping[tuple[Kind, int], Floats]  # of messages of a kind and size: ns, (times, ranks)


class Sample(NamedTuple):
    """Times that a message took, in ns, on each rank of its group: (times, ranks); and where they are from.

    Attributes:
        times: measured ones, or scaled from those of other sizes. One rank may have its result long before another.
        source: ``run`` or ``calibration``.
    """

    times: Floats
    source: str


class Link(NamedTuple):
    """A change of the links.

    Attributes:
        factor: of the bandwidth: 4.0 for links four times as fast.
        rate: of a rank's link in bytes/s, instead of a factor.
        added_ns: added to the latency of each message.
        cpu_per_byte: ns of processor time for a byte of payload, below which no link brings a transfer.
    """

    factor: float = 1.0
    rate: float | None = None
    added_ns: float = 0.0
    cpu_per_byte: float = 0.0


UNCHANGED: Final = Link()


def message_times(recorded: Recorded, steps: Sequence[int] | None = None) -> dict[tuple[Kind, int], Floats]:
    """Return the observed times of messages by kind and payload bytes: ns, (times, ranks).

    Args:
        recorded: the run.
        steps: positions in ``recorded.steps`` that are used; all by default.
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

    A backend may run messages of one group beside each other (gloo has two threads). So messages that are issued before
    those before them have ended share the time of all of them, in proportion to their bytes.
    """
    together: list[_Issued] = []
    ended, seen_to = -np.inf, 0  # how many of them had ended when the last end was seen
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
            # A rank that does not wait long enough to see the end has the result when the first of the others has it.
            ends = np.where(np.isnan(seen), np.nanmin(seen), seen)
            ended = float(ends.max())
        else:  # it had ended when a rank asked for it
            waits = recorded.waits[place, index, ranks]
            ended = float(waits[~np.isnan(waits)].min(initial=np.inf))
    _share_time(together[:seen_to], ends, times)


class _Issued(NamedTuple):
    message: Message
    arrived: float
    weight: int
    is_seen: bool  # its end was observed


def _share_time(
    together: Sequence[_Issued], ends: Floats, times: dict[tuple[Kind, int], list[Floats]]
) -> None:
    """Share the time until ``ends`` among the last of ``together``; nothing of none.

    The end of some is not known. At the rate of those after it such a message may have ended before the next was issued;
    then it has no part in this time.
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
        times: of :func:`message_times`.
        calibration: of the machine, for operations and sizes that the run does not have; None without one.
        link: how the links differ from the run's.
    """

    def __init__(self, times: Times, calibration: Calibration | None = None, link: Link = UNCHANGED) -> None:
        self._sizes: dict[Kind, dict[int, Floats]] = defaultdict(dict)
        for (kind, size), each in times.items():
            self._sizes[kind][size] = each
        self._calibration = calibration
        self._link = link
        self.bound_by_cpu = False  # links were made so fast that processors limit a message
        self._known: dict[tuple[Kind, int], Sample] = {}

    def of(self, message: Message) -> Sample:
        """Return the times that ``message`` may take.

        Those of the same element type are preferred. Without any, a message of another element type stands for it.

        Raises:
            UsageError: neither the run nor the calibration has such messages; it says what to calibrate.
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
        """Between sizes of the run, or a little beyond; the spread is that of the size that is nearest."""
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
        """Of a group of one rank, which copies: as the copy in the run whose size is nearest, in proportion to the bytes
        and a fixed part.

        No time where the run has none; no calibration measures one rank alone.
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
        """The calibrated time of that bus bandwidth, times how much slower the run's messages are than calibrated ones.

        None for an element type that neither the calibration nor the run has.
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
        """Measured by calibrated time of the run's messages of that kind, else of all; of sizes that are near first.

        1 where no message of the run has a size that is near enough. Elements of 16 bits are summed more slowly, so the
        ratio of such messages says nothing about others.
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
        """``times`` on the changed links: latency is what the smallest messages take, the rest is transfer."""
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
        """How much faster the links are than those of the run, which its fastest message is taken to have filled.

        Raises:
            UsageError: no message of the run is large enough to fill a link.
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
        """The lower decile of the times of the group's smallest messages, in ns.

        Their median is too long: on slow links such a message waits behind the last bytes of the transfer before it.
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
            f"the run has messages of {sizes[0]:,} to {sizes[-1]:,} bytes of it"
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
        have = "" if self._calibration is None else ", and the calibration none of that size"
        return (
            f"how long {op} of {size:,} bytes takes among {ranks} ranks is not known: {run}{have}. Measure it on the same "
            f"hosts, and {WITH_CALIBRATION}: {command}"
        )


def typical(times: Floats) -> float:
    """The median over messages of the time until the last rank has its result; ``times`` is (messages, ranks)."""
    return float(np.median(times.max(axis=1)))


def _sizes_around(size: int) -> str:
    return f"{max(1, size // 4)}:{size * 2}:2"


def points_of(medians: Mapping[int, float]) -> list[tuple[float, float]]:
    """Sizes and times in rising order; sizes that differ by less than a fifth are one point, as a line through them would
    follow their noise.

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
    """The time of ``size`` bytes: on a straight line between its neighbors, or through the nearest two beyond the ends.

    Below the smallest known size s it takes at least (size + L) / (s + L) of the time of s, where the transfer of L bytes
    takes about as long as the latency. The line may be far below that, even negative: times of small messages are noisy.
    If one size alone is known, the time is in proportion to the bytes.

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
