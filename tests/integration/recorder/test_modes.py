"""A collective is described identically whether a method of ProcessGroup or a kernel of c10d recorded it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from support.recording import record

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]

# The columns that depend on the mode: what recorded the call and when, and which method the program called.
# c10d has one operator where ProcessGroup has two methods.
OF_THE_MODE = {"layer", "pid", "backend_method"} | {
    f"{moment}_ns"
    for moment in (
        "issue",
        "return",
        "wait_begin",
        "wait_end",
        "exposed",
        "device_begin",
        "device_end",
    )
}


def both_modes(tmp_path, body):
    """Return the rows of rank 0, recorded by methods and by kernels."""
    found = []
    for complete in (False, True):
        run, _ = record(tmp_path / f"run-{complete}", 2, body, complete=complete)
        table = run.table("collectives").to_pylist()
        found.append(sorted((row for row in table if row["rank"] == 0), key=lambda row: row["seq"]))
    return found


def described(rows):
    return [{name: value for name, value in row.items() if name not in OF_THE_MODE} for row in rows]


def barriers(rank, world):
    subgroup = dist.new_group([0, 1])
    options = torch._C._distributed_c10d.BarrierOptions()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.barrier(subgroup, True).wait()
    dist.monitored_barrier()
    dist.group.WORLD.barrier().wait()
    dist.group.WORLD.barrier(timedelta(seconds=20)).wait()
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
    backend.barrier(options).wait()
    options.asyncOp = False
    dist.group.WORLD.barrier(opts=options)
    dist.barrier()


def test_barriers_have_no_bytes_and_say_whether_a_handle_was_asked_for(tmp_path):
    by_methods, by_kernels = both_modes(tmp_path, barriers)
    assert described(by_methods) == described(by_kernels)
    columns = ("op", "numel", "input_bytes", "output_bytes", "payload_bytes", "num_tensors", "sizes", "dtype")
    assert {tuple(row[name] for name in columns) for row in by_kernels} == {
        ("barrier", 0, 0, 0, 0, 0, None, None)
    }
    # A method of the group returns a handle unless it is told not to. A monitored barrier returns no handle.
    asked = [False, True, True, False, True, True, False, True, False, False]
    assert [row["is_async"] for row in by_kernels] == asked
    blocked = [row["wait_end_ns"] is not None for row in by_kernels]
    assert blocked == [row["wait_end_ns"] is not None for row in by_methods]


def everything(rank, world):
    other = 1 - rank
    x, pair = torch.ones(4), [torch.ones(4), torch.ones(4)]
    world_group = dist.group.WORLD
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    dist.all_reduce(torch.ones(3, dtype=torch.complex64))
    world_group.allreduce(x).wait()
    world_group.allreduce([x], dist.ReduceOp.MAX).wait()
    dist.broadcast(x, 1)
    world_group.broadcast(x, 1).wait()
    dist.reduce(x, 0, op=dist.ReduceOp.MAX)
    dist.all_gather(pair, x)
    dist.all_gather_into_tensor(torch.empty(8), x)
    dist.reduce_scatter(torch.empty(4), pair)
    dist.reduce_scatter_tensor(torch.empty(2), x)
    dist.all_to_all_single(torch.empty(4), x)
    dist.gather(x, pair if rank == 0 else None, 0)
    dist.scatter(x, pair if rank == 1 else None, 1)
    if rank == 0:
        dist.send(x, 1)
        dist.recv(x, 1)
    else:
        dist.recv(x)
        dist.send(x, 0)
    messages = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.ones(4), other)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    with dist._coalescing_manager(async_ops=True) as block:
        for _ in range(2):
            dist.all_reduce(torch.ones(4))
    block.wait()
    dist.all_reduce_coalesced(pair)
    dist.all_gather_object([None, None], {"rank": rank})
    dist.broadcast_object_list([rank], 0)


def test_every_operation_has_the_same_columns(tmp_path):
    by_methods, by_kernels = both_modes(tmp_path, everything)
    assert {row["layer"] for row in by_methods} == {"process_group"}
    assert {row["layer"] for row in by_kernels} == {"c10d"}
    assert described(by_methods) == described(by_kernels)
