"""Frameworks with the recorder.

Collectives of DDP and FSDP2 are recorded, and steps are detected although the program does not name them.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from support.recording import calls, record

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]


def model(width: int = 32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)
    )


def train_ddp(rank, world, steps):
    ddp = torch.nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(steps):
        ddp(torch.randn(4, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(torch.ones(1))  # the collective of the program itself, which is recorded


def test_the_collectives_of_ddp_are_recorded_beside_those_of_the_program(tmp_path):
    steps = 4
    run, outcomes = record(tmp_path / "run", 2, train_ddp, steps)
    for rank in range(2):
        issued = len(outcomes[rank]["flights"])  # the count of all collectives by torch itself
        rows = calls(run, rank, "layer", "op", "step")
        assert issued == outcomes[rank]["number"] == len(rows)
        assert [row for row in rows if row[0] == "process_group"] == [
            ("process_group", "all_reduce", step)
            for step in (*range(1, steps), -1)  # issued after the optimizer step, so in the next step
        ]
        assert {layer for layer, _, _ in rows} == {"process_group", "c10d"}
    assert run.health.unseen == 0 and run.health.notes == ()
    assert [row["step"] for row in run.table("steps").to_pylist() if row["rank"] == 0] == list(range(steps))


def test_steps_are_found_by_the_optimizer_where_nobody_names_them(tmp_path):
    def body(rank, world):
        dist.broadcast(torch.ones(2), 0)
        net = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            net(torch.ones(2, 4)).sum().backward()
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
        dist.barrier()

    run, _ = record(tmp_path / "run", 2, body)
    assert calls(run, 0, "op", "step") == [
        ("broadcast", -1),
        *[("all_reduce", step) for step in range(3) for _ in range(2)],
        ("barrier", -1),
    ]
    steps = run.table("steps").to_pylist()
    assert [row["step"] for row in steps] == [0, 1, 2] * 2
    assert all(row["begin_ns"] < row["end_ns"] for row in steps)


def test_fsdp2_is_seen_through_and_through(tmp_path):
    def body(rank, world):
        from torch.distributed.fsdp import fully_shard

        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            net(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    run, outcomes = record(tmp_path / "run", 2, body)
    ops = calls(run, 0, "op")
    # Two layers are gathered in the forward pass and again in the backward pass. The last layer stays
    # gathered. Each layer is reduced once.
    assert ops.count("reduce_scatter") == 2 * 2 and ops.count("all_gather") >= 2 * 2
    assert len(ops) == len(outcomes[0]["flights"]) == outcomes[0]["number"]
    assert run.health.unseen == 0
    sites = {site for op, site in calls(run, 0, "op", "call_site") if op in ("all_gather", "reduce_scatter")}
    assert all("test_frameworks.py:" in site for site in sites)


def test_a_group_that_issued_before_recording_began_owes_nothing(tmp_path):
    def body(rank, world):
        import commprof

        commprof.detach()
        train_ddp(rank, world, 1)
        commprof.attach(str(tmp_path / "late"))
        dist.all_reduce(torch.ones(1))
        commprof.detach()

    from commprof.trace.reader import open_run

    record(tmp_path / "run", 2, body)
    late = open_run(tmp_path / "late")
    assert calls(late, 0, "op") == ["all_reduce"] and late.health.unseen == 0
