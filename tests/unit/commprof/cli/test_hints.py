"""Test the hints that commands print.

The cases are a missing value, several runs, an edited configuration, and a device that is too small.
"""

from __future__ import annotations

import json
import types

import pytest
import torch

from commprof.cli import execute
from commprof.cli.sections import prediction_section
from support.runs import SyntheticRun


def a_run(directory, *, loss=None, engine=None, script="train.py", config=None):
    made = SyntheticRun(world_size=2, script=script, config=config or {"zero_optimization": {"stage": 1}})
    made.add_parameters({"w": 1000})
    for step in range(3):
        made.add_step(step, loss=loss)
        made.add_collective("all_reduce", payload_bytes=4000, step=step, purpose="gradient_reduce")
    path = made.write(directory)
    if engine is not None:
        said = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps(said | {"engine": engine}))
    return path


def shown(capsys, *words: str, code: int = 0) -> str:
    assert execute(list(words)) == code
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


@pytest.mark.sampled
@pytest.mark.parametrize("loss", [None, 2.5])
def test_a_loss_that_was_not_stated_names_the_call(tmp_path, capsys, loss):
    text = shown(capsys, "compare", str(a_run(tmp_path / "run", loss=loss)))
    assert ('commprof.metric("loss", value)' in text) == (loss is None)


def test_two_engines_are_two_settings(tmp_path, capsys):
    runs = [a_run(tmp_path / name, engine=name) for name in ("deepspeed", "zero_runtime")]
    assert execute(["compare", *map(str, runs), "--json"]) == 0
    labels = {row["label"] for row in json.loads(capsys.readouterr().out)}
    assert len(labels) == 2
    assert all(
        any(name in label and "engine" in label for label in labels) for name in ("deepspeed", "zero_runtime")
    )


@pytest.mark.parametrize("words", [(), ("--budget", "absent.toml")])
def test_check_without_a_budget_names_how_to_write_one(tmp_path, capsys, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    text = shown(capsys, "check", str(a_run(tmp_path / "run")), *words, code=2)
    assert "--write-budget" in text


@pytest.mark.parametrize("kind", ["perfetto", "chakra"])
def test_several_runs_are_exported_each_into_its_own_directory(tmp_path, capsys, kind):
    runs = [str(a_run(tmp_path / name)) for name in ("one", "two")]
    out = tmp_path / "out"
    shown(capsys, "export", *runs, "--format", kind, "--out", str(out))
    assert sorted(path.name for path in out.iterdir()) == ["one", "two"]
    assert all(any(path.iterdir()) for path in out.iterdir())
    assert "--force" in shown(capsys, "export", *runs, "--format", kind, "--out", str(out), code=2)


@pytest.mark.sampled
@pytest.mark.parametrize("edited", ["config.json", "run.json"])
@pytest.mark.parametrize("command", ["verify", "compare", "report"])
def test_an_edited_config_is_said_and_the_recorded_one_is_read(tmp_path, capsys, edited, command):
    path = a_run(tmp_path / "run", config={"zero_optimization": {"stage": 1}})
    (path / "config.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    execute([command, str(path)])
    assert "was edited after" not in " ".join(capsys.readouterr().out.split())
    if edited == "config.json":
        (path / "config.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    else:
        said = json.loads((path / "run.json").read_text())
        said["config"]["zero_optimization"]["stage"] = 2
        (path / "run.json").write_text(json.dumps(said))
    execute([command, str(path)])
    there, read = (2, 1) if edited == "config.json" else (1, 2)
    text = " ".join(capsys.readouterr().out.split())
    assert f"zero_optimization.stage is {there} in config.json and {read} in run.json" in text


def test_requested_says_whether_it_fits_and_in_which_precision(tmp_path, capsys):
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}))
    words = ("requested", str(config), "--params", "7e9", "--world", "8")
    small = shown(capsys, *words, "--device-memory", "80GiB")
    assert "Does not fit in 80.0 GiB" in small
    assert "bfloat16" in small
    assert "Fits in 1.00 TiB" in shown(capsys, *words, "--device-memory", "1TiB")
    assert execute([*words, "--device-memory", "80GiB", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    needed = sum(each["device"] for each in answer["memory_per_rank"])
    assert (answer["device_memory_bytes"], answer["fits"]) == (80 << 30, False)
    assert needed > 80 << 30
    assert "--device-memory" in shown(capsys, *words, "--device-memory", "80QB", code=2)


def test_the_memory_that_requested_holds_a_config_to_is_that_of_the_gpu_of_this_machine(
    tmp_path, capsys, monkeypatch
):
    config, devices = tmp_path / "ds.json", tmp_path / "dev"
    config.write_text(json.dumps({"zero_optimization": {"stage": 0}}))
    devices.mkdir()
    monkeypatch.setattr(prediction_section, "_DEVICES", devices)
    gpu = types.SimpleNamespace(total_memory=40 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {0: gpu}.__getitem__)
    words = ("requested", str(config), "--params", "7e9", "--world", "8")
    without = shown(capsys, *words)
    assert "its in" not in without and "oes not fit" not in without
    (devices / "nvidia3").touch()  # A container may have any single device of a machine.
    assert "Does not fit in 40.0 GiB" in shown(capsys, *words)
    assert "Fits in 1.00 TiB" in shown(capsys, *words, "--device-memory", "1TiB")

    def no_driver(device):
        raise RuntimeError("no NVIDIA driver")

    monkeypatch.setattr(torch.cuda, "get_device_properties", no_driver)
    assert "oes not fit" not in shown(capsys, *words)


def test_verify_lists_the_metric_of_one_evaluation_in_total(tmp_path, capsys):
    made = SyntheticRun(world_size=2, config={"zero_optimization": {"stage": 1}})
    made.add_parameters({"w": 1000})
    for step in range(3):
        made.add_step(step)
        made.add_collective("all_reduce", payload_bytes=4000, step=step, purpose="gradient_reduce")
    made.add_collective(
        "all_reduce", payload_bytes=12, step=-1, after_step=2, phase="evaluation", purpose="metric"
    )
    execute(["verify", str(made.write(tmp_path / "run"))])
    steps, _, apart = capsys.readouterr().out.partition(
        "Not in every step, or outside of the steps, in total"
    )
    assert "metric" not in steps.partition("Per training step")[2]
    assert ["issued", "all_reduce", "1", "12", "B"] in [line.split()[:5] for line in apart.splitlines()]
