"""Test a run with several consecutive trainings, and the communication that DDP and FSDP request."""

import json
from pathlib import Path

import pytest

from commprof.analysis import api
from commprof.cli import execute
from support.runs import SyntheticRun

pytestmark = pytest.mark.shared_answers
MS = 1_000_000
RECORDED = Path(__file__).parents[3] / "golden" / "h200"


def two_trainings() -> SyntheticRun:
    """Return a run with two consecutive trainings.

    Three steps of 10 ms reduce 4,096 bytes by all_reduce. Then four steps of 30 ms issue a reduce_scatter of
    1,024.
    """
    run = SyntheticRun(2)
    for step in range(7):
        second = step >= 3
        run.add_step(step, duration_ns=(90 if step in (0, 3) else 30 if second else 10) * MS)
        run.add_collective(
            "reduce_scatter" if second else "all_reduce",
            payload_bytes=1024 if second else 4096,
            step=step,
            purpose="gradient_reduce",
        )
    return run


def add_ddp(run: SyntheticRun, number: int, step: int, passes: str = "FB") -> None:
    """Add a model that DDP wraps in step ``step``."""
    for rank in range(2):
        who = {"rank": rank, "attempt": 0, "pid": run.pid(rank), "number": number, "step": step}
        texts = {"arguments": "{}", "parameters": '[["w", [1024], "float32", true]]', "buffers": "[]"}
        run.add("wrappers", **who, wrapper="ddp", unit="", group_ranks="0-1", time_ns=number, **texts)
        run.add("wrapper_passes", **who | {"step": step + 1}, passes=passes)


def spans(run: SyntheticRun, path: Path) -> list[tuple[int, int, int]]:
    return [tuple(each.values()) for each in api.overview(run.write(path))["trainings"]]


EXPECTED = [(0, 2, 10 * MS), (3, 6, 30 * MS)]


def test_a_second_engine_begins_a_training(tmp_path):
    run = two_trainings()
    config = {"train_batch_size": 2}
    run.engines = [{"after": after, "config": config, "same_model": True} for after in (-1, 2)]
    assert spans(run, tmp_path / "run") == EXPECTED
    assert "steps 0 to 2, 3 to 6" in (api.several_trainings(tmp_path / "run") or "")


def test_engines_that_share_their_steps_are_one_training(tmp_path):
    run = two_trainings()
    run.engines = [
        {"after": after, "config": {}, "same_model": False, "share_steps": True} for after in (-1, 2)
    ]
    assert spans(run, tmp_path / "run") == []


def test_a_second_wrapped_model_begins_a_training(tmp_path):
    run = two_trainings()
    add_ddp(run, 0, -1)
    add_ddp(run, 1, 2)
    assert spans(run, tmp_path / "run") == EXPECTED


@pytest.mark.parametrize(("first", "passes"), [(-1, "e"), (2, "FB")], ids=["evaluated", "wrapped late"])
def test_a_model_that_is_evaluated_or_alone_begins_none(tmp_path, first, passes):
    """The first case is a model that DDP wraps for an evaluation.

    The second case is the only model, which the program wraps after it has named a step.
    """
    run = two_trainings()
    if first < 0:
        add_ddp(run, 0, first)
    add_ddp(run, 1, 2, passes)
    assert spans(run, tmp_path / "run") == []


def test_a_report_has_a_mean_for_each_training(capsys, tmp_path):
    run = two_trainings()
    add_ddp(run, 0, -1)
    add_ddp(run, 1, 2)
    run.write(tmp_path / "run")
    assert execute(["report", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert "training 1  steps 0 to 2, time per step 10.0 ms" in text
    assert "training 2  steps 3 to 6, time per step 30.0 ms" in text
    first, _, second = text.partition("Per training step of training 2, of 3 steps after the first")
    first = first.partition("Per training step of training 1, of 2 steps after the first")[2]
    assert "all_reduce" in first and "4.00 KiB" in first and "reduce_scatter" not in first
    assert "reduce_scatter" in second.partition("payload: S")[0] and "1.00 KiB" in second
    assert "Not in every step" not in text
    assert execute(["compare", str(tmp_path / "run")]) == 0
    assert (
        "run: The run has 2 trainings, one after the other: steps 0 to 2, 3 to 6." in capsys.readouterr().out
    )


def test_ddp_and_fsdp_request_operations_without_a_config(capsys):
    frame = api.compare([RECORDED / "ddp", RECORDED / "fsdp2"])
    rows = dict(zip(frame["runs"], frame.to_dict("records"), strict=True))
    assert {name: (row["requested_op"], row["issued_op"]) for name, row in rows.items()} == {
        "ddp": ("all_reduce", "all_reduce"),
        "fsdp2": ("reduce_scatter", "reduce_scatter"),
    }
    assert api.overview(RECORDED / "fsdp2")["requested_op"] == "reduce_scatter"
    assert execute(["compare", "--json", str(RECORDED / "ddp")]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["requested_op"], row["requested_reason"]) == ("all_reduce", None)


def test_what_a_wrapper_requests_is_not_known_for_a_reason(tmp_path):
    run = two_trainings()
    add_ddp(run, 0, -1)
    for row in run.rows["wrappers"]:
        row["arguments"] = json.dumps({"comm_hook": "powerSGD_hook"})
    row = api.compare([run.write(tmp_path / "run")]).iloc[0]
    assert row["requested_op"] is None or row["requested_op"] != row["requested_op"]
    assert "the communication hook powerSGD_hook decides what is sent" in row["requested_reason"]


def test_the_ledger_counts_the_parameters_of_all_wrapped_models(tmp_path):
    run = two_trainings()
    run.add_parameters({"w": 1024})
    add_ddp(run, 0, -1)
    add_ddp(run, 1, 2)
    told = api.verify(run.write(tmp_path / "run")).sources["requested"]
    assert told.startswith(
        "the arguments of DistributedDataParallel and 2 parameters of 2 models, by the rules of"
    )
