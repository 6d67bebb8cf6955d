"""Test the exit code of each verdict, and the verdict on NCCL logs that are damaged or from a different run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from commprof.cli import execute
from support.runs import SyntheticRun

ROOT = Path(__file__).resolve().parents[4]
OPERATIONS = [("Broadcast", 250), ("AllReduce", 250), ("AllReduce", 1)]


def run_with_log(directory: Path, *, operations=OPERATIONS, pid=1000, host="host-a") -> Path:
    """Write a run on NCCL that sends what its configuration requests, with a log in its own directory.

    The log has the given operations, process ids and host.
    """
    made = SyntheticRun(world_size=2, backend="nccl", config={"zero_optimization": {"stage": 0}})
    made.add_parameters({"w": 250})
    made.add_collective("broadcast", payload_bytes=1000, step=-1, purpose="parameter_broadcast", peer=0)
    made.add_step(0)
    made.add_collective("all_reduce", payload_bytes=1000, step=0, purpose="gradient_reduce")
    made.add_collective("all_reduce", payload_bytes=4, step=0, purpose="gradient_norm")
    run = made.write(directory / "run")
    (run / "nccl").mkdir()
    for rank in (0, 1):
        head = f"{host}:{pid + rank}:{pid + rank} [{rank}] NCCL INFO "
        comm = f"comm 0x55{rank}0"
        lines = [
            f"{head}ncclCommInitRank {comm} rank {rank} nranks 2 cudaDev {rank} nvmlDev {rank} "
            "busId 1000 commId 0x9f - Init COMPLETE"
        ]
        lines += [
            f"{head}{op}: opCount {number} sendbuff 0x1 recvbuff 0x2 count {count} datatype 7 op 0 root 0 "
            f"{comm} [nranks=2] stream 0x3"
            for number, (op, count) in enumerate(operations)
        ]
        (run / "nccl" / f"log.{pid + rank}").write_text("\n".join(lines) + "\n")
    return run


def changed(place: int, operation: tuple[str, int]) -> list[tuple[str, int]]:
    return [*OPERATIONS[:place], operation, *OPERATIONS[place + 1 :]]


LOGS = {
    "its own": ({}, 0, "closed"),
    "one count is another": ({"operations": changed(1, ("AllReduce", 251))}, 1, "mismatch"),
    "one line too many": ({"operations": [*OPERATIONS, ("AllGather", 7)]}, 1, "mismatch"),
    "one line doubled among equals": ({"operations": [*OPERATIONS, ("AllReduce", 1)]}, 1, "mismatch"),
    "one line lost": ({"operations": OPERATIONS[:2]}, 3, "unknown"),
    "of another run of the program": ({"pid": 7000}, 3, "unknown"),
    "of another host": ({"host": "pod-7"}, 3, "unknown"),
    "of another run with other counts": (
        {"pid": 7000, "operations": [("AllReduce", 99)] * 3},
        3,
        "unknown",
    ),
    "the same processes, nothing fits": ({"operations": [("AllReduce", 99)] * 3}, 1, "mismatch"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", LOGS)
def test_a_log_decides_the_exit_code_and_what_is_printed(tmp_path, capsys, case):
    keys, code, state = LOGS[case]
    run = run_with_log(tmp_path, **keys)
    for before in ([], ["align"]):  # The choices are read from the logs, and from the stored alignment.
        if before and execute([*before, str(run), "--force"]):
            pytest.fail("the log could not be aligned")
        capsys.readouterr()
        assert execute(["verify", str(run)]) == code
        shown = " ".join(capsys.readouterr().out.split())
        assert {"closed": "ledger closed", "mismatch": "ledger mismatch", "unknown": "ledger cannot tell"}[
            state
        ] in shown
        assert ("Mismatch:" in shown) == (code == 1)
        assert ("Cannot tell:" in shown) or code != 3
        assert execute(["verify", str(run), "--json"]) == code
        answer = json.loads(capsys.readouterr().out)
        assert (answer["state"], answer["exit_code"]) == (state, code)


def test_a_log_of_another_run_is_named_with_its_processes(tmp_path, capsys):
    run = run_with_log(tmp_path, pid=7000)
    execute(["verify", str(run)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "host-a:7000, host-a:7001" in shown
    assert "host-a:1000, host-a:1001" in shown


def group_run(directory: Path, *, purpose=None, pg="7", desc="undefined", state="complete", **keys) -> Path:
    made = SyntheticRun(world_size=2, config={"zero_optimization": {"stage": 0}}, state=state, **keys)
    made.add_parameters({"w": 250})
    made.add_collective("broadcast", payload_bytes=1000, step=-1, purpose="parameter_broadcast", peer=0)
    made.add_step(0, grad_norm=1.0)
    made.add_collective("all_reduce", payload_bytes=1000, step=0, purpose="gradient_reduce")
    made.add_collective("all_reduce", payload_bytes=4, step=0, purpose="gradient_norm")
    made.add_collective(
        "all_reduce", payload_bytes=44, step=0, purpose=purpose, pg=pg, call_site="train.py:9 sneak"
    )
    return made.write(directory / "run")


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        # The group is used only by the script, so the configuration contains no information about it.
        ({}, 3),
        ({"purpose": "metric"}, 0),
        ({"pg": "0"}, 1),  # The group is the runtime's own, and no rule requests this collective.
        ({"lost": 1, "pg": "0"}, 3),  # Records are missing, so no contradiction is certain.
    ],
)
def test_a_collective_without_a_purpose(tmp_path, capsys, keys, code):
    assert execute(["verify", str(group_run(tmp_path, **keys))]) == code
    shown = " ".join(capsys.readouterr().out.split())
    assert ("a group that the script made (ranks 0-1)" in shown) == (not keys)


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("when", ["init", "forward"])
def test_a_program_that_died_early_is_judged_by_what_it_issued(tmp_path, capsys, stage, when):
    made = SyntheticRun(world_size=2, config={"zero_optimization": {"stage": stage}}, state="failed")
    made.add_parameters({"w": 250})
    for _ in range(1 + (stage == 3)):
        made.add_collective("broadcast", payload_bytes=1000, step=-1, purpose="parameter_broadcast", peer=0)
    if when == "forward":
        if stage == 3:
            made.add_collective("all_gather", payload_bytes=1000, step=-1, purpose="parameter_gather")
        made.add_step(0)
    code = execute(["verify", str(made.write(tmp_path / "run"))])
    shown = " ".join(capsys.readouterr().out.split())
    assert "did not end normally" in shown
    assert code == 0


def test_a_program_that_issued_nothing_cannot_be_judged(tmp_path):
    made = SyntheticRun(world_size=2, config={"zero_optimization": {"stage": 0}}, state="failed")
    made.add_parameters({"w": 250})
    made.add_collective("barrier", payload_bytes=0, step=-1)
    assert execute(["verify", str(made.write(tmp_path / "run"))]) == 3


def test_the_pages_have_the_same_codes_as_the_program():
    page = (ROOT / "docs" / "cli.md").read_text()
    assert re.findall(r"^\| (\d+) \|", page, re.M) == ["0", "1", "2", "3", "125", "130", "141"]
    ledger = (ROOT / "docs" / "verify.md").read_text()
    assert re.findall(r"^\| (\d) \| (closed|mismatch|cannot tell)", ledger, re.M) == [
        ("0", "closed"),
        ("1", "mismatch"),
        ("3", "cannot tell"),
    ]
