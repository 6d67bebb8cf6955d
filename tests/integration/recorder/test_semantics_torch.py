"""Smaller parts of torch with the recorder: a sharded optimizer, a pipeline, and checkpoints."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from support.recording import calls, record

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]


def sharded_optimizer(rank, world):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1, bias=False))
    )
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    optimizer.consolidate_state_dict(0)


def test_each_owner_sends_its_parameters_in_the_optimizer_step(tmp_path):
    run, _ = record(tmp_path / "run", 2, sharded_optimizer)
    rows = calls(run, 1, "step", "phase", "op", "purpose", "owner", "peer", "payload_bytes", "after_step")
    # The largest parameter is assigned first, each to the rank with the fewest elements: 15 to rank 0, 5 and
    # 5 to rank 1.
    sent = [
        ("optimizer", "broadcast", "parameter_broadcast", owner, owner, size)
        for owner, size in ((0, 60), (1, 20), (1, 20))
    ]
    in_steps = [row[:-1] for row in rows if row[1] == "optimizer"]
    assert in_steps == [(step, *row) for step in (0, 1) for row in sent]
    gathered = [row for row in rows if row[3] == "checkpoint"]
    assert gathered and {(row[7], *row[:3]) for row in gathered} == {(1, -1, "checkpoint", "broadcast")}
    assert None not in {row[3] for row in rows}


MICRO_BATCHES = 4


def pipeline(rank, world):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(0)
    stage = PipelineStage(torch.nn.Linear(4, 4), rank, world, torch.device("cpu"))
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=torch.nn.functional.mse_loss)
    for _ in range(2):
        schedule.step(*([torch.ones(8, 4)] if rank == 0 else []), target=torch.ones(8, 4) if rank else None)
        optimizer.step()


def test_the_messages_of_a_pipeline_say_so(tmp_path):
    run, _ = record(tmp_path / "run", 2, pipeline)
    for rank, op in ((0, "send"), (1, "recv")):
        rows = calls(run, rank, "step", "micro_step", "purpose", "op", "payload_bytes", "phase")
        assert {row[2] for row in rows} == {"pipeline"} and {row[1] for row in rows} == {0}
        # 2x4 activations go forward and 2x4 gradients go back. All other messages belong to the first batch.
        batches = Counter(row[0] for row in rows if row[3] == op and row[4] == 32)
        assert batches == {0: MICRO_BATCHES, 1: MICRO_BATCHES}
        assert len([row for row in rows if row[0] == 1]) == 2 * MICRO_BATCHES
        assert {row[5] for row in rows if row[0] == 1} <= {"forward", "backward"}
    assert [row["micro_steps"] for row in run.table("steps").to_pylist()] == [1] * 4


def checkpoint(rank, world, path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(4, 4)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    dcp.load({"model": model.state_dict()}, checkpoint_id=path)


def test_checkpoints_are_a_phase_and_a_purpose(tmp_path):
    run, _ = record(tmp_path / "run", 2, checkpoint, str(tmp_path / "saved"))
    rows = calls(run, 0, "step", "phase", "purpose", "after_step")
    saved = [row for row in rows if row[2] == "checkpoint"]
    assert saved and set(saved) == {(-1, "checkpoint", "checkpoint", 0)}
    assert {row[2] for row in rows} == {"checkpoint", "parameter_gather", "gradient_reduce"}


def renamed(rank, world, run):
    """Run the program as in a torch version in which a method of FSDP 2 has another name."""
    import commprof

    commprof.detach()
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as groups
    from torch.distributed.fsdp import fully_shard

    groups.FSDPParamGroup.gather_parameters = groups.FSDPParamGroup.unshard
    del groups.FSDPParamGroup.unshard
    commprof.attach(run)
    groups.FSDPParamGroup.unshard = groups.FSDPParamGroup.gather_parameters
    model = torch.nn.Linear(4, 4)
    fully_shard(model)
    model(torch.ones(1, 4)).sum().backward()
    commprof.detach()


def test_what_this_torch_does_not_have_is_noted_once_and_the_rest_is_said(tmp_path):
    from commprof.trace.reader import open_run

    record(tmp_path / "first", 2, renamed, str(tmp_path / "run"))
    run = open_run(tmp_path / "run")
    assert calls(run, 0, "op", "purpose") == [("all_gather", None), ("reduce_scatter", "gradient_reduce")]
    (note,) = run.health.notes
    assert note.startswith("ranks 0, 1: torch") and "_fsdp_param_group has no FSDPParamGroup.unshard" in note
