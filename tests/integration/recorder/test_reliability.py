"""A process may end in any way, and anything may go wrong around it: the training must not change.

The results must be equal bit for bit, and so must the exit code. Every collective that the process issued
must be in the trace, or be reported as dropped. The programs count their collectives themselves.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from commprof.errors import CommprofError
from commprof.trace.reader import open_run
from support.logged_training import Log, fork, issued, outcome, results, train
from support.ranks import run_ranks
from support.recording import calls

pytestmark = pytest.mark.ranks


def join(rank: int, world: int, store: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)


def silence() -> None:
    """Hide the messages that torch, gloo and the interpreter print when a process dies."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


# Processes that are killed at any moment.


def _issue_for_ever(place: Path, ready: int) -> None:
    silence()
    join(0, 1, place / "store")
    import commprof

    log = Log(place / "log")
    tensor = torch.ones(4)
    os.write(ready, b".")
    commprof.attach(place / "run")
    number = 0
    while True:
        if number % 50 == 0:
            commprof.step(number // 50)
        log.issue()
        if number % 7 == 3:
            dist.all_reduce(tensor[: 1 + number % 3], async_op=True).wait()
        else:
            dist.all_reduce(tensor[: 1 + number % 3])
        number += 1


def _kill_at_a_random_moment(place: Path, seed: int) -> None:
    read_end, write_end = os.pipe()
    pid = fork(_issue_for_ever, place, write_end)
    os.close(write_end)
    assert os.read(read_end, 1) == b"."
    os.close(read_end)
    time.sleep(random.Random(seed).uniform(0.0, 0.25))
    os.kill(pid, signal.SIGKILL)
    assert outcome(pid) == -signal.SIGKILL
    lines = issued(place / "log")
    try:
        run = open_run(place / "run")
    except CommprofError as error:
        assert lines <= 1, error  # it was killed before it wrote anything to read
        return
    found = run.health.records
    assert lines - 1 <= found <= lines + 1
    assert found == len(run.table("collectives")) and run.health.lost == run.health.torn == 0
    assert calls(run, 0, "seq") == calls(run, 0, "pg_seq") == list(range(found))
    assert calls(run, 0, "numel", "step") == [(1 + n % 3, n // 50) for n in range(found)]
    assert set(calls(run, 0, "status")[:-1]) <= {"ok"}
    if found:
        assert run.health.state == "killed" and any(
            "ended without closing its recording" in n for n in run.health.notes
        )


@pytest.mark.parametrize("seed", range(4))
def test_sigkill_at_a_random_moment(tmp_path, seed):
    _kill_at_a_random_moment(tmp_path, seed)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_sigkill_at_100_random_moments(tmp_path):
    for seed in range(100, 200):
        place = tmp_path / str(seed)
        place.mkdir()
        _kill_at_a_random_moment(place, seed)
        shutil.rmtree(place)


# Processes that end in any other way in the middle of a step of two ranks.

ENDINGS = {
    "os._exit": lambda: os._exit(7),
    "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigint": lambda: os.kill(os.getpid(), signal.SIGINT),
    "exception": lambda: 1 // 0,
}


def _train_until_the_end(rank: int, place: Path, ending: str, recorded: bool) -> None:
    silence()
    import faulthandler

    # The test runner enables faulthandler, but a plain program does not.
    faulthandler.disable()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    join(rank, 2, place / "store")
    if recorded:
        import commprof

        commprof.attach(place / "run")

    def end(step: int) -> None:
        if rank == 1 and step == 5:
            ENDINGS[ending]()

    train(Log(place / f"log-{rank}"), 8, end)


@pytest.mark.sampled
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_rank_that_ends_is_recorded_until_then_and_changes_nothing(tmp_path, ending):
    outcomes = {}
    for kind in ("plain", "recorded"):
        place = tmp_path / kind
        place.mkdir()
        pids = [fork(_train_until_the_end, rank, place, ending, kind == "recorded") for rank in range(2)]
        outcomes[kind] = [outcome(pid) for pid in reversed(pids)]
    assert outcomes["plain"] == outcomes["recorded"]
    assert outcomes["recorded"][0] != 0
    for rank in range(2):
        kept = results(tmp_path / "recorded" / f"log-{rank}")
        assert kept == results(tmp_path / "plain" / f"log-{rank}") and len(kept) == 5
    run = open_run(tmp_path / "recorded" / "run")
    for rank in range(2):
        lines = issued(tmp_path / "recorded" / f"log-{rank}")
        assert lines - 1 <= len(calls(run, rank, "op")) <= lines
    assert run.health.lost == run.health.torn == 0 and run.health.state == "killed"
    assert any("ended without closing its recording" in note for note in run.health.notes)


# Problems with the disk and the clock.


def _compared(place: Path, prepare, steps: int = 12, disturb=lambda place, step: None):
    """Train on two ranks without and then with recording.

    Returns for each rank the results of both, and the number of lines of the second.
    """

    def body(rank: int, world: int):
        import commprof

        train(Log(place / f"plain-{rank}"), steps)
        prepare(place)
        commprof.attach(place / "run")
        train(Log(place / f"log-{rank}"), steps, lambda step: disturb(place, step))
        commprof.detach()
        return results(place / f"plain-{rank}"), results(place / f"log-{rank}"), issued(place / f"log-{rank}")

    return run_ranks(2, body)


@pytest.mark.long
def test_a_limit_on_the_size_of_files_stops_recording_and_the_loss_is_stated(tmp_path, capfd):
    def limit(place: Path) -> None:
        # The first segment fits, and the second does not.
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    outcomes = _compared(tmp_path, limit, steps=560)
    run = open_run(tmp_path / "run")
    for rank, (plain, recorded, lines) in enumerate(outcomes):
        assert plain == recorded and lines == 2800
        kept = len(calls(run, rank, "op"))
        (entry,) = [entry for entry in run.manifest.ranks if entry["rank"] == rank]
        assert 2000 < kept < lines and kept + entry["lost"] == lines
        assert "File too large" in entry["stopped_reason"]
    assert "recording stopped" in capfd.readouterr().err
    assert sum("stopped recording" in note for note in run.health.notes) == 2


def test_a_directory_that_may_not_be_written_to_is_one_line(tmp_path, capfd):
    closed = tmp_path / "closed"

    def close(place: Path) -> None:
        if os.getuid() == 0:
            os.seteuid(65534)

    closed.mkdir(mode=0o555)
    tmp_path.chmod(0o755)
    if os.getuid() == 0:
        # The directories of the test runner are not accessible to other users. The refused directory alone is
        # enough.
        closed.chmod(0o555)

    def body(rank: int, world: int):
        import commprof

        train(Log(tmp_path / f"plain-{rank}"), 4)
        log = Log(tmp_path / f"log-{rank}")
        # the imports of the first attach are also in a directory that is not accessible
        commprof.attach(tmp_path / "warm")
        commprof.detach()
        close(tmp_path)
        commprof.attach(closed / "run")
        train(log, 4)
        commprof.detach()
        if os.getuid() == 0:
            os.seteuid(0)
        return results(tmp_path / f"plain-{rank}") == results(tmp_path / f"log-{rank}")

    assert run_ranks(2, body) == [True, True]
    errors = capfd.readouterr().err
    assert errors.count("nothing is recorded") == 2 and "Permission denied" in errors
    assert "Traceback" not in errors and not list(closed.iterdir())


def test_a_directory_deleted_under_a_training_changes_nothing(tmp_path, capfd):
    def remove(place: Path, step: int) -> None:
        if step == 5:
            shutil.rmtree(place / "run", ignore_errors=True)

    for plain, recorded, _ in _compared(tmp_path, lambda place: None, disturb=remove):
        assert plain == recorded and len(plain) == 12
    assert "Traceback" not in capfd.readouterr().err
    with pytest.raises(CommprofError, match="does not exist"):
        open_run(tmp_path / "run")


@pytest.mark.long
def test_a_step_of_the_wall_clock_moves_no_record(tmp_path, monkeypatch):
    from commprof.analysis import api
    from commprof.recorder.clocks import process_clocks

    true_time = time.time_ns
    shift = [0]

    def stepped(place: Path, step: int) -> None:
        shift[0] = 0 if step < 4 else -7200_000_000_000 if step < 8 else 86_400_000_000_000
        false_time = lambda: true_time() + shift[0]  # noqa: E731
        monkeypatch.setattr(time, "time_ns", false_time)
        monkeypatch.setattr(process_clocks.read_clocks, "__defaults__", (time.perf_counter_ns, false_time, 5))

    for plain, recorded, _ in _compared(tmp_path, lambda place: None, disturb=stepped):
        assert plain == recorded
    run = open_run(tmp_path / "run")
    for rank in range(2):
        times = calls(run, rank, "issue_ns", "return_ns", "wait_end_ns")
        assert times == sorted(times) and all(a <= b <= c for a, b, c in times)
        assert times[-1][2] - times[0][0] < 60_000_000_000
    readings = [row for row in run.table("clocks").to_pylist() if row["rank"] == 0]
    offsets = [row["realtime_ns"] - row["monotonic_ns"] for row in readings]
    # the jump of the clock is kept for users who need the date
    assert max(offsets) - min(offsets) > 80_000_000_000_000
    facts = api.overview(run)
    assert facts["collectives"] == 60 and facts["state"] == "complete"
    assert facts["step_time_ns"] is None or 0 < facts["step_time_ns"] < 60_000_000_000
