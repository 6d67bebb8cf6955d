"""Runs whose program writes a log like NCCL, to the place that its environment names.

The tests check which log is requested and what commprof keeps of it.
"""

import json
import os
import socket
import subprocess
import sys

import pytest

from support import command

HOST = socket.gethostname().partition(".")[0]
ENVIRONMENT = {
    name: value
    for name, value in command.environment(CUDA_VISIBLE_DEVICES="").items()
    if not name.startswith("NCCL_")
}

# Like src/debug.cc, the program opens a file of its own for writing. It uses standard output if no file is
# named or if the file cannot be opened.
PRINTS_LIKE_NCCL = """
import os, socket, sys

level, pattern = os.environ.get("NCCL_DEBUG", ""), os.environ.get("NCCL_DEBUG_FILE", "")
on = os.environ.get("NCCL_DEBUG_SUBSYS", "INIT").split(",")
pid, host = os.getpid(), socket.gethostname().partition(".")[0]
if len(sys.argv) > 2:
    open(sys.argv[2]).close()
lines = []
if level.upper() in ("INFO", "TRACE"):
    head = f"{host}:{pid}:{pid}"
    if "INIT" in on:
        lines += [f"{head} [0] NCCL INFO NCCL version 2.27.3+cuda12.8"]
    for number in range(50):
        if "CALL" in on and level == "TRACE":
            lines += [f"{head} NCCL CALL ncclAllReduce(0x1,0x1,4,7,0,0x55,0x2)"]
        if "COLL" in on:
            lines += [
                f"{head} [0] NCCL INFO AllReduce: opCount {number:x} sendbuff 0x1 recvbuff 0x1 count 4 datatype 7 "
                "op 0 root 0 comm 0x55 [nranks=2] stream 0x2"
            ]
text = "".join(line + "\\n" for line in lines)
try:
    file = open(pattern.replace("%h", host).replace("%p", str(pid)), "w")
except OSError:
    file = sys.stdout
if text or file is not sys.stdout:
    file.write(text)
"""


def commprof(*words, cwd, new_interpreters=False, **variables):
    return command.commprof(*words, cwd=cwd, env=ENVIRONMENT | variables, new_interpreters=new_interpreters)


@pytest.fixture
def script(tmp_path):
    (tmp_path / "job.py").write_text(PRINTS_LIKE_NCCL)
    return "job.py"


def said(done):
    """Return the lines about the log, without the name of the program."""
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("commprof: ") for line in done.stderr.splitlines()]
    return [line for line in lines if line.startswith(("NCCL log", "warning"))]


def noted(run):
    return json.loads((run / "run.json").read_text())["launcher"]["nccl_log"]


def logs(run):
    return sorted(file.name for file in (run / "nccl").iterdir())


@pytest.mark.sampled
@pytest.mark.parametrize("words", [["--nccl-log", "on"], []])
def test_the_log_of_every_rank_is_in_the_run_and_its_cost_is_said(tmp_path, script, words):
    # A list of visible devices in the environment indicates that the host has GPUs.
    visible = "" if words else "0,1"
    done = commprof(
        "run", *words, "--nproc", "2", "-o", "run", script, cwd=tmp_path, CUDA_VISIBLE_DEVICES=visible
    )
    asked, cost = said(done)
    assert asked == (
        "NCCL log: set NCCL_DEBUG=TRACE, NCCL_DEBUG_SUBSYS=INIT,COLL,CALL,TUNING, NCCL_DEBUG_FILE=run/nccl/%h.%p.log "
        "(--nccl-log off sets nothing)"
    )
    files = [tmp_path / "run" / "nccl" / name for name in logs(tmp_path / "run")]
    assert len(files) == 2
    assert all(file.read_text().count("NCCL CALL") == 50 for file in files)
    size = sum(file.stat().st_size for file in files)
    per_operation = f"2.0 lines and {size / 100:,.0f} bytes per operation (100 operations)"
    assert cost == f"NCCL log: {size:,} bytes, 202 lines in 2 files in run/nccl: {per_operation}"
    note = noted(tmp_path / "run")
    assert note["mode"] == ("on" if words else "auto")
    assert note["set"]["NCCL_DEBUG"] == "TRACE"
    assert note["left"] == {}
    assert note["written"] == {"files": 2, "size": size, "lines": 202, "operations": 100, "warnings": 0}
    assert json.loads((tmp_path / "run" / "run.json").read_text())["environment"]["NCCL_DEBUG"] == "TRACE"
    parsed = commprof("nccl", "parse", "run/nccl", "--out", "parsed", cwd=tmp_path)
    assert parsed.returncode == 0, parsed.stderr
    again = commprof("run", *words, "--force", "-o", "run", script, cwd=tmp_path)
    assert again.returncode == 0, again.stderr


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "devices"), [([], ""), (["--nccl-log", "off"], "0"), (["--nccl-log", "auto"], "-1")]
)
def test_nothing_is_set_where_there_is_no_gpu_or_the_user_does_not_want_it(tmp_path, script, words, devices):
    done = commprof(
        "run", *words, "--nproc", "1", "-o", "run", script, cwd=tmp_path, CUDA_VISIBLE_DEVICES=devices
    )
    assert said(done) == []
    assert not (tmp_path / "run" / "nccl").exists()
    assert noted(tmp_path / "run")["set"] == {}


@pytest.mark.long
def test_a_file_of_the_users_own_is_copied_and_stays_where_it_is(tmp_path, script):
    own = tmp_path / "own"
    own.mkdir()
    (own / "nccl.of.yesterday.1").write_text("old")
    os.utime(own / "nccl.of.yesterday.1", (1, 1))
    done = commprof(
        "run", "--nccl-log", "on", "--nproc", "2", "-o", "run", script,
        cwd=tmp_path, new_interpreters=True,  # the names of the files contain their process ids
        NCCL_DEBUG_FILE="own/nccl.of.%h.%p", NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="COLL",
    )  # fmt: skip
    asked, *warnings, cost = said(done)
    assert "set " not in asked.replace("as you set it", "")
    assert (
        "left as you set it: NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=COLL, NCCL_DEBUG_FILE=own/nccl.of.%h.%p"
        in asked
    )
    assert ["INIT" in text for text in warnings] == [False, True]
    assert "1.0 lines" in cost
    assert len(logs(tmp_path / "run")) == 2
    assert sorted([*logs(tmp_path / "run"), "nccl.of.yesterday.1"]) == sorted(
        file.name for file in own.iterdir()
    )


@pytest.mark.long
def test_off_leaves_the_users_file_alone(tmp_path, script):
    done = commprof(
        "run", "--nccl-log", "off", "--nproc", "1", "-o", "run", script,
        cwd=tmp_path, NCCL_DEBUG_FILE="%p.log", NCCL_DEBUG="INFO", CUDA_VISIBLE_DEVICES="0",
    )  # fmt: skip
    assert said(done) == []
    assert not (tmp_path / "run" / "nccl").exists()
    assert len(list(tmp_path.glob("*.log"))) == 1


@pytest.mark.long
def test_one_file_for_all_is_warned_of_before_it_is_too_late(tmp_path, script):
    done = commprof("run", "--nccl-log", "on", "-o", "run", script, cwd=tmp_path, NCCL_DEBUG_FILE="all.log")
    assert "warning: NCCL_DEBUG_FILE=all.log has no %p" in "\n".join(said(done))
    assert logs(tmp_path / "run") == ["all.log"]


@pytest.mark.long
def test_nothing_written_is_said(tmp_path):
    (tmp_path / "idle.py").write_text("")
    done = commprof("run", "--nccl-log", "on", "--nproc", "1", "-o", "run", "idle.py", cwd=tmp_path)
    assert said(done)[-1].startswith("NCCL log: nothing was written: no process initialised NCCL")
    assert not (tmp_path / "run" / "nccl").exists()


@pytest.mark.long
def test_a_launcher_of_the_users_passes_it_on(tmp_path, script):
    done = commprof("run", "--nccl-log", "on", "-o", "run", "--", sys.executable, script, cwd=tmp_path)
    assert "(50 operations)" in said(done)[-1]


@pytest.mark.long
@pytest.mark.parametrize("own", [None, pytest.param("%p.log", marks=pytest.mark.long)])
def test_ranks_of_another_launcher_bring_their_files_together(tmp_path, script, own):
    words = [sys.executable, "-m", "commprof", "run", "--nccl-log", "on", "--out", "run", script]
    mine = {} if own is None else {"NCCL_DEBUG_FILE": own}
    ranks = [
        subprocess.Popen(
            words, cwd=tmp_path, text=True, stderr=subprocess.PIPE,
            env=ENVIRONMENT | mine | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert len(logs(tmp_path / "run")) == 2
    assert "100 operations" in errors[0]
    assert "NCCL log" not in errors[1]  # only one rank prints the message
    assert noted(tmp_path / "run")["written"]["operations"] == 100


@pytest.mark.long
def test_a_sweep_asks_in_each_of_its_runs(tmp_path, script):
    (tmp_path / "ds.json").write_text("{}")
    done = commprof(
        "sweep", "--set", "a=1,2", "--nccl-log", "on", "--wire", "--nproc", "1", "-o", "runs", script, "--config", "ds.json",
        cwd=tmp_path,
    )  # fmt: skip
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 2, done.stderr
    for run in runs:
        assert noted(run)["written"]["operations"] == 50
        assert json.loads((run / "run.json").read_text())["launcher"]["wire"] is True
