"""Clocks compared through the stores of torch's jobs, by ranks whose clocks the test shifts."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from commprof.recorder.clocks.clock_exchange import own_addresses
from support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.alone]

WORLD = 3
SHIFT = 3_600 * 10**9


class Log:
    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.notes: list[str] = []

    def write(self, kind, row):
        self.rows.append(dict(row))

    def note(self, text):
        self.notes.append(text)


def measure(rank: int, world: int) -> dict:
    """Compare the clocks once in the initialized job.

    Every rank has a clock of its own.
    """
    import torch.distributed as dist

    from commprof.recorder.clocks.clock_meeting import job_meeting
    from commprof.recorder.clocks.clock_offsets import ClockOffsets

    log = Log()
    offsets = ClockOffsets(
        log, lambda: job_meeting("test"), lambda: time.perf_counter_ns() + rank * SHIFT, f"clock {rank}"
    )
    offsets.start(rank, world, {})
    limit = time.monotonic() + 20
    while not log.rows and not log.notes and time.monotonic() < limit:
        time.sleep(0.01)
    dist.barrier()
    time.sleep(0.3)
    offsets.part()
    dist.barrier()
    before = time.monotonic()
    offsets.finish()
    return {"rows": log.rows, "notes": log.notes, "finish_s": time.monotonic() - before}


def over_file(rank: int, world: int) -> dict:
    return measure(rank, world)


def over_tcp(rank: int, world: int, address: str) -> dict:
    """Run :func:`measure` twice in a job with a TCPStore on the same port.

    Nothing may keep the server of the first job alive.
    """
    import torch.distributed as dist

    for _ in range(2):
        dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=world)
        found = measure(rank, world)
        dist.destroy_process_group()
        # A server ends when its last handle is deleted. torch's own threads need a moment to delete theirs.
        time.sleep(0.3)
    return found


def check(outcomes: list[dict]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert not outcome["notes"]
        assert len(outcome["rows"]) == (1 if rank == 0 else 2)
        for row in outcome["rows"]:
            assert abs(row["offset_ns"] + rank * SHIFT) <= row["error_ns"] < 200_000_000
        assert outcome["finish_s"] < 2


def test_over_a_file_store():
    check(run_ranks(WORLD, over_file))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.mark.skipif(len(own_addresses()) < 2, reason="this host has no address but the loopback's")
def test_over_a_tcp_store_which_goes_with_the_job():
    address = f"{own_addresses()[0]}:{free_port()}"
    check(run_ranks(WORLD, over_tcp, address, process_group=False))


def loopback_job(rank: int, world: int, port: int) -> tuple[list, int]:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    found = measure(rank, world)
    dist.destroy_process_group()
    return [(row["offset_ns"], row["exchanges"]) for row in found["rows"]], threading.active_count()


def test_a_job_that_meets_at_the_loopback_is_on_one_host():
    outcomes = run_ranks(2, loopback_job, free_port(), process_group=False)
    assert outcomes == [([(0, 0)], 1)] * 2


def fake_job(rank: int, world: int) -> tuple[int, int]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from commprof.recorder.clocks.clock_meeting import job_meeting

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    meeting = job_meeting("test")
    dist.destroy_process_group()
    return meeting is None, threading.active_count()


def test_a_fake_job_meets_nobody():
    assert run_ranks(1, fake_job, process_group=False) == [(True, 1)]
