"""Test DeepSpeed files that are hostile, damaged, incomplete or unsupported.

Each gives one clear error, and no code from the file is executed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from zero_runtime.checkpoint import consolidated_state_dict
from zero_runtime.checkpoint.__main__ import main as command
from zero_runtime.checkpoint.consolidation import open_checkpoint
from zero_runtime.checkpoint.deepspeed.description import optimizer_class
from zero_runtime.checkpoint.deepspeed.objects import plain
from zero_runtime.checkpoint.deepspeed.tensor_runs import Flat, end_to_end
from zero_runtime.checkpoint.deepspeed.torch_file import read
from zero_runtime.errors import CheckpointError

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "deepspeed_checkpoints"
TAG = "global_step3"


@pytest.fixture
def copy(tmp_path):
    """Return a function that copies a recorded checkpoint and returns the directory of its files."""

    def made(name):
        shutil.copytree(GOLDEN / name, tmp_path / name)
        (tag,) = [each for each in (tmp_path / name).iterdir() if each.is_dir()]
        return tag

    return made


def refused(directory, *texts):
    with pytest.raises(CheckpointError) as caught:
        consolidated_state_dict(directory)
    for text in texts:
        assert text in str(caught.value)
    return str(caught.value)


class Hostile:
    """An object that calls ``function`` when it is unpickled."""

    def __init__(self, function, *arguments):
        self.reduced = (function, arguments)

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.system, ("touch MARK",), "posix.system"),
        (eval, ("open('MARK', 'w')",), "eval"),
        (Path, ("MARK",), "pathlib"),
        (shutil.copy, ("expected.json", "MARK"), "shutil.copy"),
    ],
)
def test_a_hostile_pickle_is_refused_by_name_and_never_run(
    copy, tmp_path, monkeypatch, function, arguments, name
):
    monkeypatch.chdir(tmp_path)
    directory = copy("stage2_fp32")
    path = directory / "mp_rank_00_model_states.pt"
    states = torch.load(path, weights_only=True)
    torch.save({**states, "epoch": Hostile(function, *arguments)}, path)
    message = refused(directory, str(path), name, "no code of the file was run")
    assert "\n" not in message
    assert not (tmp_path / "MARK").exists()


def test_a_class_of_deepspeed_that_is_not_on_the_list_is_refused_by_name(copy):
    directory = copy("stage2_fp32")
    path = directory / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    rename(
        path,
        b"cdeepspeed.runtime.zero.config\nZeroStageEnum",
        b"cdeepspeed.runtime.zero.config\nSomethingElse",
    )
    refused(directory, "deepspeed.runtime.zero.config.SomethingElse")


def test_a_call_of_a_stand_in_with_strange_arguments_is_an_error_of_the_file(copy):
    directory = copy("stage2_fp32")
    path = directory / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    rename(path, b"ZeroStageEnum\nq", b"ZeroStageEnum\nq", b"K\x02\x85", b"\x8f\x85\x85")
    refused(directory, str(path))


def rename(path, *pairs):
    """Replace bytes in the pickle of a file."""
    with zipfile.ZipFile(path) as archive:
        records = {each.filename: archive.read(each) for each in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            if name.endswith("data.pkl"):
                for old, new in zip(pairs[::2], pairs[1::2], strict=True):
                    data = data.replace(old, new)
            archive.writestr(name, data)


def test_values_of_numpy_and_of_argparse_become_plain_ones(tmp_path):
    numpy = pytest.importorskip("numpy")
    torch.save(
        {
            "loss": numpy.float64(2.5),
            "count": numpy.int32(-7),
            "right": numpy.bool_(True),
            "curve": numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
            "args": argparse.Namespace(layers=2),
            "seen": {3, 4},
        },
        tmp_path / "file.pt",
    )
    found = plain(read(tmp_path / "file.pt"))
    assert (found["loss"], found["count"], found["right"]) == (2.5, -7, True)
    assert type(found["loss"]) is float
    assert torch.equal(found["curve"], torch.arange(6.0, dtype=torch.float64).view(2, 3))
    assert (found["args"].layers, found["seen"]) == (2, {3, 4})


# Damaged files.


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
@pytest.mark.parametrize("keep", [0, 10, 0.5, -1])
def test_a_file_that_was_cut_off(copy, name, keep):
    path = copy("stage2_fp32") / name
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    refused(path.parent, str(path), "cut off", "copy it again")


def test_one_changed_byte_of_a_tensor(copy):
    path = copy("stage3_fp32") / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    with zipfile.ZipFile(path) as archive:
        record = next(
            each for each in archive.infolist() if "/data/" in each.filename and each.file_size > 100
        )
    data = bytearray(path.read_bytes())
    # The data before the bytes of a tensor is padded to 64.
    data[record.header_offset + 128 + 50] ^= 0x40
    path.write_bytes(data)
    refused(path.parent, str(path), "checksum")


def test_something_else_under_the_name_of_a_file(copy):
    path = copy("stage2_fp32") / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save([1, 2], path)
    refused(path.parent, str(path), "holds a list")
    torch.save({"optimizer_state_dict": {"state": {}}}, path)
    refused(path.parent, str(path), "single_partition_of_fp32_groups")
    torch.save({"other": 1}, path)
    refused(path.parent, str(path), "'optimizer_state_dict'")


# Incomplete folders, and folders with several saves.


@pytest.mark.parametrize(
    ("name", "missing", "texts"),
    [
        (
            "stage2_fp32",
            "zero_pp_rank_0_mp_rank_00_optim_states.pt",
            ("zero_pp_rank_0_mp_rank_00", "rank 0", "missing"),
        ),
        ("stage2_fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt", ("saved by 2 ranks", "files of 1")),
        ("stage2_fp32", "mp_rank_00_model_states.pt", ("optimizer states and no file *model_states.pt",)),
        ("stage3_bf16", "zero_pp_rank_0_mp_rank_00_model_states.pt", ("model states of rank 0",)),
        (
            "stage3_bf16",
            "zero_pp_rank_1_mp_rank_00_model_states.pt",
            ("zero_pp_rank_1_mp_rank_00_model_states", "missing"),
        ),
        (
            "stage3_bf16",
            "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
            ("bf16_zero_pp_rank_0_mp_rank_00", "missing"),
        ),
        ("universal_of_stage2_fp32", "zero/gain/fp32.pt", ("fp32.pt", "'gain'", "Convert")),
        ("universal_of_stage2_fp32", "zero/optimizer_state.pt", ("optimizer_state.pt", "missing")),
        (
            "export_of_stage2_bf16",
            "pytorch_model-00002-of-00002.bin",
            ("pytorch_model-00002-of-00002.bin", "missing"),
        ),
    ],
)
def test_a_file_that_is_missing(tmp_path, name, missing, texts):
    shutil.copytree(GOLDEN / name, tmp_path / name)
    (path,) = [each for each in (tmp_path / name).rglob(Path(missing).name) if str(each).endswith(missing)]
    path.unlink()
    refused(path.parent if name.startswith("export") else tmp_path / name, *texts)


def test_files_of_two_saves_in_one_folder(copy):
    directory = copy("stage2_fp32")
    other = GOLDEN / "stage2_sgd" / TAG / "mp_rank_00_model_states.pt"
    states = torch.load(other, weights_only=True)
    states["param_shapes"] = states["param_shapes"][:1]
    torch.save(states, directory / "mp_rank_00_model_states.pt")
    refused(directory, "2 flat groups", "names 1", "different saves")


def test_optimizer_states_that_are_too_short_for_the_parameters(copy):
    directory = copy("stage2_fp32")
    path = directory / "mp_rank_00_model_states.pt"
    states = torch.load(path, weights_only=True)
    states["param_shapes"][0]["up.weight"] = torch.Size([700, 6])
    torch.save(states, path)
    refused(directory, "'up.weight'", "another save")


@pytest.mark.parametrize(
    ("extra", "texts"),
    [
        ("mp_rank_01_model_states.pt", ("2 tensor-parallel ranks", "ds_to_universal")),
        ("layer_00-model_00-model_states.pt", ("pipeline", "ds_to_universal")),
        ("expert_0_mp_rank_00_model_states.pt", ("experts", "layer_<l>_expert_<n>")),
        ("layer_0_expert_0_mp_rank_00_model_states.pt", ("layer_0_expert_0", "damaged")),
        ("offloaded_tensors", ("NVMe", "none or cpu")),
    ],
)
def test_kinds_that_are_not_read_are_named(copy, extra, texts):
    directory = copy("stage2_fp32")
    (directory / extra).write_bytes(b"PK")
    refused(directory, str(directory), *texts)


def test_an_index_that_names_a_file_elsewhere(tmp_path):
    shards = tmp_path / "shards"
    shutil.copytree(GOLDEN / "export_of_stage3_fp16" / "shards", shards)
    index = shards / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"gain": "../../secret.bin"}}')
    refused(shards, str(index), "../../secret.bin")
    index.write_text("[]")
    refused(shards, str(index), "no index")


def test_the_command_says_it_in_one_line(copy, tmp_path, capsys):
    directory = copy("stage2_fp32")
    (directory / "mp_rank_00_model_states.pt").write_bytes(b"PK")
    assert command([str(directory), str(tmp_path / "out.safetensors")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert not (tmp_path / "out.safetensors").exists()


def test_a_universal_folder_of_tensor_parallel_ranks_has_whole_parameters(copy):
    directory = copy("universal_of_stage2_fp32")
    whole = consolidated_state_dict(directory)["up.weight"]
    path = directory / "mp_rank_00_model_states.pt"
    states = torch.load(path, weights_only=True)
    # This is the shard that each of two ranks has.
    states["param_shapes"][0]["up.weight"] = torch.Size([3, 7])
    states["module"]["up.weight"] = states["module"]["up.weight"].view(-1)[:21].clone().view(3, 7)
    torch.save(states, path)
    torch.save(states, directory / "mp_rank_01_model_states.pt")
    assert torch.equal(consolidated_state_dict(directory)["up.weight"], whole)


# Universal folders that cannot be written.


def test_a_universal_folder_is_not_replaced_unasked(tmp_path, capsys):
    arguments = [str(GOLDEN / "stage3_bf16"), str(tmp_path), "--universal"]
    assert command(arguments) == 0
    assert command(arguments) == 2
    assert "--force" in capsys.readouterr().err
    assert command([*arguments, "--force"]) == 0
    assert open_checkpoint(tmp_path).manifest.counters["global_steps"] == 3
    assert {each.name for each in tmp_path.iterdir()} == {TAG, "latest_universal"}


def test_a_checkpoint_without_states_by_name_becomes_no_universal_folder(tmp_path, capsys):
    assert command([str(GOLDEN / "stage0_fp32"), str(tmp_path), "--universal"]) == 2
    assert "load it into an engine" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_steps_are_counted_as_the_optimizer_needs_them(tmp_path):
    assert command([str(GOLDEN / "stage3_bf16"), str(tmp_path), "--universal"]) == 0
    assert read(tmp_path / TAG / "zero" / "gain" / "step.pt") == 3
    common = read(tmp_path / TAG / "zero" / "optimizer_state.pt")
    assert common["optimizer_state_dict"]["state"][0]["step"] == 3


# The state of DeepSpeed's own optimizers.


BOTH = frozenset(("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize(
    ("config", "states", "known", "expected"),
    [
        ({"optimizer": {"type": "Lion"}}, BOTH, "Lion", "Lion"),
        (
            {"optimizer": {"type": "Adam", "params": {"bias_correction": False}}},
            BOTH,
            None,
            "UncorrectedAdam",
        ),
        ({}, BOTH, None, "AdamW"),
        ({}, BOTH, "Adam", "AdamW"),
        ({}, BOTH, "Lion", "Lion"),  # DeepSpeedCPULion stores zeros that it does not use.
        ({}, BOTH, "Lamb", "Lamb"),
        ({}, BOTH, "SGD", "AdamW"),
        ({}, frozenset(("exp_avg_sq",)), "Adagrad", "Adagrad"),
        ({}, frozenset(("momentum_buffer",)), "Muon", "Muon"),
        ({}, frozenset(("strange",)), "Own", "Own"),
    ],
)
def test_the_class_of_the_optimizer(config, states, known, expected):
    assert optimizer_class(config, [states, states], known) == expected


def of_whole_matrices():
    """Return three parameters of 4, 6 and 2 elements on two ranks.

    Each rank keeps the complete momentum of every matrix that it owns a part of.
    """
    momenta = [torch.arange(4.0), torch.arange(10.0, 16.0), torch.arange(20.0, 22.0)]
    ranks = [
        Flat("first", torch.arange(6.0), {"momentum_buffer": torch.cat(momenta[:2])}),
        Flat("second", torch.arange(6.0, 12.0), {"momentum_buffer": torch.cat(momenta[1:])}),
    ]
    return momenta, ranks


def test_a_momentum_of_whole_matrices():
    momenta, ranks = of_whole_matrices()
    found = {}
    for run in end_to_end(["a", "b", "c"], [4, 6, 2], [0, 0, 0], ranks):
        assert torch.equal(
            run.value, torch.arange(12.0)[{"a": 0, "b": 4, "c": 10}[run.name] + run.start :][: len(run.value)]
        )
        found.setdefault(run.name, []).append((run.start, run.state["momentum_buffer"]))
    for name, momentum in zip("abc", momenta, strict=True):
        assert torch.equal(
            torch.cat([each for _, each in sorted(found[name], key=lambda pair: pair[0])]), momentum
        )


def test_a_momentum_of_whole_matrices_that_was_cut_is_refused():
    _, ranks = of_whole_matrices()
    ranks[1].state["momentum_buffer"] = ranks[1].state["momentum_buffer"][:-1]
    with pytest.raises(
        CheckpointError, match=r"second has 7 elements of 'momentum_buffer'; expected 8, .*elastic_checkpoint"
    ):
        end_to_end(["a", "b", "c"], [4, 6, 2], [0, 0, 0], ranks)
