"""An optimizer with masters and states in files trains like one in memory, bit for bit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

import zero_runtime
from support import recorded_models
from support.checkpoint_training import differences, everything_in
from support.process_group_log import logged
from support.ranks import RankError, run_ranks
from support.standing_ranks import run_standing
from zero_runtime import tensor_access
from zero_runtime.errors import OffloadError

pytestmark = pytest.mark.ranks

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
ADAGRAD = {"type": "Adagrad", "params": {"lr": 1e-2, "initial_accumulator_value": 0.1}}
AMSGRAD = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True, "amsgrad": True}}
STEPS = 4


def config(stage, nvme=None, optimizer=ADAMW, offload=None, zero=None, **top):
    block = {"stage": stage, "reduce_bucket_size": 20_000, **(zero or {})}
    if stage == 3:
        block = {"stage3_param_persistence_threshold": 100, **block}
    if nvme is not None:
        block["offload_optimizer"] = {"device": "nvme", "nvme_path": str(nvme), **(offload or {})}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": optimizer,
        "gradient_clipping": 0.0,
        "zero_optimization": block,
        "aio": {"block_size": 4096, "queue_depth": 2},
        **top,
    }


def make(given, kind="mlp", groups=False):
    model = recorded_models.make_model(kind)
    parameters = None
    if groups:
        parameters = [
            {"params": [each for each in model.parameters() if each.dim() > 1], "lr": 3e-3},
            {"params": [each for each in model.parameters() if each.dim() <= 1], "weight_decay": 0.0},
        ]
    return zero_runtime.initialize(model=model, model_parameters=parameters, config=given)[0]


def train(engine, rank, first=0, steps=STEPS, kind="mlp"):
    losses = []
    for step in range(first, first + steps):
        for micro in range(engine.gradient_accumulation_steps()):
            dtype = next(engine.module.parameters()).dtype
            loss = engine(*recorded_models.make_batch(kind, step, micro, rank, dtype))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def weights(engine):
    with zero_runtime.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: each.detach().clone() for name, each in engine.module.named_parameters()}


def files_below(path):
    return sorted(each for each in Path(path).rglob("*") if each.is_file() and each.name[0].isdigit())


def same(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 19, "hysteresis": 1}}
CASES = {
    "stage 1": (1, {}, {}, {}),
    "stage 2, clipped, two groups": (2, {"gradient_clipping": 0.05}, {}, {"groups": True}),
    "stage 2, chunks": (2, {}, {"gradient_reduction": "reduce_scatter"}, {}),
    "stage 2, bf16, accumulated": (2, {**BF16, "gradient_accumulation_steps": 2}, {}, {}),
    "stage 1, bf16 accumulated in fp32": (1, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}, {}, {}),
    "stage 2, fp16 with overflows": (2, FP16, {}, {}),
    "stage 1, round robin, broadcast": (1, BF16, {"round_robin_gradients": True, "allgather_partitions": False}, {}),
    "stage 3": (3, {}, {}, {}),
    "stage 3, bf16, sub-groups": (3, {**BF16, "gradient_clipping": 0.0}, {"sub_group_size": 5000}, {}),
    "stage 3, fp16 with overflows": (3, FP16, {}, {}),
    "SGD without state": (2, {"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}}, {}, {}),
    "SGD with momentum": (2, {**BF16, "optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}}, {}, {}),
    "Adagrad": (1, {**BF16, "optimizer": ADAGRAD}, {}, {}),
    "Lion": (3, {**BF16, "optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}, {}, {}),
    "AMSGrad": (2, {**BF16, "optimizer": AMSGRAD}, {}, {}),
}  # fmt: skip
WAYS = [
    {},
    {"pipeline": False, "buffer_count": 1},
    {"fast_init": True, "buffer_count": 2},
    {"ratio": 0.4},
]


def compare(rank, world, path, cases):
    """Return losses and weights with and without files, and the content of the files.

    Each case uses one of the ways to use files, in turn.
    """
    found = {}
    for number, (name, (stage, top, zero, more)) in enumerate(cases.items()):
        optimizer = top.get("optimizer", ADAMW)
        rest = {key: value for key, value in top.items() if key != "optimizer"}
        small = {"sub_group_size": 4096, **zero} if stage != 3 else zero
        plain = make(config(stage, zero=zero, optimizer=optimizer, **rest), **more)
        expected = train(plain, rank), weights(plain), plain.skipped_steps
        plain.destroy()
        engine = make(
            config(stage, path, zero=small, optimizer=optimizer, offload=WAYS[number % len(WAYS)], **rest),
            **more,
        )
        got = train(engine, rank), weights(engine), engine.skipped_steps
        torch.distributed.barrier()
        found[name] = len(files_below(path))
        assert got[0] == expected[0], name
        same(got[1], expected[1])
        assert got[2] == expected[2] and (0 < got[2] < STEPS) == ("overflows" in name), name
        torch.distributed.barrier()
        engine.destroy()
    torch.distributed.barrier()
    return found, files_below(path)


@pytest.mark.sampled
@pytest.mark.parametrize("half", [0, 1])
def test_losses_and_weights_are_those_without_offload(tmp_path, half):
    cases = dict(list(CASES.items())[half::2])
    for found, left in run_standing(2, compare, tmp_path, cases):
        assert left == []
        for name, count in found.items():
            assert count >= (0 if "without state" in name else 2), name


def messages(rank, world, path):
    found = []
    for nvme in (None, path):
        with logged() as log:
            engine = make(config(2, nvme))
            train(engine, rank, steps=2)
            found.append([call._replace(step=0) for call in log.calls])
    return found


def test_no_message_is_sent_for_it(tmp_path):
    for plain, offloaded in run_standing(2, messages, tmp_path):
        assert plain == offloaded and len(plain) > 5


def resume(rank, world, path, directory):
    """Save from files, and load into files and into memory, with other stages and chunks.

    Returns the losses that follow.
    """
    top = {"bf16": {"enabled": True}}
    saved = make(config(2, path, zero={"sub_group_size": 4096}, **top))
    train(saved, rank, steps=2)
    saved.save_checkpoint(directory, tag="files")
    expected = train(saved, rank, first=2)
    saved.destroy()
    found = []
    for stage, nvme, zero, offload in (
        (2, path, {"sub_group_size": 8192}, {"fast_init": True}),
        (1, None, {}, {}),
        (3, path, {"sub_group_size": 4096}, {"pipeline": False}),
    ):
        engine = make(config(stage, nvme, zero=zero, offload=offload, **top))
        train(engine, rank, first=7, steps=1)
        engine.load_checkpoint(directory, tag="files")
        engine.save_checkpoint(directory, tag=f"again{stage}")
        found.append(train(engine, rank, first=2))
        engine.destroy()
    return expected, found


def test_a_checkpoint_of_what_is_in_files_loads_anywhere(tmp_path):
    for expected, found in run_standing(2, resume, tmp_path / "nvme", tmp_path / "saved"):
        assert found[0] == expected and found[1] == expected
        assert found[2] == pytest.approx(expected, rel=5e-3)
    first = everything_in(tmp_path / "saved" / "files")
    assert ("layers.0.weight", "exp_avg_sq") in first
    for again in ("again1", "again2", "again3"):
        assert differences(first, everything_in(tmp_path / "saved" / again)) == []


def look(rank, world, path, stage):
    """Compare what scripts read and change in states in files with the same operations in memory."""
    zero = {"sub_group_size": 4096}
    seen = []
    for nvme in (None, path):
        engine = make(config(stage, nvme, zero=zero))
        train(engine, rank, steps=2)
        parameter = engine.module.layers[1].weight
        before = tensor_access.safe_get_full_optimizer_state(parameter, "exp_avg")
        tensor_access.safe_set_full_optimizer_state(parameter, before * 2, "exp_avg")
        tensor_access.safe_set_full_fp32_param(parameter, torch.full((257, 131), 0.01))
        local = tensor_access.safe_get_local_optimizer_state(parameter, "exp_avg")
        bias = engine.module.layers[0].bias
        with zero_runtime.zero.GatheredParameters([bias], modifier_rank=0), torch.no_grad():
            bias.fill_(0.25)
        state = engine.optimizer.state_dict()["state"]
        total = sum(float(value["exp_avg_sq"].double().sum()) for value in state.values())
        seen.append((before, local, total, train(engine, rank, first=2, steps=2), weights(engine)))
        other = make(config(stage))
        engine.load_module_state_dict(weights(other))
        seen[-1] += (train(engine, rank, first=4, steps=1),)
        engine.destroy()
        other.destroy()
    return seen


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [2, 3])
def test_scripts_see_and_change_what_is_in_files(tmp_path, stage):
    for plain, filed in run_standing(2, look, tmp_path, stage):
        assert torch.equal(plain[0], filed[0])
        assert torch.equal(plain[1], filed[1])
        assert plain[2] == pytest.approx(filed[2], rel=1e-12)
        assert plain[3] == filed[3]
        same(plain[4], filed[4])
        assert plain[5] == filed[5]


def grow(rank, world, path):
    found = []
    for nvme in (None, path):
        torch.manual_seed(0)
        model = recorded_models.make_model("mlp")
        first = list(model.layers[:2].parameters())
        engine = zero_runtime.initialize(model=model, model_parameters=first, config=config(3, nvme))[0]
        train(engine, rank, steps=2)
        engine.optimizer.add_param_group({"params": list(model.layers[2].parameters()), "lr": 1e-3})
        found.append((train(engine, rank, first=2, steps=2), weights(engine)))
        engine.destroy()
    return found


def test_a_param_group_that_joins_later_is_in_files_too(tmp_path):
    for plain, filed in run_standing(2, grow, tmp_path):
        assert plain[0] == filed[0]
        same(plain[1], filed[1])


def refuse(rank, world, path, optimizer):
    make(config(2, path, optimizer=optimizer))


@pytest.mark.parametrize("name", ["Lamb", "Muon"])
def test_optimizers_that_need_everything_at_once_are_refused(tmp_path, name):
    with pytest.raises(RankError, match=f"UnsupportedError.*device is nvme, and optimizer {name} needs all"):
        run_ranks(1, refuse, tmp_path, {"type": name, "params": {"lr": 1e-3}})
    assert list(tmp_path.iterdir()) == []


def leave(rank, world, path, how):
    engine = make(config(2, path))
    train(engine, rank, steps=1)
    torch.distributed.barrier()
    if how == "killed":
        os.kill(os.getpid(), 9)
    if how == "again":
        first = files_below(path)
        again = zero_runtime.initialize(model=engine.module, config=config(2, path))[0]
        train(again, rank, steps=1)
        return first, files_below(path)
    return files_below(path)


def test_files_of_killed_ranks_go_when_others_start_there(tmp_path):
    with pytest.raises(RankError):
        run_ranks(2, leave, tmp_path, "killed")
    left = files_below(tmp_path)
    assert len(left) >= 4 and {path.parts[-3] for path in left} == {"rank0", "rank1"}
    for found in run_ranks(2, leave, tmp_path, "lives"):
        assert found and not set(found) & set(left)
    assert not set(files_below(tmp_path)) & set(left)


def test_a_model_that_is_given_again_leaves_no_files_of_its_first_engine(tmp_path):
    ((first, second),) = run_ranks(1, leave, tmp_path, "again")
    assert first and len(first) == len(second)


def fill(rank, world, path, directory):
    engine = make(config(2, path / "nvme", zero={"sub_group_size": 8192}))
    engine.save_checkpoint(directory, tag="good")
    (path / "ballast").write_bytes(bytes(100_000))
    try:
        train(engine, rank, steps=1)
    except OffloadError as error:
        (path / "ballast").unlink()
        engine.destroy()
        again = make(config(2, path / "nvme", zero={"sub_group_size": 8192}))
        again.load_checkpoint(directory, tag="good")
        return str(error), train(again, rank)
    return None, []


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a tmpfs")
def test_a_full_disk_ends_the_training_and_leaves_the_checkpoint(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=524288", "tmpfs", str(mount)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        ((error, losses),) = run_standing(1, fill, mount, tmp_path / "saved")
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)
    assert "No space left on device (errno 28)" in error and "524288 bytes are free there" in error
    assert "zero_optimization.offload_optimizer.nvme_path" in error and "last checkpoint" in error
    assert losses == run_standing(1, plain)[0]


def plain(rank, world):
    return train(make(config(2)), rank)
