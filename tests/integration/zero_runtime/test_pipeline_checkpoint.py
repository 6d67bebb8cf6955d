"""Checkpoints of pipelines: training continues exactly, with the same stages or with other stages."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zero_runtime
from commprof.ledger.verification import verify
from support.ranks import RankError, run_ranks
from support.recording import record
from support.standing_ranks import run_standing
from zero_runtime.checkpoint.consolidation import consolidated_state_dict, open_checkpoint

pytestmark = pytest.mark.ranks
WIDTH, MICRO_BATCHES = 8, 2


class Normed(nn.Module):
    """A layer with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, values):
        return self.norm(torch.tanh(self.linear(values)))


def engine_of(stages, stage=1, tied=False, chunks=1, **keys):
    layers = [zero_runtime.LayerSpec(Normed) for _ in range(4)]
    if tied:
        ends = zero_runtime.TiedLayerSpec(
            "ends", nn.Linear, WIDTH, WIDTH, tied_weight_attr=["weight", "bias"]
        )
        layers = [ends, *layers, ends]
    model = zero_runtime.PipelineModule(
        [*layers, zero_runtime.LayerSpec(nn.Linear, WIDTH, 1)],
        num_stages=stages,
        loss_fn=lambda outputs, targets: (outputs - targets).square().mean(),
        seed_layers=True,
        seed_fn=torch.manual_seed,
        partition_method="uniform",
        virtual_stages=chunks,
    )
    given = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6}},
        "zero_optimization": {"stage": stage},
        **keys,
    }
    return zero_runtime.initialize(model=model, config=given)[0]


def train(engine, steps):
    replica = engine.parallelism.replica
    found = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + replica)
        features = torch.randn(MICRO_BATCHES * 4, WIDTH, generator=generator)
        found.append(float(engine.train_batch(data=features, targets=features.sum(1, keepdim=True))))
    return found


def _save(rank, world, directory, stages, stage, tied, chunks=1):
    engine = engine_of(stages, stage, tied, chunks)
    train(engine, range(3))
    engine.save_checkpoint(directory, client_state={"told": 7})
    return train(engine, range(3, 5))


def _load(rank, world, directory, stages, stage, tied, chunks=1):
    engine = engine_of(stages, stage, tied, chunks)
    train(engine, range(7, 8))
    path, told = engine.load_checkpoint(directory)
    assert path.endswith("global_step3") and told == {"told": 7} and engine.global_steps == 3
    return train(engine, range(3, 5))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("saved", "loaded", "tied"),
    [
        ((2, 1), (2, 1), False),
        ((2, 1), (3, 0), True),
        ((3, 0), (2, 1), True),
        ((1, 0), (2, 1), True),
        ((2, 0), (1, 1), True),
    ],
    ids=str,
)
def test_training_goes_on_with_any_number_of_stages(tmp_path, saved, loaded, tied):
    wanted = run_standing(saved[0], _save, tmp_path, *saved, tied)
    found = run_standing(loaded[0], _load, tmp_path, *loaded, tied)
    assert all(each == pytest.approx(wanted[0], rel=1e-5) for each in (*wanted, *found))


@pytest.mark.sampled
@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2)])
def test_training_goes_on_with_other_virtual_stages(tmp_path, saved, loaded):
    """Training continues with other virtual stages.

    The number of stages is the same, but each stage has other layers.
    """
    wanted = run_standing(2, _save, tmp_path, 2, 1, True, saved)
    found = run_standing(2, _load, tmp_path, 2, 0, True, loaded)
    assert all(each == pytest.approx(wanted[0], rel=1e-5) for each in (*wanted, *found))


@pytest.mark.long
def test_what_loading_sends_is_explained(tmp_path):
    """The messages of loading are explained.

    Tied parameters are synchronized after each stage has read its own copy.
    """
    run_standing(1, _save, tmp_path / "saved", 1, 1, True)
    run, _ = record(tmp_path / "run", 2, _load, tmp_path / "saved", 2, 1, True)
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict


@pytest.mark.long
def test_replicas_and_stages(tmp_path):
    wanted = run_standing(4, _save, tmp_path, 2, 1, True)
    found = run_standing(4, _load, tmp_path, 4, 0, True)
    # Without replicas a step has half the samples. Only the first loss after loading must therefore agree.
    assert all(len(each) == 2 for each in found)
    again = run_standing(4, _load, tmp_path, 2, 0, True)
    assert all(each == pytest.approx(wanted[0], rel=1e-5) for each in again)


def _weights(rank, world, directory):
    engine = engine_of(2, tied=True, bf16={"enabled": True})
    next(engine.module.parameters()).requires_grad_(False)
    engine.save_checkpoint(directory, tag="here")
    assert engine.save_16bit_model(directory)
    engine.save_16bit_model(directory / "new", "model.safetensors", exclude_frozen_parameters=True)
    whole = engine.module_state_dict(whole=True)
    assert (whole is None) == bool(rank)
    frozen = set(engine.module_state_dict()) - set(engine.module_state_dict(exclude_frozen_parameters=True))
    assert len(frozen) == 1
    (directory / "taken").write_text("no folder")
    with pytest.raises(zero_runtime.errors.CheckpointError, match="saving"):
        engine.save_16bit_model(directory / "taken")
    return engine.module_state_dict(), whole, frozen


def test_one_state_dict_of_all_stages(tmp_path):
    """One state dict of all stages can be read by torch and safetensors."""
    outcomes = run_standing(2, _weights, tmp_path)
    consolidated = consolidated_state_dict(tmp_path, "here")
    assert open_checkpoint(tmp_path, "here").manifest.tag == "here"
    file = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    some = load_file(tmp_path / "new" / "model.safetensors")
    frozen = {name for _, _, names in outcomes for name in names}
    for found in (file, outcomes[0][1], {**file, **some}):
        assert set(found) == set(consolidated) and not frozen & set(some)
        assert len(some) == len(found) - len(frozen)
        for name, value in {**outcomes[1][0], **outcomes[0][0]}.items():
            assert found[name].dtype == value.dtype and torch.equal(found[name], value)


def _layer_files(rank, world, directory):
    def state(engine):
        return {name: value.clone() for name, value in engine.module.state_dict().items()}

    first = engine_of(2, tied=True)
    train(first, range(1))
    first.module.save_state_dict(str(directory))
    torch.distributed.barrier()
    second = engine_of(2, tied=True, chunks=2)
    second.module.load_state_dir(str(directory))
    assert Path(second.module.ckpt_layer_path(str(directory), 0)).is_file()
    missing = pytest.raises(
        zero_runtime.errors.CheckpointError, match=r"there is no .*layer_0\d-model_states\.pt"
    )
    with missing:
        second.module.load_state_dir(str(directory / "nowhere"))
    return state(first), state(second)


def test_files_of_layers(tmp_path):
    """Files of layers have DeepSpeed's names, and can be read by stages other than those that wrote them."""
    outcomes = run_standing(2, _layer_files, tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        f"layer_{n:02d}-model_states.pt" for n in range(7)
    ]
    written, read = ({**outcomes[0][which], **outcomes[1][which]} for which in (0, 1))
    assert set(written) == set(read)
    assert all(torch.equal(written[name], read[name]) for name in written)


def _load_state_dict(rank, world, directory):
    engine = engine_of(2, tied=True)
    whole = consolidated_state_dict(directory, "here")
    engine.load_module_state_dict(whole)
    for name, value in engine.module.state_dict().items():
        torch.testing.assert_close(value, whole[name].to(value.dtype))


def test_a_state_dict_of_all_stages_is_loaded(tmp_path):
    run_standing(2, _weights, tmp_path)
    run_standing(2, _load_state_dict, tmp_path)


def _other_model(rank, world, directory):
    engine = engine_of(1)
    with pytest.raises(zero_runtime.errors.CheckpointError, match="another model: it lacks '0"):
        engine.load_checkpoint(directory)


def test_another_model_is_refused(tmp_path):
    run_standing(2, _save, tmp_path, 2, 0, True)
    run_standing(1, _other_model, tmp_path)


# Saves with the same tag.


def _fail_alone(rank, world, directory):
    """Fail on the second stage while it writes its part of a second save."""
    engine = engine_of(2)
    train(engine, range(1))
    engine.save_checkpoint(directory, tag="best", client_state={"saved": 1})
    wanted = train(engine, range(1, 2))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    message = "could not be written" if rank == 1 else "failed on rank 1"
    for tag in ("best", "new"):
        with pytest.raises(zero_runtime.errors.CheckpointError, match=message):
            engine.save_checkpoint(directory, tag=tag, client_state={"saved": 2})
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    torch.distributed.barrier()
    after_failure = _names(directory / "best")
    assert _names(directory) == ["best", "latest"]
    _, told = engine.load_checkpoint(directory)
    assert told == {"saved": 1} and train(engine, range(1, 2)) == wanted
    engine.save_checkpoint(directory, tag="best", client_state={"saved": 3})
    assert engine.load_checkpoint(directory)[1] == {"saved": 3}
    return after_failure, _names(directory / "best")


def _names(directory):
    return sorted(each.name for each in directory.iterdir())


def test_a_failed_save_leaves_the_one_before(tmp_path):
    (before, after), _ = run_ranks(2, _fail_alone, tmp_path)
    assert before == ["part-00000", "part-00001", "parts.json"]
    assert after == ["part-00000-2", "part-00001-2", "parts.json"]


def _killed(rank, world, directory):
    """Kill the second stage in a second save after the first stage has written its part."""
    engine = engine_of(2)
    train(engine, range(1))
    engine.save_checkpoint(directory, tag="best", client_state={"saved": 1})
    train(engine, range(1, 2))

    def kill(*arguments):
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Path, "replace", kill)
        engine.save_checkpoint(directory, tag="best", client_state={"saved": 2})


def _resumed(rank, world, directory):
    engine = engine_of(2)
    _, told = engine.load_checkpoint(directory)
    engine.save_checkpoint(directory, tag="best", client_state={"saved": 2})
    return told, engine.global_steps


@pytest.mark.long
def test_the_checkpoint_before_a_killed_save_loads(tmp_path):
    with pytest.raises(RankError, match="died with status -9"):
        run_ranks(2, _killed, tmp_path)
    assert run_ranks(2, _resumed, tmp_path) == [({"saved": 1}, 1)] * 2
    assert _names(tmp_path / "best") == ["part-00000-2", "part-00001-2", "parts.json"]


def _save_again(rank, world, directory, stages, number):
    engine = engine_of(stages)
    if number:
        _, told = engine.load_checkpoint(directory)
        assert told == {"number": number - 1} and engine.global_steps == number
    train(engine, range(number, number + 1))
    engine.save_checkpoint(directory, tag="best", client_state={"number": number})


def test_other_stages_save_the_same_tag(tmp_path):
    """If other stages save the same tag, the last save is used."""
    for number, stages in enumerate((2, 1, 2)):
        run_standing(stages, _save_again, tmp_path, stages, number)
        parts = ["part-00000", "part-00001", "parts.json"]
        files = ["manifest.json", "rank-00000-1.safetensors"]
        assert _names(tmp_path / "best") == (parts if stages > 1 else files)
        assert open_checkpoint(tmp_path).manifest.client_state == {"number": number}


# Param groups.


def _grouped(rank, world, directory, stages, decays):
    """Train two stages, the first of which has no vectors and therefore no param group of vectors."""
    layers = [
        *(zero_runtime.LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(2)),
        zero_runtime.LayerSpec(Normed),
        zero_runtime.LayerSpec(nn.Linear, WIDTH, 1),
    ]
    model = zero_runtime.PipelineModule(
        layers,
        num_stages=stages,
        loss_fn=lambda outputs, targets: (outputs - targets).square().mean(),
        partition_method="uniform",
    )

    def optimizer(parameters):
        parameters = list(parameters)
        groups = [
            {"params": [each for each in parameters if (each.dim() > 1) == matrices], "weight_decay": decay}
            for matrices, decay in zip((False, True), decays, strict=True)
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_optimization": {"stage": 0},
    }
    engine, *_ = zero_runtime.initialize(model=model, optimizer=optimizer, config=config)
    if decays == (0.0, 0.1):
        train(engine, range(1))
        engine.save_checkpoint(directory, tag="here")
    else:
        engine.load_checkpoint(directory)
    return [group["weight_decay"] for group in engine.optimizer.param_groups]


def test_stages_with_other_param_groups(tmp_path):
    assert run_standing(2, _grouped, tmp_path, 2, (0.0, 0.1)) == [[0.1], [0.0, 0.1]]
    assert run_standing(1, _grouped, tmp_path, 1, (0.5, 0.6)) == [[0.0, 0.1]]
