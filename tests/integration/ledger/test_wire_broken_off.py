"""Runs on three hosts that were killed, ran twice or recorded only sums.

Verify must not accuse a host, and must find planted bytes. The expected bytes are written here by hand from
gloo's algorithms, and not taken from the package under test.
"""

import json
import os
import subprocess
import sys

import pytest

from support import hosts as network
from support.command import commprof

WHY_NOT = network.why_impossible()
TOLERANCE = 0.02
MB = 1_000_000

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.alone,
    pytest.mark.long,
]

# 4 MB are reduced on all ranks: each rank sends 2 x 2/3 of this. Rank 1 sends 3 MB to both other ranks.
STEP = {0: 16 / 3, 1: 16 / 3 + 6, 2: 16 / 3}
STEPS, KILLED_AT = 6, 3
PROGRAM = f"""
import os, signal, socket, time
import torch, torch.distributed as dist
from commprof import hooks

def plant(size):
    # From host 0 to host 2, beneath torch.distributed.
    address = os.environ["PLANTED_HOST"], 29_700
    if rank == 2:
        with socket.create_server(address) as server, server.accept()[0] as connection:
            while connection.recv(1 << 20):
                pass
    if rank == 0:
        for _ in range(100):
            try:
                with socket.create_connection(address) as connection:
                    connection.sendall(bytes(size))
                break
            except ConnectionRefusedError:
                time.sleep(0.05)

dist.init_process_group("gloo")
rank = dist.get_rank()
waits = os.environ.get("BARRIERS", "1") == "1"
dies = os.environ.get("DIES") == os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
million, most = torch.ones(1_000_000), torch.ones(750_000)
for step in range({STEPS}):
    if waits:
        dist.barrier()
    hooks.step(step)
    dist.all_reduce(million)
    if step == {KILLED_AT} and dies and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get("ROOTED", "1") == "1":
        dist.broadcast(most, src=1)
    if step == 1 and "PLANTED" in os.environ:
        plant(int(os.environ["PLANTED"]))
    if waits:
        dist.barrier()
hooks.step(step + 1)
dist.destroy_process_group()
"""
# A launcher of this test that starts the ranks again. torchrun would need host names that all hosts can
# resolve.
AGAIN = """
import os, subprocess, sys
for attempt in range(2):
    port = str(int(os.environ["MASTER_PORT"]) + attempt)
    environment = os.environ | {"TORCHELASTIC_RESTART_COUNT": str(attempt), "MASTER_PORT": port}
    code = subprocess.run([sys.executable, "train.py"], env=environment).returncode
sys.exit(code)
"""


def record(folder, machines, words, **variables):
    """Run ``words`` with ``commprof run --wire`` on each host, and return the JSON output of verify."""
    (folder / "train.py").write_text(PROGRAM)
    (folder / "again.py").write_text(AGAIN)
    ranks = [
        machine.start(
            [sys.executable, "-m", "commprof", "run", "--wire", "--out", "run", *words],
            network.environment(machines, rank) | {name: str(value) for name, value in variables.items()},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank, machine in enumerate(machines)
    ]
    try:
        codes = [process.wait(timeout=200) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    done = commprof("verify", "run", "--json", cwd=folder, env=dict(os.environ))
    assert "Traceback" not in done.stderr
    return codes, json.loads(done.stdout)


def mismatches(verdict):
    return [sentence for sentence in verdict["sentences"] if sentence.startswith("Mismatch")]


def test_a_run_that_was_killed_accuses_no_host(tmp_path):
    with network.hosts(3) as machines:
        codes, verdict = record(tmp_path, machines, ["train.py"], DIES=0)
    assert all(codes)
    assert not mismatches(verdict)
    judged = {int(row["host"][-1]): row for row in verdict["moved"] if row["expected_bytes"] is not None}
    for number, row in judged.items():
        assert row["expected_bytes"] == pytest.approx(row["steps"] * STEP[number] * MB, rel=0.01)
        assert row["steps"] <= KILLED_AT + 1
    assert judged  # the readings at the steps of each host remain


@pytest.mark.parametrize("killed", [True, False])
def test_what_waits_in_send_buffers_when_a_run_ends_accuses_no_host(tmp_path, killed):
    with network.hosts(3, "50mbit") as machines:
        codes, verdict = record(
            tmp_path, machines, ["train.py"], BARRIERS=0, **({"DIES": 0} if killed else {})
        )
    assert all(codes) if killed else not any(codes)
    assert not mismatches(verdict)
    root = next(row for row in verdict["moved"] if row["host"][-1] == "1")
    # The root of the broadcast returns when its bytes are in send buffers. The last of the bytes are still
    # there.
    assert root["sent_bytes"] < root["expected_bytes"]
    if not killed:
        assert root["sent_bytes"] + root["queued_last_bytes"] >= (1 - TOLERANCE) * root["expected_bytes"]


def test_what_a_killed_run_sent_without_a_record_is_found(tmp_path):
    with network.hosts(3) as machines:
        size = round(0.06 * (KILLED_AT + 1) * STEP[0] * MB)
        planted = {"DIES": 0, "PLANTED": size, "PLANTED_HOST": machines[2].address}
        _, verdict = record(tmp_path, machines, ["train.py"], **planted)
    (said,) = mismatches(verdict)
    assert "-0 moved" in said


def test_of_two_attempts_the_last_is_compared(tmp_path):
    with network.hosts(3) as machines:
        codes, verdict = record(tmp_path, machines, ["--", sys.executable, "again.py"], DIES=0)
        resent = [network.resent_bytes(machine) for machine in machines]
    assert codes == [0] * 3
    assert not mismatches(verdict)
    assert len(verdict["moved"]) == 3
    for row in verdict["moved"]:
        number = int(row["host"][-1])
        if row["expected_bytes"] is None:
            assert "2 attempts" in row["reason"]
            continue
        expected = STEPS * STEP[number] * MB
        assert row["expected_bytes"] == pytest.approx(expected, rel=1e-4)
        assert expected <= row["sent_bytes"] <= expected * (1 + TOLERANCE) + resent[number]


def test_sums_of_a_run_hold_each_host_to_its_own_bytes(tmp_path):
    with network.hosts(3) as machines:
        _, verdict = record(tmp_path, machines, ["--aggregate", "train.py"], ROOTED=0)
    assert not mismatches(verdict)
    assert [row["expected_bytes"] for row in verdict["moved"]] == pytest.approx(
        [STEPS * 16 / 3 * MB] * 3, rel=1e-4
    )


def test_sums_without_roots_hold_all_hosts_together(tmp_path):
    with network.hosts(3) as machines:
        _, verdict = record(tmp_path, machines, ["--aggregate", "train.py"])
    assert not mismatches(verdict)
    assert [row["expected_bytes"] for row in verdict["moved"]] == [None] * 3
    assert verdict["moved_together"]["expected_bytes"] == pytest.approx(
        sum(STEP.values()) * STEPS * MB, rel=1e-4
    )
