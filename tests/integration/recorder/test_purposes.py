"""Collectives that torch issues in addition to those for gradients and parameters.

Each has a purpose, and none of these purposes hides a collective of the program. The expectations are written
by hand from the calls of the programs.
"""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commprof
from support.recording import calls, record

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]


def objects(rank, world):
    """Issue one collective of each kind for objects, one of them with a tag of the program."""
    dist.barrier()
    dist.all_gather_object([None] * world, {"rank": rank})
    dist.broadcast_object_list([rank], src=0)
    dist.gather_object(rank, [None] * world if rank == 0 else None)
    dist.scatter_object_list([None], list(range(world)) if rank == 0 else None)
    with commprof.tag("metric"):
        dist.all_gather_object([None] * world, rank)
        dist.barrier()
    dist.all_reduce(torch.ones(3))


@pytest.mark.long
def test_objects_and_barriers_say_so_where_nobody_says_more(tmp_path):
    run, outcomes = record(tmp_path / "run", 2, objects)
    rows = calls(run, 0, "purpose", "op")
    assert Counter(rows) == {
        ("control", "barrier"): 1,
        ("object", "all_gather"): 3,  # the sizes and the objects, and the sizes before a gather
        ("object", "broadcast"): 3,  # the largest size is broadcast before a scatter
        ("object", "gather"): 1,
        ("object", "scatter"): 2,
        ("metric", "all_gather"): 2,
        ("metric", "barrier"): 1,
        (None, "all_reduce"): 1,
    }
    assert len(rows) == len(outcomes[0]["flights"])


def tensor_parallel(rank, world, way):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        if way == "whole":
            total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            total.full_tensor()
        elif way == "parts":
            gradients = [p.grad for p in model.parameters()]
            total = torch.nn.utils.get_total_norm(gradients).full_tensor()
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, total)
        optimizer.step()
    next(iter(model.parameters())).full_tensor()


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["whole", "parts"])
def test_tensor_parallel_training_is_told_by_its_phases(tmp_path, way):
    run, _ = record(tmp_path / "run", 2, tensor_parallel, way)
    begin = [
        *[(-1, "init", "parameter_broadcast", "scatter", size) for size in (64, 16, 64)],
        # Each rank has the whole bias of the second layer.
        (-1, "init", "parameter_broadcast", "broadcast", 16),
    ]
    step = [
        ("forward", "activation", "all_reduce", 32),
        ("other", "gradient_norm", "all_reduce", 16),  # one for each of four parameters
    ]
    # The program reads the last parameter.
    end = [(-1, "other", "parameter_access", "all_gather", 128)]
    rows = calls(run, 0, "step", "phase", "purpose", "op", "output_bytes")
    assert rows == begin + [(number, *row) for number in (0, 1) for row in step] + end


def spmd(rank, world):
    """Use shards of a weight that the model gathers, and a total norm that is summed later."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))

        def forward(self, x):
            whole = self.weight.redistribute(placements=[Replicate()])
            return x @ whole.to_local(grad_placements=[Partial()])

    model = Whole()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()
        optimizer.step()


def test_parameters_that_a_model_makes_whole_are_gathered_and_their_gradients_reduced(tmp_path):
    run, _ = record(tmp_path / "run", 2, spmd)
    rows = calls(run, 0, "step", "phase", "purpose", "op")
    step = [
        ("forward", "parameter_gather", "all_gather"),
        ("backward", "gradient_reduce", "reduce_scatter"),
        ("other", "gradient_norm", "all_reduce"),
        ("other", "gradient_norm", "all_reduce"),
    ]
    assert rows[0] == (-1, "init", "parameter_broadcast", "scatter")
    assert rows[1:] == [(number, *row) for number in (0, 1) for row in step]


class OneOfTwo(torch.nn.Module):
    """A model whose layer in use depends on the rank."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        return self.layers[dist.get_rank()](self.norm(x))


def uneven(rank, world):
    torch.manual_seed(0)
    model = DistributedDataParallel(OneOfTwo(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for _ in range(2 + rank):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()


def hooked(rank, world):
    """Reduce buffers with a hook of the program after the forward pass."""
    from torch.nn.parallel.distributed import _BufferCommHookLocation

    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))

    def average(state, buffers):
        return [dist.all_reduce(buffers["1.running_mean"], async_op=True).get_future()]

    model._register_buffer_comm_hook(None, average, _BufferCommHookLocation.POST_FORWARD)
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.long
def test_a_hook_for_buffers_sends_buffers(tmp_path):
    run, _ = record(tmp_path / "run", 2, hooked)
    rows = [row for row in calls(run, 0, "step", "phase", "purpose", "op") if row[0] >= 0]
    assert rows == [
        (0, "forward", "buffer_broadcast", "all_reduce"),
        (0, "backward", "gradient_reduce", "all_reduce"),
    ]


def differentiable(rank, world):
    from torch.distributed.nn import all_gather, all_reduce

    weight = torch.ones(4, requires_grad=True)
    (sum(all_gather(weight)) + all_reduce(weight)).sum().backward()


def functional(rank, world):
    import torch.distributed._functional_collectives as functions

    inputs = torch.ones(2, 3, requires_grad=True)
    exchanged = functions.all_to_all_single_autograd(inputs, None, None, dist.group.WORLD)
    gathered = functions.all_gather_tensor_autograd(exchanged, 0, dist.group.WORLD)
    (functions.reduce_scatter_tensor_autograd(gathered, "sum", 0, dist.group.WORLD) ** 2).sum().backward()


@pytest.mark.parametrize("body", [differentiable, functional])
def test_collectives_that_gradients_flow_through_are_activations(tmp_path, body):
    run, outcomes = record(tmp_path / "run", 2, body)
    assert set(calls(run, 0, "purpose")) == {"activation"}
    assert len(calls(run, 0, "op")) == len(outcomes[0]["flights"]) >= 4


def reduced_in_a_hook(rank, world):
    import torch.distributed._functional_collectives as functions

    weight = torch.ones(4, requires_grad=True)
    weight.register_hook(lambda gradient: functions.all_reduce(gradient, "sum", dist.group.WORLD) + 0)
    weight.sum().backward()


def test_a_functional_collective_of_a_program_s_hook_has_no_purpose(tmp_path):
    run, _ = record(tmp_path / "run", 2, reduced_in_a_hook)
    assert calls(run, 0, "purpose", "phase", "op") == [(None, "backward", "all_reduce")]


@pytest.mark.long
def test_all_that_join_sends_for_ranks_without_data_has_the_purpose_that_it_has_on_the_others(tmp_path):
    run, _ = record(tmp_path / "run", 2, uneven)
    begin = ["trace_check"] * 2 + ["parameter_broadcast"] * 2
    forward = ["control", "control", "buffer_broadcast", "buffer_broadcast", "control"]
    step = [*forward, "gradient_reduce", "unused_parameters"]
    # First whether any rank still has data, then which rank has the last model, and then the model.
    end = ["control", "control", "parameter_broadcast", "parameter_broadcast"]
    for rank in range(2):
        rows = calls(run, rank, "purpose", "op", "numel")
        assert [row[0] for row in rows] == begin + 3 * step + end
        # There are two layers of 20, a norm of 8, and a running mean and variance of 4. Each of 6 parameters
        # has a flag.
        sizes = {purpose: {row[2] for row in rows if row[0] == purpose} for purpose in step}
        assert sizes == {
            "control": {1},
            "buffer_broadcast": {8, 1},
            "gradient_reduce": {48},
            "unused_parameters": {6},
        }


def saved_beside_training(rank, world, path):
    """Save a checkpoint in a thread of torch, which starts, lets the training overtake it, and then writes."""
    import threading

    import torch.distributed.checkpoint as dcp

    entered, passed = threading.Event(), threading.Event()

    class Writer(dcp.FileSystemWriter):
        def set_up_storage_writer(self, *args, **kwargs):
            entered.set()
            passed.wait(60)
            return super().set_up_storage_writer(*args, **kwargs)

    model = torch.nn.Linear(4, 4)
    saving = dcp.async_save(model.state_dict(), storage_writer=Writer(path))
    entered.wait(60)
    model(torch.ones(1, 4)).sum().backward()
    passed.set()
    saving.result()
    with commprof.tag("metric"):
        dist.all_reduce(torch.ones(1))


def test_a_checkpoint_beside_the_training_leaves_its_phase_alone(tmp_path):
    run, _ = record(tmp_path / "run", 2, saved_beside_training, str(tmp_path / "saved"))
    rows = calls(run, 0, "purpose", "phase")
    assert rows[-1] == ("metric", "other")  # the phase after any backward pass
    assert set(rows[:-1]) == {("checkpoint", "other")}


def sharded_state(rank, world):
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    model(torch.ones(1, 4)).sum().backward()
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FullyShardedDataParallel.state_dict_type(model, kind):
            model.load_state_dict(model.state_dict())


@pytest.mark.long
def test_the_state_of_a_module_in_shards_is_a_checkpoint(tmp_path):
    run, outcomes = record(tmp_path / "run", 2, sharded_state)
    rows = calls(run, 0, "purpose", "phase", "op")
    assert rows[:2] == [
        ("parameter_gather", "forward", "all_gather"),
        ("gradient_reduce", "backward", "reduce_scatter"),
    ]
    assert {row[:2] for row in rows[2:]} == {("checkpoint", "checkpoint")}
    assert len(rows) == len(outcomes[0]["flights"])


_TITAN = """
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as funcol

def _dist_reduce(x, op, mesh, extra_pg):
    return funcol.all_reduce(x, reduceOp=op, group=mesh).item()

def dist_mean(x, mesh):
    return _dist_reduce(x, "avg" if dist.get_backend() == "nccl" else "sum", mesh, None)

def set_determinism():
    dist.broadcast(torch.zeros(1, dtype=torch.int64), src=0)

def clip_grad_norm_(total):
    dist.all_reduce(total)  # over the stages of a pipeline
"""


def titan(rank, world, place):
    sys.path.insert(0, str(place))
    from torchtitan.distributed import utils

    utils.set_determinism()
    utils.dist_mean(torch.ones(1), dist.group.WORLD)
    utils.clip_grad_norm_(torch.ones(2))


def test_what_torchtitan_sends_beside_its_models_has_a_purpose(tmp_path):
    (tmp_path / "torchtitan" / "distributed").mkdir(parents=True)
    (tmp_path / "torchtitan" / "distributed" / "utils.py").write_text(_TITAN)
    run, _ = record(tmp_path / "run", 2, titan, tmp_path)
    assert calls(run, 0, "purpose", "numel") == [("control", 1), ("metric", 1), ("gradient_norm", 2)]
