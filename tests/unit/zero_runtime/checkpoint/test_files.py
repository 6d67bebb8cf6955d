"""Test checkpoints as files.

A checkpoint gives one state dict, and every invalid checkpoint gives a clear error.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.checkpoint_training import Odd, make_engine, train
from support.ranks import run_ranks
from zero_runtime import checkpoint
from zero_runtime.checkpoint.__main__ import main
from zero_runtime.errors import CheckpointError

pytestmark = pytest.mark.ranks


def save(rank, world, root):
    engine = make_engine(2, "bf16")
    train(engine, rank, 0, 1, "bf16")
    engine.save_checkpoint(root, tag="first", client_state={"n": 1})
    train(engine, rank, 1, 1, "bf16")
    engine.save_checkpoint(root, tag="second", client_state={"n": 2}, exclude_frozen_parameters=True)
    assert engine.save_16bit_model(root, "weights.safetensors")
    assert engine.save_16bit_model(Path(root) / "more")
    masters = {
        part.name: master.tensor.detach().reshape(-1).narrow(0, part.offset, part.numel).clone()
        for master in engine.optimizer.masters_with_parts()
        for part in master.parts
    }
    return engine.module.state_dict(), masters


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    return root, run_ranks(2, save, str(root), timeout=200)


@pytest.fixture
def copy(saved, tmp_path):
    """Return a copy of the checkpoints that a test may damage."""
    return Path(shutil.copytree(saved[0], tmp_path / "copy"))


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("rank-*.safetensors"))


# One state dict.


def test_the_state_dict_is_the_masters_of_all_ranks(saved):
    root, outcomes = saved
    found = checkpoint.get_fp32_state_dict_from_zero_checkpoint(root, "second")
    model = Odd()
    missing = model.load_state_dict(found, strict=False)
    assert sorted(missing.missing_keys) == ["_extra_state", "frozen.bias", "frozen.weight"]
    for name, parameter in outcomes[0][0].items():
        if isinstance(parameter, torch.Tensor) and name in found:
            assert found[name].dtype is torch.float32
            assert torch.equal(found[name].to(parameter.dtype), parameter)
    parts = [outcome[1]["turned"] for outcome in outcomes if "turned" in outcome[1]]
    assert torch.equal(found["turned"].reshape(-1), torch.cat(parts))
    assert found["tied.weight"] is found["second.weight"]


def test_frozen_parameters_and_buffers_are_in_it(saved):
    found = checkpoint.consolidated_state_dict(saved[0], "first")
    Odd().load_state_dict(found, strict=False)
    assert {"frozen.weight", "seen", "empty", "unused"} <= found.keys()
    assert "scratch" not in found
    assert "frozen.weight" not in checkpoint.consolidated_state_dict(saved[0], "first", True)


def test_latest_and_a_directory_of_its_own_are_found(saved):
    latest = checkpoint.consolidated_state_dict(saved[0])
    named = checkpoint.consolidated_state_dict(saved[0] / "second")
    assert latest.keys() == named.keys()
    assert all(torch.equal(latest[name], named[name]) for name in named)
    model = checkpoint.load_state_dict_from_zero_checkpoint(Odd(), saved[0], "first")
    assert torch.equal(
        model.first.weight, checkpoint.consolidated_state_dict(saved[0], "first")["first.weight"]
    )


def test_the_command_writes_what_the_call_returns(saved, tmp_path, capsys):
    wanted = checkpoint.consolidated_state_dict(saved[0], "first")
    assert main([str(saved[0]), str(tmp_path / "out"), "--tag", "first"]) == 0
    assert "model.safetensors: " in capsys.readouterr().out
    for found in (load_file(tmp_path / "out" / "model.safetensors"),):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert main([str(saved[0]), str(tmp_path / "out")]) == 2
    assert "--force" in capsys.readouterr().err
    assert main([str(saved[0]), str(tmp_path / "x.pt"), "--tag", "first"]) == 0
    assert torch.load(tmp_path / "x.pt", weights_only=True).keys() == wanted.keys()
    assert main([str(tmp_path / "nowhere"), str(tmp_path / "y.safetensors")]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err


def test_large_models_are_written_in_several_files(saved, tmp_path):
    checkpoint.convert_zero_checkpoint_to_fp32_state_dict(saved[0], tmp_path, "1KB", safe_serialization=True)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    wanted = checkpoint.consolidated_state_dict(saved[0])
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], wanted[name])
    checkpoint.convert_zero_checkpoint_to_fp32_state_dict(saved[0], tmp_path / "one")
    assert [each.name for each in (tmp_path / "one").iterdir()] == ["pytorch_model.bin"]


def test_16_bit_weights_are_the_model(saved):
    for found in (
        load_file(saved[0] / "weights.safetensors"),
        torch.load(saved[0] / "more" / "pytorch_model.bin", weights_only=True),
    ):
        model = saved[1][0][0]
        assert found.keys() == {name for name, each in model.items() if isinstance(each, torch.Tensor)}
        assert all(torch.equal(found[name], model[name]) for name in found)


# Invalid checkpoints.


def refused(directory, tag, match):
    with pytest.raises(CheckpointError, match=match):
        checkpoint.consolidated_state_dict(directory, tag)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_file_says_so(copy, keep):
    path = files_of(copy / "first")[1]
    path.write_bytes(path.read_bytes()[:keep])
    refused(copy, "first", r"rank-00001-1.safetensors has \d+ bytes, and was written with \d+")


@pytest.mark.parametrize("place", [20, 3000, -1])
def test_a_changed_byte_is_found(copy, place):
    path = files_of(copy / "first")[0]
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    refused(copy, "first", "rank-00000-1.safetensors")


def test_a_missing_file_names_its_rank(copy):
    files_of(copy / "first")[1].unlink()
    refused(copy, "first", "the file of rank 1, is missing")


def test_files_of_another_save_or_rank_are_found(copy):
    shutil.copy(files_of(copy / "second")[1], files_of(copy / "first")[1])
    refused(copy, "first", "rank-00001-1.safetensors")
    shutil.copy(files_of(copy / "second")[0], files_of(copy / "second")[1])
    refused(copy, "second", "rank-00001-1.safetensors")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda text: text[:200], "is no JSON"),
        (lambda text: "", "is no JSON"),
        (lambda text: "[]", "is not the manifest of"),
        (lambda text: text.replace("zero_runtime checkpoint", "something"), "is not the manifest of"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "of version 2"),
        (lambda text: text.replace('"global_steps": 1', '"global_steps": 9'), "its own checksum"),
        (lambda text: "[" * 100_000, "is no JSON"),
    ],
)
def test_a_damaged_manifest_says_so(copy, change, match):
    path = copy / "first" / "manifest.json"
    path.write_text(change(path.read_text()))
    refused(copy, "first", match)


def test_what_was_never_a_checkpoint_says_what_it_is(copy):
    refused(copy, "third", "there is no checkpoint .*third; .* has first, second")
    refused(copy / "none", None, "there is no checkpoint")
    (copy / "empty").mkdir()
    refused(copy, "empty", "is empty")
    refused(copy, "weights.safetensors", "is a file")
    (copy / "first" / "manifest.json").unlink()
    refused(copy, "first", "never finished")
    deepspeed = copy / "global_step3"
    deepspeed.mkdir()
    (deepspeed / "mp_rank_00_model_states.pt").write_bytes(b"PK")
    refused(copy, "global_step3", "mp_rank_00_model_states.pt cannot be read")


def test_pickles_under_the_name_of_a_file_are_not_run(copy, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    path = files_of(copy / "first")[0]
    torch.save(Bomb(), path)
    refused(copy, "first", "was written with")
    assert not (tmp_path / "ran").exists()


def test_latest_that_names_no_directory_is_an_error(copy):
    (copy / "latest").write_text("../elsewhere")
    refused(copy, None, "latest holds the tag '../elsewhere'")
    (copy / "latest").unlink()
    refused(copy, None, "name the tag")
