"""The fast path from torch.distributed's functions to a record.

The tests check that it does not change results, confuse calls or leave references behind.
"""

from __future__ import annotations

import datetime
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, ProcessGroup, Work
from torch.utils._python_dispatch import TorchDispatchMode

import commprof
from commprof.recorder.process_group import compiled_calls
from commprof.trace.reader import open_run
from support.ranks import run_ranks
from support.recording import calls, record

FUNCTIONS = ("all_reduce", "broadcast", "reduce")
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@pytest.fixture(autouse=True, params=["compiled", "python"])
def way(request, monkeypatch):
    """Run each test with the wrapper in C, and with the Python wrapper that handles the calls that C does not."""
    if request.param == "python":
        monkeypatch.setattr(compiled_calls, "MODULE", None)
    elif compiled_calls.MODULE is None:
        pytest.skip("the compiled parts were not built here")


def inner_functions() -> list[object]:
    """Return the functions that torch's logging wrappers call."""
    logged = [getattr(dist, name) for name in FUNCTIONS] + [GATHER, SCATTER]
    return [[cell.cell_contents for cell in function.__closure__] for function in logged]


@pytest.mark.long
def test_one_line_of_the_program_may_ask_for_anything(tmp_path):
    """One call site may issue different calls.

    The calls differ in reduction, type, shape, root and group, and are synchronous or not. Their results are
    unchanged.
    """

    def body(rank, world):
        other = dist.new_group([0, 1])
        asked, results = [], []
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            for dtype in (torch.float32, torch.int64):
                for size in (3, 5):
                    for group in (None, other):
                        for is_async in (False, True):
                            tensor = torch.full((size,), rank + 1, dtype=dtype)
                            handle = dist.all_reduce(tensor, op, group=group, async_op=is_async)
                            assert (handle is not None) is is_async
                            if is_async:
                                handle.wait()
                            asked.append((op.name, str(dtype).removeprefix("torch."), str(size), is_async))
                            results.append(tensor.tolist())
        roots = []
        for root in (0, 1, 1, 0):
            tensor = torch.full((2,), float(rank))
            dist.broadcast(tensor, root)
            dist.reduce(tensor, dst=root)
            roots += [root, root]
            results.append(tensor.tolist() if rank == root else root)
        return asked, roots, results

    run, outcomes = record(tmp_path / "run", 2, body)
    plain = run_ranks(2, body)
    for rank in (0, 1):
        asked, roots, results = outcomes[rank]["result"]
        assert results == plain[rank][2]
        rows = calls(run, rank, "op", "reduce_op", "dtype", "sizes", "is_async", "peer")
        reductions = [row[1:5] for row in rows if row[0] == "all_reduce"]
        assert reductions == asked
        assert [row[5] for row in rows if row[0] in ("broadcast", "reduce")] == roots
    times = run.table("collectives").to_pylist()
    assert all(row["return_ns"] <= row["wait_begin_ns"] <= row["wait_end_ns"] for row in times)
    assert run.health.unseen == 0


@pytest.mark.long
def test_forms_that_the_short_way_does_not_take_are_recorded_all_the_same(tmp_path):
    """Forms that the fast path does not support are also recorded.

    These are views of complex numbers, methods of the group, torch's function without its logging wrapper,
    and keyword arguments.
    """

    def body(rank, world):
        dist.all_reduce(torch.ones(3, dtype=torch.complex64))
        dist.all_reduce(tensor=torch.ones(4), op=dist.ReduceOp.MAX)
        dist.all_reduce.__wrapped__(torch.ones(5))
        dist.group.WORLD.allreduce([torch.ones(6)]).wait()
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        dist.group.WORLD.allreduce([torch.ones(7)], options).wait()
        with pytest.raises((TypeError, ValueError)):
            dist.all_reduce("no tensor")
        dist.group.WORLD.allreduce([torch.ones(8)]).wait()

    run, _ = record(tmp_path / "run", 2, body)
    assert calls(run, 0, "sizes", "reduce_op") == [
        ("3x2", "SUM"),
        ("4", "MAX"),
        ("5", "SUM"),
        ("6", "SUM"),
        ("7", "MIN"),
        ("8", "SUM"),
    ]
    assert all(row["wait_end_ns"] for row in run.table("collectives").to_pylist())


@pytest.mark.sampled
def test_threads_that_call_at_the_same_time_take_nothing_of_each_other(tmp_path):
    def body(rank, world):
        groups = [dist.new_group([0, 1]) for _ in range(3)]
        ops = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN)

        def work(number):
            for _ in range(100):
                dist.all_reduce(torch.ones(number + 1), ops[number], group=groups[number])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run, _ = record(tmp_path / "run", 2, body)
    rows = calls(run, 0, "reduce_op", "sizes")
    assert sorted(rows) == sorted([("SUM", "1")] * 100 + [("MAX", "2")] * 100 + [("MIN", "3")] * 100)
    assert len(set(calls(run, 0, "call_site"))) == 1


@pytest.mark.sampled
def test_no_tensor_outlives_its_call(tmp_path):
    def body(rank, world):
        alive = []
        for size in range(1, 20):
            tensor = torch.ones(size)
            dist.all_reduce(tensor)
            GATHER(torch.empty(2 * size), tensor)
            alive.append(weakref.ref(tensor))
            del tensor
        deadline = time.monotonic() + 10  # gloo's own threads release their references a moment later
        while any(reference() is not None for reference in alive) and time.monotonic() < deadline:
            time.sleep(0.01)
        return sum(reference() is not None for reference in alive)

    _, outcomes = record(tmp_path / "run", 2, body)
    assert [outcome["result"] for outcome in outcomes] == [0, 0]


@pytest.mark.long
def test_who_wraps_wait_while_recording_sees_synchronous_calls_too(tmp_path):
    def body(rank, world):
        seen = []
        commprof.attach(str(tmp_path / "run"))
        try:
            dist.all_reduce(torch.ones(2))
            ours = Work.wait

            def wait(work, *args):
                seen.append(type(work).__name__)
                return ours(work, *args)

            Work.wait = wait
            try:
                for _ in range(3):
                    dist.all_reduce(torch.ones(2))
            finally:
                Work.wait = ours
            dist.all_reduce(torch.ones(2))
        finally:
            commprof.detach()
        return seen

    assert run_ranks(2, body) == [["Work"] * 3] * 2
    run = open_run(tmp_path / "run")
    rows = run.table("collectives").to_pylist()
    assert len(rows) == 10 and all(row["wait_end_ns"] for row in rows)


@pytest.mark.sampled
def test_what_waiting_raises_comes_through_and_the_wait_has_ended(tmp_path):
    def body(rank, world):
        commprof.attach(str(tmp_path / "run"))
        try:
            if rank == 0:
                with pytest.raises(RuntimeError) as caught:
                    dist.all_reduce(torch.ones(2))
                return "commprof" in str(caught.value)
            return False
        finally:
            commprof.detach()

    def alone(rank, world):
        store = dist.FileStore(str(tmp_path / "store"), world)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=2)
        )
        return body(rank, world)

    assert run_ranks(2, alone, process_group=False) == [False, False]
    rows = [row for row in open_run(tmp_path / "run").table("collectives").to_pylist() if row["rank"] == 0]
    (row,) = rows
    assert (
        row["status"] == "ok"
        and row["issue_ns"] < row["return_ns"] <= row["wait_begin_ns"] < row["wait_end_ns"]
    )


class FirstUseOfDdp(TorchDispatchMode):
    """Use DDP's reducer between torch's function and its operator, as another thread might."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.name()
        if name == "c10d::allreduce_":
            self.operators.append(name)
            if len(self.operators) == 3:
                with pytest.raises(TypeError):
                    dist.Reducer()
        return operator(*args, **(kwargs or {}))


@pytest.mark.long
def test_a_call_under_way_when_ddp_is_first_used_is_recorded_once(tmp_path):
    """A call in progress when DDP is first used is recorded once.

    From then on kernels also record what reaches c10d. This call reaches c10d after the kernels were
    installed.
    """

    def body(rank, world):
        with FirstUseOfDdp() as mode:
            for _ in range(5):
                dist.all_reduce(torch.ones(3))
                dist.reduce(torch.ones(3), 0)
        dist._broadcast_coalesced(dist.group.WORLD, [torch.ones(5)], 1 << 20, 0)
        return mode.operators

    run, outcomes = record(tmp_path / "run", 2, body)
    for rank in (0, 1):
        assert len(outcomes[rank]["result"]) == 5
        assert calls(run, rank, "op") == ["all_reduce", "reduce"] * 5 + ["broadcast"]
    assert run.health.unseen == 0


@pytest.mark.sampled
def test_everything_of_torch_is_as_it_was_after_detach(tmp_path):
    def body(rank, world):
        before = inner_functions(), dict(vars(ProcessGroup)), dict(vars(Work))
        commprof.attach(str(tmp_path / "run"))
        changed = inner_functions() != before[0]
        commprof.detach()
        return changed, (inner_functions(), dict(vars(ProcessGroup)), dict(vars(Work))) == before

    assert run_ranks(1, body) == [(True, True)]


@pytest.mark.sampled
def test_a_stand_in_that_somebody_replaced_is_left_alone(tmp_path):
    def body(rank, world):
        commprof.attach(str(tmp_path / "run"))
        cell = next(cell for cell in dist.all_reduce.__closure__ if callable(cell.cell_contents))
        ours = cell.cell_contents

        def somebody_else(*args, **kwargs):
            return ours(*args, **kwargs)

        cell.cell_contents = somebody_else
        dist.all_reduce(torch.ones(2))
        commprof.detach()
        left = cell.cell_contents is somebody_else
        dist.all_reduce(torch.ones(2))
        cell.cell_contents = dist.all_reduce.__wrapped__
        return left

    assert run_ranks(1, body) == [True]
    (row,) = open_run(tmp_path / "run").table("collectives").to_pylist()
    assert "test_direct.py" in row["call_site"] and row["api"] == "all_reduce"


class PassesOn:
    """A group of the program that passes calls on to a real group.

    It passes more arguments than torch's function gives, or fewer.
    """

    def __init__(self, group):
        self.group = group
        self.given = []

    def __getattr__(self, name):
        return getattr(self.group, name)

    def allreduce(self, tensors, options):
        if len(self.given) % 2:
            return self.group.allreduce(tensors)
        return self.group.allreduce(tensors, dist.ReduceOp.SUM, datetime.timedelta(seconds=5))


@pytest.mark.sampled
@pytest.mark.parametrize("complete", [False, True], ids=["layers", "complete"])
def test_what_a_group_of_the_program_passes_on_arrives(tmp_path, complete):
    def body(rank, world):
        arrived = []
        group = PassesOn(dist.group.WORLD)
        for number in range(4):
            group.given = [None] * number
            tensor = torch.ones(2)
            dist.all_reduce(tensor, group=group)
            arrived.append(tensor.tolist())
        return arrived

    plain = run_ranks(2, body)
    run, outcomes = record(tmp_path / "run", 2, body, complete=complete)
    assert [each["result"] for each in outcomes] == plain == [[[2.0, 2.0]] * 4] * 2
    assert calls(run, 0, "op") == ["all_reduce"] * 4


def groups_in_python(rank, world):
    """Call methods of a class that a program derives from ProcessGroup: its own method and inherited ones.

    The backend sends nothing. Below such a class torch holds the GIL while it calls the backend, and a gloo
    thread may wait for the GIL while it holds a lock of gloo. Both then wait forever, with or without
    recording.
    """

    class Group(ProcessGroup):
        def __init__(self):
            super().__init__(rank, world)
            kind = ProcessGroup.BackendType.CUSTOM
            self._set_default_backend(kind)
            self._register_backend(torch.device("cpu"), kind, FakeProcessGroup._create_internal(rank, world))
            self._set_group_name("mine")

        def broadcast(self, tensors, options=None):
            return super().broadcast(tensors, options or dist.BroadcastOptions())

    group, tensor = Group(), torch.full((2,), rank + 1.0)
    for _ in range(3):
        group.broadcast([tensor]).wait()
        group.barrier(dist.BarrierOptions()).wait()
        group.allreduce([tensor], dist.AllreduceOptions()).wait()
        dist.all_reduce(tensor, group=group)
    return tensor.tolist()


@pytest.mark.sampled
@pytest.mark.parametrize("complete", [False, True], ids=["layers", "complete"])
def test_a_class_derived_from_torchs_in_python_works_as_ever(tmp_path, complete):
    plain = run_ranks(2, groups_in_python)
    run, outcomes = record(tmp_path / "run", 2, groups_in_python, complete=complete)
    assert [each["result"] for each in outcomes] == plain == [[1.0, 1.0], [2.0, 2.0]]
    assert calls(run, 0, "op") == ["broadcast", "barrier", "all_reduce", "all_reduce"] * 3
