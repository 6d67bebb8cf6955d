"""Test how many ranks share data and parameters, as given by configurations, meshes and scripts."""

from __future__ import annotations

import pytest
import torch

from support.ranks import run_ranks
from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError
from zero_runtime.groups.parallelism import ModelRanks, of_mpu, with_mesh
from zero_runtime.groups.process_grid import ProcessGrid, ProcessTopology

PLAIN = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}


def _batch(world: int, stages: int = 1, **more) -> int:
    return RuntimeConfig.from_mapping({**PLAIN, **more}, world, stages).train_batch_size


def test_samples_of_a_step_are_those_of_all_replicas():
    assert _batch(8) == 48 and _batch(8, tp_size=2) == 24 and _batch(8, sequence_parallel_size=4) == 12
    assert _batch(8, 2, tp_size=2, sequence_parallel_size=2) == 6
    assert _batch(8, tp_size=2, data_parallel_size=4) == 24
    assert _batch(8, tensor_parallel={"tp": {"tp_size": 2}}, tp_size=2) == 24


def test_autotp_may_count_a_sample_for_each_of_its_ranks():
    block = {"tensor_parallel": {"autotp_size": 2}}
    assert _batch(8, **block) == 24 and _batch(8, train_batch_size=24, **block) == 24
    theirs = RuntimeConfig.from_mapping({**PLAIN, **block, "train_batch_size": 48}, 8)
    assert theirs.train_batch_size == 24
    assert any("counts each sample once for each of the 2 ranks" in notice for notice in theirs.notices)
    with pytest.raises(ConfigError, match="do not multiply"):
        _batch(8, train_batch_size=48, tp_size=2)


@pytest.mark.parametrize(
    ("world", "stages", "more", "said"),
    [
        (6, 1, {"tp_size": 4}, "tp_size 4 makes 4 ranks for each model, which does not divide the 6"),
        (6, 2, {"tp_size": 2}, "stages of a pipeline 2 x tp_size 2 makes 4"),
        (8, 1, {"tp_size": 2, "data_parallel_size": 2}, "8 ranks divided by tp_size 2 leave 4"),
        (8, 1, {"tp_size": 2, "tensor_parallel": {"tp": {"tp_size": 4}}}, "differ; keep one"),
        (8, 1, {"tensor_parallel": {"sequence_parallel": True}}, "tp_size is 1"),
        (8, 1, {"tp_size": 0}, "tp_size is 0"),
        (8, 1, {"tensor_parallel": {"tp": {"mpu": 1}}}, "pass mpu to initialize"),
    ],
)
def test_axes_that_do_not_fit_are_one_error(world, stages, more, said):
    with pytest.raises(ConfigError, match=said):
        _batch(world, stages, **more)


def test_a_mesh_is_two_keys():
    assert with_mesh({}, (2, 4)) == {"data_parallel_size": 2, "sequence_parallel_size": 4}
    for wrong in ((2,), 3, (2, 0), ("a", 1)):
        with pytest.raises(ConfigError, match="two positive numbers"):
            with_mesh({}, wrong)
    with pytest.raises(ConfigError, match="sequence_parallel_size in the configuration is 2"):
        with_mesh({"sequence_parallel_size": 2}, (2, 4))


class Half:
    """An mpu with only half of the required methods."""

    def get_data_parallel_group(self):
        return None


class Wrong:
    """An mpu that reports three data-parallel ranks."""

    def get_data_parallel_group(self):
        return None

    def get_data_parallel_world_size(self):
        return 3

    def get_data_parallel_rank(self):
        return 0


def _mpu(rank: int, world: int) -> None:
    with pytest.raises(
        ConfigError, match="Half without get_data_parallel_world_size, get_data_parallel_rank"
    ):
        of_mpu(Half())
    with pytest.raises(ConfigError, match="rank 0 of 3 data-parallel ranks, but it is rank"):
        of_mpu(Wrong())
    grid = ProcessGrid(ProcessTopology.of(data=1, model=2))
    found = of_mpu(grid)
    assert found.replicas == 1 and found.model is not None and found.sizes() == {"data": 1, "model": 2}
    assert found.model_sizes() == {"model": 2} and found.model.is_first == (rank == 0)
    cut, shared, tied = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    cut.tensor_model_parallel = True
    tied.ds_pipe_replicated = True
    counted = [ModelRanks.counts(found.model, each) for each in (cut, shared, tied)]
    assert counted == [True, rank == 0, False]


def test_what_an_mpu_says_is_checked():
    run_ranks(2, _mpu)
