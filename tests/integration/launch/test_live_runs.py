"""Verbs that would write into a run directory leave a run alone while it is being recorded.

The reason that they print must be correct.
"""

import os
import socket
import subprocess

import pytest

from commprof.trace.process import start_ticks
from support import command
from support.rank_files import write_rank

LOG = (
    "h:1:1 [0] NCCL INFO AllReduce: opCount 0 sendbuff 0x1 recvbuff 0x2 count 8 datatype 7 op 0 root 0 comm 0x3 "
    "[nranks=1] stream 0x4\n"
)


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """Return a run directory whose recording process is still alive."""
    process = subprocess.Popen(["sleep", "300"])
    run = tmp_path_factory.mktemp("sweep") / "run"
    about = {"pid": process.pid, "host": socket.gethostname(), "start_ticks": start_ticks(process.pid)}
    write_rank(run, ended=False, **about)
    (run.parent.parent / "train.py").write_text("")
    (run.parent.parent / "ds.json").write_text("{}")
    (run.parent.parent / "log").write_text(LOG)
    yield run
    process.kill()
    process.wait()


def commprof(cwd, *words):
    done = command.commprof(*words, cwd=cwd, env=dict(os.environ, COMMPROF_OPTIONS=""))
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["run", "--out", "{run}", "train.py"], 2),
        (["run", "--out", "{run}", "--force", "train.py"], 2),
        (
            [
                "sweep",
                "--out",
                "{runs}",
                "--force",
                "--set",
                "zero_optimization.stage=1,2",
                "--",
                "train.py",
                "--config",
                "ds.json",
            ],
            2,
        ),
        (["export", "{run}", "--format", "csv", "--out", "{run}", "--force"], 2),
        (["align", "{run}", "log", "--force"], 2),
        (["nccl", "parse", "log", "--out", "{run}", "--force"], 2),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_a_live_run_is_left_alone_and_the_reason_is_said(live, words, code):
    before = {path: path.read_bytes() for path in live.iterdir()}
    filled = [word.format(run=live, runs=live.parent) for word in words]
    found, said = commprof(live.parent.parent, *filled)
    assert found == code, said
    assert said.count("\n") == 1 and f"{live} is being recorded by rank 0 (process " in said
    assert "did not write" not in said
    assert {path: path.read_bytes() for path in live.iterdir()} == before


def test_a_run_that_has_ended_is_replaced_with_all_that_commprof_wrote_into_it(tmp_path):
    run = tmp_path / "run"
    write_rank(run)
    for name in ("stacks", "dumps", "wire", "nccl"):
        (run / name).mkdir()
    (run / "samples-other.jsonl").write_text("")
    (tmp_path / "train.py").write_text("")
    found, said = commprof(tmp_path, "run", "--nproc", "1", "--out", run, "--force", "train.py")
    assert found == 0, said
    assert not list(run.glob("samples*")) and (run / "run.json").exists()


def test_no_export_goes_into_a_run(tmp_path):
    run = tmp_path / "run"
    write_rank(run)
    found, said = commprof(tmp_path, "export", run, "--format", "parquet", "--out", run, "--force")
    assert found == 2 and "is a run, and an export would mix its files with the run's" in said
