"""Process groups that are aborted, shrunk or given other members.

Each state of a group is a separate group in the trace.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d as c10d

from commprof import hooks
from commprof.trace.reader import open_run
from support.ranks import run_ranks
from support.recording import calls, record

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::UserWarning")]

WORLD = 3
LEAVING = 1  # the rank that is not in the second state of the group


def test_a_group_made_after_an_abort_is_another_group_of_the_trace(tmp_path):
    outcomes = run_ranks(2, train_after_an_abort, str(tmp_path / "run"), str(tmp_path / "store"))
    assert outcomes == ["0", "0"]
    run = open_run(tmp_path / "run")
    for rank in range(2):
        assert calls(run, rank, "pg", "pg_seq", "payload_bytes") == [
            ("0", 0, 8),
            ("1", 0, 8),
            ("0", 1, 0),
            ("0#2", 0, 16),
            ("0#2", 1, 16),
        ]
    assert run.health.unseen == 0


def test_one_aborted_group_leaves_the_others_as_they_were(tmp_path):
    def body(rank, world):
        for _ in range(2):
            group = dist.new_group([0, 1])
            dist.all_reduce(torch.ones(2), group=group)
            # An abort resets connections, including those from which the other rank still reads.
            dist.barrier()
            c10d._abort_process_group(group)
            dist.all_reduce(torch.ones(4))

    run, _ = record(tmp_path / "run", 2, body)
    rows = calls(run, 0, "pg", "pg_seq", "payload_bytes")
    assert [row[1:] for row in rows] == [(0, 8), (0, 0), (1, 16), (0, 8), (2, 0), (3, 16)]
    assert len({row[0] for row in rows}) == 3
    assert run.health.unseen == 0


def test_a_rank_that_is_no_member_of_a_destroyed_group_keeps_its_groups(tmp_path, capfd):
    def body(rank, world):
        group = dist.new_group([0])
        dist.all_reduce(torch.ones(2))
        dist.destroy_process_group(group)
        for step in range(2):
            hooks.step(step)
            dist.all_reduce(torch.ones(2))

    run, _ = record(tmp_path / "run", 2, body)
    name = calls(run, 0, "pg")[0]
    for rank in range(2):
        rows = calls(run, rank, "pg", "pg_seq", "layer")
        assert rows == [(name, number, "process_group") for number in range(3)]
    assert run.health.unseen == 0
    assert "could not be recorded" not in capfd.readouterr().err


def test_groups_without_a_name_are_groups_of_their_own(tmp_path):
    """Groups without a name are separate groups in the trace.

    Programs such as torchft create such groups themselves, beside those of torch.distributed.
    """

    def body(rank, world):
        def make(prefix, size):
            store = dist.PrefixStore(prefix, dist.FileStore(str(tmp_path / "groups"), world))
            group = dist.ProcessGroup(store, rank, size)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
            return group

        all_ranks, pair = make("all", world), make("pair", 2) if rank < 2 else None
        for number in range(2):
            all_ranks.allreduce([torch.ones(2)]).wait()
            if pair is not None:
                pair.allreduce([torch.ones(4 + number)]).wait()

    run, _ = record(tmp_path / "run", WORLD, body)
    for rank in range(WORLD):
        rows = calls(run, rank, "pg", "pg_seq", "payload_bytes", "group_size")
        of_all = [("unnamed:1", 0, 8, 3), ("unnamed:1", 1, 8, 3)]
        of_pair = [("unnamed:2", 0, 16, 2), ("unnamed:2", 1, 20, 2)]
        assert sorted(rows) == of_all + (of_pair if rank < 2 else [])


def test_a_group_that_was_destroyed_unnoticed_is_not_the_next_of_its_name(tmp_path):
    # The test keeps the original function, like a program that imported it before recording began.
    destroy = dist.destroy_process_group

    def body(rank, world):
        import commprof

        commprof.attach(tmp_path / "run")
        for size in (2, 1):
            if rank < size:
                store = dist.FileStore(str(tmp_path / f"store-{size}"), size)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
                dist.all_reduce(torch.ones(2))
                dist.barrier()
                destroy()
        commprof.detach()

    run_ranks(2, body, process_group=False)
    run = open_run(tmp_path / "run")
    assert calls(run, 0, "pg", "pg_seq", "group_ranks") == [
        ("0", 0, "0-1"),
        ("0", 1, "0-1"),
        ("0#2", 0, "0"),
        ("0#2", 1, "0"),
    ]


def test_a_process_that_becomes_another_rank_is_told_of(tmp_path):
    """A process that becomes another rank is reported.

    A library that restarts the ranks of a job within their processes does this.
    """

    def body(rank, world):
        import commprof

        commprof.attach(tmp_path / "run")
        for number, new_rank in enumerate((rank, 1 - rank)):
            store = dist.FileStore(str(tmp_path / f"store-{number}"), world)
            dist.init_process_group("gloo", store=store, rank=new_rank, world_size=world)
            dist.barrier()
            dist.destroy_process_group()
        commprof.detach()

    run_ranks(2, body, process_group=False)
    told = [
        note for note in open_run(tmp_path / "run").health.notes if "initialized torch.distributed" in note
    ]
    assert len(told) == 2
    for rank, note in enumerate(told):
        assert f"rank {rank} initialized torch.distributed as rank {1 - rank} of 2" in note


def train_after_an_abort(rank: int, world: int, run: str, store: str) -> str:
    import commprof

    commprof.attach(run)
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(2), group=dist.new_group([0, 1]))
    dist.barrier()
    c10d._abort_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    for _ in range(2):
        dist.all_reduce(torch.ones(4))
    name = dist.group.WORLD.group_name
    commprof.detach()
    return name


reconfigures = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="groups are reconfigured in place since torch 2.14"
)


def reconfigure(store, uuid: int, position: int, size: int) -> None:
    """Change the members of the group of all ranks.

    This rank gets rank ``position`` of ``size``.
    """
    store.set(f"{uuid}/{position}", dist._get_reconfigure_handle())
    handles = [store.get(f"{uuid}/{each}").decode() for each in range(size)]
    dist._reconfigure(uuid=uuid, handles=handles).wait()


def train_elastically(rank: int, world: int, run: str, path: str, complete: bool) -> str:
    """Train with three ranks, then with two of them in the opposite order, then with three as at first."""
    import commprof

    store = dist.FileStore(path, world)
    commprof.attach(run, complete=complete)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, enable_reconfigure=True)
    commprof.step(0)
    reconfigure(store, 11, rank, world)
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    if rank != LEAVING:
        reconfigure(store, 12, {0: 1, 2: 0}[rank], 2)
        commprof.step(1)
        dist.broadcast(torch.ones(4), group_src=0)
        c10d._get_default_group().allreduce([torch.ones(4)])
        c10d._get_default_group()._get_backend(torch.device("cpu")).allreduce([torch.ones(4)]).wait()
        commprof.step(2)
    reconfigure(store, 13, rank, world)
    dist.broadcast(torch.ones(8), group_src=2)
    c10d._get_default_group()._get_backend(torch.device("cpu")).allreduce([torch.ones(8)]).wait()
    commprof.step(3)
    name = dist.group.WORLD.group_name
    commprof.detach()
    return name


@reconfigures
@pytest.mark.parametrize("complete", [False, True], ids=["layers", "complete"])
def test_a_group_that_is_given_other_members_in_place_is_another_group_of_the_trace(tmp_path, complete):
    store = str(tmp_path / "store")
    name, *_ = run_ranks(
        WORLD, train_elastically, str(tmp_path / "run"), store, complete, process_group=False
    )
    run = open_run(tmp_path / "run")
    first = [(f"{name}@11", seq, "0-2", 3, "all_reduce", -1) for seq in range(3)]
    second = [
        (f"{name}@12", seq, "", 2, op, -1) for seq, op in enumerate(["broadcast", "all_reduce", "all_reduce"])
    ]
    third = [(f"{name}@13", 0, "0-2", 3, "broadcast", 2), (f"{name}@13", 1, "0-2", 3, "all_reduce", -1)]
    for rank in range(WORLD):
        rows = calls(run, rank, "pg", "pg_seq", "group_ranks", "group_size", "op", "peer")
        assert rows == first + (second if rank != LEAVING else []) + third
    positions = {
        rank: [row[1] for row in calls(run, rank, "pg", "group_rank") if row[0] == f"{name}@12"]
        for rank in range(WORLD)
    }
    assert positions == {0: [1] * 3, LEAVING: [], 2: [0] * 3}
    assert run.health.unseen == run.health.raised == 0
    flights = [row["pg"] for row in run.table("flight").to_pylist() if row["rank"] == 0]
    assert flights == calls(run, 0, "pg")
    assert [note.partition(":")[2] for note in run.health.notes if "clock" not in note] == [
        f" group {name}@12 got other members in place, and torch does not report which ranks they are: its "
        "records have no group_ranks, and roots and peers are unknown"
    ]


def shrink(rank: int, world: int, run: str) -> str:
    """Call ``shrink_group`` as if the backend had done its part.

    Only the NCCL backend can shrink a group.
    """
    import commprof

    dist.init_process_group("fake", store=dist.HashStore(), rank=2, world_size=4)
    other = dist.new_group([1, 2])
    commprof.attach(run)
    for group in (None, other):
        dist.all_reduce(torch.ones(2), group=group)
    shrunk = c10d._finalize_shrunk_group(
        c10d._prepare_shrink_target_group(None),
        {1},
        FakeProcessGroup._create_internal(1, 3),
    )
    dist.broadcast(torch.ones(4), 2)  # the ranks are renumbered, and this rank was 3
    dist.all_reduce(torch.ones(4), group=shrunk)
    commprof.detach()
    return shrunk.group_name


@pytest.mark.skipif(not hasattr(c10d, "_finalize_shrunk_group"), reason="groups shrink since torch 2.12")
def test_a_shrunk_group_is_another_group_of_the_trace(tmp_path):
    (name,) = run_ranks(1, shrink, str(tmp_path / "run"), process_group=False)
    run = open_run(tmp_path / "run")
    assert calls(run, 2, "pg", "group_ranks", "group_rank", "op", "peer") == [
        ("0", "0-3", 2, "all_reduce", -1),
        (calls(run, 2, "pg")[1], "1-2", 1, "all_reduce", -1),
        (name, "0,2,3", 1, "broadcast", 3),
        (name, "0,2,3", 1, "all_reduce", -1),
    ]
