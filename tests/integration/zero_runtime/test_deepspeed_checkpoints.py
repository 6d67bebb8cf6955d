"""Checkpoints that the real DeepSpeed wrote: training continues from them with DeepSpeed's own losses.

``tests/golden/deepspeed_checkpoints`` was recorded by ``tools/deepspeed_checkpoints.py``. It has the files,
and the losses of DeepSpeed in the steps after the save.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import zero_runtime
from support import deepspeed_cases as cases
from support.ranks import run_ranks
from support.standing_ranks import run_standing
from zero_runtime.checkpoint import consolidated_state_dict
from zero_runtime.checkpoint.__main__ import main as command
from zero_runtime.checkpoint.deepspeed.torch_file import read
from zero_runtime.errors import CheckpointError

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden" / "deepspeed_checkpoints"
RECORDER = ROOT / "tools" / "deepspeed_checkpoints.py"
REAL = "COMMPROF_DEEPSPEED_PYTHON"  # an interpreter that has the real DeepSpeed
# fp16 at stage 0: DeepSpeed does not scale the loss there, so its training differs
# (docs/deepspeed-differences.md).
UNSCALED = {"stage0_fp16", "stage0_lamb_fp16"}
TOLERANCE = {"fp32": 1e-6, "bf16": 5e-3, "fp16": 2e-3}


def source(name):
    return (cases.UNIVERSAL | cases.EXPORTS).get(name, name)


def precision(case):
    return next((kind for kind in ("bf16", "fp16") if kind in case.get("config", {})), "fp32")


def expected(name):
    return json.loads((GOLDEN / source(name) / "expected.json").read_text())


def make_engine(name, stage=None, **zero):
    """Create an engine with the settings of a case, at its own stage or another."""
    case = cases.CASES[source(name)]
    if stage is not None:
        case = {**case, "stage": stage, "zero": zero}
    model = cases.make_model()
    config = cases.make_config(case)
    engine, *_ = zero_runtime.initialize(
        model=model, model_parameters=cases.make_groups(model, case), config=config
    )
    return engine


def go_on(rank, world, names, stage=None, root=str(GOLDEN)):
    found = {}
    for name in names:
        engine = make_engine(name, stage)
        path, client = engine.load_checkpoint(Path(root) / name)
        rates, scale, losses = [], [], []
        counters = (engine.global_steps, engine.global_samples, engine.skipped_steps)
        for step in range(cases.BEFORE, cases.BEFORE + cases.AFTER):
            losses += cases.train(engine, rank, step, 1)
            rates.append(engine.get_lr())
            scale.append(engine.optimizer.loss_scale)
        found[name] = {
            "path": path,
            "client": client,
            "counters": counters,
            "losses": losses,
            "rates": rates,
            "scales": scale,
            "passes": int(engine.module.passes),
        }
    return found


TRAININGS = [*cases.CASES, *cases.UNIVERSAL]


def rounding(name):
    """Return how far losses may differ from DeepSpeed's, whose own optimizers round differently than torch's."""
    optimizer = cases.make_config(cases.CASES[source(name)])["optimizer"]["type"]
    if optimizer == "Muon":  # the iteration that orthogonalizes matrices
        return TOLERANCE["bf16"] if "bf16" in name else 2e-5
    return 3e-6 if optimizer != "AdamW" or counts_in_numbers(name) else 1e-6


def counts_in_numbers(name):
    """Return whether DeepSpeed trains the case with an Adam of its own."""
    optimizer = cases.make_config(cases.CASES[source(name)])["optimizer"]
    return optimizer["type"] == "AdamW" and not optimizer["params"].get("torch_adam")


@functools.cache
def resumed(names):
    return run_standing(cases.WORLD, go_on, names, timeout=280)


@pytest.mark.sampled
@pytest.mark.parametrize("name", TRAININGS)
def test_training_goes_on_with_deepspeeds_own_losses(cases_that_run, name):
    case, told = cases.CASES[source(name)], expected(name)
    for rank, mine in enumerate(each[name] for each in resumed(cases_that_run)):
        theirs = told["ranks"][rank]
        after = theirs.get("resumed", theirs["after"])
        counters = theirs["counters"]
        assert mine["counters"] == (
            counters["global_steps"],
            counters["global_samples"],
            counters["skipped_steps"],
        )
        assert mine["client"].keys() == cases.CLIENT_STATE.keys()
        assert torch.equal(mine["client"]["table"], cases.CLIENT_STATE["table"])
        assert mine["client"]["seen"] == cases.CLIENT_STATE["seen"]
        micro_steps = (cases.BEFORE + cases.AFTER) * case.get("config", {}).get(
            "gradient_accumulation_steps", 1
        )
        assert mine["passes"] == micro_steps
        if name in UNSCALED:
            continue
        assert mine["losses"] == pytest.approx(after["losses"], rel=rounding(name))
        assert mine["rates"] == [pytest.approx(each) for each in after["rates"]]
        if precision(case) == "fp16":
            assert mine["scales"] == after["scales"]


@pytest.mark.sampled
@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 3), (2, 1), (3, 3), (3, 2)])
def test_it_loads_at_any_stage_and_world_size(stage, world):
    """A checkpoint loads at any stage and world size.

    The first loss after loading depends on the weights alone, and is equal everywhere.
    """
    names = [
        "stage0_bf16",
        "stage1_bf16",
        "stage2_round_robin",
        "stage2_aligned",
        "stage3_sub_groups",
    ]
    names += ["v0.14.5_stage2_round_robin", "v0.16.9_stage3_fp32", "universal_of_stage3_bf16"]
    outcomes = run_standing(world, go_on, names, stage, timeout=280)
    for name in names:
        theirs = expected(name)["ranks"]
        tolerance = TOLERANCE[precision(cases.CASES[source(name)])]
        for rank in range(min(world, cases.WORLD)):
            mine = outcomes[rank][name]["losses"]
            told = theirs[rank].get("resumed", theirs[rank]["after"])["losses"]
            assert mine[0] == pytest.approx(told[0], rel=tolerance), name
            if world == cases.WORLD and precision(cases.CASES[source(name)]) == "fp32":
                assert mine == pytest.approx(told, rel=1e-5), name


def weights_only(rank, world, stage):
    found = {}
    for name in cases.EXPORTS:
        for kind in ("whole", "shards"):
            engine = make_engine(name, stage)
            path, client = engine.load_checkpoint(GOLDEN / name / kind)
            assert (path, client) == (str(GOLDEN / name / kind), {})
            assert engine.global_steps == 0
            found[name, kind] = cases.train(engine, rank, cases.BEFORE, 1)
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_export_of_the_weights_loads_as_weights(stage):
    for rank, found in enumerate(run_standing(cases.WORLD, weights_only, stage)):
        for (name, _), losses in found.items():
            told = expected(name)["ranks"][rank]["after"]["losses"]
            assert losses == pytest.approx(told[:1], rel=TOLERANCE[precision(cases.CASES[source(name)])])


@pytest.mark.parametrize("name", [name for name, case in cases.CASES.items() if case["stage"]])
def test_the_weights_are_those_that_deepspeeds_own_tool_reads(name):
    told = expected(name)["weights"]
    found = consolidated_state_dict(GOLDEN / name)
    assert {"table.weight", "head.weight", "passes", "level", "gain"} <= found.keys()
    for key, (total, squares) in (told or {}).items():
        assert found[key].double().sum().item() == pytest.approx(total, rel=1e-9, abs=1e-12), key
        assert found[key].double().square().sum().item() == pytest.approx(squares, rel=1e-9), key
    assert told is None or found.keys() - told.keys() <= {"frozen.weight", "frozen.bias"}


def test_the_command_reads_a_checkpoint_of_deepspeed(tmp_path, capsys):
    out = tmp_path / "model.safetensors"
    assert command([str(GOLDEN / "stage3_bf16"), str(out)]) == 0
    assert "218 elements of global_step3, step 3" in capsys.readouterr().out
    assert out.stat().st_size > 218 * 4


def counted_in_numbers(path, one_of_each_group):
    """Let the optimizer states of a file count steps with whole numbers, like DeepSpeed's own optimizers.

    Without ZeRO these optimizers only increment the count of one parameter of each group.
    """
    content = read(path)
    if one_of_each_group:
        optimizer = content["optimizer"]
    else:
        states = content["optimizer_state_dict"]
        # The classes of these values are not installed.
        for key in ("loss_scaler", "zero_stage", "param_slice_mappings"):
            del states[key]
        optimizer = states["base_optimizer_state"]
    for group in optimizer["param_groups"]:
        for index in group["params"]:
            last = index == group["params"][-1]
            optimizer["state"][index]["step"] = cases.BEFORE if last or not one_of_each_group else 0
    # The tensors are mapped from the file itself, so the new file replaces it afterwards.
    torch.save(content, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def test_steps_that_are_counted_in_numbers(tmp_path):
    for name in ("stage0_fp32", "stage2_fp32"):
        shutil.copytree(GOLDEN / name, tmp_path / name)
    counted_in_numbers(tmp_path / "stage0_fp32" / "global_step3" / "mp_rank_00_model_states.pt", True)
    for path in (tmp_path / "stage2_fp32").rglob("*optim_states.pt"):
        counted_in_numbers(path, False)
    outcomes = run_standing(cases.WORLD, go_on, ["stage0_fp32", "stage2_fp32"], None, str(tmp_path))
    for rank, found in enumerate(outcomes):
        for name, mine in found.items():
            assert mine["losses"] == pytest.approx(
                expected(name)["ranks"][rank]["resumed"]["losses"], rel=1e-6
            )


def module_alone(rank, world, directory):
    engine = make_engine("stage2_bf16", 3)
    engine.load_checkpoint(directory, load_module_only=True)
    return engine.global_steps, cases.train(engine, rank, cases.BEFORE, 1)


def test_without_files_of_optimizer_states_the_models_own_weights_load(tmp_path):
    shutil.copytree(GOLDEN / "stage2_bf16", tmp_path / "copy")
    for path in (tmp_path / "copy").rglob("*optim_states.pt"):
        path.unlink()
    for rank, (steps, losses) in enumerate(run_standing(cases.WORLD, module_alone, str(tmp_path / "copy"))):
        assert steps == 0
        told = expected("stage2_bf16")["ranks"][rank]["after"]["losses"]
        assert losses == pytest.approx(told[:1], rel=TOLERANCE["bf16"])


# Experts.


def go_on_with_experts(rank, world, name, ep_size, stage):
    case = cases.EXPERTS[name] | {"ep_size": ep_size, "stage": stage}
    zero_runtime.as_deepspeed()
    model = cases.make_model(case)
    engine, *_ = zero_runtime.initialize(
        model=model, model_parameters=cases.make_groups(model, case), config=cases.make_config(case)
    )
    engine.load_checkpoint(GOLDEN / name)
    return engine.global_steps, cases.train(engine, rank, cases.BEFORE, cases.AFTER)


def experts_at(name, world=None, ep_size=None, stage=None):
    case = cases.EXPERTS[name]
    return run_ranks(
        world or case.get("world", cases.WORLD),
        go_on_with_experts,
        name,
        ep_size or case["ep_size"],
        case["stage"] if stage is None else stage,
    )


def told_of(name, rank):
    return expected(name)["ranks"][rank]["resumed"]["losses"]


@pytest.mark.sampled
@pytest.mark.parametrize("name", cases.EXPERTS)
def test_training_with_experts_goes_on_with_deepspeeds_own_losses(name):
    for rank, (steps, losses) in enumerate(experts_at(name)):
        assert steps == cases.BEFORE
        assert losses == pytest.approx(told_of(name, rank), rel=TOLERANCE[precision(cases.EXPERTS[name])])


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "world", "ep_size", "stage"),
    [
        ("experts_stage0", 2, 1, 0),
        ("experts_stage1_w4", 4, 1, 0),
        ("experts_stage2_data_first_w4", 4, 1, 2),
        ("experts_stage2_ep1", 2, 2, 1),
        ("experts_stage0", 2, 2, 2),
    ],
)
def test_experts_load_at_another_ep_size_and_stage(name, world, ep_size, stage):
    """Experts load at another ep_size and stage.

    Clipping at stage 0 uses the mean of the ranks' norms, as in DeepSpeed, and so depends on the experts of a
    rank.
    """
    for rank, (_, losses) in enumerate(experts_at(name, world, ep_size, stage)):
        told = told_of(name, rank)
        assert losses[0] == pytest.approx(told[0], rel=1e-6)
        assert losses == pytest.approx(told, rel=1e-3 if "stage0" in name or not stage else 1e-5)


@pytest.mark.parametrize("name", cases.EXPERTS)
def test_one_file_has_all_experts(name, tmp_path):
    found = consolidated_state_dict(GOLDEN / name)
    layer = "mixtures.{}.deepspeed_moe.experts.deepspeed_experts.{}.0.weight"
    experts = [found[layer.format(*place)] for place in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]]
    assert not any(torch.equal(experts[0], other) for other in experts[1:])
    assert {key for key in found if "experts.0." in key or "experts.3." in key}
    shutil.copytree(GOLDEN / name, tmp_path / "copy")
    next((tmp_path / "copy").rglob("layer_0_expert_3_*")).unlink()
    with pytest.raises(CheckpointError, match="expert 3 of layer 0 has no file"):
        consolidated_state_dict(tmp_path / "copy")


# Checkpoints written for DeepSpeed.


WRITTEN = [
    "stage2_fp32",
    "stage2_fp16",
    "stage1_bf16",
    "stage3_one_group",
    "stage2_fused_adam_fp16",
    "stage2_cpu_adam_bf16",
]


def save_again(rank, world, root, stage):
    """Load a checkpoint of DeepSpeed at another world size, and save it in this runtime's own format."""
    for name in WRITTEN:
        engine = make_engine(name, stage)
        engine.load_checkpoint(GOLDEN / name)
        engine.save_checkpoint(Path(root) / name, client_state={"epoch": 3, "table": torch.arange(3.0)})


@pytest.fixture(scope="module")
def universal(tmp_path_factory):
    """Return universal folders, which the command created from checkpoints that three ranks saved at stage 3."""
    root = tmp_path_factory.mktemp("universal")
    run_standing(3, save_again, str(root / "saved"), 3, timeout=200)
    for name in WRITTEN:
        steps = [] if counts_in_numbers(name) else ["--steps", "tensors"]
        assert command([str(root / "saved" / name), str(root / name), "--universal", *steps]) == 0
    return root


def structure(value):
    """Return the types, keys, shapes and dtypes in a file.

    For lists it returns their structure, and not their numbers.
    """
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {key: structure(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [structure(each) for each in value]
    return type(value).__name__


def test_a_universal_folder_has_the_files_and_tensors_of_deepspeeds_own(universal):
    theirs = GOLDEN / "universal_of_stage2_fp32" / "global_step3_universal"
    mine = universal / "stage2_fp32" / "global_step3"
    assert (universal / "stage2_fp32" / "latest_universal").read_text() == "global_step3"
    trained = {path.parent.name for path in (theirs / "zero").glob("*/exp_avg.pt")}
    assert {path.name for path in (mine / "zero").iterdir()} == {*trained, "optimizer_state.pt"}
    for name in trained:
        files = {path.name for path in (theirs / "zero" / name).iterdir()}
        assert {path.name for path in (mine / "zero" / name).iterdir()} == files
        for file in files:
            one, other = read(mine / "zero" / name / file), read(theirs / "zero" / name / file)
            if isinstance(one, dict):
                assert structure(one["param"]) == structure(other["param"])
                assert torch.allclose(one["param"], other["param"], rtol=1e-6)
            else:
                assert structure(one) == structure(other)
                assert one == other
    common, told = read(mine / "zero" / "optimizer_state.pt"), read(theirs / "zero" / "optimizer_state.pt")
    assert [each["params"] for each in common["param_groups"]] == [
        each["params"] for each in told["param_groups"]
    ]
    for one, other in zip(common["param_groups"], told["param_groups"], strict=True):
        assert one == {key: other[key] for key in one}
    models, theirs_model = (
        read(mine / "mp_rank_00_model_states.pt"),
        read(theirs / "mp_rank_00_model_states.pt"),
    )
    for key in (
        "param_shapes",
        "lr_scheduler",
        "global_steps",
        "shared_params",
        "buffer_names",
        "frozen_param_shapes",
    ):
        assert models[key] == theirs_model[key], key
    assert structure(models["module"]) == structure(dict(theirs_model["module"]))


def test_a_dynamic_loss_scale_goes_along_under_deepspeeds_class(universal):
    mine = read(universal / "stage2_fp16" / "global_step3" / "zero" / "optimizer_state.pt")["loss_scaler"]
    theirs = read(GOLDEN / "stage2_fp16" / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert vars(mine) == vars(theirs["optimizer_state_dict"]["loss_scaler"])


def test_a_universal_folder_of_ones_own_loads_again(universal):
    for rank, found in enumerate(run_standing(2, go_on, ["stage2_fp32", "stage2_fp16"], 2, str(universal))):
        for name, mine in found.items():
            assert mine["losses"] == pytest.approx(
                expected(name)["ranks"][rank]["resumed"]["losses"], rel=1e-5
            )


@pytest.mark.long
@pytest.mark.skipif(REAL not in os.environ, reason=f"{REAL} names no interpreter that has DeepSpeed")
@pytest.mark.parametrize("name", WRITTEN)
def test_deepspeed_goes_on_from_a_universal_folder(universal, name):
    done = subprocess.run(
        [os.environ[REAL], str(RECORDER), str(universal / name), "--go-on", "--only", name],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])[name]
    for rank, theirs in enumerate(expected(name)["ranks"]):
        assert found[rank]["losses"] == pytest.approx(theirs["resumed"]["losses"], rel=3e-6)
        assert found[rank]["scales"] == theirs["resumed"]["scales"]
