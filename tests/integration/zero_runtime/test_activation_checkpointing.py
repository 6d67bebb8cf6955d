"""Activation checkpointing on real ranks: partitions over model-parallel groups, and the ledger of their messages."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import commprof
import zero_runtime
from commprof.analysis import api
from support.ranks import RankError, run_ranks
from support.recording import record
from zero_runtime import checkpointing
from zero_runtime.errors import ConfigError

pytestmark = pytest.mark.ranks
BATCH, WIDTH, LAYERS, STEPS = 3, 7, 4, 2
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1},
    "activation_checkpointing": {"partition_activations": True},
}


class Groups:
    """Model-parallel groups of consecutive ranks, with the methods of a script's ``mpu``."""

    def __init__(self, size):
        firsts = range(0, dist.get_world_size(), size)
        groups = [dist.new_group(list(range(first, first + size))) for first in firsts]
        self.size, self.group = size, groups[dist.get_rank() // size]

    def get_model_parallel_rank(self):
        return dist.get_rank() % self.size

    def get_model_parallel_world_size(self):
        return self.size

    def get_model_parallel_group(self):
        return self.group


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, hidden, mask):
        return hidden + F.dropout(self.narrow(F.gelu(self.wide(hidden)) * mask), 0.2)


class Model(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.call = call

    def forward(self, hidden):
        mask = torch.linspace(0, 1, 3 * WIDTH)
        for layer in self.layers:
            hidden = self.call(layer, hidden, mask)
        return hidden.square().mean()


def plainly(function, *arguments):
    return function(*arguments)


def trained(call, place, config=CONFIG):
    """Return the parameters after some steps of an engine.

    ``place`` selects the batches.
    """
    torch.manual_seed(0)
    model = Model(call)
    engine, *_ = zero_runtime.initialize(model=model, config=config)
    torch.manual_seed(50 + place)
    for _ in range(STEPS):
        engine.backward(engine(torch.randn(BATCH, WIDTH)))
        engine.step()
    with zero_runtime.zero.GatheredParameters(list(model.parameters())):
        return [parameter.detach().clone() for parameter in model.parameters()]


def partitioned(rank, world, size):
    place = rank // size
    wanted = trained(plainly, place)
    checkpointing.configure(Groups(size), deepspeed_config=CONFIG)
    assert all(map(torch.equal, trained(checkpointing.checkpoint, place), wanted))
    assert all(map(torch.equal, trained(checkpointing.non_reentrant_checkpoint, place), wanted))
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_partitioned_activations_train_the_same_model_to_the_bit(world):
    assert all(run_ranks(world, partitioned, 2))


def recorded(rank, world):
    checkpointing.configure(Groups(2), deepspeed_config=CONFIG)
    trained(checkpointing.checkpoint, rank // 2)


@pytest.mark.long
def test_the_gathers_of_partitions_are_recorded_with_the_bytes_they_must_have(tmp_path):
    """The gathers of partitions are recorded with the bytes that follow from the shapes.

    Each rank keeps 11 of 21 elements, and 22 elements are sent. The mask also has 21 elements, and is
    gathered for each layer.
    """
    run, _ = record(tmp_path / "run", 4, recorded)
    rows = [row for row in run.table("collectives").to_pylist() if row["purpose"] == "activation"]
    assert {(row["op"], row["phase"], row["group_size"], row["dtype"]) for row in rows} == {
        ("all_gather", "backward", 2, "float32")
    }
    per_rank_and_step = Counter((row["rank"], row["step"]) for row in rows)
    assert per_rank_and_step == {(rank, step): 2 * LAYERS for rank in range(4) for step in range(STEPS)}
    assert {row["payload_bytes"] for row in rows} == {22 * 4}
    assert {row["input_bytes"] for row in rows} == {11 * 4}
    assert {(row["rank"], row["group_ranks"]) for row in rows} == {
        (0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3"),
    }  # fmt: skip
    traffic = api.traffic(run, by=("purpose", "op"))
    (found,) = traffic[traffic["purpose"] == "activation"].to_dict("records")
    # Each of two groups gathers 2 tensors in each of 4 layers in each of 2 steps. Half of a payload is sent.
    assert found["collectives"] == 2 * 2 * LAYERS * STEPS
    assert found["payload_bytes"] == 2 * 2 * LAYERS * STEPS * 88
    assert found["wire_bytes"] == 2 * 2 * LAYERS * STEPS * 44
    verdict = api.verify(run)
    assert [each for each in verdict.unexplained if "activation" in str(each)] == []
    # The config has no key for the sizes of activations, so a label does not predict them.
    assert verdict.state == "unknown", verdict
    assert verdict.labelled_bytes == found["payload_bytes"]


def kept_bytes(rank, world, size, cpu):
    """Return the bytes that remain allocated after a forward pass of six layers, without its output."""
    layers = [nn.Linear(64, 64) for _ in range(6)]
    scale = torch.rand(1000)
    checkpointing.configure(
        Groups(size) if size > 1 else None, partition_activations=True, checkpoint_in_cpu=cpu
    )
    with torch.profiler.profile(profile_memory=True) as profiled:
        hidden = torch.ones(32, 64)
        for layer in layers:
            hidden = checkpointing.checkpoint(lambda x, s, layer=layer: layer(x) * s.sum(), hidden, scale)
    events = profiled.profiler.kineto_results.events()
    left = sum(event.nbytes() for event in events if event.name() == "[memory]")
    hidden.sum().backward()
    return left - 32 * 64 * 4


def test_each_rank_keeps_its_part_of_each_input_once():
    """Each rank keeps its partition of each input once.

    There are six inputs of 32x64, one of 1000 that is passed six times, and a state of the random generator
    for each call.
    """
    random = 6 * torch.get_rng_state().nbytes
    whole = 6 * 32 * 64 * 4
    assert run_ranks(1, kept_bytes, 1, False) == [whole + random]
    for cpu in (False, True):
        assert run_ranks(2, kept_bytes, 2, cpu) == [(whole + 4000) // 2 + random] * 2


def initialized(rank, world, blocks):
    found = []
    for block in blocks:
        model = nn.Linear(4, 4)
        config = {"train_batch_size": world} | ({} if block is None else {"activation_checkpointing": block})
        zero_runtime.initialize(model=model, config=config)
        found.append(checkpointing.is_configured())
    return found


def test_the_block_of_initialize_configures_and_says_what_it_does_not_change(capfd):
    block = {"partition_activations": True, "cpu_checkpointing": True}
    assert run_ranks(2, initialized, [None, {"profile": False}, block, None])[1] == [False, True, True, False]
    said = capfd.readouterr().err
    assert said.count("partition_activations: there is no model-parallel group") == 1
    assert said.count("cpu_checkpointing: the model is in host memory, and so are its checkpoints") == 1


def configured_first(rank, world):
    checkpointing.configure(None, profile=True)
    initialized(rank, world, [{"profile": False}])
    checkpointing.checkpoint(torch.sin, torch.ones(1))


def test_what_configure_has_said_stays_when_an_engine_is_made(capfd):
    run_ranks(2, configured_first)
    assert capfd.readouterr().err.count("checkpoint of sin: forward") == 1


def contradicting(rank, world):
    mpu = Groups(2)
    mpu.get_model_parallel_rank = lambda: 0
    with (
        pytest.raises(ConfigError, match="rank 0 of 2 model-parallel ranks, but it is rank 1")
        if rank
        else (commprof.tag("other"))
    ):
        checkpointing.configure(mpu)


def test_an_mpu_that_contradicts_its_group_is_an_error():
    run_ranks(2, contradicting)


def refused(rank, world, block):
    zero_runtime.initialize(
        model=nn.Linear(4, 4), config={"train_batch_size": 1, "activation_checkpointing": block}
    )


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"contiguous_memory_optimization": True}, "without partition_activations"),
        (
            {"contiguous_memory_optimization": True, "partition_activations": True},
            "number_checkpoints is None",
        ),
        ({"checkpoint_in_cpu": True}, "write activation_checkpointing.cpu_checkpointing"),
        (
            {"contiguous_checkpointing": True},
            "write activation_checkpointing.contiguous_memory_optimization",
        ),
    ],
)
def test_blocks_that_cannot_be_used(block, said):
    with pytest.raises(RankError, match=said):
        run_ranks(1, refused, block)
