"""Calls that torch refuses on some ranks only.

They take no number, so all other calls have equal numbers on all ranks.
"""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.distributed as dist

from commprof.analysis import api
from commprof.ledger.verification import verify
from commprof.sampling.job_dump import take_dump
from support.hanging import await_stillness, hanging_ranks, load_batch
from support.recording import calls, record

pytestmark = pytest.mark.ranks


@contextlib.contextmanager
def refused():
    with pytest.raises((RuntimeError, ValueError)):
        yield


def refused_call():
    """Issue a call that gloo refuses.

    gloo checks tensors before it counts the call or sends anything.
    """
    with refused():
        dist.all_reduce(torch.ones(4, 4).to_sparse(), dist.ReduceOp.MAX)


def refused_parts():
    with refused():
        dist.all_gather_into_tensor(torch.zeros(7), torch.ones(4))


def exchange(rank, payload):
    """Send a message from rank 0 to rank 1."""
    if rank == 0:
        dist.send(torch.ones(payload), 1)
    else:
        dist.recv(torch.ones(payload), 0)


def uneven_refusals(rank, world):
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        refused_call()
        refused_parts()
    dist.all_gather([torch.zeros(5) for _ in range(world)], torch.ones(5))
    if rank == 0:
        with refused():
            dist.send(torch.ones(4, 4).t(), 1)
    exchange(rank, 6)
    refused_call()  # on all ranks
    handle = dist.all_reduce(torch.ones(7), async_op=True)
    if rank == 0:
        refused_parts()
    handle.wait()
    dist.broadcast(torch.ones(8), 0)


@pytest.mark.parametrize("complete", [False, True])
def test_after_a_call_that_raised_on_one_rank_the_ranks_number_alike(tmp_path, complete):
    run, _ = record(tmp_path / "run", 2, uneven_refusals, complete=complete)
    expected = [
        ("all_reduce", 0),
        ("all_gather", 1),
        ("all_reduce", 2),
        ("broadcast", 3),
    ]
    for rank in (0, 1):
        rows = [row for row in calls(run, rank, "op", "pg_seq", "status") if row[2] == "ok"]
        assert [row[:2] for row in rows if row[0] not in ("send", "recv")] == expected
        assert [row[1] for row in rows if row[0] in ("send", "recv")] == [0]
    number = {rank: calls(run, rank, "pg_seq") for rank in (0, 1)}
    assert [n for n in number[1] if n < 0] == [-2, -2, -3]
    assert run.health.raised == 3 + 3 and run.health.unseen == 0

    arrived = api.arrivals(run)
    assert len(arrived) == 2 * 4 + 2  # a call that raised has no arrivals
    for row in run.table("collectives").to_pylist():
        partners = api.record(run, row["rank"], row["seq"]).partners
        assert partners["rank"].tolist() == ([] if row["status"] == "raised" else [0, 1])
        assert set(partners["op"]) <= ({"send", "recv"} if row["is_p2p"] else {row["op"]})
    found = verify(run)
    assert (found.differences, found.disagreements) == ((), ()), found.disagreements
    assert found.sources["executed"].endswith("torch's Flight Recorder agrees on 8 of 8"), found.sentences
    assert str(found.state) == "unknown"  # no config states what was requested
    assert take_dump(tmp_path / "run").situation.differences == []


def two_threads(rank, world):
    """Train in one thread while torch refuses the calls of another thread in the same group."""
    over = threading.Event()

    def issue_refused():
        while not over.is_set():
            refused_call()

    thread = threading.Thread(target=issue_refused)
    if rank == 1:
        thread.start()
    try:
        for n in range(300):
            dist.all_reduce(torch.ones(1 + n))
    finally:
        over.set()
        if rank == 1:
            thread.join()


def test_what_another_thread_issues_meanwhile_keeps_its_numbers(tmp_path):
    run, _ = record(tmp_path / "run", 2, two_threads)
    assert run.health.raised > 0
    for rank in (0, 1):
        rows = [row for row in calls(run, rank, "pg_seq", "numel", "status") if row[2] == "ok"]
        assert [row[:2] for row in rows] == [(n, 1 + n) for n in range(300)]


def gives_up(rank, world):
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        refused_call()
        load_batch()
    dist.all_reduce(torch.ones(4))


def test_a_rank_whose_call_raised_is_named_as_missing_in_what_the_other_waits_for(tmp_path):
    with hanging_ranks(tmp_path / "run", 2, gives_up):
        await_stillness(tmp_path / "run", 4)
        verdict = take_dump(tmp_path / "run", watch_seconds=0.2).verdict
    assert verdict.sentence.startswith("rank 0 waits in all_reduce #1 of group default_pg (16 B float32")
    assert "; rank 1 has not issued it: it is in load_batch (hanging.py:" in verdict.sentence
