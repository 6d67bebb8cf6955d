"""Test ``commprof check`` with budgets that the run meets, budgets that it exceeds, and invalid budget files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commprof.cli import execute
from support.runs import SyntheticRun, with_sums


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Write a run of two ranks and return its path.

    Step 1 sends more than step 0: an all_reduce of 1000 bytes, and 24 bytes from a line of the script.
    """
    monkeypatch.chdir(tmp_path)
    made = SyntheticRun(world_size=2, config={"zero_optimization": {"stage": 0}})
    made.add_parameters({"w": 250})
    made.add_collective("broadcast", payload_bytes=1000, step=-1, purpose="parameter_broadcast", peer=0)
    for step in (0, 1):
        made.add_step(step)
        made.add_collective(
            "all_reduce",
            payload_bytes=1000,
            step=step,
            purpose="gradient_reduce",
            call_site="engine.py:3 reduce",
        )
        made.add_collective("all_reduce", payload_bytes=4, step=step, purpose="gradient_norm")
    made.add_collective("all_gather", payload_bytes=24, step=1, call_site="train.py:9 main")
    return made.write(tmp_path / "run")


def check(capsys, text: str, *words: str) -> tuple[int, str]:
    Path("budget.toml").write_text(text)
    code = execute(["check", "run", "--budget", "budget.toml", *words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize(
    "text",
    [
        "[step]\nmax_payload_bytes = 1028",
        # The bytes are 1000 + 4 as all_reduce of 2 ranks, and half of 24 as all_gather.
        "[step]\nmax_wire_bytes = 1016",
        "[step]\nmax_collectives = 3",
        "[step]\nallowed_ops = ['all_reduce', 'all_gather']",
        "[step.op.all_reduce]\nmax_collectives = 2",
        "[step.purpose.untagged]\nmax_payload_bytes = 24",
        "[init]\nmax_wire_bytes = 500\nallowed_ops = ['broadcast']",
        "[run]\nmax_payload_bytes = 3032\nmax_collectives = 6",
    ],
)
def test_a_budget_that_is_just_kept(capsys, run, text):
    assert check(capsys, text) == (0, "run keeps to budget.toml\n")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "[step]\nmax_payload_bytes = 1027",
            "step.max_payload_bytes: 1,028 is more than 1,027 in step 1; mostly 1 all_reduce at engine.py:3 reduce",
        ),
        ("[step]\nmax_wire_bytes = 1015", "step.max_wire_bytes: 1,016 is more than 1,015 in step 1"),
        ("[step]\nmax_collectives = 1", "step.max_collectives: 3 is more than 1 in step 1 and 1 more"),
        (
            "[step]\nallowed_ops = ['all_reduce']",
            "step.allowed_ops: all_gather is not among all_reduce: first in step 1, 1 all_gather at train.py:9 main",
        ),
        (
            "[step.op.all_gather]\nmax_collectives = 0",
            "step.op.all_gather.max_collectives: 1 is more than 0 in step 1; 1 all_gather at train.py:9 main",
        ),
        ("[init]\nmax_collectives = 0", "init.max_collectives: 1 is more than 0 before the first step"),
        ("[run]\nmax_payload_bytes = 3031", "run.max_payload_bytes: 3,032 is more than 3,031 in the run"),
        (
            "only_requested = true",
            "only_requested: 1 all_gather (24 bytes, purpose untagged) in step 1 at train.py:9 main",
        ),
    ],
)
def test_a_broken_limit_names_value_limit_and_place(capsys, run, text, line):
    code, said = check(capsys, text)
    assert code == 1
    assert line in said
    assert "1 limit of budget.toml is broken" in said


def test_json_has_the_same(capsys, run):
    code, said = check(capsys, "[step]\nmax_collectives = 1", "--json")
    answer = json.loads(said)
    assert (code, answer["holds"], answer["violations"][0]["key"]) == (1, False, "step.max_collectives")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[step]\nmax_payload_byte = 1",
            "unknown key 'max_payload_byte' in [step]: did you mean 'max_payload_bytes'?",
        ),
        ("[steps]\nmax_collectives = 1", "unknown key 'steps': did you mean 'step'?"),
        ("[step.op.allreduce]\nmax_collectives = 1", "did you mean 'all_reduce'?"),
        ("[step]\nallowed_ops = ['gathers']", "did you mean 'gather'?"),
        ("[step]\nmax_collectives = -1", "step.max_collectives is -1; expected a whole number, 0 or more"),
        ("[step]\nmax_collectives = 1.5", "step.max_collectives is 1.5"),
        ("[step]\nmax_collectives = true", "step.max_collectives is True"),
        ("only_requested = 1", "only_requested is 1; expected true or false"),
        ("step = 3", "step is 3; expected a table"),
        ("", "limits nothing"),
        ("[step", "is not valid TOML"),
    ],
)
def test_a_wrong_budget_is_a_usage_error(capsys, run, text, words):
    code, said = check(capsys, text)
    assert code == 2
    assert words in said


@pytest.mark.parametrize(
    "words", [[], ["--budget", "none.toml"], ["--budget", "run"], ["--budget", "a", "--write-budget", "b"]]
)
def test_usage_errors_are_told_without_a_traceback(capsys, run, words):
    assert execute(["check", "run", *words]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_budget_of_a_run_is_kept_by_it_and_broken_by_more(capsys, run, tmp_path):
    assert execute(["check", "run", "--write-budget", "own.toml"]) == 0
    assert execute(["check", "run", "--budget", "own.toml"]) == 0
    text = (tmp_path / "own.toml").read_text()
    (tmp_path / "own.toml").write_text(text.replace("max_collectives = 3", "max_collectives = 2"))
    assert execute(["check", "run", "--budget", "own.toml"]) == 1
    assert execute(["check", "run", "--write-budget", "own.toml"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_what_is_sent_between_steps_counts_in_the_run_and_in_no_step(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = SyntheticRun(world_size=2)
    for step in (0, 1):
        made.add_step(step)
        made.add_collective("all_reduce", payload_bytes=100, step=step)
        outside = {"step": -1, "after_step": step, "phase": ("evaluation", "checkpoint")[step]}
        made.add_collective("all_gather", payload_bytes=9000, **outside)
    made.write(tmp_path / "run")
    assert check(capsys, "[step]\nmax_payload_bytes = 100\nallowed_ops = ['all_reduce']")[0] == 0
    assert check(capsys, "[run]\nmax_payload_bytes = 18200")[0] == 0
    assert check(capsys, "[run]\nmax_payload_bytes = 18199")[0] == 1
    assert execute(["check", "run", "--write-budget", "own.toml"]) == 0
    assert "max_payload_bytes = 100\n" in (tmp_path / "own.toml").read_text()


def test_of_a_run_of_sums_no_budget_is_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = SyntheticRun(world_size=2)
    made.add_step(0)
    made.add_collective("all_reduce", payload_bytes=100, step=0)
    with_sums(made).write(tmp_path / "run")
    assert execute(["check", "run", "--write-budget", "own.toml"]) == 2
    assert (
        "cannot be shown to meet a budget" in capsys.readouterr().err and not (tmp_path / "own.toml").exists()
    )


def test_nothing_can_be_shown_of_a_run_with_lost_records(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = SyntheticRun(world_size=2, lost=3)
    made.add_collective("all_reduce", payload_bytes=4, step=-1)
    made.write(tmp_path / "run")
    code, said = check(capsys, "[step]\nmax_collectives = 9")
    assert code == 1
    assert "records: 3 collectives were dropped" in said
    assert "the run has no training step" in said
