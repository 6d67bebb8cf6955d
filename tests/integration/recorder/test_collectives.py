"""Every collective is recorded exactly once.

The expected records are counted by hand, and by torch's own Flight Recorder if it records the collective.
"""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
import torch.distributed as dist

from commprof.trace.reader import open_run
from support.programs import EXCHANGES_LISTS
from support.ranks import run_ranks
from support.recording import calls, record

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]

F4 = 4  # bytes of a float32


def ones(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(n, dtype=dtype)


def plain_api(rank: int, world: int) -> None:
    for async_op in (False, True):
        works = [
            dist.all_reduce(ones(3), op=dist.ReduceOp.MAX, async_op=async_op),
            dist.broadcast(ones(5), src=1, async_op=async_op),
            dist.reduce(ones(7), dst=0, async_op=async_op),
            dist.all_gather([ones(2) for _ in range(world)], ones(2), async_op=async_op),
            dist.all_gather_into_tensor(ones(2 * world), ones(2), async_op=async_op),
            dist.reduce_scatter(ones(2), [ones(2) for _ in range(world)], async_op=async_op),
            dist.reduce_scatter_tensor(ones(2), ones(2 * world), async_op=async_op),
            dist.all_to_all_single(ones(2 * world), ones(2 * world), async_op=async_op),
            *(
                [dist.all_to_all([ones(3) for _ in range(world)], [ones(3)] * world, async_op=async_op)]
                if EXCHANGES_LISTS
                else []
            ),
            dist.gather(
                ones(2), [ones(2) for _ in range(world)] if rank == 1 else None, dst=1, async_op=async_op
            ),
            dist.scatter(
                ones(2), [ones(2) for _ in range(world)] if rank == 1 else None, src=1, async_op=async_op
            ),
            dist.barrier(async_op=async_op),
        ]
        for work in works:
            if async_op:
                work.wait()


def test_plain_api_synchronous_and_asynchronous(tmp_path):
    world = 3
    run, outcomes = record(tmp_path / "run", world, plain_api)
    expected = [
        # The columns are op, api, numel, payload, peer, reduce_op. Input and output bytes by rank follow
        # below.
        ("all_reduce", "all_reduce", 3, 12, -1, "MAX"),
        ("broadcast", "broadcast", 5, 20, 1, None),
        ("reduce", "reduce", 7, 28, 0, "SUM"),
        ("all_gather", "all_gather", 2 * world, 8 * world, -1, None),
        ("all_gather", "all_gather_into_tensor", 2 * world, 8 * world, -1, None),
        ("reduce_scatter", "reduce_scatter", 2 * world, 8 * world, -1, "SUM"),
        ("reduce_scatter", "reduce_scatter_tensor", 2 * world, 8 * world, -1, "SUM"),
        ("all_to_all", "all_to_all_single", 2 * world, 8 * world, -1, None),
        *([("all_to_all", "all_to_all", 3 * world, 12 * world, -1, None)] if EXCHANGES_LISTS else []),
        ("gather", "gather", 2 * world, 8 * world, 1, None),
        ("scatter", "scatter", 2 * world, 8 * world, 1, None),
        ("barrier", "barrier", 0, 0, -1, None),
    ]
    for rank in range(world):
        root = rank == 1
        moved = [
            (12, 12),
            (20 if root else 0, 20),
            (28, 28),
            (8, 8 * world),
            (8, 8 * world),
            (8 * world, 8),
            (8 * world, 8),
            (8 * world, 8 * world),
            *([(12 * world, 12 * world)] if EXCHANGES_LISTS else []),
            (8, 8 * world if root else 0),
            (8 * world if root else 0, 8),
            (0, 0),
        ]
        assert calls(run, rank, "op", "api", "numel", "payload_bytes", "peer", "reduce_op") == expected * 2
        assert calls(run, rank, "input_bytes", "output_bytes") == moved * 2
        assert calls(run, rank, "is_async") == [False] * len(expected) + [True] * len(expected)
        assert calls(run, rank, "pg_seq") == list(range(2 * len(expected)))
        # The Flight Recorder records a list reduce_scatter as one all_reduce per rank.
        assert len(outcomes[rank]["flights"]) == 2 * len(expected) + 2 * (world - 1)
        for row in run.table("collectives").to_pylist():
            assert row["status"] == "ok" and row["issue_ns"] < row["return_ns"]
            assert row["return_ns"] <= row["wait_begin_ns"] <= row["wait_end_ns"]
            begin = row["wait_begin_ns"] if row["is_async"] else row["issue_ns"]
            assert row["exposed_ns"] == row["wait_end_ns"] - begin
            assert "test_collectives.py:" in row["call_site"] and row["call_site"].endswith("plain_api")
            assert row["backend"] == "gloo" and row["group_ranks"] == "0-2" and row["group_size"] == world
    assert run.health.unseen == run.health.lost == run.health.torn == 0
    assert run.health.state == "complete" and run.health.notes == ()


@pytest.mark.long
def test_names_imported_before_attach_are_seen(tmp_path):
    from torch.distributed import all_gather, all_reduce, barrier

    def body(rank, world):
        all_reduce(ones(2))
        all_gather([ones(2), ones(2)], ones(2))
        barrier()

    run, outcomes = record(tmp_path / "run", 2, body)
    for rank in range(2):
        assert calls(run, rank, "op") == ["all_reduce", "all_gather", "barrier"]
        assert len(outcomes[rank]["flights"]) == 3


def test_subgroups_name_global_ranks_whether_roots_are_global_or_of_the_group(tmp_path):
    def body(rank, world):
        group = dist.new_group([1, 2], group_desc="tail")
        if rank == 0:
            return None
        before = group._get_sequence_number_for_group()
        dist.broadcast(ones(4), src=2, group=group)
        dist.broadcast(ones(4), group_src=1, group=group)
        dist.reduce(ones(4), dst=1, group=group)
        dist.reduce(ones(4), group_dst=0, group=group)
        dist.gather(ones(4), [ones(4), ones(4)] if rank == 2 else None, group_dst=1, group=group)
        if rank == 1:
            dist.send(ones(4), dst=2, group=group)
            dist.send(ones(4), group_dst=1, group=group)
        else:
            dist.recv(ones(4), src=1, group=group)
            dist.recv(ones(4), group_src=0, group=group)
        return group._get_sequence_number_for_group() - before

    run, outcomes = record(tmp_path / "run", 3, body)
    assert calls(run, 0, "op") == []
    for rank, other in ((1, 2), (2, 1)):
        assert outcomes[rank]["result"] == 7
        assert calls(run, rank, "peer") == [2, 2, 1, 1, 2, other, other]
        assert set(calls(run, rank, "group_ranks", "group_desc", "group_size")) == {("1-2", "tail", 2)}
        assert calls(run, rank, "group_rank") == [rank - 1] * 7
        # point-to-point messages have their own count
        assert calls(run, rank, "pg_seq") == [0, 1, 2, 3, 4, 0, 1]
        # A rank that only receives has no input bytes.
        assert calls(run, rank, "input_bytes")[:2] == [16 if rank == 2 else 0] * 2
    assert run.health.unseen == 0


def test_point_to_point(tmp_path):
    def body(rank, world):
        other = 1 - rank
        if rank == 0:
            dist.send(ones(3), 1)
            dist.isend(ones(3), 1).wait()
            dist.recv(ones(3))  # from any source
        else:
            dist.recv(ones(3), 0)
            dist.irecv(ones(3), 0).wait()
            dist.send(ones(3), 0)
        exchange = [dist.P2POp(dist.isend, ones(2), other), dist.P2POp(dist.irecv, ones(2), other)]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()

    run, outcomes = record(tmp_path / "run", 2, body)
    assert calls(run, 0, "op", "peer", "is_async", "input_bytes", "output_bytes", "payload_bytes") == [
        ("send", 1, False, 12, 0, 12),
        ("send", 1, True, 12, 0, 12),
        ("recv", -1, False, 0, 12, 12),
        ("send", 1, True, 8, 0, 8),
        ("recv", 1, True, 0, 8, 8),
    ]
    assert calls(run, 1, "op") == ["recv", "recv", "send", "send", "recv"]
    assert all(calls(run, 0, "is_p2p"))
    assert calls(run, 0, "api")[3:] == ["batch_isend_irecv"] * 2
    assert [outcome["number"] for outcome in outcomes] == [
        5,
        5,
    ]  # the Flight Recorder does not record these operations on gloo
    assert run.health.unseen == 0


@pytest.mark.long
def test_the_bytes_of_a_sparse_tensor_are_said_to_be_those_of_a_dense_one(tmp_path):
    def body(rank, world):
        dist.all_reduce(torch.ones(4))
        for _ in range(2):
            dist.all_reduce(torch.eye(50).to_sparse())

    run, _ = record(tmp_path / "run", 2, body)
    assert calls(run, 0, "sizes", "payload_bytes") == [("4", 16), *[("50x50", 10_000)] * 2]
    (note,) = run.health.notes
    assert "sparse tensors are counted" in note and "all_reduce of 50x50 float32" in note


def test_a_coalesced_call_is_one_row_with_summed_bytes(tmp_path):
    def body(rank, world):
        with dist.distributed_c10d._coalescing_manager():
            dist.all_reduce(ones(4))
            dist.all_reduce(ones(6))
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
            dist.all_gather_into_tensor(ones(2 * world), ones(2))
            dist.all_gather_into_tensor(ones(3 * world), ones(3))
        manager.wait()
        with dist.distributed_c10d._coalescing_manager():
            dist.reduce_scatter_tensor(ones(2), ones(2 * world))
            dist.reduce_scatter_tensor(ones(3), ones(3 * world))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.all_reduce_coalesced([ones(1), ones(2)])

    run, _ = record(tmp_path / "run", 2, body)
    for rank in range(2):
        assert calls(run, rank, "op", "num_tensors", "numel", "payload_bytes", "sizes") == [
            ("all_reduce", 2, 10, 40, "4;6"),
            ("all_gather", 2, 10, 40, "2;3->4;6"),
            ("reduce_scatter", 2, 10, 40, "4;6->2;3"),
            ("all_reduce", 2, 3, 12, "1;2"),
        ]
    assert run.health.unseen == 0  # gloo counts the coalesced reduce_scatter as two collectives


def wait_for_a_block_where_dead_handles_were(rank, world, run):
    """Run coalescing blocks until a handle reuses the address of an earlier handle.

    The earlier handle is one of fifty that were deleted without a wait.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import commprof

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    commprof.attach(run, quiet=True)
    tensor = ones(4)
    for _ in range(100):
        handles = [dist.all_reduce(tensor, async_op=True) for _ in range(50)]
        places = {id(handle) for handle in handles}
        del handles
        with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            dist.all_reduce(tensor)
        taken = id(manager.works[0]) in places
        manager.wait()
        if taken:
            break
    commprof.detach()
    return taken


def test_the_wait_for_a_coalescing_block_is_not_that_of_a_call_whose_handle_is_gone(tmp_path):
    (taken,) = run_ranks(
        1, wait_for_a_block_where_dead_handles_were, str(tmp_path / "run"), process_group=False
    )
    assert taken
    rows = open_run(tmp_path / "run").table("collectives").to_pylist()
    waits = {row["wait_begin_ns"] for row in rows if row["coalesce_id"] is None}
    assert waits == {None} and len(rows) >= 51


@pytest.mark.long
def test_object_collectives_are_the_tensor_collectives_they_are_made_of(tmp_path):
    def body(rank, world):
        dist.all_gather_object([None] * world, {"rank": rank})
        dist.broadcast_object_list([rank, "x"], src=0)
        dist.gather_object(rank, [None] * world if rank == 0 else None, dst=0)
        dist.scatter_object_list([None], [rank, "x"] if rank == 1 else None, src=1)

    run, outcomes = record(tmp_path / "run", 2, body)
    for rank in range(2):
        assert calls(run, rank, "op", "api") == [
            ("all_gather", "all_gather_object"),
            ("all_gather", "all_gather_object"),
            ("broadcast", "broadcast_object_list"),
            ("broadcast", "broadcast_object_list"),
            ("all_gather", "gather_object"),
            ("gather", "gather_object"),
            # First the largest size for all ranks, then for each rank its object and the size of the object.
            ("broadcast", "scatter_object_list"),
            ("scatter", "scatter_object_list"),
            ("scatter", "scatter_object_list"),
        ]
        assert len(outcomes[rank]["flights"]) == outcomes[rank]["number"] == 9
    assert run.health.unseen == 0


def test_a_call_by_any_of_its_names_is_one_record(tmp_path):
    def body(rank, world):
        group = dist.group.WORLD
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist._all_gather_base(ones(4), ones(2))
            dist._reduce_scatter_base(ones(2), ones(4))
            dist.all_gather_coalesced([[ones(2), ones(3)], [ones(2), ones(3)]], [ones(2), ones(3)])
        names = ["_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single"]
        found = [name for name in names if hasattr(group, name)]
        for name in found:
            gathers = "gather" in name
            outputs, inputs = (ones(4), ones(2)) if gathers else (ones(2), ones(4))
            getattr(group, name)(outputs, inputs).wait()
        return ["all_gather" if "gather" in name else "reduce_scatter" for name in found]

    for complete in (False, True):
        run, outcomes = record(tmp_path / f"run-{complete}", 2, body, complete=complete)
        direct = outcomes[0]["result"]
        rows = calls(run, 0, "op", "payload_bytes")
        expected = [("all_gather", 16), ("reduce_scatter", 16), ("all_gather", 40)]
        assert rows == expected + [(op, 16) for op in direct]
        assert len(outcomes[0]["flights"]) == len(rows) >= 5
        assert run.health.unseen == 0


@pytest.mark.long
def test_barriers(tmp_path):
    def body(rank, world):
        dist.barrier()
        dist.barrier(async_op=True).wait()
        dist.monitored_barrier()

    run, _ = record(tmp_path / "run", 3, body)
    for rank in range(3):
        assert calls(run, rank, "op", "backend_method") == [
            ("barrier", "barrier"),
            ("barrier", "barrier"),
            ("barrier", "monitored_barrier"),
        ]
        assert all(row is not None for row in calls(run, rank, "exposed_ns"))
    assert run.health.unseen == 0  # gloo counts a monitored_barrier as several messages


@pytest.mark.long
def test_threads_keep_their_names_and_share_no_record(tmp_path):
    def body(rank, world):
        groups = [dist.new_group(list(range(world))) for _ in range(2)]

        def work(group):
            for _ in range(20):
                dist.all_reduce(ones(2), group=group)

        threads = [
            threading.Thread(target=work, args=(group,), name=f"issuer-{k}") for k, group in enumerate(groups)
        ]
        for thread in threads:
            thread.start()
        dist.all_reduce(ones(2))
        for thread in threads:
            thread.join()

    run, outcomes = record(tmp_path / "run", 2, body)
    for rank in range(2):
        names = calls(run, rank, "thread")
        assert {name: names.count(name) for name in set(names)} == {
            "MainThread": 1,
            "issuer-0": 20,
            "issuer-1": 20,
        }
        by_group: dict[str, list[int]] = {}
        for pg, seq in calls(run, rank, "pg", "pg_seq"):
            by_group.setdefault(pg, []).append(seq)
        assert sorted(map(sorted, by_group.values())) == [[0], list(range(20)), list(range(20))]
        assert len(outcomes[rank]["flights"]) == 41


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x.clone())
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


@pytest.mark.long
def test_hooks_autograd_functions_and_grad_modes(tmp_path):
    def body(rank, world):
        x = ones(4).requires_grad_()
        x.register_hook(lambda gradient: dist.broadcast(gradient.clone(), 0) and None)
        _Scaled.apply(x).sum().backward()
        with torch.no_grad():
            dist.all_reduce(ones(1))
        with torch.inference_mode():
            dist.all_reduce(ones(1))
            dist.all_gather([ones(1), ones(1)], ones(1))
        with torch.autocast("cpu"):
            dist.all_reduce(ones(1))

    run, outcomes = record(tmp_path / "run", 2, body)
    for rank in range(2):
        assert calls(run, rank, "op") == [
            "all_reduce",
            "all_reduce",
            "broadcast",
            "all_reduce",
            "all_reduce",
            "all_gather",
            "all_reduce",
        ]
        assert len(outcomes[rank]["flights"]) == 7


@pytest.mark.long
def test_methods_called_directly_on_a_group_in_every_form(tmp_path):
    def body(rank, world):
        pg = dist.group.WORLD
        pg.allreduce(ones(2)).wait()
        pg.allreduce([ones(2)], dist.ReduceOp.MAX).wait()
        pg.allreduce(tensors=[ones(2)], op=dist.ReduceOp.MIN).wait()
        pg.broadcast(ones(3), 1).wait()
        pg.broadcast(tensor=ones(3), root=1).wait()
        pg.reduce(ones(3), 1).wait()
        pg.allgather([ones(2), ones(2)], ones(2)).wait()
        pg.barrier().wait()
        dist.all_reduce(ones(2), dist.ReduceOp.PRODUCT)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):  # one call site with two reductions
            dist.all_reduce(ones(2), op=op)

    run, _ = record(tmp_path / "run", 2, body)
    assert calls(run, 0, "op", "reduce_op", "peer", "api") == [
        ("all_reduce", "SUM", -1, None),
        ("all_reduce", "MAX", -1, None),
        ("all_reduce", "MIN", -1, None),
        ("broadcast", None, 1, None),
        ("broadcast", None, 1, None),
        ("reduce", "SUM", 1, None),
        ("all_gather", None, -1, None),
        ("barrier", None, -1, None),
        ("all_reduce", "PRODUCT", -1, "all_reduce"),
        ("all_reduce", "SUM", -1, "all_reduce"),
        ("all_reduce", "MAX", -1, "all_reduce"),
    ]
    assert run.health.unseen == 0


def test_a_call_that_raises_raises_the_same_and_is_marked(tmp_path):
    def body(rank, world):
        options = dist.BroadcastOptions()
        options.rootRank = 9
        try:
            dist.group.WORLD.broadcast([ones(2)], options)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        dist.all_reduce(ones(2))
        return raised

    run, outcomes = record(tmp_path / "run", 2, body)
    assert calls(run, 0, "op", "status", "peer") == [("broadcast", "raised", -1), ("all_reduce", "ok", -1)]
    assert run.health.raised == 2 and run.health.unseen == 0
    assert "invalid root rank: 9" in outcomes[0]["result"]


@pytest.mark.long
def test_tags_steps_phases_and_metrics_stand_in_the_tables(tmp_path):
    def body(rank, world):
        import commprof
        from commprof import hooks

        tag = commprof.tag(
            "gradient_reduce", bucket=3, owner=1, parameters=("w", "b"), intended_op="reduce_scatter"
        )
        hooks.describe_config({"stage": 2}, "test 1.0")
        dist.broadcast(ones(2), 0)
        for step in range(2):
            commprof.step(step)
            commprof.phase("backward")
            with tag:
                dist.all_reduce(ones(2))
                with commprof.tag("no such purpose"):
                    dist.all_reduce(ones(2))
            commprof.step(step, 1)
            commprof.phase("optimizer")
            dist.all_reduce(ones(2))
            commprof.metric("loss", 0.5 + step)
            commprof.metric("samples", 4)
            commprof.metric("samples", 4)
            commprof.metric("grad_norm", torch.tensor(1.0))  # refused, because it would synchronize a device
            hooks.describe_bucket(bucket=0, numel=2, bytes=8, dtype="float32", parameters="w,b")

    run, _ = record(tmp_path / "run", 2, body)
    backward = ("backward", "gradient_reduce", "reduce_scatter", 3, 1, "w,b")
    other = ("backward", "other", None, None, None, None)
    optimizer = ("optimizer", None, None, None, None, None)
    assert calls(run, 1, "phase", "purpose", "intended_op", "bucket", "owner", "parameters") == [
        ("init", None, None, None, None, None),
        *[backward, other, optimizer] * 2,
    ]
    assert calls(run, 1, "step", "micro_step") == [(-1, 0), (0, 0), (0, 0), (0, 1), (1, 0), (1, 0), (1, 1)]
    steps = [row for row in run.table("steps").to_pylist() if row["rank"] == 1]
    assert [(s["step"], s["micro_steps"], s["loss"], s["samples"], s["grad_norm"]) for s in steps] == [
        (0, 2, 0.5, 8.0, None),
        (1, 2, 1.5, 8.0, None),
    ]
    assert steps[0]["end_ns"] == steps[1]["begin_ns"] and steps[1]["end_ns"] > steps[1]["begin_ns"]
    assert all(s["rss_bytes"] > 0 and s["cpu_ns"] > 0 for s in steps)
    assert run.manifest.effective_config == {"stage": 2} and run.manifest.engine == "test 1.0"
    buckets = [row for row in run.table("buckets").to_pylist() if row["rank"] == 0]
    assert [(b["step"], b["micro_step"], b["numel"]) for b in buckets] == [(0, 1, 2), (1, 1, 2)]
    assert len(run.table("clocks")) >= 4


def test_each_line_of_the_program_is_its_own_call_site_through_any_depth_of_torch(tmp_path):
    def body(rank, world):
        import torch.distributed.nn.functional as differentiable

        def reduce_here():
            return differentiable.all_reduce(ones(2))

        def gather_here():
            dist.all_gather_into_tensor(ones(4), ones(2))

        for _ in range(3):  # the cached values of the first round must not affect the next round
            reduce_here()
            differentiable.all_reduce(ones(2))
            gather_here()
            dist.all_gather_into_tensor(ones(4), ones(2))
            dist.all_reduce(ones(2))

    run, _ = record(tmp_path / "run", 2, body)
    names = [site.rsplit(".", 1)[-1] for site in calls(run, 1, "call_site")]
    lines = [int(site.split()[0].rsplit(":", 1)[1]) for site in calls(run, 1, "call_site")]
    assert names == ["reduce_here", "body", "gather_here", "body", "body"] * 3
    assert lines == lines[:5] * 3 and len(set(lines[:5])) == 5
    assert set(calls(run, 1, "op", "api")) == {
        ("all_reduce", "all_reduce"),
        ("all_gather", "all_gather_into_tensor"),
    }
