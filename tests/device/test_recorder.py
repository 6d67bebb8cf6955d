"""The recorder with NCCL on a GPU.

The recorder never waits for the device and keeps no device memory alive. Its times agree with CUDA events.
"""

from __future__ import annotations

import time
import weakref

import pytest
import torch
import torch.distributed as dist

from commprof import hooks
from support.recording import calls, record

pytestmark = pytest.mark.ranks
MIB = 2**18  # float32 elements per MiB


def spin(seconds: float) -> None:
    """Queue a kernel that keeps the stream busy. An H100 runs at most 1.98e9 cycles per second."""
    torch.cuda._sleep(int(seconds * 1.9e9))


def warm(size: int = 4) -> None:
    """Create the connections of NCCL. Otherwise the first operation of a test creates them while the host waits."""
    dist.all_reduce(torch.ones(size))
    torch.cuda.synchronize()


def test_the_program_never_waits_for_the_device(tmp_path):
    def body(rank, world):
        warm()
        x = torch.ones(1024)
        spin(2.0)
        reached = torch.cuda.Event()
        reached.record()
        began = time.perf_counter()
        works = []
        for _ in range(50):
            dist.all_reduce(x)
            works.append(dist.all_reduce(x, async_op=True))
        for work in works:
            work.wait()
        still_busy = not reached.query()
        took = time.perf_counter() - began
        torch.cuda.synchronize()
        return still_busy, took

    run, outcomes = record(tmp_path / "run", 2, body)
    for outcome in outcomes:
        still_busy, took = outcome["result"]
        assert still_busy and took < 1.0
    assert len(calls(run, 0, "op")) == 101


def test_the_load_of_experts_is_read_without_waiting_for_the_device(tmp_path):
    def body(rank, world):
        warm()
        hooks.describe_expert_layers(
            [
                {
                    "layer": "moe",
                    "num_experts": 4,
                    "ep_size": 2,
                    "k": 1,
                    "min_capacity": 1,
                    "hidden": 8,
                    "expert_ranks": "0,1",
                    "drop_tokens": True,
                }
            ]
        )
        counts = torch.tensor([5, 1, 0, 2], device="cuda")
        torch.cuda.synchronize()
        spin(1.0)
        reached = torch.cuda.Event()
        reached.record()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(20):
                hooks.step(step)
                hooks.expert_load("moe", counts + step, 3, 8)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        still_busy = not reached.query()
        torch.cuda.synchronize()
        return still_busy

    run, outcomes = record(tmp_path / "run", 2, body)
    assert all(outcome["result"] for outcome in outcomes)
    assert [note for note in run.health.notes if "expert" in note] == []
    rows = run.table("expert_loads").to_pylist()
    assert [row["tokens"] for row in rows if (row["rank"], row["step"]) == (1, 7)] == [12, 8, 7, 9]
    assert len(rows) == 2 * 20 * 4


def test_exposed_time_of_synchronous_calls_is_what_events_around_them_say(tmp_path):
    def body(rank, world):
        warm()
        x = torch.ones(64 * MIB)
        measured = []
        for number in range(8):
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            dist.all_reduce(x)
            end.record()
            torch.cuda.synchronize()
            if number >= 2:  # the first calls with the same arguments take longer on the host
                measured.append(begin.elapsed_time(end) * 1e6)
        return measured

    run, outcomes = record(tmp_path / "run", 2, body)
    for rank, outcome in enumerate(outcomes):
        rows = calls(run, rank, "payload_bytes", "exposed_ns", "device_begin_ns", "device_end_ns")[3:]
        for (payload, exposed, begin, end), measured in zip(rows, outcome["result"], strict=True):
            assert payload == 64 * 2**20
            # The two events of the recorder are between the events of the program. So the recorded time is
            # shorter by the time that the host needs to issue. If the GPU runs the other rank between two
            # events, the recorded time is also shorter by that time.
            assert measured - 5_000_000 < exposed <= measured + 1000
            assert end - begin == pytest.approx(exposed, rel=0.02, abs=20_000)


def test_exposed_time_of_an_asynchronous_call_is_what_its_wait_blocks(tmp_path):
    def body(rank, world):
        warm()
        x = torch.ones(64)
        for _ in range(3):  # overlapped: the kernel takes longer than the collective
            torch.cuda.synchronize()
            work = dist.all_reduce(x, async_op=True)
            spin(0.3)
            work.wait()
        torch.cuda.synchronize()

    run, _ = record(tmp_path / "run", 2, body)
    for rank in range(2):
        rows = calls(run, rank, "is_async", "exposed_ns")[1:]
        assert all(is_async for is_async, _ in rows)
        assert min(exposed for _, exposed in rows) < 5_000_000  # the overlapping kernel takes 300 ms


def test_no_tensor_and_no_device_memory_is_kept(tmp_path):
    def body(rank, world):
        warm()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        references = []
        for index in range(200):
            x = torch.ones(MIB)
            references.append(weakref.ref(x))
            work = dist.all_reduce(x, async_op=index % 2 == 1)
            if work is not None:
                work.wait()
            del x, work
        torch.cuda.synchronize()
        # The work list of ProcessGroupNCCL keeps the tensors of asynchronous calls alive until its watchdog
        # checks the list.
        deadline = time.monotonic() + 10
        while torch.cuda.memory_allocated() > before and time.monotonic() < deadline:
            time.sleep(0.05)
        return torch.cuda.memory_allocated() - before, sum(each() is not None for each in references)

    _, outcomes = record(tmp_path / "run", 2, body)
    assert [outcome["result"] for outcome in outcomes] == [(0, 0), (0, 0)]


def test_a_captured_collective_is_recorded_once_and_its_replays_are_counted(tmp_path):
    def body(rank, world):
        x = torch.ones(256)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            dist.all_reduce(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        x.fill_(1.0)
        with torch.cuda.graph(graph, stream=stream):
            dist.all_reduce(x)
            work = dist.all_reduce(x, async_op=True)
            work.wait()
        for _ in range(3):
            x.fill_(1.0)
            graph.replay()
        torch.cuda.synchronize()
        dist.all_reduce(torch.ones(2))
        return x[0].item()

    run, outcomes = record(tmp_path / "run", 2, body)
    assert [outcome["result"] for outcome in outcomes] == [4.0, 4.0]
    for rank in range(2):
        rows = calls(run, rank, "payload_bytes", "captured", "replays")
        assert [row[:2] for row in rows] == [(1024, False), (1024, True), (1024, True), (8, False)]
        assert [row[2] for row in rows if row[1]] == [3, 3]
        assert all(exposed is None for exposed in calls(run, rank, "exposed_ns")[1:3])
    assert run.health.unseen == run.health.lost == run.health.raised == 0


def test_exposed_time_on_a_side_stream_is_unknown(tmp_path):
    def body(rank, world):
        warm()
        with torch.cuda.stream(torch.cuda.Stream()):
            dist.all_reduce(torch.ones(64))
        torch.cuda.synchronize()

    run, _ = record(tmp_path / "run", 2, body)
    exposed = calls(run, 0, "exposed_ns")
    assert exposed[1] is None and exposed[0] is not None
    assert calls(run, 0, "device_end_ns")[1] is not None


def test_groups_messages_and_batches_are_recorded_once(tmp_path):
    def body(rank, world):
        other = 1 - rank
        group = dist.new_group([0, 1], group_desc="pair")
        x = torch.ones(8)
        dist.all_reduce(x, group=group)
        if rank == 0:
            dist.send(x, other)
            dist.recv(x, other)
        else:
            dist.recv(x, other)
            dist.send(x, other)
        y = torch.ones(8)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]
        ):
            work.wait()
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        dist.barrier(device_ids=[0])
        dist.all_gather_object([None, None], {"rank": rank})
        torch.cuda.synchronize()

    run, _ = record(tmp_path / "run", 2, body)
    first = ["send", "recv"]
    for rank in range(2):
        ops = calls(run, rank, "op")
        assert ops[:7] == [
            "all_reduce", *(first if rank == 0 else first[::-1]), "send", "recv", "all_reduce", "barrier",
        ]  # fmt: skip
        assert ops[7:] == ["all_gather", "all_gather"]
        assert calls(run, rank, "reduce_op")[5] == "AVG"
        assert {device for device in calls(run, rank, "device") if device} == {"cuda:0"}
        assert set(calls(run, rank, "backend")) == {"nccl"}
    assert run.health.unseen == run.health.lost == run.health.raised == 0
