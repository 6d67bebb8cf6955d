"""``commprof calibrate`` with real gloo ranks.

The ranks are started by the command itself, by torchrun, or by the environment variables of another launcher.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from commprof.calibration.calibration_plan import OPS, Plan
from commprof.calibration.file import read_calibration
from commprof.launch.environment import free_port
from support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.alone]

SMALL = ["--sizes", "1K,3000,64K", "--iterations", "3", "--warmup", "1"]
QUIET = {
    name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
}
QUIET |= {"OMP_NUM_THREADS": "1"}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "commprof", "calibrate", *words]


def run(words: list[str], **options) -> subprocess.CompletedProcess:
    return subprocess.run(words, capture_output=True, text=True, timeout=110, **{"env": QUIET, **options})


def measured(rank: int, world: int, plan: Plan, wrong: bool = False, most: int | None = None):
    """Run one rank of a sweep in a forked process.

    With ``wrong``, the backend loses the data that rank 1 sends. Rank 1 has no memory for more than ``most``
    elements.
    """
    import torch.distributed as dist

    from commprof.calibration import calibration_sweep
    from commprof.errors import CommprofError

    if wrong and rank == 1:
        send = dist.all_reduce
        dist.all_reduce = lambda tensor, *rest, **named: send(
            tensor.zero_() if tensor.dtype.is_floating_point and tensor.numel() > 1 else tensor,
            *rest,
            **named,
        )
    if most is not None and rank == 1:
        prepare = calibration_sweep.trial

        def refuse(op, rank, count, buffers):
            if count > most:
                raise RuntimeError("out of memory")
            return prepare(op, rank, count, buffers)

        calibration_sweep.trial = refuse
    said: list[str] = []
    try:
        found = calibration_sweep.measure(
            plan, calibration_sweep.Member(rank, world, rank, world), said.append
        )
    except CommprofError as error:
        return str(error)
    return found, said


def of_ranks(world: int, plan: Plan, **options):
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return run_ranks(world, measured, plan, *options.values(), process_group=False, env=port)


def test_every_operation_is_timed_at_every_size_with_its_data_checked():
    plan = Plan(sizes=(1000, 4096, 65536), device="cpu", iterations=4, warmup=1)
    results = of_ranks(3, plan)
    assert [found is None for found, _ in results] == [False, True, True], "the first rank has the results"
    found, said = results[0]
    assert set(found.timings) == set(OPS) and not found.skipped
    for timings in found.timings.values():
        assert [t.payload_bytes for t in timings] == [996, 4092, 65532], (
            "whole elements of 4 bytes for each of 3 ranks"
        )
        assert all(0 < t.low_ns <= t.time_ns <= t.high_ns and t.iterations == 4 for t in timings)
    assert (found.world_size, found.backend, found.device, len(found.hosts)) == (3, "gloo", "cpu", 1)
    assert len(said) == len(OPS)
    assert not any("/" in value for value in found.environment.values())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_element_types_are_checked_exactly_too(dtype):
    plan = Plan(
        ops=("all_reduce", "all_gather"), sizes=(4096,), dtype=dtype, device="cpu", iterations=1, warmup=0
    )
    found, _ = of_ranks(2, plan)[0]
    assert set(found.timings) == {"all_reduce", "all_gather"} and found.dtype == dtype


def test_wrong_data_end_the_calibration_on_every_rank():
    plan = Plan(ops=("all_reduce",), sizes=(4096,), device="cpu", iterations=1, warmup=0)
    for message in of_ranks(2, plan, wrong=True):
        assert "wrong data" in message and "all_reduce" in message


def test_a_size_for_which_one_rank_has_no_memory_is_left_out():
    plan = Plan(ops=("all_reduce", "reduce"), sizes=(4096, 65536), device="cpu", iterations=1, warmup=0)
    found, said = of_ranks(2, plan, wrong=False, most=1024)[0]
    assert {op: [each.payload_bytes for each in timings] for op, timings in found.timings.items()} == {
        "all_reduce": [4096],
        "reduce": [4096],
    }
    why = "from 65536 bytes on: another rank could not run the operation"
    assert found.skipped == {"all_reduce": why, "reduce": why} and why in said[0]


def test_the_command_starts_its_ranks_and_writes_one_file(tmp_path):
    out = tmp_path / "calibration.json"
    began = time.monotonic()
    done = run(command("--nproc", "2", *SMALL, "--out", str(out)))
    assert done.returncode == 0, done.stderr
    print(f"{time.monotonic() - began:.1f} s")
    assert [entry.name for entry in tmp_path.iterdir()] == [out.name]
    for op in OPS:
        assert op in done.stdout and f"{op}: 3 sizes measured" in done.stderr
    content = json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text(), "no place of this machine is in it"
    assert list(content["ops"]) == list(OPS)
    again = run(command("--nproc", "2", *SMALL, "--out", str(out)))
    assert again.returncode == 2 and "--force" in again.stderr
    assert json.loads(out.read_text()) == content


@pytest.mark.long
def test_under_torchrun_each_process_is_a_rank(tmp_path):
    out = tmp_path / "c.json"
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        f"--master_port={free_port()}",
    ]
    done = run([*launcher, "-m", "commprof", "calibrate", "--ops", "reduce", *SMALL, "--out", str(out)])
    assert done.returncode == 0, done.stderr
    found = read_calibration(out)
    assert list(found.timings) == ["reduce"] and found.world_size == 2
    assert done.stdout.count("Calibration: 2 ranks") == 1, "one rank speaks"


@pytest.mark.long
def test_with_the_variables_of_a_launcher_a_process_is_one_rank(tmp_path):
    out = tmp_path / "c.json"
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMPI_COMM_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            command("--ops", "broadcast", *SMALL, "--out", str(out)),
            env=QUIET
            | meeting
            | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=110)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert list(read_calibration(out).timings) == ["broadcast"]


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (["--nproc", "1"], {}, "cannot send to another"),
        (["--nproc", "x"], {}, "--nproc"),
        (["--nproc", "2"], {"RANK": "0", "WORLD_SIZE": "2"}, "Leave --nproc out"),
        ([], {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        (["--ops", "al_reduce"], {}, "did you mean 'all_reduce'"),
        (["--sizes", "4K:1K"], {}, "--sizes"),
        (["--dtype", "int8"], {}, "float32"),
        (["--device", "tpu"], {}, "cuda"),
        (["--backend", "mpi"], {}, "gloo"),
        (["--iterations", "0"], {}, "--iterations"),
        (["--nproc", "2", "--backend", "nccl", "--device", "cpu"], {}, "needs --device cuda"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_line(tmp_path, words, environment, said, capfd, monkeypatch):
    from commprof.cli import main

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["commprof", "calibrate", *words, "--out", str(tmp_path / "c.json")])
    with pytest.raises(SystemExit) as ended:
        main()
    text = capfd.readouterr().err
    assert ended.value.code == 2 and said in text and "Traceback" not in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_an_interrupt_ends_the_ranks_and_leaves_no_file(tmp_path):
    out = tmp_path / "c.json"
    words = command("--nproc", "2", "--sizes", "1K,2K", "--iterations", "1000000", "--out", str(out))
    process = subprocess.Popen(
        words, env=QUIET, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert "all_reduce" in process.stderr.readline(), "it has begun to measure"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode != 0 and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []
