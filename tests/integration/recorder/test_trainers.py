"""accelerate, transformers.Trainer and Lightning with the recorder.

Each collective is recorded once, and each has a purpose.
"""

from __future__ import annotations

import json

import pytest

from commprof.analysis import api
from support import warm_programs
from support.command import commprof
from support.recording import calls
from support.trainer_programs import ACCELERATE, LIGHTNING, TRAINER

pytestmark = pytest.mark.ranks


def recorded(tmp_path, program):
    """Return the run of ``program``, after comparing its records with the Flight Recorder's list."""
    from commprof.trace.reader import open_run

    (tmp_path / "train.py").write_text(program, "utf-8")
    warm_programs.import_all("accelerate", "transformers.trainer")
    done = commprof("run", "--out", "run", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = open_run(tmp_path / "run")
    for rank in range(2):
        flights = json.loads((tmp_path / f"flights-{rank}.json").read_text("utf-8"))
        assert len(calls(run, rank, "op")) == len(flights) > 0
    assert run.health.notes == ()
    return run


def by_purpose(run):
    """Return the calls of each purpose.

    Checks that only the calls of the program itself have no purpose.
    """
    rows = calls(run, 0, "purpose", "phase", "op", "numel", "call_site")
    nameless = [row for row in rows if row[0] is None]
    assert {row[2:4] for row in nameless} == {("all_reduce", 3)}
    assert all("train.py" in row[4] and row[4].endswith(" own") for row in nameless)
    assert api.untagged(run)["collectives"].sum() == len(nameless)
    found = {}
    for purpose, *row in rows:
        found.setdefault(purpose, []).append(tuple(row))
    return found, len(nameless)


def calls_of_program(run):
    """Return step and phase of the collectives of the program itself."""
    return [row[1:] for row in calls(run, 0, "purpose", "step", "phase") if row[0] is None]


@pytest.mark.long
def test_trainer(tmp_path):
    found, own = by_purpose(recorded(tmp_path, TRAINER))
    assert own == 2  # the number of steps
    assert set(found) == {
        None,
        "trace_check",
        "parameter_broadcast",
        "gradient_reduce",
        "unused_parameters",
        "metric",
        "control",
        "checkpoint",
    }
    # The model has embeddings of 32 tokens and 8 positions, one layer of width 8 (two norms, attention, an
    # inner width 4 times as large), and a norm.
    norm, layer = 8 + 8, (8 * 24 + 24) + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8)
    parameters = 32 * 8 + 8 * 8 + 2 * norm + layer + norm
    assert [row[:3] for row in found["gradient_reduce"]] == [("backward", "all_reduce", parameters)] * 2
    # These are the logits of the 2 x 8 tokens of both ranks, in each of three batches of the evaluation.
    assert [row[2] for row in found["metric"]].count(2 * 2 * 8 * 32) == 3
    assert {row[1] for row in found["metric"]} == {"all_gather"}
    assert {row[0] for row in found["checkpoint"]} == {"checkpoint"}
    assert [row[:2] for row in found["control"]] == [("init", "barrier")]
    # The call site is the caller, except for gathers within accelerate's own functions.
    assert all("/transformers/trainer.py:" in row[3] for row in found["metric"])


PLANTED = """
class Planted(Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(3))
        return loss

trainer = Planted("""


@pytest.mark.long
def test_verify_closes_for_trainer_and_names_a_gather_in_its_loop(tmp_path):
    alone = TRAINER.replace(", callbacks=[Own()]", "")
    planted = alone.replace("trainer = Trainer(", PLANTED)
    assert TRAINER != alone != planted
    for name, program, code in (("alone", alone, 0), ("planted", planted, 1)):
        (tmp_path / name).mkdir()
        recorded(tmp_path / name, program)
        done = commprof("verify", "run", "--json", cwd=tmp_path / name)
        assert done.returncode == code, done.stdout + done.stderr
        verdict = json.loads(done.stdout)
        # One in each of two steps: 3 elements of fp32 from each of two ranks.
        extra = [
            (item["op"], item["purpose"], item["count"], item["steps"]) for item in verdict["unexplained"]
        ]
        assert extra == ([("all_gather", None, 2, "0-1")] if code else [])
        assert {row["issued_count"] for row in verdict["rows"] if row["purpose"] == "gradient_reduce"} == {2}


@pytest.mark.long
def test_accelerate(tmp_path):
    found, own = by_purpose(recorded(tmp_path, ACCELERATE))
    assert own == 2  # batches of 4 for each of two ranks, out of 16
    assert set(found) == {
        None,
        "trace_check",
        "parameter_broadcast",
        "buffer_broadcast",
        "gradient_reduce",
        "input",
        "metric",
        "control",
        "object",
    }
    # One optimizer step covers two batches. The model is a layer of 4 x 4 and 4, and a norm of 4 and 4.
    assert [row[:3] for row in found["gradient_reduce"]] == [("backward", "all_reduce", 28)]
    # Rank 0 reads batches of 2 x 4 x 4 for both ranks, and first sends their shapes.
    assert [row[2] for row in found["input"]].count(32) == 2
    # Two gathers of a loss, the sizes of one padding, and two sums of a loss.
    assert sorted(row[1] for row in found["metric"]) == ["all_gather"] * 3 + ["all_reduce"] * 2
    assert sorted(row[1] for row in found["control"]) == ["all_reduce"] + ["barrier"] * 3
    assert all("/accelerate/" not in row[3] for rows in found.values() for row in rows)


@pytest.mark.long
def test_lightning(tmp_path):
    run = recorded(tmp_path, LIGHTNING)
    found, own = by_purpose(run)
    assert own == 2  # batches of 4 for each of two ranks, out of 16
    assert set(found) == {
        None,
        "trace_check",
        "parameter_broadcast",
        "gradient_reduce",
        "bucket_rebuild",
        "metric",
        "control",
        "checkpoint",
        "evaluation",
    }
    assert [row[:3] for row in found["gradient_reduce"]] == [("backward", "all_reduce", 10)] * 2
    # The model of 4 x 2 and 2 is sent once for the training and once for the validation after it.
    assert [row[1:3] for row in found["parameter_broadcast"]] == [("broadcast", 10)]
    assert [row[1:3] for row in found["evaluation"]] == [("broadcast", 10)]
    # Lightning sets the wrapped model to training mode, and the wrapper to evaluation mode.
    assert calls_of_program(run) == [(0, "forward"), (1, "forward")]
    assert {row["name"]: row["numel"] for row in run.table("parameters").to_pylist()} == {
        "layer.weight": 8,
        "layer.bias": 2,
    }
    # One loss for each training batch.
    losses = [row for row in found["metric"] if row[0] == "forward" and row[1] == "all_reduce"]
    assert [row[2] for row in losses] == [1, 1]
    assert {row[0] for row in found["checkpoint"]} == {"checkpoint"}
    assert all("/fabric/utilities/" not in row[3] for rows in found.values() for row in rows)
