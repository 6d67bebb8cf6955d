"""deepspeed.comm: every function behaves like torch's, and the log counts and times each call."""

from __future__ import annotations

import time

import pytest
import torch

from support.programs import EXCHANGES_LISTS
from tests.support.ranks import run_ranks


def every_function(rank, world):
    from zero_runtime import as_deepspeed

    as_deepspeed()
    import deepspeed
    import deepspeed.comm as dist

    assert dist.is_available() and dist.is_initialized()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
    assert dist.get_local_rank() == rank == dist.get_world_rank_from_launcher()
    assert dist.get_all_ranks_from_group() == [0, 1] and dist.get_global_rank(dist.get_world_group(), 1) == 1
    everyone = dist.new_group([0, 1])
    mine = torch.tensor([1.0 + rank])

    summed = mine.clone()
    dist.all_reduce(summed)
    assert summed.item() == 3.0
    largest = mine.clone()
    work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=everyone, async_op=True)
    work.wait()
    assert largest.item() == 2.0
    inferred = mine.clone()
    dist.inference_all_reduce(inferred)
    several = [mine.clone(), 10 * mine]
    dist.all_reduce_coalesced(several)
    assert (inferred.item(), several[0].item(), several[1].item()) == (3.0, 3.0, 30.0)

    onto_one = mine.clone()
    dist.reduce(onto_one, 1)
    assert rank == 0 or onto_one.item() == 3.0
    sent = mine.clone()
    dist.broadcast(sent, src=1)
    assert sent.item() == 2.0

    listed = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(listed, mine)
    whole = torch.zeros(2)
    dist.all_gather_into_tensor(whole, mine)
    again = torch.zeros(2)
    dist.allgather_fn(again, mine)
    pairs = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather_coalesced(pairs, [mine, -mine])
    assert [each.item() for each in listed] == whole.tolist() == again.tolist() == [1.0, 2.0]
    assert pairs[0].tolist() == [1.0, 2.0] and pairs[1].tolist() == [-1.0, -2.0]

    rows, own = torch.tensor([1.0, 10.0]), torch.zeros(1)
    dist.reduce_scatter_tensor(own, rows.clone())
    assert own.item() == (2.0 if rank == 0 else 20.0)
    own.zero_()
    dist.reduce_scatter_fn(own, rows.clone())
    assert own.item() == (2.0 if rank == 0 else 20.0)
    own.zero_()
    dist.reduce_scatter(own, list(rows.chunk(2)))
    assert own.item() == (2.0 if rank == 0 else 20.0)

    exchanged = torch.zeros(2)
    dist.all_to_all_single(exchanged, rows + rank)
    assert exchanged.tolist() == ([1.0, 2.0] if rank == 0 else [10.0, 11.0])
    if EXCHANGES_LISTS:
        received = [torch.zeros(1), torch.zeros(1)]
        dist.all_to_all(received, list((rows + rank).chunk(2)))
        assert [each.item() for each in received] == exchanged.tolist()

    collected = [torch.zeros(1), torch.zeros(1)] if rank == 0 else None
    dist.gather(mine, collected, dst=0)
    assert rank == 1 or [each.item() for each in collected] == [1.0, 2.0]
    dealt = torch.zeros(1)
    dist.scatter(dealt, list(rows.chunk(2)) if rank == 0 else None, src=0)
    assert dealt.item() == rows[rank].item()

    if rank == 0:
        dist.send(mine, 1)
        dist.isend(mine, dst=1).wait()
    else:
        got = torch.zeros(1)
        assert dist.recv(got, 0) == 0 and got.item() == 1.0
        dist.irecv(got, src=0).wait()
    got = torch.zeros(1)
    operations = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert got.item() == 2.0 - rank

    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    shared = [rank]
    dist.broadcast_object_list(shared, src=1)
    assert shared == [1]

    dist.barrier()
    dist.monitored_barrier()
    mesh = dist.initialize_mesh_device((2,), ("data_parallel",))
    assert mesh.size() == 2
    with pytest.raises(RuntimeError, match="3 places, and there are 2 ranks"):
        dist.initialize_mesh_device((3,), ("data_parallel",))
    for flag in ("has_all_gather_into_tensor", "has_reduce_scatter_tensor", "has_all_reduce_coalesced"):
        assert getattr(deepspeed.comm, flag)() is True
    return True


def test_every_function_does_what_its_name_says():
    assert all(run_ranks(2, every_function))


CALLS = 20
NUMEL = 50_000


def logged(rank, world):
    from zero_runtime import as_deepspeed

    as_deepspeed()
    import deepspeed.comm as dist
    from deepspeed.comm import log_summary

    assert not dist.has_comm_data()
    tensor, gathered = torch.ones(NUMEL), torch.zeros(world * NUMEL)
    dist.all_reduce(tensor)  # not counted, because the log is still off
    dist.configure(enabled=True)
    began = time.perf_counter()
    for _ in range(CALLS):
        dist.all_reduce(tensor)
    dist.all_reduce(torch.ones(10))
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(5)]
    for work in works:
        work.wait()
    dist.all_gather_into_tensor(gathered, tensor)
    dist.reduce_scatter_tensor(tensor, gathered)
    dist.all_gather_object([None] * world, rank)
    dist.monitored_barrier()
    passed = (time.perf_counter() - began) * 1e3
    dist.all_reduce(torch.ones(10), log_name="mine", prof=True)
    found = log_summary(show_straggler=True, return_dict=True)
    again = log_summary(return_dict=True)
    count, names = dist.get_comm_operation_count(), dist.get_logged_comm_ops()
    dist.reset_log()
    dist.configure(enabled=False)
    dist.all_reduce(tensor)
    return (
        found,
        again["summary"].keys() == found["summary"].keys(),
        count,
        names,
        dist.has_comm_data(),
        passed,
    )


def test_the_log_counts_and_times_each_call_by_itself():
    for rank, (found, same, count, names, left, passed) in enumerate(run_ranks(2, logged)):
        assert same and not left
        assert found["metadata"]["world_size"] == 2 and found["metadata"]["rank"] == rank
        reductions = found["summary"]["all_reduce"]
        assert {size: each["count"] for size, each in reductions.items()} == {4 * NUMEL: CALLS + 5, 40: 1}
        # The sum of all times cannot exceed the elapsed time. DeepSpeed's log reports ten times as long.
        every = [row for by_size in found["summary"].values() for row in by_size.values()]
        assert sum(row["total_latency_ms"] for row in every if row["count"] == CALLS + 5) <= passed * 3
        blocking = [row for row in every if row["count"] < CALLS]
        assert sum(row["total_latency_ms"] for row in blocking) <= passed * 2
        for row in reductions.values():
            assert 0 < row["avg_latency_ms"] <= row["total_latency_ms"]
        # By nccl-tests, with two ranks an all_reduce moves 2 (n-1)/n = 1 of its bytes, and an all_gather
        # moves half of the whole.
        large, gathering = reductions[4 * NUMEL], found["summary"]["all_gather_into_tensor"][4 * NUMEL]
        assert large["busbw_avg_gbps"] == pytest.approx(large["tput_avg_gbps"])
        assert gathering["tput_avg_gbps"] == pytest.approx(
            8 * 2 * 4 * NUMEL / (gathering["avg_latency_ms"] * 1e6)
        )
        assert gathering["busbw_avg_gbps"] == pytest.approx(gathering["tput_avg_gbps"] / 2)
        scattering = found["summary"]["reduce_scatter_tensor"][8 * NUMEL]
        assert scattering["tput_avg_gbps"] == pytest.approx(
            8 * 8 * NUMEL / (scattering["avg_latency_ms"] * 1e6)
        )
        straggling = found["straggler_analysis"]["all_reduce"][4 * NUMEL]
        assert straggling["count"] == CALLS + 5 and straggling["total_straggler_ms"] >= 0.0
        assert straggling["total_comm_lat_ms"] + straggling["total_straggler_ms"] == pytest.approx(
            large["total_latency_ms"]
        )
        assert "mine" in names and "monitored_barrier" in names and count == CALLS + 5 + 1 + 4 + 1


def chosen(rank, world):
    from zero_runtime import as_deepspeed

    as_deepspeed()
    import deepspeed.comm as dist

    dist.configure(enabled=True, prof_all=False, prof_ops=["broadcast"], debug=True)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    dist.all_reduce(tensor, prof=True)
    return dist.get_logged_comm_ops()


def test_the_log_keeps_what_was_asked_for_and_names_the_caller():
    for names in run_ranks(2, chosen):
        assert names == ["broadcast | [Caller Func: chosen]", "all_reduce | [Caller Func: chosen]"]


def trained(rank, world, capture):
    import contextlib
    import io

    import zero_runtime
    from zero_runtime.deepspeed_names.ranks import comm_summary

    model = torch.nn.Linear(4, 4)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
        "comms_logger": {"enabled": True},
    }
    engine, *_ = zero_runtime.initialize(model=model, config=config)
    comm_summary.reset_log()
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        found = comm_summary.log_summary(return_dict=True)
    return found["summary"], printed.getvalue()


def test_the_configuration_switches_the_log_on_for_the_engine_too():
    found = run_ranks(2, trained, True)
    for summary, _ in found:
        assert summary["all_gather_into_tensor"].popitem()[1]["count"] == 3
        assert sum(row["count"] for by_size in summary.values() for row in by_size.values()) >= 6
    assert found[0][1].splitlines()[0].startswith("Comm. Op            Message Size") and found[1][1] == ""
