"""Checkpoints: training continues exactly as without an interruption, at any world size, stage and reduction."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zero_runtime
from support import recorded
from support.checkpoint_training import FEATURES, Odd, differences, everything_in, make_engine, train
from support.process_group_log import logged
from support.recorded_models import make_batch, make_model
from support.standing_ranks import run_standing
from zero_runtime.checkpoint import consolidated_state_dict

pytestmark = pytest.mark.ranks

STAGES = (0, 1, 2, 3)
SETTINGS = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, bf16, sub-groups, nothing persistent": {
        "stage": 3,
        "precision": "bf16",
        "zero": {"sub_group_size": 50, "stage3_param_persistence_threshold": 0},
    },
    "stage 0, bf16": {"stage": 0, "precision": "bf16"},
    "stage 2, bf16": {"stage": 2, "precision": "bf16"},
    "stage 1, fp16": {"stage": 1, "precision": "fp16"},
    "stage 2, SGD with momentum": {"stage": 2, "optimizer": "SGD"},
    "stage 1, Adagrad, no schedule": {"stage": 1, "optimizer": "Adagrad", "schedule": False},
    "stage 0, SGD": {"stage": 0, "optimizer": "SGD", "precision": "bf16"},
    "stage 2, round robin, 2 micro-batches": {
        "stage": 2,
        "gradient_accumulation_steps": 2,
        "zero": {"round_robin_gradients": True, "gradient_reduction": "reduce_scatter"},
    },
    "stage 2, chunks of small buckets": {
        "stage": 2,
        "precision": "bf16",
        "zero": {"gradient_reduction": "reduce_scatter", "reduce_bucket_size": 100},
    },
    "stage 2, Lamb": {"stage": 2, "optimizer": "Lamb"},
    "stage 3, Lion": {"stage": 3, "optimizer": "Lion", "zero_allow_untested_optimizer": True},
    "stage 0, Muon": {"stage": 0, "optimizer": "Muon"},
    "stage 1, NAdam": {"stage": 1, "optimizer": "NAdam", "zero_allow_untested_optimizer": True},
    "stage 2, parameters under way": {"stage": 2, "zero": {"overlap_parameter_gather": True}},
    "stage 2, a schedule of torch's": {
        "stage": 2,
        "schedule": False,
        "scheduler": {"type": "MultiStepLR", "params": {"milestones": [1, 4], "gamma": 0.5}},
    },
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the directory of the checkpoints, and the results of the 2 ranks that saved them."""
    root = tmp_path_factory.mktemp("checkpoints")
    return root, run_standing(2, save_and_resume, str(root), timeout=280)


def save_and_resume(rank, world, root):
    """Save and resume with every setting.

    Returns the losses after a save, and the losses of a new engine after loading the checkpoint, among other
    results.
    """
    results = {}
    for name, setting in SETTINGS.items():
        precision = setting.get("precision", "fp32")
        torch.manual_seed(100 + rank)
        engine = make_engine(dropout=0.2, **setting)
        train(engine, rank, 0, 3, precision)
        engine.save_checkpoint(Path(root) / name, client_state={"epoch": 3, "seen": (1, torch.ones(2))})
        at_save = (engine.global_steps, engine.global_samples, engine.micro_steps, engine.module.calls)
        went_on = train(engine, rank, 3, 3, precision)
        rates = engine.get_lr()

        torch.manual_seed(7)
        engine = make_engine(dropout=0.2, **setting)
        train(engine, rank, 50, 1, precision)
        path, client = engine.load_checkpoint(Path(root) / name)
        after = (engine.global_steps, engine.global_samples, engine.micro_steps, engine.module.calls)
        resumed = train(engine, rank, 3, 3, precision)
        assert path == str(Path(root) / name / "global_step3")
        assert client["epoch"] == 3
        assert isinstance(client["seen"], tuple)
        assert torch.equal(client["seen"][1], torch.ones(2))
        results[name] = (went_on, resumed, at_save, after, rates, engine.get_lr())
    return results


@pytest.mark.parametrize("name", SETTINGS)
def test_training_goes_on_bit_by_bit(saved, name):
    for result in saved[1]:
        went_on, resumed, at_save, after, rates, rates_after = result[name]
        assert resumed == went_on
        assert after == at_save
        assert rates_after == rates
        assert len(set(went_on)) == len(went_on)


CROSSINGS = [
    (name, stage, world)
    for index, name in enumerate(
        ("stage 0", "stage 1", "stage 2, bf16", "stage 3", "stage 3, bf16, sub-groups, nothing persistent")
    )
    for world in (1, 2, 3)
    for stage in STAGES
    if (index + stage + world) % 2 or index == 3
]


def load_and_save_again(rank, world, root, again, crossings):
    results = {}
    for name, stage, _ in crossings:
        precision = SETTINGS[name].get("precision", "fp32")
        more = {"zero": {"gradient_reduction": "reduce_to_owner"}} if stage in (1, 2) else {}
        engine = make_engine(stage, precision, **more)
        engine.load_checkpoint(Path(root) / name)
        engine.save_checkpoint(Path(again) / f"{name} as {stage} of {world}", tag="again")
        results[name, stage] = (train(engine, rank, 3, 1, precision)[0], engine.get_lr())
    return results


@pytest.fixture(scope="module")
def crossed(saved, tmp_path_factory):
    again = tmp_path_factory.mktemp("again")
    outcomes = {
        world: run_standing(
            world,
            load_and_save_again,
            str(saved[0]),
            str(again),
            [each for each in CROSSINGS if each[2] == world],
            timeout=280,
        )
        for world in (1, 2, 3)
    }
    return again, outcomes


@pytest.mark.parametrize(("name", "stage", "world"), CROSSINGS)
def test_any_world_size_and_stage_loads_every_bit(saved, crossed, name, stage, world):
    before = everything_in(saved[0] / name / "global_step3")
    after = everything_in(crossed[0] / f"{name} as {stage} of {world}" / "again")
    assert differences(before, after) == []
    assert any(isinstance(key, tuple) and key[1] == "exp_avg" for key in before)


def test_the_next_loss_is_the_same_everywhere(crossed):
    for name in {each[0] for each in CROSSINGS}:
        found = {
            outcome[0][crossing, stage][0]
            for outcome in crossed[1].values()
            for crossing, stage in outcome[0]
            # Only rank 0 is used, because its data and buffers are the same everywhere.
            if crossing == name
        }
        assert max(found) - min(found) <= 1e-6 * max(found), name


def change_by_script(rank, world, root):
    engine = make_engine(3, "bf16", zero={"stage3_param_persistence_threshold": 0})
    train(engine, rank, 0, 2, "bf16")
    engine.save_checkpoint(root, tag="before")
    went_on = train(engine, rank, 2, 2, "bf16")

    def change():
        with zero_runtime.zero.GatheredParameters(engine.module.second.weight, modifier_rank=0):
            if rank == 0:
                engine.module.second.weight.data.fill_(1 / 3)

    change()
    engine.load_checkpoint(root, tag="before")
    assert train(engine, rank, 2, 2, "bf16") == went_on
    change()
    engine.save_checkpoint(root, tag="after")
    changed = train(engine, rank, 4, 2, "bf16")
    engine = make_engine(1, "bf16")
    engine.load_checkpoint(root, tag="after")
    return changed, train(engine, rank, 4, 2, "bf16")


def test_what_a_script_changes_in_slices_is_saved_and_loaded_over(tmp_path):
    for changed, loaded in run_standing(2, change_by_script, str(tmp_path)):
        assert changed == loaded
    kept = everything_in(tmp_path / "after")["second.weight"]
    assert torch.equal(kept, torch.full_like(kept, 1 / 3).bfloat16().float())


def without_optimizer(rank, world, root):
    losses = []
    for stage, tag in ((0, None), (3, "none0"), (0, "none3")):
        engine, *_ = zero_runtime.initialize(
            model=Odd(), config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
        )
        if tag:
            engine.load_checkpoint(root, tag=tag)
        engine.save_checkpoint(root, tag=f"none{stage}")
        engine.module.seen.zero_()
        engine.eval()
        with torch.no_grad():
            losses.append(engine(torch.ones(4, FEATURES), torch.ones(4, 5)).item())
    return losses


def test_an_engine_without_an_optimizer_keeps_its_model(tmp_path):
    for losses in run_standing(2, without_optimizer, str(tmp_path)):
        # The losses are not equal bit for bit. A product may be summed in a different order if a gathered
        # weight is placed differently in memory.
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6)


def constructed_in_slices(rank, world, root, save):
    with zero_runtime.zero.Init():
        torch.manual_seed(9 if save else 1)
        model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 5), torch.nn.Linear(5, 3))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step():
        loss = engine(torch.ones(2, FEATURES)).square().mean()
        engine.backward(loss)
        engine.step()
        return loss.item()

    if save:
        step()
        engine.save_checkpoint(root)
    else:
        engine.load_checkpoint(root)
    return [step(), step()]


def test_a_model_made_in_slices_goes_on_at_another_world_size(tmp_path):
    went_on = run_standing(3, constructed_in_slices, str(tmp_path), True)[0]
    assert run_standing(2, constructed_in_slices, str(tmp_path), False)[0] == pytest.approx(went_on, rel=1e-5)


# Comparison with DeepSpeed.

needs_recordings = pytest.mark.skipif(not recorded.ROOT.is_dir(), reason=recorded.MISSING)


def recorded_case(name):
    return recorded.Case(recorded.ROOT / name)


def train_recorded(engine, rank, steps):
    losses = []
    for step in steps:
        loss = engine(*make_batch("gpt", step, 0, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def recorded_engine(case, **changes):
    model = make_model("gpt")
    config = {**case.config, **changes}
    engine, *_ = zero_runtime.initialize(
        model=model, model_parameters=model.parameters(), config=config, dist_init_required=True
    )
    return engine


def save_recorded(rank, world, root, names):
    calls = {}
    for name in names:
        engine = recorded_engine(recorded_case(name))
        losses = train_recorded(engine, rank, range(3))
        with logged() as log:
            engine.save_checkpoint(Path(root) / name, tag="t1", client_state={"my": 7})
        saving = seen(log.calls)
        with logged() as log:
            kept = engine.save_16bit_model(Path(root) / name, "weights.safetensors")
        calls[name] = (losses, saving, kept, seen(log.calls))
    return calls


def seen(calls):
    """Return the collectives without their position in the run."""
    return [
        (each.method, each.root, each.numel_in, each.numel_out, each.dtype, each.reduction) for each in calls
    ]


def load_recorded(rank, world, root, pairs):
    results = {}
    for source, name in pairs:
        engine = recorded_engine(recorded_case(name), checkpoint={"load_universal": True})
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.zero_()
        engine.load_checkpoint(Path(root) / source, tag="t1")
        results[name] = (train_recorded(engine, rank, (10, 11)), engine.global_steps)
    return results


@functools.cache
def recorded_loads():
    root = tempfile.mkdtemp()
    saves = [f"C_ckptx_a_save_s{stage}_w2" for stage in (1, 2, 3)]
    run_standing(2, save_recorded, root, saves, timeout=200)
    pairs = [(f"C_ckptx_a_save_s{stage}_w2", f"C_ckptx_b_loaduniv_s{stage}_as_w{{}}") for stage in (1, 2, 3)]
    outcomes = {}
    for world in (1, 2, 3):
        mine = [(source, name.format(world)) for source, name in pairs]
        if world == 2:
            mine.append((saves[0], "C_ckptx_c_s1_as_s2_w2"))
        if world == 3:
            mine.append((saves[1], "C_ckptx_c_univ_s2_as_s1_w3"))
        outcomes[world] = run_standing(world, load_recorded, root, mine, timeout=200)
    return outcomes


@pytest.mark.long
@needs_recordings
@pytest.mark.parametrize("world", [1, 2, 3])
def test_losses_after_loading_are_those_that_deepspeed_had(world):
    for rank, outcome in enumerate(recorded_loads()[world]):
        assert outcome
        for name, (losses, steps) in outcome.items():
            results = recorded_case(name).results
            assert losses == pytest.approx(results["losses"][str(rank)], rel=1e-6), name
            assert steps == results["extra_rank0"]["global_steps"]


@pytest.fixture(scope="module")
def recorded_saves(tmp_path_factory):
    root = tmp_path_factory.mktemp("recorded")
    return root, run_standing(2, save_recorded, str(root), RECORDED_SAVES, timeout=200)


RECORDED_SAVES = ["C_ckpt_s0_w2", "C_ckpt_s2_w2", "C_ckpt_s3_w2", "C_ckpt_s3_gather16_w2"]


@needs_recordings
@pytest.mark.parametrize("name", RECORDED_SAVES)
def test_saving_sends_what_deepspeed_sends_and_agreements(recorded_saves, name):
    case = recorded_case(name)
    for rank, outcome in enumerate(recorded_saves[1]):
        losses, saving, kept, gathering = outcome[name]
        assert losses == pytest.approx(case.results["losses"][str(rank)], rel=1e-6)
        calls = case.expected_calls(rank)
        wanted = seen(call for call in calls if call.phase == "save_checkpoint")
        # See docs/deepspeed-differences.md: an all_gather of what each rank wrote, and agreements on the
        # outcome.
        report = ("all_gather_single", None, 3, 6, "int64", "")
        agreement = ("allreduce", None, 1, 1, "int64", "MAX")
        assert saving == [*wanted[:-1], report, agreement, wanted[-1]]
        assert kept == case.results["extra_rank0"]["save_16bit_model"]
        wanted = seen(call for call in calls if call.phase == "save_16bit_model")
        assert gathering == [*wanted, agreement] if kept else not gathering


@needs_recordings
def test_gathered_weights_are_those_of_the_state_dict(recorded_saves):
    directory = recorded_saves[0] / "C_ckpt_s3_gather16_w2"
    weights = load_file(directory / "weights.safetensors")
    wanted = consolidated_state_dict(directory)
    told = recorded_case("C_ckpt_s3_gather16_w2").results["extra_rank0"]["zero_to_fp32"]
    assert weights.keys() == wanted.keys() == told.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, wanted[name])
        assert list(tensor.shape) == told[name][0]


def _whole_around_a_checkpoint(rank, world, folder):
    engine = make_engine(3)
    train(engine, rank, 0, 1)
    engine.empty_partition_cache()
    whole = []
    for act in (None, engine.save_checkpoint, engine.load_checkpoint):
        if act is not None:
            act(folder)
        whole.append([parameter.ds_status.name == "AVAILABLE" for parameter in engine.module.parameters()])
    return whole, [parameter.ds_persist for parameter in engine.module.parameters()]


def test_small_parameters_are_whole_behind_a_checkpoint_as_behind_a_step(tmp_path):
    for (before, saved, loaded), persistent in run_standing(2, _whole_around_a_checkpoint, str(tmp_path)):
        assert not any(before) and any(persistent)
        assert saved == loaded == persistent
