"""The communication logger (``comms_logger``, ``log_summary``): durations of collectives by operation and size.

Each call is timed separately: on the host for tensors in host memory, and by events on CUDA. The events are
synchronized only when the log is read. The duration of an asynchronous call ends when the call completes, or,
on CUDA, when the program has waited for the call. Bandwidths follow the definitions of nccl-tests, with the
number of ranks of the call's group.

The size of a call is the size of one rank's input, as in DeepSpeed. For an all_gather this is the rank's shard,
and for a reduce_scatter the whole input.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final, NamedTuple

import torch

from zero_runtime import log

# Factor from the algorithm bandwidth to the bus bandwidth for n ranks.
_BUS: Final[Mapping[str, Callable[[int], float]]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}
# The kind of each operation whose name differs from its kind.
KINDS: Final[Mapping[str, str]] = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_TRIM: Final = 0.1  # share of the calls at either end that averages exclude


class Sample(NamedTuple):
    """One call of a collective.

    Attributes:
        operation: The kind of the operation, such as ``all_reduce``. It determines the bandwidth formula.
        ranks: The number of ranks of the group.
        milliseconds: The duration of the call.
        speeds: The algorithm and bus bandwidth in Gbit/s, if they are known and need not be computed.
    """

    operation: str
    ranks: int
    milliseconds: float
    speeds: tuple[float, float] | None = None

    def bandwidths(self, size: int) -> tuple[float, float]:
        """Return the (algorithm, bus) bandwidth in Gbit/s of this call of ``size`` bytes."""
        return self.speeds or bandwidths(self.operation, self.ranks, size, self.milliseconds)


class Summary(NamedTuple):
    """The figures of the calls of one operation and size.

    Attributes:
        calls: The number of calls.
        total_ms: The total duration of the calls.
        average_ms: The mean duration without the slowest and the fastest tenth.
        algorithm_gbps: The algorithm bandwidth in Gbit/s.
        bus_gbps: The bus bandwidth in Gbit/s.
    """

    calls: int
    total_ms: float
    average_ms: float
    algorithm_gbps: float
    bus_gbps: float


@dataclass(slots=True)
class CommLog:
    """The log of one process.

    Attributes:
        enabled: Whether calls are timed.
        verbose: Whether a line is printed for each call.
        prof_all: Whether all operations are timed. Otherwise only the operations in ``prof_ops`` are timed.
        prof_ops: The names of operations.
        debug: Whether the name of the calling function is added to the operation.
    """

    enabled: bool = False
    verbose: bool = False
    prof_all: bool = True
    prof_ops: Sequence[str] = ()
    debug: bool = False
    _samples: dict[str, dict[int, list[Sample]]] = field(default_factory=dict)
    _on_device: list[tuple[str, int, Sample, Any, Any]] = field(default_factory=list)

    def configure(self, **settings: Any) -> None:
        """Set attributes of the log. None leaves an attribute unchanged."""
        for name, value in settings.items():
            if value is not None:
                setattr(self, name, value)

    def start_profiling_comms(self) -> None:
        """Time all operations."""
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Time only the operations in ``prof_ops``."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Time these operations too."""
        self.prof_ops = list(dict.fromkeys([*self.prof_ops, *op_name_list]))

    def stop_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Stop timing these operations."""
        self.prof_ops = [name for name in self.prof_ops if name not in op_name_list]

    def wants(self, name: str, asked: bool = False) -> bool:
        """Return whether calls of operation ``name`` are timed. ``asked`` requests this explicitly."""
        return self.enabled and (asked or self.prof_all or name in self.prof_ops)

    def add(self, name: str, size: int, sample: Sample) -> None:
        """Add a call of ``size`` bytes under ``name``."""
        self._samples.setdefault(name, {}).setdefault(size, []).append(sample)
        if self.verbose:
            summary = summarise(size, [sample])
            log.info(
                f"{name}, {shown_size(size)}: {sample.milliseconds:.3f} ms, "
                f"{summary.algorithm_gbps:.2f} Gbit/s ({summary.bus_gbps:.2f} on the bus)"
            )

    def time(
        self, name: str, operation: str, ranks: int, size: int, call: Callable[[], Any], cuda: bool
    ) -> Any:
        """Time ``call``, which issues a collective.

        Return the result of ``call``, or a wrapper of its work handle.
        """
        stopwatch = _DeviceStopwatch(self) if cuda else _HostStopwatch(self)
        result = call()

        def stop() -> None:
            stopwatch.stop(name, operation, ranks, size)

        if not _is_work(result):
            stop()
            return result
        if cuda or not _tells_of_its_end(result, stop):
            return LoggedWork(result, stop)
        return result

    def read(self) -> Mapping[str, Mapping[int, Sequence[Sample]]]:
        """Return all calls, by name and size. This waits for the device."""
        waiting, self._on_device = self._on_device, []
        for name, size, sample, begin, end in waiting:
            end.synchronize()
            self.add(name, size, sample._replace(milliseconds=begin.elapsed_time(end)))
        return self._samples

    @property
    def comms_dict(self) -> dict[str, dict[int, list[Any]]]:
        """By name and size: the number of calls, and lists of their milliseconds, algorithm and bus bandwidths.

        The property may be set.
        """
        return {
            name: {
                size: [
                    len(samples),
                    [each.milliseconds for each in samples],
                    *map(list, zip(*(each.bandwidths(size) for each in samples), strict=True)),
                ]
                for size, samples in by_size.items()
                if samples
            }
            for name, by_size in self.read().items()
        }

    @comms_dict.setter
    def comms_dict(self, by_name: Mapping[str, Mapping[int, Sequence[Any]]]) -> None:
        self.reset()
        for name, by_size in by_name.items():
            for size, (_, *series) in by_size.items():
                samples = [
                    Sample(name, 0, took, (speed, bus)) for took, speed, bus in zip(*series, strict=True)
                ]
                self._samples.setdefault(name, {})[size] = samples

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        """Return the value of ``comms_dict``."""
        return self.comms_dict

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]]:
        """Return the figures of one operation by size; empty if no call was logged."""
        return figures(self.read().get(operation_name, {}))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which nothing is timed."""
        enabled, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = enabled

    def reset(self) -> None:
        """Drop all calls."""
        self._samples.clear()
        self._on_device.clear()


class _HostStopwatch:
    def __init__(self, log: CommLog) -> None:
        self._log = log
        self._start = time.perf_counter()

    def stop(self, name: str, operation: str, ranks: int, size: int) -> None:
        passed = (time.perf_counter() - self._start) * 1e3
        self._log.add(name, size, Sample(operation, ranks, passed))


class _DeviceStopwatch:
    def __init__(self, log: CommLog) -> None:
        self._log = log
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record()

    def stop(self, name: str, operation: str, ranks: int, size: int) -> None:
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._log._on_device.append((name, size, Sample(operation, ranks, 0.0), self._start, end))


class LoggedWork:
    """A work handle for a timed call. The time ends when the program has waited for the handle."""

    def __init__(self, work: Any, stop: Callable[[], None]) -> None:
        self._work = work
        self._stop: Callable[[], None] | None = stop

    def wait(self, *arguments: Any) -> Any:
        """Wait for the collective, and end its time."""
        result = self._work.wait(*arguments)
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _is_work(result: Any) -> bool:
    return hasattr(result, "wait") and hasattr(result, "is_completed")


def _tells_of_its_end(work: Any, stop: Callable[[], None]) -> bool:
    try:
        work.get_future().add_done_callback(lambda _: stop())
    except RuntimeError:  # point-to-point messages of gloo have no future
        return False
    return True


def message_size(*tensors: Any) -> int:
    """Return the size of ``tensors`` in bytes. The tensors may be nested in lists and tuples."""
    size = 0
    for each in tensors:
        if isinstance(each, torch.Tensor):
            size += each.element_size() * each.numel()
        elif isinstance(each, list | tuple):
            size += message_size(*each)
    return size


def bandwidths(operation: str, ranks: int, size: int, milliseconds: float) -> tuple[float, float]:
    """Return the (algorithm, bus) bandwidth in Gbit/s, by the definitions of nccl-tests (doc/PERFORMANCE.md).

    Args:
        operation: The kind of operation.
        ranks: The number of ranks of the group.
        size: The size of one rank's input in bytes.
        milliseconds: The duration.
    """
    if milliseconds <= 0.0:
        return 0.0, 0.0
    algorithm_bytes = size * ranks if operation == "all_gather" else size
    algorithm = algorithm_bytes * 8 / (milliseconds * 1e6)
    factor = _BUS.get(operation)
    return algorithm, algorithm * (1.0 if factor is None else factor(ranks))


def trimmed_mean(values: Iterable[float], share: float = _TRIM) -> float:
    """Return the mean of ``values`` without the largest and the smallest ``share``; 0 if there are no values."""
    ordered = sorted(values)
    cut = int(len(ordered) * share)
    middle = ordered[cut : len(ordered) - cut]
    return fmean(middle) if middle else 0.0


def summarise(size: int, samples: Sequence[Sample]) -> Summary:
    """Return the figures of the calls of one operation and size."""
    speeds = [each.bandwidths(size) for each in samples]
    return Summary(
        len(samples),
        sum(each.milliseconds for each in samples),
        trimmed_mean(each.milliseconds for each in samples),
        trimmed_mean(speed for speed, _ in speeds),
        trimmed_mean(bus for _, bus in speeds),
    )


def figures(by_size: Mapping[int, Sequence[Sample]]) -> dict[int, dict[str, Any]]:
    """Return the figures of one operation by size, under DeepSpeed's names."""
    summaries = {size: summarise(size, samples) for size, samples in sorted(by_size.items())}
    return {
        size: {
            "count": each.calls,
            "total_latency_ms": each.total_ms,
            "avg_latency_ms": each.average_ms,
            "tput_avg_gbps": each.algorithm_gbps,
            "busbw_avg_gbps": each.bus_gbps,
            "msg_size_bytes": size,
            "msg_size_str": shown_size(size),
        }
        for size, each in summaries.items()
    }


def shown_size(size: int) -> str:
    """Return a number of bytes in a readable form, in powers of 1024."""
    value = float(size)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1024:
            return f"{size} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TB"


LOG: Final = CommLog()  # the log of this process
