"""The sweep of a calibration on each rank: times each operation at each size and keeps the times of the slowest rank.

Needs torch, which is imported when a sweep begins.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from statistics import quantiles
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from commprof import hooks
from commprof.calibration.calibration_plan import DTYPES, Plan
from commprof.calibration.results import Calibration, Timing
from commprof.calibration.trials import Buffers, Trial, trial
from commprof.errors import CommprofError, UsageError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

TIMEOUT_SECONDS: Final = 120
_SIZE_NS: Final = 600_000_000  # time budget for the iterations of one operation and size
_LEAST_ITERATIONS: Final = 5
_NAME_BYTES: Final = 256  # length of a host name in messages between ranks
_ANOTHER: Final = "another rank could not run the operation"
_ENVIRONMENT: Final = ("NCCL_", "GLOO_", "OMP_", "TORCH_NCCL_")


class Member(NamedTuple):
    """The place of this process among the ranks of the sweep. ``local_*`` refers to the ranks of its host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def measure(plan: Plan, member: Member, say: Callable[[str], None]) -> Calibration | None:
    """Carry out ``plan`` together with the other ranks.

    The first rank returns the results, and all other ranks return None. The ranks meet at ``MASTER_ADDR`` and
    ``MASTER_PORT``. An active recorder records the collectives with the purpose ``other``.

    Args:
        plan: The operations, sizes and iterations.
        member: The place of this process among the ranks.
        say: A function that the first rank calls with one line for each operation.

    Raises:
        UsageError: the plan requests a device or backend that is not available here. Every rank raises it.
        CommprofError: an operation returned wrong data. Every rank raises it.
    """
    with _meeting(plan, member) as sweep, hooks.tag("other"):
        for op in plan.ops:
            sweep.time_op(op)
            if member.rank == 0:
                say(sweep.last_line(op))
        return sweep.results()


@contextmanager
def _meeting(plan: Plan, member: Member) -> Iterator[_Sweep]:
    import torch
    import torch.distributed as dist

    device, backend = _choose(plan, member)
    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if absent:
        raise UsageError(
            f"{' and '.join(absent)} of the environment must say where the ranks meet (host and free port of rank 0); "
            "this launcher does not set them"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        rank=member.rank,
        world_size=member.world_size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
        device_id=device if backend == "nccl" else None,
    )
    try:
        yield _Sweep(plan, member, device, backend)
    finally:
        dist.destroy_process_group()


def _choose(plan: Plan, member: Member) -> tuple[torch.device, str]:
    """Return the device and the backend of this rank."""
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = plan.device
    if kind == "auto":
        kind = "cuda" if gpus >= member.local_world_size and plan.backend != "gloo" else "cpu"
    if kind == "cuda" and gpus < member.local_world_size:
        raise UsageError(
            f"--device cuda: a GPU for each of {member.local_world_size} ranks was expected, {gpus} are visible to torch"
        )
    backend = plan.backend if plan.backend != "auto" else "nccl" if kind == "cuda" else "gloo"
    if backend == "nccl" and kind == "cpu":
        raise UsageError(
            f"--backend nccl: a GPU for each of {member.local_world_size} ranks was expected, {gpus} are visible to torch"
        )
    if backend == "nccl" and not dist.is_nccl_available():
        raise UsageError("--backend nccl: this torch was built without NCCL")
    device = torch.device("cuda", member.local_rank) if kind == "cuda" else torch.device("cpu")
    return device, backend


class _Sweep:
    """A sweep in progress, with the times so far. All ranks must call its methods in the same order."""

    def __init__(self, plan: Plan, member: Member, device: torch.device, backend: str) -> None:
        import torch

        self.plan = plan
        self.member = member
        self.device = device
        self.backend = backend
        self.empty = torch.empty(0, dtype=getattr(torch, plan.dtype), device=device)
        self.timings: dict[str, list[Timing]] = {}
        self.skipped: dict[str, str] = {}

    def time_op(self, op: str) -> None:
        """Time ``op`` at every size, and stop at the first size that some rank cannot carry out."""
        timings: dict[int, Timing] = {}
        for size in self._counts():
            ready, why = self._ready(op, size)
            if ready is None:
                payload = size * self.empty.element_size()
                self.skipped[op] = f"from {payload} bytes on: {why}" if timings else why
                break
            timings[size] = self._timed(ready, size)
        if timings:
            self.timings[op] = list(timings.values())

    def _counts(self) -> list[int]:
        """Return the distinct sizes of the plan in elements, each a multiple of the number of ranks."""
        unit = self.member.world_size
        item = DTYPES[self.plan.dtype]
        return sorted({max(1, size // (item * unit)) * unit for size in self.plan.sizes})

    def _ready(self, op: str, count: int) -> tuple[Trial | None, str]:
        """Prepare ``op`` on all ranks, carry it out once, and check its result.

        Return None and the reason if a rank cannot carry out the operation. No rank calls ``op`` before all ranks have
        allocated their buffers. Otherwise the ranks would wait for a rank that is out of memory.
        """
        ready, why = _attempt(
            lambda: trial(op, self.member.rank, count, Buffers(self.member.world_size, self.empty))
        )
        if not self._all(ready is not None) or ready is None:
            return None, why or _ANOTHER
        wrong, why = _attempt(partial(_carried_out, ready))
        if not self._all(wrong is not None) or wrong is None:
            return None, why or _ANOTHER
        total = self._total(wrong)
        if total:
            raise CommprofError(
                f"{self.backend} delivered wrong data: {total} elements of {op} with {count} {self.plan.dtype} are "
                "not what was sent. A calibration of this machine would be meaningless; have its hardware checked"
            )
        ready.sent.zero_()
        return ready, ""

    def _timed(self, ready: Trial, count: int) -> Timing:
        warm = [self._times(ready, 1)[0] for _ in range(max(1, self.plan.warmup))]
        longest = max(self._largest(min(warm)), 1)
        iterations = min(self.plan.iterations, max(_LEAST_ITERATIONS, _SIZE_NS // longest))
        times = self._times(ready, iterations)
        low, middle, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        slowest = max(self._of_all([round(middle), round(low), round(high)]))
        return Timing(
            payload_bytes=count * self.empty.element_size(),
            time_ns=max(1, slowest[0]),
            low_ns=max(1, slowest[1]),
            high_ns=max(1, slowest[2]),
            iterations=iterations,
        )

    def _times(self, ready: Trial, iterations: int) -> list[int]:
        """Return the durations of ``iterations`` calls in ns, measured on the GPU stream or, on a CPU, on the host."""
        together = self.empty.new_zeros(1)
        if self.device.type == "cuda":
            return self._times_on_device(ready, iterations, together)
        times = []
        for _ in range(iterations):
            self._bring_together(ready, together)
            begin = time.perf_counter_ns()
            ready.call()
            times.append(time.perf_counter_ns() - begin)
        return times

    def _times_on_device(self, ready: Trial, iterations: int, together: torch.Tensor) -> list[int]:
        import torch

        device, events = self.device, []
        for _ in range(iterations):
            self._bring_together(ready, together)
            begin, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
            begin.record()
            ready.call()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize(self.device)
        return [round(begin.elapsed_time(end) * 1e6) for begin, end in events]

    @staticmethod
    def _bring_together(ready: Trial, together: torch.Tensor) -> None:
        """Synchronize the ranks before a call that does not synchronize them itself.

        Without this, for example the root of a broadcast would run ahead, and the time to fill its buffers would be
        measured.
        """
        import torch.distributed as dist

        if not ready.keeps_step:
            dist.all_reduce(together)

    def _reduced(self, value: int, how: Any) -> int:
        import torch
        import torch.distributed as dist

        number = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(number, op=how)
        return int(number.item())

    def _total(self, value: int) -> int:
        import torch.distributed as dist

        return self._reduced(value, dist.ReduceOp.SUM)

    def _largest(self, value: int) -> int:
        import torch.distributed as dist

        return self._reduced(value, dist.ReduceOp.MAX)

    def _all(self, flag: bool) -> bool:
        return self._largest(int(not flag)) == 0

    def _of_all(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the ``numbers`` of every rank, in rank order."""
        import torch
        import torch.distributed as dist

        every = torch.zeros((self.member.world_size, len(numbers)), dtype=torch.int64, device=self.device)
        every[self.member.rank] = torch.tensor(numbers)
        dist.all_reduce(every)
        return [list(map(int, row)) for row in every.tolist()]

    def last_line(self, op: str) -> str:
        """Return the result of ``op`` as a line of text."""
        timings = self.timings.get(op)
        if not timings:
            return f"{op}: left out: {self.skipped.get(op, 'nothing was measured')}"
        cut = f"; left out {self.skipped[op]}" if op in self.skipped else ""
        ends = f"{timings[0].payload_bytes:,} to {timings[-1].payload_bytes:,} bytes"
        return f"{op}: {len(timings)} sizes measured, {ends}{cut}"

    def results(self) -> Calibration | None:
        """Return the results on the first rank, and None on all other ranks."""
        import torch

        name = socket.gethostname().encode("utf-8")[:_NAME_BYTES]
        rows = self._of_all([*name, *[0] * (_NAME_BYTES - len(name))])
        if self.member.rank != 0:
            return None
        hosts = [bytes(row).rstrip(b"\0").decode("utf-8", "replace") for row in rows]
        on_gpu = self.device.type == "cuda"
        return Calibration(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            torch=torch.__version__,
            backend=self.backend,
            backend_version=_nccl_version() if self.backend == "nccl" else None,
            device=self.device.type,
            dtype=self.plan.dtype,
            world_size=self.member.world_size,
            hosts=tuple(dict.fromkeys(hosts)),
            machine={
                "system": f"{platform.system()} {platform.release()}",
                "machine": platform.machine(),
                "cpus": len(os.sched_getaffinity(0)),
                "accelerator": torch.cuda.get_device_name(self.device) if on_gpu else None,
            },
            environment={
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith(_ENVIRONMENT) and "/" not in value
            },
            warmup=max(1, self.plan.warmup),
            timings={op: tuple(timings) for op, timings in self.timings.items()},
            skipped=dict(self.skipped),
        )


def _attempt(action: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result of ``action``, or None and the reason if torch refuses it.

    Torch refuses, for example, an operation that the backend lacks, or a buffer for which there is no memory.
    """
    try:
        return action(), ""
    except (RuntimeError, ValueError) as error:
        return None, str(error).strip().partition("\n")[0][:200] or type(error).__name__


def _carried_out(ready: Trial) -> int:
    """Carry out ``ready`` once and return the number of wrong elements on this rank."""
    ready.call()
    return ready.wrong()


def _nccl_version() -> str:
    import torch

    numbers: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, numbers))
