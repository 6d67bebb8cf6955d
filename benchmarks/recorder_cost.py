"""Measures the CPU time that recorders add to one collective, on a fake process group that sends nothing.

The benchmark measures thread CPU time in blocks of calls. In every round, each case is measured with its recorder off,
on and off, so that a disturbance of the machine affects all cases. A round gives one difference for each case, and one
ratio between two cases. DeepSpeed's comms logger takes turns with the other recorders. It runs in a Python environment
that has DeepSpeed (``--deepspeed-python``), and is left out without this option.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from results import Spread, arguments, median_interval, publish
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from commprof import hooks

WARM_UP = 50  # calls of a block before the timing begins, because the first calls intern their strings
TRACE_OBSERVER = "ExecutionTraceObserver"
DEFAULT = "commprof, default"
ALL_REDUCE = "all_reduce, sync"


class Case(NamedTuple):
    """A collective call under one recorder.

    Attributes:
        recorder: A function that takes a new folder and returns a context manager. Inside the context, the recorder is
            on.
    """

    name: str
    call_name: str
    call: Callable[[], object]
    recorder: Callable[[Path], AbstractContextManager[object]]
    tag: AbstractContextManager[object] = nullcontext()


class Added(NamedTuple):
    """The time per call without the recorder, and the time that the recorder adds, in us."""

    alone: float
    added: float


def block(call: Callable[[], object], calls: int) -> float:
    """Return the thread CPU time per call, in us."""
    for _ in range(WARM_UP):
        call()
    begin = time.thread_time_ns()
    for _ in range(calls):
        call()
    return (time.thread_time_ns() - begin) / calls / 1000


@contextlib.contextmanager
def recording(folder: Path, **options: object) -> Iterator[None]:
    """Record with commprof into ``folder``."""
    hooks.attach(str(folder), **options)
    if not hooks.recording():
        raise SystemExit("recording did not start; see the message above")
    hooks.step(0)
    try:
        yield
    finally:
        hooks.detach()


@contextlib.contextmanager
def recorded_before(folder: Path) -> Iterator[None]:
    """Record with commprof and stop before the context is entered."""
    with recording(folder):
        pass
    yield


@contextlib.contextmanager
def observed(folder: Path) -> Iterator[None]:
    """Record with torch's ExecutionTraceObserver into the file ``folder`` + ``.json``."""
    observer = torch.profiler.ExecutionTraceObserver()
    observer.register_callback(str(folder) + ".json")
    observer.start()
    try:
        yield
    finally:
        observer.stop()
        observer.unregister_callback()


def profiled(**options: bool) -> Callable[[Path], AbstractContextManager[object]]:
    """Return a recorder for torch.profiler with the given options."""
    return lambda folder: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options)


def cases() -> list[Case]:
    """Return all cases to measure."""
    small, bucket = torch.zeros(8), torch.zeros(1024)
    gathered, pieces = torch.zeros(4 * 1024), [torch.zeros(8) for _ in range(4)]
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    tag = hooks.tag(
        "gradient_reduce", bucket=3, owner=1, parameters=("a.weight", "a.bias"), bucket_bytes=4096
    )

    def sync() -> None:
        dist.all_reduce(small)

    chance = random.Random(1)
    splits = itertools.cycle(
        [tuple([chance.randrange(1, 9) for _ in range(4)] for _ in range(2)) for _ in range(5000)]
    )
    rows, taken = torch.zeros(32, 4), torch.zeros(32, 4)

    def exchange() -> None:
        sent, received = next(splits)
        dist.all_to_all_single(taken[: sum(received)], rows[: sum(sent)], received, sent)

    def coalesced() -> None:
        with dist._coalescing_manager():
            dist.all_reduce(small)
            dist.all_reduce(bucket)

    def recorder_of(**options: object) -> Callable[[Path], AbstractContextManager[object]]:
        return lambda folder: recording(folder, **options)

    default = recorder_of()
    return [
        Case("commprof, detached again", ALL_REDUCE, sync, recorded_before),
        Case(DEFAULT, ALL_REDUCE, sync, default),
        # commprof does not know the backend of this benchmark. With torch 2.14 and newer, the self-check therefore
        # counts calls through a hook of the dispatcher.
        Case("commprof, no self-check", ALL_REDUCE, sync, recorder_of(selfcheck=False)),
        Case(DEFAULT, "all_reduce, sync, tagged", sync, default, tag),
        Case(
            DEFAULT, "all_reduce, async, wait", lambda: dist.all_reduce(small, async_op=True).wait(), default
        ),
        Case(DEFAULT, "all_reduce, async, no wait", lambda: dist.all_reduce(small, async_op=True), default),
        Case(DEFAULT, "reduce, tagged", lambda: dist.reduce(bucket, 2), default, tag),
        Case(DEFAULT, "broadcast", lambda: dist.broadcast(bucket, 2), default),
        Case(DEFAULT, "all_gather of a buffer", lambda: gather(gathered, bucket), default),
        Case(DEFAULT, "reduce_scatter of a buffer", lambda: scatter(bucket, gathered), default),
        Case(DEFAULT, "all_gather of a list", lambda: dist.all_gather(pieces, small), default),
        Case(DEFAULT, "send", lambda: dist.send(small, 1), default),
        Case(DEFAULT, "barrier", dist.barrier, default),
        Case(DEFAULT, "all_to_all_single, other splits in each call", exchange, default),
        Case(DEFAULT, "two all_reduces, coalesced", coalesced, default),
        Case("commprof, complete", ALL_REDUCE, sync, recorder_of(complete=True)),
        Case("torch.profiler, plain", ALL_REDUCE, sync, profiled()),
        Case(
            "torch.profiler, shapes and stacks",
            ALL_REDUCE,
            sync,
            profiled(record_shapes=True, with_stack=True),
        ),
        Case(TRACE_OBSERVER, ALL_REDUCE, sync, observed),
        Case("CommDebugMode", ALL_REDUCE, sync, lambda folder: CommDebugMode()),
    ]


def measure(case: Case, calls: int, folder: Path) -> Added:
    """Measure one round of one case."""
    with case.tag:
        before = block(case.call, calls)
        with case.recorder(folder):
            on = block(case.call, calls)
        alone = (before + block(case.call, calls)) / 2
    return Added(alone, on - alone)


class CommsLogger:
    """A process that measures rounds of DeepSpeed's comms logger on request."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("comms_logger_cost.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def measure(self, calls: int) -> Added | None:
        """Measure one round of ``calls`` calls; return None if the process has exited."""
        try:
            self._process.stdin.write(f"{calls}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self._process.stdout.readline()
        return Added(*json.loads(line)) if line else None

    def end(self) -> None:
        """Stop the process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(timeout=30)


def rounds_of(
    chosen: list[Case], logger: CommsLogger | None, count: int, calls: int, peer_calls: int
) -> dict[tuple[str, str], list[Added]]:
    """Return one result per round for each recorder and call."""
    found: dict[tuple[str, str], list[Added]] = {(case.name, case.call_name): [] for case in chosen}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            for index, case in enumerate(chosen):
                amount = calls if case.name.startswith("commprof") else peer_calls
                found[case.name, case.call_name].append(
                    measure(case, amount, Path(folder) / f"{number}-{index}")
                )
            added = logger.measure(peer_calls) if logger else None
            if added is not None:
                found.setdefault(("DeepSpeed's comms logger", "its all_reduce, sync"), []).append(added)
    return found


def summarise(
    found: Mapping[tuple[str, str], list[Added]],
) -> tuple[list[list[str]], dict[str, dict[str, Any]]]:
    """Return the rows of the table, and the figures."""
    reference = [each.added for each in found.get((DEFAULT, ALL_REDUCE), [])]
    rows, figures = [], {}
    for (recorder, call), rounds in found.items():
        added = median_interval([each.added for each in rounds])
        alone = median_interval([each.alone for each in rounds])
        least = min(each.added for each in rounds)
        ratio: Spread | None = None
        if call.endswith(ALL_REDUCE) and len(reference) == len(rounds):
            ratio = median_interval(
                [each.added / mine for each, mine in zip(rounds, reference, strict=True) if mine > 0]
            )
        rows.append(
            [
                recorder,
                call,
                alone.text(),
                added.text(),
                f"{least:.2f}",
                "" if ratio is None else ratio.text(),
            ]
        )
        figures[f"{recorder}: {call}"] = {
            "alone_us": alone,
            "added_us": added,
            "least_added_us": least,
            "by_default": ratio,
        }
    return rows, figures


def main() -> None:
    """Measure, print the table and write it."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--calls", type=int, default=2000, help="calls of a block")
    parser.add_argument("--peer-calls", type=int, default=500, help="calls of a block under another recorder")
    parser.add_argument("--only", help="only the cases whose recorder or call contains this")
    parser.add_argument("--deepspeed-python", help="the Python of an environment that has DeepSpeed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    chosen = [case for case in cases() if (args.only or "") in f"{case.name}: {case.call_name}"]
    logger = CommsLogger(args.deepspeed_python) if args.deepspeed_python else None
    if logger is None:
        print("DeepSpeed's comms logger is left out: no --deepspeed-python was given", file=sys.stderr)
    try:
        found = rounds_of(chosen, logger, args.rounds, args.calls, args.peer_calls)
    finally:
        if logger is not None:
            logger.end()
    dist.destroy_process_group()
    rows, figures = summarise(found)
    publish(
        args,
        "CPU time added per collective (fake process group), microseconds: median (95 % interval)",
        ["recorder", "call", "call alone", "added", "least", "added, commprof's default = 1"],
        rows,
        figures,
    )


if __name__ == "__main__":
    main()
