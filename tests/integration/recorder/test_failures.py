"""Training continues whatever happens to the recording or to its process.

Collectives that were issued stay in the trace.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.ranks import run_ranks
from support.recording import calls, record

pytestmark = pytest.mark.ranks


def issue(count: int) -> None:
    tensor = torch.ones(4)
    for _ in range(count):
        dist.all_reduce(tensor)


# A process that is killed.

_ENDLESS = """
import mmap, os, sys, time
import torch, torch.distributed as dist
import commprof

run, counter_file, store = sys.argv[1:]
counter = mmap.mmap(os.open(counter_file, os.O_RDWR), 8)
dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
commprof.attach(run)
tensor = torch.ones(4)
n = 0
while True:
    if n % 50 == 0:
        commprof.step(n // 50)
    dist.all_reduce(tensor[: 1 + n % 3])
    n += 1
    counter[:8] = n.to_bytes(8, "little")
"""


@pytest.mark.sampled
@pytest.mark.parametrize("attempt", range(2))
def test_sigkill_at_any_moment_loses_nothing_that_was_issued(tmp_path, attempt):
    from commprof.trace.finaliser import finalise
    from commprof.trace.reader import open_run

    counter = tmp_path / "counter"
    counter.write_bytes(bytes(8))
    run = tmp_path / "run"
    arguments = [sys.executable, "-c", _ENDLESS, str(run), str(counter), str(tmp_path / "store")]
    process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while struct.unpack("<Q", counter.read_bytes())[0] < 200 and time.monotonic() < deadline:
        time.sleep(0.01)
    still_open = open_run(run)
    assert still_open.health.state == "running" and still_open.health.records >= 200
    assert list(run.glob("*.records"))  # opening a run in progress does not finalise it
    time.sleep(random.Random(attempt).uniform(0.0, 0.3))
    process.send_signal(signal.SIGKILL)
    process.wait()
    issued = struct.unpack("<Q", counter.read_bytes())[0]

    opened = open_run(run)
    assert issued <= opened.health.records <= issued + 1
    assert opened.health.records == len(opened.table("collectives"))
    assert opened.health.lost == opened.health.torn == 0
    assert opened.health.state == "killed"
    assert any("rank 0 ended without closing its recording" in note for note in opened.health.notes)
    assert calls(opened, 0, "pg_seq") == list(range(opened.health.records))
    assert calls(opened, 0, "numel") == [1 + n % 3 for n in range(opened.health.records)]
    assert calls(opened, 0, "step") == [n // 50 for n in range(opened.health.records)]
    statuses = calls(opened, 0, "status")
    assert set(statuses[:-1]) == {"ok"} and statuses[-1] in ("ok", "incomplete")
    assert opened.health.incomplete == (statuses[-1] == "incomplete")
    finalise(run)
    assert not list(run.glob("*.records"))
    assert open_run(run).table("collectives").equals(opened.table("collectives"))


# A disk without free space.


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="mounts a tmpfs")
def test_a_full_disk_stops_recording_and_not_the_training(small_disk, capfd):
    from commprof.trace.reader import open_run

    total = 20_000  # these records take 2 MiB

    def body(rank, world):
        import commprof

        commprof.attach(str(small_disk / "run"))
        issue(total)
        commprof.detach()
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        return tensor.tolist()

    assert run_ranks(1, body) == [[1.0] * 4]
    errors = capfd.readouterr().err
    assert "recording stopped: could not reserve space in the trace" in errors
    assert errors.count("commprof:") == 1
    run = open_run(small_disk / "run")
    assert 1000 < run.health.records < total
    # The disk has no space left for the totals.
    assert run.health.records + run.health.lost == total or run.health.lost == 0
    assert str(total - run.health.records) in errors
    assert calls(run, 0, "pg_seq") == list(range(run.health.records))


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path, capfd):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")

    def body(rank, world):
        import commprof

        commprof.attach(str(blocked / "run"))
        issue(5)
        commprof.detach()
        return 1

    assert run_ranks(1, body) == [1]
    errors = capfd.readouterr().err
    assert "nothing is recorded" in errors and "Not a directory" in errors and "training continues" in errors
    assert "Traceback" not in errors and blocked.read_text() == "not a directory"


@pytest.mark.parametrize("out", ["run", None])
def test_ranks_that_change_their_working_directory_share_the_one_where_recording_was_requested(
    tmp_path, capfd, out
):
    from commprof.trace.directory import find_runs
    from commprof.trace.reader import open_run

    def body(rank, world):
        import commprof

        os.chdir(tmp_path)
        commprof.attach(out)
        elsewhere = tmp_path / f"elsewhere-{rank}"
        elsewhere.mkdir()
        os.chdir(elsewhere)
        store = dist.FileStore(str(tmp_path / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        issue(2)
        elsewhere.rmdir()
        commprof.detach()

    run_ranks(2, body, process_group=False)
    (run,) = find_runs(tmp_path)
    assert run.parent == (tmp_path if out else tmp_path / "traces")
    assert [calls(open_run(run), rank, "op") for rank in range(2)] == [["all_reduce"] * 2] * 2
    # The last line names the directory. A path relative to the deleted working directory would be useless.
    errors = capfd.readouterr().err
    assert "could not be closed" not in errors and (out is not None or str(run) in errors)


def test_a_directory_deleted_while_recording(tmp_path, capfd):
    def body(rank, world):
        import commprof

        commprof.attach(str(tmp_path / "run"))
        issue(3000)
        shutil.rmtree(tmp_path / "run")
        issue(3000)  # grows the file, whose name is already removed
        commprof.step(1)
        commprof.detach()
        return 1

    assert run_ranks(1, body) == [1]
    assert "Traceback" not in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def refuse_to_reserve(number):
    def reserve(descriptor, offset, size):
        raise OSError(number, os.strerror(number))

    return reserve


@pytest.mark.sampled
@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_cannot_reserve_is_written_through(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "posix_fallocate", refuse_to_reserve(number))
    run, _ = record(tmp_path / "run", 1, lambda rank, world: issue(300))
    assert run.health.records == 300 and run.health.lost == 0
    assert set(calls(run, 0, "status")) == {"ok"}
    assert all(wait is not None for wait in calls(run, 0, "wait_end_ns"))


@pytest.mark.sampled
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_no_room_from_the_beginning(tmp_path, monkeypatch, capfd, number):
    monkeypatch.setattr(os, "posix_fallocate", refuse_to_reserve(number))
    run, _ = record(tmp_path / "run", 1, lambda rank, world: issue(30))
    assert run.health.records == 0 and run.health.lost == 30
    assert os.strerror(number) in capfd.readouterr().err
    assert any(
        "stopped recording" in note and "30 collectives were dropped" in note for note in run.health.notes
    )


def test_no_room_for_the_side_file_stops_records_that_nobody_could_read(tmp_path, monkeypatch, capfd):
    write = os.write

    def fails_later(descriptor, data, written=[0]):  # noqa: B006 - counts over all calls
        if b'"kind":"signature"' in data:
            written[0] += 1
            if written[0] > 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    def body(rank, world):
        monkeypatch.setattr(os, "write", fails_later)
        issue(10)
        dist.broadcast(torch.ones(3), 0)  # a second signature
        issue(10)

    run, _ = record(tmp_path / "run", 1, body)
    assert calls(run, 0, "op") == ["all_reduce"] * 10
    assert run.health.lost == 11
    assert "No space left on device" in capfd.readouterr().err


# Faults of the recorder itself.


def losses() -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for _ in range(20):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(
                parameter.grad, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM
            )
        work = dist.all_gather(
            [torch.empty(()) for _ in range(dist.get_world_size())], loss.detach(), async_op=True
        )
        work.wait()
        optimizer.step()
        history.append(loss.item())
    return history


def test_a_fault_in_the_recorder_changes_nothing(tmp_path, monkeypatch, capfd):
    from commprof.recorder.process import journal
    from commprof.recorder.process_group import callsite, groups, signatures, wrappers
    from commprof.recorder.training import step_writer

    places = [
        (signatures, "describe"),
        (signatures.Signer, "sign"),
        (wrappers, "freeze"),
        (journal.Journal, "intern"),
        (journal.Journal, "intern_thread"),
        (journal.Journal, "write"),
        (groups.Groups, "_read"),
        (callsite.CallSites, "find"),
        (step_writer.Steps, "begin"),
    ]

    def broken(*args, **kwargs):
        raise RuntimeError("planted")

    def body(rank, world):
        import commprof

        plain = losses()
        recorded = []
        for number, place in enumerate(places):
            with monkeypatch.context() as patch:
                patch.setattr(*place, broken)
                commprof.attach(str(tmp_path / f"run-{number}"))
                recorded.append(losses())
                commprof.detach()
        return plain, recorded

    for plain, recorded in run_ranks(2, body):
        assert recorded == [plain] * len(places)
    errors = capfd.readouterr().err
    assert "Traceback" not in errors and errors.count("planted") >= len(places)


# Processes that start and exit.


def test_a_forked_child_leaves_the_files_of_its_parent_alone(tmp_path):
    def body(rank, world):
        issue(3)
        pid = os.fork()
        if pid == 0:
            import commprof
            from commprof.recorder.session import current

            commprof.step(99)
            commprof.metric("loss", 1.0)
            clean = current() is None and not commprof.recording()
            os._exit(0 if clean else 1)
        issue(3)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    run, outcomes = record(tmp_path / "run", 1, body)
    assert outcomes[0]["result"] == 0
    assert calls(run, 0, "op") == ["all_reduce"] * 6
    assert len(run.manifest.ranks) == 1 and len(run.table("metrics")) == 0


def test_attach_and_detach_twice_goes_on_counting(tmp_path):
    from commprof.trace.reader import open_run

    def body(rank, world):
        import commprof

        for n in (2, 3):
            commprof.attach(str(tmp_path / "run"))
            commprof.attach(str(tmp_path / "elsewhere"))  # does nothing
            issue(n)
            commprof.detach()
            issue(1)  # not recorded
        return 1

    run_ranks(2, body)
    run = open_run(tmp_path / "run")
    for rank in range(2):
        assert calls(run, rank, "seq") == [0, 1, 2, 3, 4]
    assert len(run.manifest.ranks) == 4 and run.health.ranks_recorded == 2
    assert not (tmp_path / "elsewhere").exists()
    assert run.health.unseen == 0


def test_init_and_destroy_again_and_again_under_one_recording(tmp_path):
    from commprof.trace.reader import open_run

    def body(rank, world):
        import commprof

        commprof.attach(str(tmp_path / "run"))
        for cycle in range(3):
            store = dist.FileStore(str(tmp_path / f"store-{cycle}"), world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            issue(cycle + 1)
            dist.destroy_process_group()
        commprof.detach()
        return 1

    run_ranks(2, body, process_group=False)
    run = open_run(tmp_path / "run")
    assert calls(run, 1, "pg", "pg_seq") == [
        ("0", 0),
        ("0#2", 0),
        ("0#2", 1),
        ("0#3", 0),
        ("0#3", 1),
        ("0#3", 2),
    ]
    assert run.health.unseen == 0 and run.health.state == "complete"


def test_torch_has_its_own_methods_back_after_detach(tmp_path):
    def body(rank, world):
        from torch._C._distributed_c10d import ProcessGroup, Work

        import commprof

        before = (
            dict(vars(ProcessGroup)),
            dict(vars(Work)),
            dist.init_process_group,
            dist.destroy_process_group,
        )
        commprof.attach(str(tmp_path / "run"))
        assert vars(ProcessGroup)["allreduce"] is not before[0]["allreduce"]
        ours = vars(ProcessGroup)["broadcast"]

        def somebody_else(*args, **kwargs):
            return ours(*args, **kwargs)

        ProcessGroup.broadcast = somebody_else
        commprof.detach()
        assert vars(ProcessGroup)["broadcast"] is somebody_else
        dist.broadcast(torch.ones(1), 0)
        ProcessGroup.broadcast = before[0]["broadcast"]
        after = (
            dict(vars(ProcessGroup)),
            dict(vars(Work)),
            dist.init_process_group,
            dist.destroy_process_group,
        )
        return before == after

    assert run_ranks(1, body) == [True]


_ARMED = """
import os, sys
import torch.distributed as dist
from commprof.recorder.session import arm
arm()
if sys.argv[1] == "rank":
    import torch
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 1), rank=0, world_size=1)
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2] + "b", 1), rank=0, world_size=1)
    dist.barrier()
"""


@pytest.mark.long
def test_armed_processes_record_once_they_are_ranks(tmp_path):
    from commprof.trace.reader import open_run

    environment = {**os.environ, "COMMPROF_RUN": str(tmp_path / "run"), "TORCHELASTIC_RESTART_COUNT": "2"}
    for role in ("bystander", "rank"):
        command = [sys.executable, "-c", _ARMED, role, str(tmp_path / "store")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stderr) == (0, "")
        if role == "bystander":
            assert not (tmp_path / "run").exists()
    run = open_run(tmp_path / "run")
    assert calls(run, 0, "op", "attempt") == [("all_reduce", 2), ("barrier", 2)]
    assert run.health.state == "complete"
    assert Path(run.manifest.command[0]).name.startswith("python")


_SPAWNED = """
import sys
import torch, torch.distributed as dist, torch.multiprocessing
from commprof.recorder.session import arm

def rank_main(rank, store):
    arm()
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    dist.all_reduce(torch.ones(2))

if __name__ == "__main__":
    arm()
    torch.multiprocessing.start_processes(rank_main, (sys.argv[1],), nprocs=2, start_method=sys.argv[2])
"""


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_that_the_program_itself_starts(tmp_path, method):
    from commprof.trace.reader import open_run

    script = tmp_path / "program.py"
    script.write_text(_SPAWNED)
    environment = {**os.environ, "COMMPROF_RUN": str(tmp_path / "run")}
    command = [sys.executable, str(script), str(tmp_path / "store"), method]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    assert [calls(run, rank, "op") for rank in range(2)] == [["all_reduce"]] * 2
    # each rank recorded that it ended
    assert run.health.state == "complete" and run.health.ranks_recorded == 2


_WORKERS = """
import multiprocessing, sys, torch, torch.distributed as dist
from commprof.recorder.session import arm

def work():
    pass

arm()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
worker = multiprocessing.get_context("fork").Process(target=work)
worker.start()
worker.join()
dist.all_reduce(torch.ones(2))
"""


@pytest.mark.long
def test_a_data_loader_s_worker_is_no_rank(tmp_path):
    from commprof.trace.reader import open_run

    script = tmp_path / "program.py"
    script.write_text(_WORKERS)
    environment = {**os.environ, "COMMPROF_RUN": str(tmp_path / "run")}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    assert calls(run, 0, "op") == ["all_reduce"] * 2
    assert (run.health.state, run.health.notes) == ("complete", ())
    assert len(run.manifest.ranks) == 1


@pytest.mark.long
def test_ranks_of_one_launcher_share_a_directory_by_default(tmp_path):
    from commprof.trace.directory import find_runs
    from commprof.trace.reader import open_run

    script = tmp_path / "train_net.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist, commprof\n"
        "commprof.attach()\n"
        "dist.init_process_group('gloo', store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2)\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    for job in range(2):  # two consecutive jobs of one parent, as from a shell
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(tmp_path / f"store-{job}")],
                cwd=tmp_path,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        errors = [process.communicate(timeout=100)[1] for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0]
        assert "next: commprof report traces/train_net-20" in errors[0] and errors[1] == ""
    first, second = find_runs(tmp_path / "traces")
    assert first.name.startswith("train_net-20") and second.name == f"{first.name}-2"
    for directory in (first, second):
        run = open_run(directory)
        assert run.health.ranks_recorded == 2 and run.health.records == 2 and run.manifest.world_size == 2
