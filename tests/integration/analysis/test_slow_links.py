"""Real gloo ranks on hosts with slow links, and ranks that sleep.

The verdict must name the cause that the test planted.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from commprof.analysis import api
from support import hosts as network
from support.warm_hosts import run_on_each

WHY_NOT = network.why_impossible()
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.alone,
]

PROGRAM = """
import sys, time
import torch, torch.distributed as dist
import commprof
from commprof import hooks

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
commprof.attach(sys.argv[1], quiet=True)
kind, late = sys.argv[2], int(sys.argv[3])
tensor = torch.ones(64 * 1024)
parts = [tensor] * world if rank == 1 else None
for step in range(6 if kind == "all_reduce" else 12):  # of a path eight transfers are the least that tell
    hooks.step(step)
    time.sleep(0.004 + 0.08 * (rank == late))
    if kind == "all_reduce":
        for _ in range(3):
            dist.all_reduce(tensor)
    elif kind == "broadcast":
        for _ in range(3):
            dist.broadcast(tensor, 1)
    elif kind == "scatter":
        for _ in range(3):
            dist.scatter(torch.empty_like(tensor), parts, 1)
    elif kind == "gather":
        for _ in range(3):
            dist.gather(tensor, [torch.empty_like(tensor) for _ in parts] if parts else None, 1)
    else:
        for sender in range(world):
            for receiver in range(world):
                if rank == sender != receiver:
                    dist.send(tensor, receiver)
                if rank == receiver != sender:
                    dist.recv(tensor, sender)
dist.barrier()
dist.destroy_process_group()
"""


def record(directory: Path, rates, kind: str, late: int = -1) -> tuple[str, str]:
    """Return the culprit and the statement about it, with the hosts named host 0, host 1 and so on."""
    script, run = directory / "train.py", directory / "run"
    script.write_text(textwrap.dedent(PROGRAM))
    with network.hosts(len(rates), rates) as machines:
        run_on_each(machines, [str(script), str(run), kind, str(late)], directory)
        said = api.stragglers(run).attrs
        statement = said["statement"] or ""
        for number, machine in enumerate(machines):
            statement = statement.replace(machine.name, str(number))
    return said["culprit"], statement


def _names_nobody_but(host: int, said: str) -> None:
    """Check that the statement names no host but ``host``.

    A ring does not show the slow host in every run. The statement must then report that the cause is not
    known.
    """
    assert f"host {host} (rank {host})" in said or ("not known" in said and "host 0" not in said), said


def test_a_slow_link_is_named_and_no_rank_is_late_by_itself(tmp_path):
    culprit, said = record(tmp_path, [None, "20mbit", None], "all_reduce")
    assert culprit in ("slow_transfer", "transfers") and "by itself" not in said, said
    _names_nobody_but(1, said)
    # The load of the machine decides whether the slow link makes a rank arrive late.
    assert (
        "The delay is inherited: the previous collectives ended late on th" in said
        or "no rank stands out" in said
    ), said


@pytest.mark.long
@pytest.mark.parametrize("slow", [0, 2])
def test_the_link_of_another_host(tmp_path, slow):
    rates = [None] * 3
    rates[slow] = "20mbit"
    culprit, said = record(tmp_path, rates, "all_reduce")
    assert culprit in ("slow_transfer", "transfers") and "by itself" not in said, said
    _names_nobody_but(slow, said)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rate", "said"),
    [
        ("20mbit", "the link of host 1 (rank 1) is slow"),
        # Acknowledgements may wait in the same queue, so that both directions look slow.
        (("20mbit", None), "host 1 (rank 1) "),
        ((None, "20mbit"), "host 1 (rank 1) "),
    ],
)
def test_messages_tell_the_slow_side(tmp_path, rate, said):
    culprit, statement = record(tmp_path, [None, rate, None], "messages")
    assert culprit == "slow_transfer" and said in statement, statement
    assert "host 0" not in statement and "host 2" not in statement, statement


@pytest.mark.long
def test_a_rank_that_sleeps_is_late_by_itself_across_hosts(tmp_path):
    culprit, said = record(tmp_path, [None, None, None], "all_reduce", late=2)
    assert culprit == "late_rank" and said.startswith("Rank 2 is a straggler"), said
    assert "Slow transfers" not in said, said


@pytest.mark.long
@pytest.mark.parametrize("op", ["broadcast", "scatter"])
@pytest.mark.parametrize("late", [1, 2])
def test_only_the_root_that_sends_keeps_others_waiting(tmp_path, op, late):
    culprit, said = record(tmp_path, [None, None, None], op, late=late)
    if late == 1:
        assert culprit == "late_rank" and said.startswith("Rank 1 is a straggler as the root"), said
    else:
        assert "by itself" not in said, said


@pytest.mark.long
@pytest.mark.parametrize("late", [1, 2])
def test_only_a_late_sender_keeps_the_root_of_a_gather_waiting(tmp_path, late):
    culprit, said = record(tmp_path, [None, None, None], "gather", late=late)
    if late == 2:
        assert culprit == "late_rank" and said.startswith("Rank 2 is a straggler"), said
    else:
        assert "by itself" not in said, said


@pytest.mark.long
@pytest.mark.parametrize("op", ["broadcast", "scatter", "gather"])
def test_a_slow_link_below_rooted_collectives_blames_no_other(tmp_path, op):
    culprit, said = record(tmp_path, [None, None, "20mbit"], op)
    assert "straggler" not in said and "host 0" not in said and "host 1 (" not in said, said
    if op == "gather":  # the senders return as soon as their data is buffered
        assert culprit == "transfers" and "no rank stands out" in said and "It is not known" in said, said
    else:
        assert culprit == "slow_transfer" and "host 2 (rank 2) receives slowly" in said, said
