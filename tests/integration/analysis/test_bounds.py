"""Runs that record only some steps, only sums, or only up to a size.

Each run must state correctly how many collectives have no record.
"""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import commprof
from support.recording import calls, record

pytestmark = pytest.mark.ranks

STEPS, REDUCTIONS = 6, 3


def train(rank, world, marked):
    """Train with three all_reduces of 40 bytes and a broadcast of 20 bytes in each step.

    There is one barrier before the first step and one after the last.
    """
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tensor = torch.ones(10)
    dist.barrier()
    for step in range(STEPS):
        if marked:
            commprof.step(step)
            commprof.metric("loss", float(step))
        model(torch.ones(1, 2)).sum().backward()
        with commprof.tag("gradient_reduce", bucket=0):
            for _ in range(REDUCTIONS):
                dist.all_reduce(tensor)
        dist.broadcast(tensor[:5], src=0)
        optimizer.step()
    dist.barrier()
    return [vars(dist.ProcessGroup)[name].__module__ for name in ("allreduce", "broadcast")]


# Recording of selected steps.


# The options, the steps that they select, and the number of collectives outside these steps. Outside are the
# barriers and four collectives in each step that is not recorded.
WINDOWS = [
    ({"steps": "2:4"}, [2, 3], 2 + 4 * 4),
    ({"warmup": 4}, [4, 5], 1 + 4 * 4),
    ({"steps": ":1"}, [-1, 0], 1 + 5 * 4),
    ({"steps": "0:5", "warmup": 3}, [3, 4], 2 + 4 * 4),
    ({"steps": "9:"}, [], 2 + 6 * 4),
]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "steps", "outside", "marked"),
    [
        # The quick tests run each window once, either with marked or with detected steps. The long tests also
        # run the other case.
        pytest.param(*window, marked, marks=[pytest.mark.long] if marked == bool(number % 2) else [])
        for number, window in enumerate(WINDOWS)
        for marked in (True, False)
    ],
)
def test_only_the_steps_that_were_asked_for(tmp_path, marked, options, steps, outside):
    run, outcomes = record(tmp_path / "run", 2, train, marked, **options)
    for rank, outcome in enumerate(outcomes):
        recorded = calls(run, rank, "step", "op")
        if steps[-1:] == [STEPS - 1]:
            assert recorded.pop() == (-1, "barrier")  # the collectives after the last step belong to no step
        if steps[:1] == [-1]:
            assert recorded.pop(0) == (-1, "barrier")
        expected = [
            (step, op) for step in steps if step >= 0 for op in ["all_reduce"] * REDUCTIONS + ["broadcast"]
        ]
        assert recorded == expected
        # The number that gloo itself counted includes the collectives outside the selected steps.
        assert outcome["number"] == len(calls(run, rank, "op")) + outside
    assert run.health.unseen == 0
    assert run.health.outside == 2 * outside
    (said,) = (note for note in run.health.notes if "were recorded" in note)
    assert said.endswith(f"outside them the groups of a rank counted {outside} collectives")
    rows = sorted((row["rank"], row["step"]) for row in run.table("steps").to_pylist() if row["end_ns"])
    assert rows == [(rank, step) for rank in (0, 1) for step in steps if step >= 0]
    metrics = {row["step"] for row in run.table("metrics").to_pylist()}
    assert metrics == ({step for step in steps if step >= 0} if marked else set())


def look_at_methods(rank, world):
    methods = {}
    for step in range(4):
        commprof.step(step)
        methods[step] = vars(dist.ProcessGroup)["allreduce"]
        dist.all_reduce(torch.ones(1))
    return [hasattr(methods[step], "__wrapped__") for step in range(4)]


def test_outside_the_steps_torchs_own_methods_are_in_place(tmp_path):
    run, outcomes = record(tmp_path / "run", 1, look_at_methods, steps="1:3")
    assert outcomes[0]["result"] == [False, True, True, False]
    assert calls(run, 0, "step") == [1, 2]


def make_and_destroy_groups(rank, world):
    """Issue 2 + 3 collectives in groups that are destroyed, and one in the default group.

    All of these precede the recorded step, and the two groups do not exist any more when the run ends.
    """
    for number in (2, 3):
        group = dist.new_group([0, 1])
        for _ in range(number):
            dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
    dist.all_reduce(torch.ones(1))
    commprof.step(5)
    dist.all_reduce(torch.ones(1))


@pytest.mark.long
def test_groups_that_are_gone_are_counted_too(tmp_path):
    run, outcomes = record(tmp_path / "run", 2, make_and_destroy_groups, steps="5:")
    # new_group and destroy_process_group may synchronize through the default group. The sequence number of
    # gloo shows how often.
    of_the_default_group = outcomes[0]["number"] - 1
    assert run.health.outside == 2 * (5 + of_the_default_group)
    assert calls(run, 0, "op") == ["all_reduce"]


# Recording of sums only.


def sums(run) -> dict[tuple, int]:
    """Return the calls of rank 0 by step, operation and purpose."""
    counted: collections.Counter = collections.Counter()
    for row in run.table("aggregates").to_pylist():
        if row["rank"] == 0:
            counted[row["step"], row["op"], row["purpose"]] += row["calls"]
    return dict(counted)


def test_sums_hold_what_the_records_would(tmp_path):
    from commprof.analysis import api

    whole, _ = record(tmp_path / "whole", 2, train, True)
    summed, _ = record(tmp_path / "summed", 2, train, True, aggregate=True)
    assert len(summed.table("collectives")) == summed.health.records == summed.health.unseen == 0
    assert summed.health.summed == whole.health.records == 2 * (STEPS * 4 + 2)
    assert sums(summed) == {
        (-1, "barrier", "control"): 2,  # one before the first step and one after the last
        **{(step, "all_reduce", "gradient_reduce"): REDUCTIONS for step in range(STEPS)},
        **{(step, "broadcast", None): 1 for step in range(STEPS)},
    }
    by = ("step", "op", "purpose", "phase", "group_ranks")
    measures = [*by, "collectives", "records", "payload_bytes", "wire_bytes"]
    assert api.traffic(summed, by)[measures].equals(api.traffic(whole, by)[measures])
    assert (api.traffic(summed, by)["host_ns"] > 0).all()
    times, expected = api.step_times(summed), api.step_times(whole)
    assert times["collectives"].tolist() == expected["collectives"].tolist() == [4] * STEPS
    assert times["payload_bytes"].tolist() == [REDUCTIONS * 40 + 20] * STEPS
    comparison = api.compare([whole, summed])
    assert comparison["wire_bytes_per_step"].nunique() == 1
    assert any("only sums by step" in note for note in summed.health.notes)
    assert "recorded as sums only" in " ".join(api.verify(summed).sentences)


def messages(rank, world):
    commprof.step(0)
    tensor = torch.ones(10)
    if rank == 0:
        dist.send(tensor, dst=1)
        dist.recv(tensor, src=1)
    else:
        dist.recv(tensor, src=0)
        dist.send(tensor, dst=0)


@pytest.mark.long
def test_a_message_counts_at_its_send(tmp_path):
    from commprof.analysis import api

    run, _ = record(tmp_path / "run", 2, messages, aggregate=True)
    rows = {row["op"]: row for row in api.traffic(run, ("op",)).to_dict("records")}
    assert (rows["send"]["collectives"], rows["send"]["payload_bytes"], rows["send"]["records"]) == (2, 80, 2)
    assert (rows["recv"]["collectives"], rows["recv"]["payload_bytes"], rows["recv"]["records"]) == (0, 0, 2)


def issue_without_steps(rank, world, count):
    tensor = torch.ones(4)
    for _ in range(count):
        dist.all_reduce(tensor)


@pytest.mark.long
def test_a_program_without_steps_does_not_grow(tmp_path):
    count = 20_000
    run, _ = record(tmp_path / "run", 1, issue_without_steps, count, aggregate=True)
    assert sums(run) == {(-1, "all_reduce", None): count}
    assert run.health.summed == count


def late_waits(rank, world):
    """Wait in each step for the all_reduce that the previous step issued."""
    work = None
    for step in range(5):
        commprof.step(step)
        issued = dist.all_reduce(torch.ones(4), async_op=True)
        if work is not None:
            work.wait()
        work = issued
    work.wait()


@pytest.mark.long
def test_waits_of_the_next_step_are_in_the_sums(tmp_path):
    run, _ = record(tmp_path / "run", 1, late_waits, aggregate=True)
    rows = run.table("aggregates").to_pylist()
    assert [(row["step"], row["calls"]) for row in rows] == [(step, 1) for step in range(5)]
    assert all(row["exposed_ns"] > 0 for row in rows)


# Recording up to a size.


def file_bytes(run: Path) -> int:
    return sum(file.stat().st_size for file in run.glob("rank-*"))


def issue_by_steps(rank, world, run, steps, count):
    sizes = []
    tensor = torch.ones(4)
    for step in range(steps):
        commprof.step(step)
        for _ in range(count):
            dist.all_reduce(tensor)
        sizes.append(file_bytes(Path(run)))
    return sizes


@pytest.mark.long
def test_beyond_the_size_sums_are_kept(tmp_path):
    steps, count, limit = 8, 2_000, 1_000_000
    path = tmp_path / "run"
    run, outcomes = record(path, 1, issue_by_steps, str(path), steps, count, max_bytes=limit)
    assert max(outcomes[0]["result"]) <= limit
    assert run.health.records + run.health.summed == steps * count
    assert 0.6 * limit / 104 < run.health.records < 0.8 * limit / 104
    assert run.health.lost == run.health.unseen == 0
    in_both = collections.Counter(calls(run, 0, "step"))
    for (step, _, _), number in sums(run).items():
        in_both[step] += number
    assert in_both == dict.fromkeys(range(steps), count)
    assert any("on, only sums are kept" in note and "1,000,000 bytes" in note for note in run.health.notes)


def publish(rank, world, run):
    text = "x" * 1000
    for step in range(2_000):
        commprof.step(step)
        commprof.hooks.describe_bucket(
            bucket=0, numel=1, bytes=4, dtype="float32", parameters=f"{step}{text}"
        )
        dist.all_reduce(torch.ones(1))
    return file_bytes(Path(run))


@pytest.mark.long
def test_what_fits_no_more_is_counted(tmp_path):
    path = tmp_path / "run"
    run, outcomes = record(path, 1, publish, str(path), max_bytes=1_000_000)
    assert outcomes[0]["result"] <= 1_000_000 + 2_000
    assert run.health.lost > 0
    assert run.health.records + run.health.summed + run.health.lost == 2_000
    (said,) = (note for note in run.health.notes if "stopped recording" in note)
    assert "the 1,000,000 bytes that a rank may write are used up" in said


# Options of the command line.

SCRIPT = """
import torch, torch.distributed as dist, sys
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    model(torch.ones(1, 2)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
sys.exit(3)
"""


@pytest.mark.long
def test_options_reach_the_ranks_and_the_exit_code_stays_the_scripts(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    root = Path(__file__).parents[3]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COMMPROF")}
    words = [
        sys.executable,
        "-m",
        "commprof",
        "run",
        "--nproc",
        "1",
        "--out",
        "run",
        "--steps",
        "1:3",
        "--aggregate",
    ]
    done = subprocess.run(
        [*words, "train.py"], cwd=tmp_path, env={**environment, "PYTHONPATH": str(root)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert (
        "1 rank, 0 records, 0 dropped, 0 unseen, 2 in sums, 3 outside the steps recorded, recording took"
        in last
    )


def train_ddp(rank, world):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        commprof.step(step)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


@pytest.mark.long
def test_a_reducer_made_before_the_steps_is_recorded_in_them(tmp_path):
    run, outcomes = record(tmp_path / "run", 2, train_ddp, steps="2:4")
    for rank, outcome in enumerate(outcomes):
        assert calls(run, rank, "step", "op", "layer") == [
            (2, "all_reduce", "c10d"),
            (3, "all_reduce", "c10d"),
        ]
        assert run.health.outside == 2 * (outcome["number"] - 2)
    assert run.health.unseen == 0


# A process that is killed.

KILLED = """
import os, signal, sys, torch, torch.distributed as dist, commprof
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
commprof.attach(sys.argv[2], aggregate=True)
for step in range(6):
    commprof.step(step)
    dist.all_reduce(torch.ones(1))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_what_a_killed_process_had_not_added_up_is_said_to_be_missing(tmp_path):
    from commprof.trace.reader import open_run

    words = [sys.executable, "-c", KILLED, str(tmp_path / "store"), str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run(words, env=environment, timeout=100, check=False)
    run = open_run(tmp_path / "run")
    assert sums(run) == {(step, "all_reduce", None): 1 for step in range(4)}
    assert any("those of the last steps before rank 0 ended are missing" in note for note in run.health.notes)


def evaluating(rank, world, told):
    """Run two steps, an evaluation, two more steps, an evaluation and a checkpoint.

    Collectives of a step have 4 bytes. Those of an evaluation and of the checkpoint have 8 and 16 bytes.
    """
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if told:
            commprof.step(step)
        model(torch.ones(1, 2)).sum().backward()
        dist.all_reduce(torch.ones(1))
        optimizer.step()
        if step % 2:
            if told:
                commprof.step(step + 1)
            commprof.phase("evaluation")
            dist.all_reduce(torch.ones(2))
            commprof.phase("other")
    commprof.phase("checkpoint")
    dist.broadcast(torch.ones(4), src=0)


@pytest.mark.long
@pytest.mark.parametrize("told", [True, False], ids=["told", "found"])
def test_sums_are_of_the_steps_that_single_records_are_of(tmp_path, told):
    records, _ = record(tmp_path / "records", 2, evaluating, told)
    sums, _ = record(tmp_path / "sums", 2, evaluating, told, aggregate=True)

    def of(run, table, calls):
        found = collections.Counter()
        for row in run.table(table).to_pylist():
            found[row["rank"], row["op"], row["step"], row["after_step"], row["payload_bytes"]] += calls(row)
        return found

    single = of(records, "collectives", lambda row: 1)
    assert single == of(sums, "aggregates", lambda row: row["calls"])
    assert {(step, after) for _, _, step, after, size in single if size > 4} == {(-1, 1), (-1, 3)}
