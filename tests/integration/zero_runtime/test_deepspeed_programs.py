"""Unmodified programs written for DeepSpeed: they run, or fail with one error that tells the user what to do."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys

import pytest

from support.command import ROOT, commprof
from tests.support.ranks import RankError, run_ranks

EXAMPLES = ROOT / "examples"
COMPLETE = {"fp16": {"enabled": True, "auto_cast": True}, "optimizer": {"type": "Adam"}}


def recorded(cwd, name, *arguments):
    """Run the program under the command on two ranks.

    Returns its result, and its records by purpose and operation.
    """
    done = commprof(
        "run", "--engine", "zero_runtime", "--nproc", "2", "--out", "run", str(EXAMPLES / name), *arguments,
        cwd=cwd,
    )  # fmt: skip
    from commprof.trace.reader import open_run

    run = open_run(cwd / "run")
    assert run.manifest.exit_code == done.returncode and (run.health.lost, run.health.unseen) == (0, 0)
    rows = run.table("collectives").to_pylist()
    return done, {(row["purpose"], row["intended_op"] or row["op"]) for row in rows}


def losses(text):
    """Return the numbers after ``step k, loss``, for k from 0 on."""
    found = re.findall(r"^step (\d+), loss (\S+)$", text, re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(len(found)))
    return [float(loss) for _, loss in found]


def run_program(rank, world, name, arguments, changes=None):
    """Run the program as ``__main__`` of a rank in which this runtime replaces DeepSpeed, and return its output.

    ``changes`` override keys of the config, like an edit of the file.
    """
    import zero_runtime

    zero_runtime.as_deepspeed()
    import deepspeed

    initialize = deepspeed.initialize
    if changes is not None:
        deepspeed.initialize = lambda **given: initialize(
            **{**given, "config": merged(given["config"], changes)}
        )
    sys.argv = [name, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def merged(config, changes):
    both = {**config, **changes}
    for key in config.keys() & changes.keys():
        if isinstance(config[key], dict) and isinstance(changes[key], dict):
            both[key] = merged(config[key], changes[key])
    return both


def test_the_least_program(tmp_path):
    done, traffic = recorded(tmp_path, "deepspeed_minimal.py")
    assert (done.returncode, done.stdout) == (
        0,
        "stage 3, torch.float16, micro-batches of 8, optimizer: None\n",
    )
    assert ("parameter_broadcast", "broadcast") in traffic and not {"gradient_reduce"} & {
        p for p, _ in traffic
    }


@pytest.mark.parametrize("world", [1, 4])
def test_a_batch_of_16_on_any_number_of_ranks_that_divides_it(world):
    first, *others = run_ranks(world, run_program, "deepspeed_minimal.py", [])
    assert f"micro-batches of {16 // world}," in first and all("micro-batches" not in text for text in others)


def test_a_batch_of_16_on_three_ranks():
    with pytest.raises(RankError, match=r"ConfigError: .*train_batch_size .*16.* 3"):
        run_ranks(3, run_program, "deepspeed_minimal.py", [])


@pytest.mark.long
def test_offload(tmp_path):
    done, traffic = recorded(tmp_path, "deepspeed_offload.py", "--complete", "--nvme-path", "files")
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout)) == 10 and len(set(losses(done.stdout))) == 10
    assert (
        "offload_param nvme has put nothing into files" in done.stderr and not (tmp_path / "files").exists()
    )
    assert traffic >= {
        ("parameter_gather", "all_gather"),
        ("gradient_reduce", "reduce_scatter"),
        ("overflow_check", "all_reduce"),
    }


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["deepspeed_offload.py", "deepspeed_activation_checkpointing.py"])
def test_what_float32_inputs_and_a_missing_optimizer_come_to(tmp_path, name):
    with pytest.raises(RankError) as raised:
        run_ranks(2, run_program, name, ["--nvme-path", str(tmp_path)])
    assert (
        "UsageError: the model is in float16, and it was given inputs in float32, which are not cast"
        in str(raised.value)
    )
    assert "set fp16.auto_cast to true, or cast them" in str(raised.value)
    with pytest.raises(RankError, match="UsageError: step needs an optimizer, and there is none") as raised:
        run_ranks(2, run_program, name, ["--nvme-path", str(tmp_path)], {"fp16": COMPLETE["fp16"]})
    assert "name an optimizer in the config, or pass one to initialize" in str(raised.value)


@pytest.mark.long
def test_what_a_program_that_cannot_train_ends_in(tmp_path):
    done, traffic = recorded(tmp_path, "deepspeed_offload.py", "--nvme-path", "files")
    assert done.returncode == 2 and losses(done.stdout) == []
    errors = [line for line in done.stderr.splitlines() if line.startswith("zero_runtime: error: ")]
    assert len(errors) == 1 and "set fp16.auto_cast to true, or cast them" in errors[0]
    assert "Traceback" not in done.stderr
    assert "deepspeed_offload.py, line " in done.stderr and "output = engine(inputs)" in done.stderr
    assert ("parameter_broadcast", "broadcast") in traffic


IN_FILES = {
    "zero_optimization": {"offload_param": {"max_in_cpu": 0}, "stage3_param_persistence_threshold": 0}
}


def test_parameters_in_files(tmp_path):
    arguments = ["--complete", "--nvme-path", str(tmp_path / "files")]
    first, second = run_ranks(2, run_program, "deepspeed_offload.py", arguments, IN_FILES)
    assert len(losses(first)) == 10 and second == ""
    assert (tmp_path / "files" / "zero_runtime").is_dir()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "/dev/null/nvme",
            r"offload_param.nvme_path is '/dev/null/nvme', where no folder can be made \(Not a directory",
        ),
        (None, r"offload_param.device is 'nvme' without nvme_path"),
    ],
)
def test_a_folder_that_cannot_be(path, said):
    changes = merged(IN_FILES, {"zero_optimization": {"offload_param": {"max_in_cpu": 0, "nvme_path": path}}})
    with pytest.raises(RankError, match=said):
        run_ranks(1, run_program, "deepspeed_offload.py", ["--complete"], changes)


@pytest.mark.long
def test_activation_checkpoints(tmp_path):
    arguments = ("--complete", "--checkpoint", "--nvme-path", "files")
    done, traffic = recorded(tmp_path, "deepspeed_activation_checkpointing.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout)) == 10
    assert ("gradient_reduce", "reduce_scatter") in traffic
    assert "activation_checkpointing.partition_activations: there is no model-parallel group" in done.stderr


@pytest.mark.long
def test_checkpoints_change_no_loss(tmp_path):
    plain, checkpointed = (
        run_ranks(1, run_program, "deepspeed_activation_checkpointing.py", ["--complete", *words])[0]
        for words in ([], ["--checkpoint"])
    )
    assert losses(plain) == losses(checkpointed) and len(losses(plain)) == 10


@pytest.mark.long
def test_a_config_of_175_billion_parameters(tmp_path):
    config = EXAMPLES / "deepspeed_175b.json"
    words = ("requested", str(config), "--params", "175e9", "--world", "256")
    done = commprof(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # A shard of the parameters in fp16 takes 2 bytes, and masters and two states in fp32 take 12 bytes, for
    # each of 175e9 / 256 elements.
    assert re.search(r"parameters +1\.27 GiB", done.stdout) and "memory per rank" in done.stdout
    assert re.search(r"masters +0 B +2\.55 GiB", done.stdout) and re.search(
        r"states +0 B +5\.09 GiB", done.stdout
    )
    answer = json.loads(commprof(*words, "--json", cwd=tmp_path).stdout)
    sent = {row["purpose"]: row for row in answer["messages_per_step"]}
    # The forward and backward passes of 16 micro-batches gather every parameter in fp16. Each micro-batch
    # reduces its gradients.
    assert sent["parameter_gather"]["payload_bytes"] == pytest.approx(2 * 16 * 2 * 175e9, rel=0.01)
    assert sent["gradient_reduce"]["payload_bytes"] == pytest.approx(16 * 2 * 175e9, rel=0.01)
    assert answer["note"] is None


def test_the_runtime_takes_the_config_of_175_billion_parameters():
    from zero_runtime.config import RuntimeConfig, load

    config = RuntimeConfig.from_mapping(load(str(EXAMPLES / "deepspeed_175b.json")), 256)
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (4096, 1)
    assert config.gradient_accumulation_steps == 16
    assert config.effective()["fp16"]["loss_scale"] == 0


@pytest.mark.long
def test_classic_keys(tmp_path):
    done, traffic = recorded(tmp_path, "deepspeed_classic_keys.py")
    assert done.returncode == 0, done.stderr
    found = losses(done.stdout)
    assert len(found) == 5 and found == sorted(found, reverse=True)
    assert ("gradient_reduce", "reduce_scatter") in traffic


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_classic_keys_at_other_stages(tmp_path, stage):
    given = json.loads((EXAMPLES / "deepspeed_classic_keys.json").read_text())
    given["zero_optimization"]["stage"] = stage
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(given))
    first, _ = run_ranks(2, run_program, "deepspeed_classic_keys.py", ["--deepspeed_config", str(config)])
    found = losses(first)
    assert len(found) == 5 and found == sorted(found, reverse=True)
