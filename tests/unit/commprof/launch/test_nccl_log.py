"""Test the NCCL log settings of a run together with the user's settings, and how files are collected and counted."""

import os
import re
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commprof.launch.logs import nccl_files
from commprof.launch.logs.nccl_log import Mode, request, subsystems, user_file, with_user_file

RUN = Path("/data/runs/one")
OWN = {"NCCL_DEBUG": "TRACE", "NCCL_DEBUG_SUBSYS": "ALL", "NCCL_DEBUG_FILE": "/logs/%h.%p"}
HOST = socket.gethostname().partition(".")[0]


@pytest.mark.parametrize(
    ("mode", "gpus", "asks"),
    [("auto", True, True), ("auto", False, False), ("on", False, True), ("off", True, False)],
)
def test_nccl_is_asked_where_it_will_run_or_where_the_user_says_so(mode, gpus, asks):
    asked = request({}, RUN, Mode(mode), gpus=gpus)
    assert bool(asked.set) == asks
    if asks:
        assert asked.set == {
            "NCCL_DEBUG": "TRACE",
            "NCCL_DEBUG_SUBSYS": "INIT,COLL,CALL,TUNING",
            "NCCL_DEBUG_FILE": "/data/runs/one/nccl/%h.%p.log",
        }
    assert bool(asked.sentences("runs/one")) == asks


@given(st.sets(st.sampled_from(sorted(OWN))))
def test_what_the_user_set_is_left_and_the_rest_is_set(names):
    environment = {name: OWN[name] for name in names} | {"HOME": "/nowhere"}
    asked = request(environment, RUN, Mode.ON, gpus=True)
    assert asked.left == {name: OWN[name] for name in names}
    assert set(asked.set) == set(OWN) - names
    assert asked.warnings == ()
    said = asked.sentences("runs/one")
    if asked.set:
        assert len(said) == 1
        assert all(f"{name}=" in said[0] for name in OWN)
        assert ("left as you set it" in said[0]) == bool(names)
        assert "--nccl-log off" in said[0]


def test_an_empty_variable_says_nothing():
    assert request({"NCCL_DEBUG": ""}, RUN, Mode.ON, gpus=True).set["NCCL_DEBUG"] == "TRACE"


@pytest.mark.parametrize(
    ("own", "lost"),
    [
        ({"NCCL_DEBUG": "WARN"}, r"NCCL_DEBUG=WARN prints no lines of operations"),
        ({"NCCL_DEBUG": "version"}, r"NCCL_DEBUG=version prints no lines of operations"),
        ({"NCCL_DEBUG": "typo"}, r"NCCL_DEBUG=typo prints no lines of operations"),
        ({"NCCL_DEBUG": "info"}, r"NCCL_DEBUG=info loses the lines of API calls"),
        ({"NCCL_DEBUG": "trace"}, None),
        (
            {"NCCL_DEBUG_SUBSYS": "COLL"},
            r"loses which rank a communicator's address stands for \(INIT\), .*\(CALL\)",
        ),
        ({"NCCL_DEBUG_SUBSYS": "INIT,ENV"}, r"loses the lines of operations \(COLL\)"),
        (
            {"NCCL_DEBUG_SUBSYS": "^INIT,NET"},
            r"loses which rank a communicator's address stands for \(INIT\)$",
        ),
        ({"NCCL_DEBUG_SUBSYS": "^NET"}, None),
        ({"NCCL_DEBUG_SUBSYS": "init,coll,call,tuning,net"}, None),
        (
            {"NCCL_DEBUG_FILE": "/logs/nccl.%h.log"},
            r"has no %p, so the processes of a host write over each other",
        ),
        ({"NCCL_DEBUG_FILE": "/logs/%%p.log"}, r"has no %p"),
        ({"NCCL_DEBUG_FILE": "/dev/stderr"}, r"is not a file, so the log is not kept"),
        ({"NCCL_DEBUG_FILE": "%p"}, None),
    ],
)
def test_a_value_of_the_users_that_loses_something_is_warned_of(own, lost):
    asked = request(own, RUN, Mode.ON, gpus=True)
    assert asked.left == own
    if lost is None:
        assert asked.warnings == ()
    else:
        (warning,) = asked.warnings
        assert re.search(lost, warning)
        assert f"warning: {warning}" in asked.sentences("runs/one")
    assert request(own, RUN, Mode.OFF, gpus=True).sentences("runs/one") == []


def test_a_per_cent_sign_in_the_path_is_not_taken_for_a_field():
    assert request({}, Path("/a%h"), Mode.ON, gpus=False).set["NCCL_DEBUG_FILE"] == "/a%%h/nccl/%h.%p.log"


def test_the_users_configuration_file_counts_as_set_by_the_user(tmp_path):
    (tmp_path / ".nccl.conf").write_text("# mine\nNCCL_DEBUG=INFO\nNCCL_IB_HCA=mlx5\nno pair\n")
    environment = with_user_file({"NCCL_IB_HCA": "x"}, user_file({"HOME": str(tmp_path)}))
    assert environment == {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "x"}
    assert user_file({"HOME": str(tmp_path), "NCCL_CONF_FILE": "/nowhere"}) == ""
    assert user_file({}) == ""
    assert request(environment, RUN, Mode.ON, gpus=True).left == {"NCCL_DEBUG": "INFO"}


def test_subsystems_as_nccl_reads_them():
    assert subsystems("ALL") == subsystems("^NET") == {"INIT", "COLL", "CALL", "TUNING"}
    assert subsystems("^ALL") == subsystems("nonsense") == set()


def logs_of(tmp_path, *names):
    directory = tmp_path / "logs"
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).write_text(f"log {name}\n")
    return directory


def test_only_this_jobs_files_are_copied_and_the_originals_stay(tmp_path):
    directory = logs_of(
        tmp_path, f"{HOST}.11.log", f"{HOST}.12.log", f"{HOST}.99.log", "other.11.log", f"{HOST}.x.log"
    )
    os.utime(directory / f"{HOST}.12.log", ns=(1, 1))
    run = tmp_path / "run"
    run.mkdir()
    since = (directory / f"{HOST}.11.log").stat().st_mtime_ns
    copies = nccl_files.collect(f"{directory}/%h.%p.log", run, since, {11, 12})
    assert copies == [run / "nccl" / f"{HOST}.11.log"]
    assert copies[0].read_text() == (directory / f"{HOST}.11.log").read_text()
    everybody = nccl_files.collect(f"{directory}/%h.%p.log", run, since)
    assert [file.name for file in everybody] == [f"{HOST}.11-2.log", f"{HOST}.99.log"]


def test_a_pattern_is_no_glob(tmp_path):
    directory = logs_of(tmp_path, "a[b]*%.log", "ab.log")
    run = tmp_path / "run"
    run.mkdir()
    assert [f.name for f in nccl_files.collect(f"{directory}/a[b]*%%.log", run, 0)] == ["a[b]*%.log"]
    assert nccl_files.collect("/nowhere/%h/%p", run, 0) == []


def test_the_cost_counts_lines_operations_and_warnings_across_blocks(tmp_path):
    assert nccl_files.measure(tmp_path) is None
    nccl_files.make_directory(tmp_path)
    assert nccl_files.measure(tmp_path) is None
    assert not (tmp_path / "nccl").exists()
    nccl_files.make_directory(tmp_path)
    line = "h:1:1 [0] NCCL INFO AllReduce: opCount 0 sendbuff 0x1\n"
    text = ("h:1:1 NCCL CALL ncclAllReduce(1)\n" + line) * 30_000 + "\nh:1:1 [0] a.cc:1 NCCL WARN no\n"
    (tmp_path / "nccl" / "a.log").write_text(text)
    (tmp_path / "nccl" / "b.log").write_bytes(b"\xff" * 3_000_000)
    cost = nccl_files.measure(tmp_path)
    assert cost == (2, len(text) + 3_000_000, 60_002, 30_000, 1)
    assert "60,002 lines in 2 files in run/nccl: 2.0 lines" in cost.sentence("run")
    assert "NCCL warns 1 time" in cost.sentence("run")
