"""Test repeated calls.

The wrappers in C and in Python record each call, and the caller gets the same results as from plain torch.
"""

from __future__ import annotations

import datetime
import gc
import random
import re
import signal
import sys
import threading
import time
import tracemalloc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, ProcessGroup, Work
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.utils._python_dispatch import TorchDispatchMode

import commprof
from commprof.recorder.process_group import compiled_calls
from commprof.recorder.session import current
from commprof.trace.reader import open_run
from support.ranks import run_ranks
from support.recording import calls, record

pytestmark = pytest.mark.ranks
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
COMPILED = compiled_calls.MODULE
TIMES = 3  # Each call is issued three times. The first call is learned, and the others are quick.
PURPOSES = {
    "a": ("input", "metric", "input"),
    "b": ("control", "input", "activation", "metric"),
}  # The names are of two recordings.
COLUMNS = ("op", "payload_bytes", "reduce_op", "peer", "is_async", "input_splits")


@pytest.fixture(autouse=True, params=["compiled", "python"])
def way(request, monkeypatch):
    """Return which wrappers record.

    The wrappers in C pass unknown calls to the wrappers in Python. The other case uses only the wrappers in
    Python.
    """
    if request.param == "python":
        monkeypatch.setattr(compiled_calls, "MODULE", None)
    elif COMPILED is None:
        pytest.skip("the compiled parts were not built here")
    return request.param


def shown(call):
    """Return the observable result of ``call``: its exception, or its result and the result of waiting."""
    try:
        result = call()
        waited = [result.wait(), result.wait(), result.is_completed()] if hasattr(result, "wait") else result
        return type(result).__name__, waited
    except Exception as error:
        return type(error).__name__, re.sub(r"0x\w+|\d{6,}", "", str(error).splitlines()[0])


def compare(path, world, body, faults=0, **options):
    """Run ``body`` with and without recording, and assert that callers see the same results.

    Returns:
        The opened run, which has no missing records.
    """
    plain = run_ranks(world, body)
    run, outcomes = record(path, world, body, **options)
    assert [outcome["result"] for outcome in outcomes] == plain
    assert sum(entry.get("faults") or 0 for entry in run.manifest.ranks) == faults * world
    assert run.health.unseen == run.health.lost == 0
    rows = [row for row in run.table("collectives").to_pylist() if row["status"] == "ok"]
    assert all(0 < row["issue_ns"] <= row["return_ns"] for row in rows)
    for row in rows:
        if row["wait_begin_ns"]:
            assert row["return_ns"] <= row["wait_begin_ns"] <= row["wait_end_ns"]
    return run


def functions(rank):
    """Yield calls of torch.distributed that two ranks issue, each with its expected record."""
    group = dist.group.WORLD
    tensor, whole, numbers = torch.arange(8.0) + rank, torch.zeros(16), torch.arange(12)
    pairs = [[1, 3], [3, 5]]
    sent, got = torch.ones(sum(pairs[rank])), torch.zeros(pairs[0][rank] + pairs[1][rank])
    splits = ([pairs[0][rank], pairs[1][rank]], pairs[rank])
    total = max(sent.nbytes, got.nbytes)

    def reduced(size, op="SUM", root=-1, is_async=False, name="all_reduce"):
        return name, size, op, root, is_async, None

    maximum = dist.ReduceOp.MAX
    yield lambda: dist.all_reduce(tensor, group=group), reduced(32)
    yield lambda: dist.all_reduce(tensor, maximum, group), reduced(32, "MAX")
    yield lambda: dist.all_reduce(tensor, group=group, async_op=True), reduced(32, is_async=True)
    yield lambda: dist.all_reduce(numbers, group=group), reduced(96)
    yield lambda: dist.all_reduce(torch.ones(4, 4).t(), group=group), reduced(64)
    yield lambda: dist.all_reduce(torch.nn.Parameter(tensor).data, group=group), reduced(32)
    for root in (0, 1):
        yield lambda root=root: dist.broadcast(tensor, root, group), reduced(32, None, root, name="broadcast")
        yield (
            lambda root=root: dist.reduce(tensor, root, group=group),
            reduced(32, "SUM", root, name="reduce"),
        )
    yield lambda: dist.broadcast(tensor, 1, group, True), reduced(32, None, 1, True, "broadcast")
    yield lambda: GATHER(whole, tensor, group=group), reduced(64, None, name="all_gather")
    yield lambda: GATHER(whole, tensor, group, True), reduced(64, None, -1, True, "all_gather")
    # torch refuses this call because the output is too short.
    yield lambda: GATHER(whole[:8], tensor, group=group), None
    yield lambda: SCATTER(tensor, whole, group=group), reduced(64, name="reduce_scatter")
    yield lambda: dist.all_gather([whole[:8], whole[8:]], tensor, group), reduced(64, None, name="all_gather")
    yield (
        lambda: dist.all_to_all_single(got, sent, *splits, group=group),
        ("all_to_all", total, None, -1, False, ",".join(str(4 * each) for each in pairs[rank])),
    )
    yield lambda: dist.barrier(group), ("barrier", 0, None, -1, False, None)
    yield lambda: tensor.tolist() + whole.tolist() + got.tolist(), None


@pytest.mark.sampled
@pytest.mark.parametrize("complete", [False, True], ids=["layers", "complete"])
def test_each_function_is_recorded_as_it_was_called_and_returns_what_it_would(tmp_path, complete):
    def body(rank, world):
        return [shown(call) for call, _ in functions(rank) for _ in range(TIMES)]

    run = compare(tmp_path / "run", 2, body, complete=complete)
    for rank in (0, 1):
        expected = [each for _, each in functions(rank) if each for _ in range(TIMES)]
        rows = calls(run, rank, "status", "pg_seq", "call_site", "wait_begin_ns", *COLUMNS)
        issued = [row for row in rows if row[0] == "ok"]
        assert [row[4:] for row in issued] == expected and len(rows) == len(issued) + TIMES
        assert [row[1] for row in issued] == list(range(len(expected)))
        assert all("test_quick_calls.py" in row[2] and "functions" in row[2] and row[3] for row in issued)


def methods():
    """Yield calls of a group's own methods with any arguments.

    Each call that torch issues is given with its operation, bytes and reduction.
    """
    group, tensor, matrix = dist.group.WORLD, torch.ones(8), torch.ones(2, 3, dtype=torch.bfloat16)
    plain, maximum = dist.AllreduceOptions(), dist.AllreduceOptions()
    maximum.reduceOp = dist.ReduceOp.MAX
    loop, deep, sum_of_8 = [], [], ("all_reduce", 32, "SUM")
    loop.append(loop)
    for _ in range(1000):
        deep = [deep]
    yield lambda: group.allreduce([tensor]), sum_of_8
    yield lambda: group.allreduce([tensor], plain), sum_of_8
    yield lambda: group.allreduce([tensor], maximum), ("all_reduce", 32, "MAX")
    yield lambda: group.allreduce(tensors=[tensor], opts=maximum), ("all_reduce", 32, "MAX")
    yield lambda: group.allreduce([tensor], dist.ReduceOp.MIN), ("all_reduce", 32, "MIN")
    yield lambda: group.allreduce(tensor, timeout=datetime.timedelta(seconds=5)), sum_of_8
    yield lambda: group.allreduce((tensor,), plain), sum_of_8
    yield lambda: group.allreduce([tensor, tensor], plain), ("all_reduce", 64, "SUM")
    yield lambda: group.allreduce([torch.nn.Parameter(tensor)], plain), sum_of_8
    yield lambda: group.allreduce([torch.ones(9)], plain), ("all_reduce", 36, "SUM")
    yield lambda: group.allreduce([matrix], plain), ("all_reduce", 12, "SUM")
    yield lambda: group.allreduce([torch.ones(8, device="meta")], plain), sum_of_8
    yield lambda: ProcessGroup.allreduce(group, [tensor], plain), sum_of_8
    yield lambda: group.allgather([[matrix.clone()]], [matrix]), ("all_gather", 12, None)
    yield lambda: group.alltoall_base(torch.zeros(8), tensor, [8], [8]), ("all_to_all", 32, None)
    yield lambda: group.broadcast(tensor, root=0), ("broadcast", 32, None)
    yield lambda: group.barrier(), ("barrier", 0, None)
    yield lambda: group.barrier(opts=dist.BarrierOptions()), ("barrier", 0, None)
    yield lambda: dist.all_reduce(torch.ones(3, dtype=torch.complex64)), ("all_reduce", 24, "SUM")
    yield lambda: dist.all_reduce(tensor, async_op=1), sum_of_8
    yield lambda: dist.all_reduce.__wrapped__(tensor), sum_of_8
    yield lambda: (group.allreduce.__name__, group.allreduce.__self__ is group), None
    for refused in (
        lambda: group.allreduce([tensor], plain, "more"),
        lambda: group.allreduce([], plain),
        lambda: group.allreduce(),
        lambda: group.allreduce(object(), plain),
        lambda: group.allreduce(loop, plain),
        lambda: group.allreduce(deep, plain),
        lambda: dist.broadcast(tensor, 5),
        lambda: dist.broadcast(tensor, [1]),
        lambda: dist.all_reduce([tensor]),
        lambda: dist.all_reduce(tensor, 17),
    ):
        yield refused, None


@pytest.mark.sampled
def test_any_arguments_reach_torch_and_what_it_refuses_is_refused(tmp_path):
    def body(rank, world):
        return [shown(call) for call, _ in methods() for _ in range(TIMES)]

    def expected(rank, world):
        return [each for _, each in methods() if each for _ in range(TIMES)]

    # Endlessly nested lists cannot be described. These calls are counted, and torch refuses them.
    run = compare(tmp_path / "run", 1, body, faults=2 * TIMES)
    statuses = calls(run, 0, "status", "op", "payload_bytes", "reduce_op")
    assert [row[1:] for row in statuses if row[0] == "ok"] == run_ranks(1, expected)[0]
    assert [row[0] for row in statuses if row[0] != "ok"] == ["raised"] * run.health.raised
    assert run.health.raised == 5 * TIMES


@pytest.mark.sampled
def test_waits(tmp_path):
    """The first wait of a handle is timed in every form. An exception of the wait reaches the caller."""

    def body(rank, world):
        short = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
        tensor, seen = torch.ones(4), []
        for _ in range(TIMES):
            dist.all_reduce(tensor, async_op=True)  # This call is never waited for.
            for form in (
                lambda work: work.wait(),
                lambda work: work.wait(datetime.timedelta(seconds=9)),
                lambda work: work.wait(timeout=datetime.timedelta(seconds=9)),
                lambda work: Work.wait(work),
            ):
                work = dist.all_reduce(tensor, async_op=True)
                seen.append(
                    (form(work), shown(lambda work=work, form=form: form(work)), sys.getrefcount(work))
                )
            seen.append(shown(lambda: Work.wait())[0])
        if rank == 0:
            work = dist.all_reduce(tensor, group=short, async_op=True)
            seen.append(shown(work.wait)[0])
            seen.append(shown(lambda: dist.reduce(tensor, 1, group=short))[0])
        return seen

    plain = run_ranks(2, body)
    run, outcomes = record(tmp_path / "run", 2, body)
    assert [outcome["result"] for outcome in outcomes] == plain and plain[0][-2:] == ["RuntimeError"] * 2
    rows = calls(run, 0, "return_ns", "wait_begin_ns", "wait_end_ns")
    for number, (returned, begin, end) in enumerate(rows[: 5 * TIMES]):
        assert begin is end is None if number % 5 == 0 else returned <= begin <= end
    assert len(rows) == 5 * TIMES + 2 and all(row[2] for row in rows[-2:])
    assert rows[-2][2] - rows[-2][1] > 5e8  # The failed wait has an end.


@pytest.mark.sampled
def test_each_line_of_the_program_is_named_also_through_more_of_torch(tmp_path):
    def body(rank, world):
        model, tensor = torch.nn.Linear(2, 2, bias=False), torch.ones(2, 2)
        for _ in range(TIMES):
            dist.all_reduce(tensor)
            dist.all_reduce(tensor)
            average_parameters(model.parameters(), None)
            average_parameters(model.parameters(), None)
        return model.weight.shape

    sites = calls(compare(tmp_path / "run", 1, body), 0, "call_site")
    lines = [int(site.split()[0].rpartition(":")[2]) for site in sites]
    assert lines == [lines[0] + number for number in range(4)] * TIMES
    assert all("test_quick_calls.py" in site and "body" in site for site in sites)


@pytest.mark.sampled
def test_a_tag_counts_in_each_recording_and_only_where_it_is_set(tmp_path):
    def issue():
        for _ in range(TIMES):
            dist.all_reduce(torch.ones(2))
            dist.barrier()

    def body(rank, world):
        with commprof.tag(purpose="metric"):  # The tag has a different number in each recording.
            for name, purposes in PURPOSES.items():
                commprof.attach(str(tmp_path / name))
                for purpose in purposes:
                    if purpose == "metric":
                        issue()
                        continue
                    with commprof.tag(purpose=purpose, bucket=7):
                        issue()
                commprof.detach()

    run_ranks(1, body)
    for name, purposes in PURPOSES.items():
        expected = [(each, None if each == "metric" else 7) for each in purposes for _ in range(2 * TIMES)]
        assert calls(open_run(tmp_path / name), 0, "purpose", "bucket") == expected


@pytest.mark.sampled
@pytest.mark.parametrize("complete", [False, True], ids=["layers", "complete"])
def test_more_calls_than_a_part_of_the_file_holds_from_new_threads(tmp_path, complete):
    """Each thread uses its own group.

    While one call is in progress, the call of another thread is also recorded.
    """

    def body(rank, world):
        groups = [dist.new_group([0]) for _ in range(3)]

        def work(number):
            for _ in range(700):
                dist.all_reduce(torch.ones(number + 1), group=groups[number])
                groups[number].barrier(dist.BarrierOptions()).wait()

        threads = [threading.Thread(target=work, args=(number,), name=f"t{number}") for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run = compare(tmp_path / "run", 1, body, complete=complete)
    rows = calls(run, 0, "pg", "thread", "op", "payload_bytes", "pg_seq", "status")
    for number in range(3):
        of_thread = [row for row in rows if row[1] == f"t{number}"]
        assert len({row[0] for row in of_thread}) == 1
        assert [row[2:4] for row in of_thread] == [("all_reduce", 4 * (number + 1)), ("barrier", 0)] * 700
        assert [row[4:] for row in of_thread] == [(each, "ok") for each in range(1400)]


@pytest.mark.sampled
def test_what_the_recorder_costs_is_sampled_of_both_kinds_of_calls(tmp_path, way):
    def body(rank, world):
        kinds, samples = [type(vars(ProcessGroup)["allreduce"]), type(vars(Work)["wait"])], []
        for issue in (lambda: dist.all_reduce(torch.ones(1)), lambda: dist.group.WORLD.barrier().wait()):
            before = current().journal.cost_samples
            for _ in range(502):
                issue()
            samples.append(current().journal.cost_samples - before)
        return [kind in vars(COMPILED).values() for kind in kinds] if COMPILED else [False] * 2, samples

    run, outcomes = record(tmp_path / "run", 1, body)
    # Assert that the fixture selects the wrappers that it names. Otherwise this file would test Python twice.
    assert outcomes[0]["result"] == ([way == "compiled"] * 2, [2, 2])
    # There is no upper bound, because four samples represent 1,004 calls and one of them may be interrupted.
    assert run.health.recorder_ns > 0


# The Python functions that wrappers call: for the first handle, each new tag, a call that raised, and each
# sampled call.
TIMERS = 1_000
INTERRUPTED = ("find_direct", "intern_tag", "record_raised", "settle")


class Broken:
    """The memory of a record, on a disk that is gone: nothing can be written to it."""

    def __setitem__(self, index, value):
        raise OSError("disk gone")


class LosesRecords(TorchDispatchMode):
    """A mode that makes the words of the current record unwritable between torch's method and its operator."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "c10d" and current():
            current().journal.place[0].let_go(Broken())
        return operator(*args, **(kwargs or {}))


@pytest.mark.sampled
def test_faults_of_the_recorder_are_counted_and_the_caller_sees_nothing(tmp_path):
    def body(rank, world):
        group, tensor, seen = dist.group.WORLD, torch.ones(3), []
        for issue in (
            lambda: dist.all_reduce(tensor),
            lambda: dist.all_reduce(tensor, async_op=True),
            lambda: group.allreduce([tensor]),
        ):
            seen.extend(shown(issue) for _ in range(TIMES))
            with LosesRecords():
                seen.append(shown(issue))
            seen.append(shown(issue))
        return seen

    plain = run_ranks(1, body)
    run, outcomes = record(tmp_path / "run", 1, body)
    assert [outcome["result"] for outcome in outcomes] == plain
    assert len(calls(run, 0, "op")) == 3 * (TIMES + 2) and run.health.unseen == 0
    assert any("commprof itself failed on 3 collectives" in note for note in run.health.notes)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
def test_an_interruption_within_the_recorder_is_the_programs(tmp_path, kind):
    """A program's interruption within the recorder reaches the program.

    When a Python function runs for the wrapper, Ctrl-C or an exception of the program's signal handler may
    occur. The exception is neither swallowed nor counted as a fault.
    """

    def body(rank, world):
        tensor, interrupted, refused, raised = torch.ones(2), [], 0, []

        def trace(frame, event, argument):
            if "commprof/recorder" in frame.f_code.co_filename and frame.f_code.co_name == function:
                sys.settrace(None)
                raised.append(function)
                raise kind("interrupted")

        for _ in range(600):
            function = INTERRUPTED[len(interrupted)] if len(interrupted) < len(INTERRUPTED) else None
            try:
                with commprof.tag(purpose="metric") if function == "intern_tag" else nullcontext():
                    sys.settrace(trace if function else None)
                    dist.all_reduce(tensor)
                    dist.group.WORLD.barrier().wait()
                    dist.broadcast(tensor, 5)
            except kind as error:
                interrupted.append(type(error.__context__).__name__)
            except RuntimeError as error:
                refused += "invalid root" in str(error)
            finally:
                sys.settrace(None)
        return interrupted, refused, raised

    run, outcomes = record(tmp_path / "run", 1, body)
    interrupted, refused, raised = outcomes[0]["result"]
    assert dict(zip(INTERRUPTED, interrupted, strict=True)) == dict.fromkeys(INTERRUPTED, "NoneType") | {
        "record_raised": "RuntimeError"  # The exception that the program would have seen is preserved.
    }
    assert raised == list(INTERRUPTED)  # No exception was swallowed.
    assert refused == 600 - len(INTERRUPTED)
    assert run.health.unseen == 0 and not any("commprof itself failed" in note for note in run.health.notes)


@pytest.mark.sampled
def test_exceptions_of_signal_handlers_reach_the_program(tmp_path):
    """One in a hundred exceptions used to be lost.

    torch prints and drops an exception in a callback of a future that is already complete.
    """

    def body(rank, world):
        def handle(number, frame):
            raise TimeoutError("too late")

        chance, tensor, caught = random.Random(0), torch.ones(2), 0
        before = signal.signal(signal.SIGALRM, handle)
        for _ in range(TIMERS):
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-5, 4e-4))
                for _ in range(10_000):
                    dist.all_reduce(tensor)
            except TimeoutError:
                caught += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        return caught

    run, outcomes = record(tmp_path / "run", 1, body)
    assert TIMERS - 3 <= outcomes[0]["result"] <= TIMERS
    assert run.health.unseen == 0 and not any("commprof itself failed" in note for note in run.health.notes)


def groups_in_python(rank, world):
    """Use groups of a class that the program derives from ProcessGroup.

    The calls of such a group may return any object.
    """

    class Handle(Work):
        def wait(self, timeout=None):
            return "waited"

    class Group(ProcessGroup):
        def __init__(self, handle):
            super().__init__(rank, world)
            self.handle = handle
            kind = ProcessGroup.BackendType.CUSTOM
            self._set_default_backend(kind)
            self._register_backend(torch.device("cpu"), kind, FakeProcessGroup._create_internal(rank, world))
            self._set_group_name(f"mine{type(handle).__name__}")

        def allreduce(self, tensors, options=None):
            # One call is issued within another call.
            super().broadcast(tensors, dist.BroadcastOptions()).wait()
            return self.handle

    tensor, seen = torch.ones(2), []
    for group in (Group(Handle()), Group(None), Group(17)):
        call = partial(group.allreduce, [tensor], dist.AllreduceOptions())
        seen.extend(shown(call) for _ in range(TIMES))
    return seen


@pytest.mark.sampled
def test_whatever_a_group_of_the_program_returns_is_given_back(tmp_path):
    run = compare(tmp_path / "run", 1, groups_in_python)
    assert calls(run, 0, "op") == ["broadcast"] * 3 * TIMES


@pytest.mark.sampled
def test_nothing_is_held_and_nothing_leaks(tmp_path):
    def body(rank, world):
        tensor, whole, group = torch.ones(8), torch.ones(8), dist.group.WORLD
        held = (tensor, whole, group, dist.ReduceOp.SUM)

        def issue(times):
            for _ in range(times):
                dist.all_reduce(tensor)
                dist.all_reduce(tensor, async_op=True).wait()
                GATHER(whole, tensor)
                group.allreduce([tensor, whole]).wait()
            gc.collect()

        def references():
            deadline = time.monotonic() + 5  # gloo's own threads release the group a moment later.
            while time.monotonic() < deadline and [sys.getrefcount(each) for each in held] != before:
                time.sleep(0.01)
            return [sys.getrefcount(each) for each in held]

        commprof.attach(str(tmp_path / "run"))
        issue(50)
        time.sleep(0.2)
        before = [sys.getrefcount(each) for each in held]
        issue(300)
        same = references() == before
        tracemalloc.start()
        issue(300)
        begin, _ = tracemalloc.get_traced_memory()
        issue(500)
        grown = tracemalloc.get_traced_memory()[0] - begin
        tracemalloc.stop()
        wrappers = vars(ProcessGroup)["allreduce"], vars(ProcessGroup)["barrier"], vars(Work)["wait"]
        in_loops = [gc.is_tracked(each) and len(gc.get_referents(each)) > 1 for each in wrappers]
        other = dist.new_group([0])
        dist.all_reduce(tensor, group=other)
        gone = weakref.ref(other)
        dist.destroy_process_group(other)
        del other
        gc.collect()
        commprof.detach()
        return same, grown, gone() is None, in_loops

    ((same, grown, is_gone, in_loops),) = run_ranks(1, body)
    assert same and is_gone
    # The limit is in bytes after 2000 calls. One object of 16 bytes per call would be 32,000.
    assert grown < 16_000
    assert all(in_loops)  # The garbage collector finds the objects that wrappers reference.


@pytest.mark.skipif(COMPILED is None, reason="the compiled parts were not built here")
@pytest.mark.parametrize("kind", ["DirectCall", "GeneralCall", "WaitCall"])
def test_a_wrapper_that_was_not_made_ready_refuses(kind):
    raw = getattr(COMPILED, kind)
    with pytest.raises(TypeError):
        raw()
    with pytest.raises(RuntimeError, match="not made ready"):
        raw.__new__(raw)(1, 2, 3)
