"""A watchdog over real ranks: one dump for each hang, and none for a job that is only slow.

``commprof run`` must behave in the same way.
"""

import json
import os
import time
from pathlib import Path

import pytest

from commprof.sampling.processes import RankProcess, State, state_of
from commprof.sampling.watchdog import Watchdog
from commprof.trace.reader import open_run
from support import command
from support.hanging import all_reduces, await_records, await_stillness, hanging_ranks, load_batch

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.ranks, pytest.mark.alone]


def everybody_calculates(rank, world):
    all_reduces(3)
    load_batch()


@pytest.mark.long
def test_the_watchdog_makes_one_dump_for_each_hang_and_lets_the_job_go_on(tmp_path):
    run, said = tmp_path / "run", []
    with hanging_ranks(run, 2, sleeps_twice, str(tmp_path)) as pids:
        await_stillness(run, 2 * 3 + 1)
        with Watchdog(run, 1.5, said.append):
            await_said(said, 1)
            time.sleep(2.5)
            assert len(said) == 1 and len(list((run / "dumps").glob("*.txt"))) == 1
            (tmp_path / "go-0").touch()
            await_said(said, 2)
        assert [state_of(RankProcess(rank, pid)) for rank, pid in pids.items()] == [State.RUNS] * 2
    for text, seq in zip(said, (3, 7), strict=True):
        assert text.startswith(
            f"watchdog: no progress for 1.5 s: rank 0 waits in all_reduce #{seq} of group default"
        )
        assert "rank 1 has not issued it: it is in await_file (" in text
    files = sorted((run / "dumps").glob("*.txt"))
    assert len(files) == 2 and said[0].endswith(f"; {files[0]}")
    assert files[0].read_text().startswith("rank 0 waits in all_reduce #3 of group default_pg")
    kept = json.loads(files[0].with_suffix(".json").read_text())
    assert [row["rank"] for row in kept["ranks"]] == [0, 1] and kept["hangs"]


def await_said(said, count):
    deadline = time.monotonic() + 30
    while len(said) < count:
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


def await_file(file):
    while not os.path.exists(file):  # noqa: PTH110 - nothing of the standard library shall be the innermost frame
        time.sleep(0.05)


def sleeps_twice(rank, world, directory):
    for turn in range(2):
        all_reduces(3)
        if rank == 1:
            await_file(f"{directory}/go-{turn}")
        all_reduces(1)


def slow_but_live(rank, world):
    for n in range(12):
        time.sleep(0.4 if rank == n % 2 else 0.05)
        all_reduces(1)


@pytest.mark.long
def test_no_alarm_for_a_slow_job_nor_for_a_long_calculation(tmp_path):
    said = []
    with hanging_ranks(tmp_path / "slow", 2, slow_but_live):
        await_records(tmp_path / "slow", 2)
        with Watchdog(tmp_path / "slow", 3.0, said.append):
            await_records(tmp_path / "slow", 2 * 12)  # at least 4.8 s
    with hanging_ranks(tmp_path / "long", 2, everybody_calculates):
        await_stillness(tmp_path / "long", 6)
        with Watchdog(tmp_path / "long", 0.4, said.append):
            time.sleep(2.0)
    assert said == []
    assert not list(tmp_path.glob("*/dumps"))


# Rank 1 keeps other ranks waiting until the watchdog reports this, and then the job exits normally. In the
# meantime rank 1 calls only functions in C. They have no Python frame, which would be the innermost one.
HANGS_FOR_A_WHILE = """
import os, sys, time
import torch, torch.distributed as dist

def until_the_dump():
    run, deadline = os.environ["COMMPROF_RUN"], time.monotonic() + 60
    while time.monotonic() < deadline:
        if "dumps" in os.listdir(run) and ".json" in " ".join(os.listdir(run + "/dumps")):
            return
        time.sleep(0.05)

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(8))
if dist.get_rank() == 1:
    until_the_dump()
dist.all_reduce(torch.ones(1000))
print("done\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_commprof_run_samples_watches_and_hands_on_the_exit_code(tmp_path):
    (tmp_path / "train.py").write_text(HANGS_FOR_A_WHILE)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "runtime")])

    def commprof(*words):
        return command.commprof(*words, cwd=tmp_path, env=environment, timeout=120, new_interpreters=True)

    samplers = ("--sample", "proc,stacks", "--sample-every", "0.2")
    done = commprof("run", "--nproc", "2", "--out", "run", "--watchdog", "4", *samplers, "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["done", "done"]
    (line,) = [line for line in done.stderr.splitlines() if "watchdog" in line]
    assert line.startswith(
        "commprof: watchdog: no progress for 4 s: rank 0 waits in all_reduce #1 of group default_pg"
    )
    assert "rank 1 has not issued it: it is in until_the_dump (train.py:" in line

    run = tmp_path / "run"
    rows = open_run(run).table("samples").to_pylist()
    proc = {(row["device"], row["name"]) for row in rows if row["source"] == "proc"}
    assert proc >= {("rank 0", "rss_bytes"), ("rank 1", "cpu_percent"), ("rank 1", "threads")}
    stacks = [
        row["name"] for row in rows if row["source"] == "py-spy" and row["device"] == "rank 1 MainThread"
    ]
    assert any(stack.endswith("train.py:until_the_dump") for stack in stacks)

    ended = commprof("dump", "run")
    assert ended.returncode == 0
    assert ended.stdout.startswith("nothing hangs: every rank ended its recording normally\n")
    assert commprof("dump", "run", "--json", "--out", "kept.json").stderr.startswith(
        "commprof: nothing hangs"
    )
    assert json.loads((tmp_path / "kept.json").read_text())["kind"] == "ended"
    refused = commprof("dump", "run", "--out", "kept.json")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "kept.json exists already and is not overwritten without --force" in refused.stderr
    assert commprof("dump", "nowhere").returncode == 1
