"""The compiled wrappers and their Python twins leave the same records of every function of torch.distributed.

The backend sends nothing, so that every form exists. Each call is issued several times from one place. At
first the Python function learns the call, and then the compiled wrapper handles it.
"""

from __future__ import annotations

import sys
import time

import pytest
import torch
import torch.distributed as dist

from commprof.recorder.device import device_times
from commprof.recorder.process_group import compiled_calls
from commprof.trace.reader import open_run
from support.ranks import run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.skipif(compiled_calls.MODULE is None, reason="the compiled parts were not built here"),
]

WORLD = 4
TIMES = 3  # the number of calls of each form
RUN_TO_RUN = {
    "issue_ns",
    "return_ns",
    "wait_begin_ns",
    "wait_end_ns",
    "pid",
    "thread",
    "device_begin_ns",
    "device_end_ns",
    "exposed_ns",
}
# These forms do not use torch's function, or not with its tensor. The twin of the fast path passes them to
# the compiled general path.
OTHERWISE_CALLED = [
    "all_reduce of a named reduction",
    "all_reduce of complex numbers",
    "all_reduce of defaults",
    "all_reduce of the group's options",
]


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


def parts(size: int = 2) -> list[torch.Tensor]:
    return [tensor(size) for _ in range(WORLD)]


def coalesced(issue, is_async):
    def call():
        with dist._coalescing_manager(async_ops=is_async) as manager:
            issue(2)
            issue(3)
        if is_async:
            manager.wait()

    return call


def forms():
    """Return calls without arguments, by name.

    They cover positional and named arguments, defaults, reductions, and calls with and without a handle.
    """
    found = {}
    reductions = (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MIN
    group = dist.group.WORLD
    methods = {
        "all_reduce": lambda n, **k: dist.all_reduce(tensor(n), **k),
        "broadcast": lambda n, **k: dist.broadcast(tensor(n), 1, **k),
        "reduce": lambda n, **k: dist.reduce(tensor(n), 2, **k),
        "all_gather": lambda n, **k: dist.all_gather(parts(n), tensor(n), **k),
        "all_gather_into_tensor": lambda n, **k: dist.all_gather_into_tensor(
            tensor(WORLD * n), tensor(n), **k
        ),
        "reduce_scatter": lambda n, **k: dist.reduce_scatter(tensor(n), parts(n), **k),
        "reduce_scatter_tensor": lambda n, **k: dist.reduce_scatter_tensor(tensor(n), tensor(WORLD * n), **k),
        "all_to_all": lambda n, **k: dist.all_to_all(parts(n), parts(n), **k),
        "all_to_all_single": lambda n, **k: dist.all_to_all_single(tensor(WORLD * n), tensor(WORLD * n), **k),
        "all_to_all_single, splits": lambda n, **k: dist.all_to_all_single(
            tensor(10), tensor(10), [1, 2, 3, 4], output_split_sizes_or_input(n), **k
        ),
        "gather": lambda n, **k: dist.gather(tensor(n), parts(n), **k),
        "gather, elsewhere": lambda n, **k: dist.gather(tensor(n), dst=1, **k),
        "scatter": lambda n, **k: dist.scatter(tensor(n), parts(n), **k),
        "scatter, elsewhere": lambda n, **k: dist.scatter(tensor(n), src=1, **k),
        "barrier": lambda n, **k: dist.barrier(**k),
    }
    for name in ("all_gather_single", "reduce_scatter_single", "gather_single"):
        if hasattr(dist, name):
            inner = getattr(dist, name)
            if name == "reduce_scatter_single":
                methods[name] = lambda n, inner=inner, **k: inner(tensor(n), tensor(WORLD * n), **k)
            elif name == "all_gather_single":
                methods[name] = lambda n, inner=inner, **k: inner(tensor(WORLD * n), tensor(n), **k)
            else:
                methods[name] = lambda n, inner=inner, **k: inner(tensor(n), tensor(WORLD * n), **k)
    for name, method in methods.items():
        for is_async in (False, True):

            def call(method=method, is_async=is_async):
                work = method(3, async_op=is_async)
                if is_async:
                    work.wait()

            found[f"{name}, async_op={is_async}"] = call
        found[f"{name}, no wait"] = lambda method=method: method(2, async_op=True) and None
        found[f"{name}, group"] = lambda method=method: method(5, group=group) and None
    for op in reductions:
        found[f"all_reduce {op.name}"] = lambda op=op: dist.all_reduce(tensor(4), op)
        found[f"reduce {op.name}"] = lambda op=op: dist.reduce(tensor(4), dst=1, op=op)
        found[f"reduce_scatter {op.name}"] = lambda op=op: dist.reduce_scatter(tensor(4), parts(4), op=op)
        found[f"reduce_scatter_tensor {op.name}"] = lambda op=op: dist.reduce_scatter_tensor(
            tensor(2), tensor(2 * WORLD), op
        )
    for is_async in (False, True):
        found[f"coalesced all_reduce, {is_async}"] = coalesced(lambda n: dist.all_reduce(tensor(n)), is_async)
        found[f"coalesced all_gather, {is_async}"] = coalesced(
            lambda n: dist.all_gather_into_tensor(tensor(WORLD * n), tensor(n)), is_async
        )
        found[f"coalesced reduce_scatter, {is_async}"] = coalesced(
            lambda n: dist.reduce_scatter_tensor(tensor(n), tensor(WORLD * n)), is_async
        )
    found |= {
        "all_reduce of names": lambda: dist.all_reduce(tensor=tensor(7, dtype=torch.int64), async_op=False),
        "all_reduce of the group's options": lambda: group.allreduce([tensor(6)], options).wait(),
        "all_reduce of defaults": lambda: group.allreduce([tensor(6)]).wait(),
        "all_reduce of a named reduction": lambda: group.allreduce([tensor(6)], op=dist.ReduceOp.MAX).wait(),
        "broadcast of the root in the group": lambda: dist.broadcast(tensor(6), group_src=3),
        "all_reduce of all positions": lambda: dist.all_reduce(tensor(9), dist.ReduceOp.MIN, None, False),
        "all_reduce of complex numbers": lambda: dist.all_reduce(tensor(3, dtype=torch.complex64)),
        "send": lambda: dist.send(tensor(3), 1),
        "send, tag": lambda: dist.send(tensor(3), dst=2, tag=5),
        "isend": lambda: dist.isend(tensor(2), 1).wait(),
        "recv": lambda: dist.recv(tensor(3), 1),
        "irecv": lambda: dist.irecv(tensor(2), 3).wait(),
        "waited twice": lambda: twice(dist.all_reduce(tensor(2), async_op=True)),
        "of two dimensions": lambda: dist.all_reduce(tensor(2, 3, dtype=torch.bfloat16)),
    }
    return found


def output_split_sizes_or_input(n: int) -> list[int]:
    return [4, 3, 2, 1] if n % 2 else [1, 2, 3, 4]


def twice(work) -> None:
    work.wait()
    work.wait()


class Mark:
    """An event of a device that has always completed its work."""

    def __init__(self) -> None:
        self.at = 0

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Mark) -> float:
        return (end.at - self.at) / 1e6


class Marks:
    """Events for tensors without storage, which stand in for GPU tensors."""

    def record(self, event: Mark | None, index: int, stream: object = None) -> Mark:
        event = event or Mark()
        event.at = time.perf_counter_ns()
        return event

    def is_aside(self, index: int) -> bool:
        return False

    def is_capturing(self) -> bool:
        return False


def program(rank, world, run, device):
    """Record every form.

    Returns the names of the forms that exist here, and of those whose last call went through a Python twin.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import commprof

    torch.set_default_device(device)
    device_times._SOURCES["meta"] = Marks
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    issued, through_python, name = [], set(), ""

    def watch(frame, event, argument):
        if (
            event == "call"
            and frame.f_code.co_filename.endswith(
                tuple(f"recorder/process_group/{module}.py" for module in ("fast_path", "wrappers", "waits"))
            )
            and frame.f_code.co_name in ("call", "wait")
        ):
            through_python.add(name)

    commprof.attach(run)
    try:
        for name, call in forms().items():
            try:
                for number in range(TIMES):
                    sys.setprofile(watch if number == TIMES - 1 else None)
                    call()
            except RuntimeError as error:
                # The fake backend of this torch version does not have all forms, or not for tensors without
                # storage.
                if "support" not in str(error) and "Meta tensors" not in str(error):
                    raise
                continue
            finally:
                sys.setprofile(None)
            issued.append(name)
    finally:
        commprof.detach()
    return issued, sorted(through_python)


def recorded(tmp_path, way, device):
    """Return the issued forms, those that still went through Python, and the comparable columns of the rows."""
    ((issued, through_python),) = run_ranks(1, program, str(tmp_path / way), device, process_group=False)
    run = open_run(tmp_path / way)
    assert run.health.unseen == 0
    rows = sorted(run.table("collectives").to_pylist(), key=lambda row: row["seq"])
    # Completion times of calls on the host are sampled, and differ between runs.
    columns = ["return_ns", "wait_begin_ns", "wait_end_ns"]
    if device != "cpu":
        columns += ["device_begin_ns", "device_end_ns", "exposed_ns"]
    times = [[row[name] is not None for name in columns] for row in rows]
    kept = [{name: value for name, value in row.items() if name not in RUN_TO_RUN} for row in rows]
    return issued, through_python, kept, times


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_form_leaves_the_same_record(tmp_path, monkeypatch, device):
    issued, through_python, rows, times = recorded(tmp_path, "compiled", device)
    monkeypatch.setattr(compiled_calls, "MODULE", None)
    same, all_through_python, expected, expected_times = recorded(tmp_path, "python", device)
    assert issued == same and len(issued) > 80
    assert len(rows) >= TIMES * len(issued)
    for row, other in zip(rows, expected, strict=True):
        assert row == other
    assert times == expected_times
    assert all_through_python == sorted(issued)
    assert through_python == OTHERWISE_CALLED


def capturing_program(rank, world, run):
    """Issue two calls in a simulated CUDA graph, and one after the graph. No events are recorded."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import commprof
    from commprof.recorder.process import journal

    torch.set_default_device("meta")
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    commprof.attach(run, completion_every=0)
    dist.all_reduce(tensor(2))  # from here on the recorder assumes device tensors in this group
    journal.is_capturing = lambda: True
    for _ in range(2):
        dist.all_reduce(tensor(2))
    journal.is_capturing = lambda: False
    dist.all_reduce(tensor(2))
    commprof.detach()


@pytest.mark.parametrize("way", ["compiled", "python"])
def test_a_captured_call_says_so_also_where_no_events_are_made(tmp_path, monkeypatch, way):
    if way == "python":
        monkeypatch.setattr(compiled_calls, "MODULE", None)
    run_ranks(1, capturing_program, str(tmp_path / "run"), process_group=False)
    rows = sorted(open_run(tmp_path / "run").table("collectives").to_pylist(), key=lambda row: row["seq"])
    assert [row["captured"] for row in rows] == [False, True, True, False]
