"""Writes a directory with a run of every kind that the dashboard may read.

There are recorded, killed and imported runs, a run with only sums, and a hostile run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.logged_training import fork
from support.ranks import RankError, run_ranks
from support.runs import SyntheticRun

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>" + "x" * 10_000
WORLD = 2
STEPS = 4
CAPACITY_MB = 0.05
KINDS = (
    "ddp",
    "fsdp",
    "one-rank",
    "sums",
    "killed",
    "going",
    "imported-flight",
    "imported-kineto",
    "imported-inspector",
    "imported-comms",
    "hostile",
    "no-steps",
    "nothing",
    "broken",
)


def make_kinds(base: Path) -> None:
    """Write every run of :data:`KINDS` except ``going`` below ``base``."""
    record(base / "ddp", "ddp")
    record(base / "fsdp", "fsdp")
    record(base / "one-rank", "ddp", world=1)
    record(base / "sums", "ddp", aggregate=True)
    record(base / "no-steps", "plain")
    with contextlib.suppress(RankError):  # the ranks of this run are meant to be killed
        record(base / "killed", "killed")
    import_flight(base)
    import_kineto(base)
    import_inspector(base)
    import_comms_logger(base)
    hostile_run().write(base / "hostile")
    SyntheticRun(WORLD).write(base / "nothing")
    (base / "broken").mkdir()
    (base / "broken" / "run.json").write_text("{")


def record(path: Path, how: str, world: int = WORLD, **options: Any) -> None:
    """Record a run of gloo ranks that train, or that only issue collectives, as ``how`` specifies."""
    from commprof.trace.manifest import COMPLETE, Manifest, create_run, read_manifest, write_manifest

    create_run(path, _manifest(Manifest, world))
    run_ranks(world, _rank, str(path), how, options)
    manifest = read_manifest(path)
    manifest.state, manifest.exit_code = COMPLETE, 0
    write_manifest(path, manifest)


def _manifest(kind: Any, world: int) -> Any:
    return kind(
        command=["python", "train.py"],
        script="train.py",
        started_realtime_ns=1_700_000_000_000_000_000,
        world_size=world,
        nproc=world,
        hosts=[os.uname().nodename],
    )


@contextlib.contextmanager
def going_run(path: Path) -> Iterator[None]:
    """Write a run whose ranks have finished a few steps, and keep the ranks waiting until the end of the context."""
    from commprof.trace.manifest import Manifest, create_run

    create_run(path, _manifest(Manifest, WORLD))
    ready, hold = os.pipe(), os.pipe()
    parent = fork(_hold, path, ready[1], hold[0])
    try:
        for _ in range(WORLD):
            os.read(ready[0], 1)
        yield
    finally:
        os.write(hold[1], b"." * WORLD)
        os.waitpid(parent, 0)
        for end in (*ready, *hold):
            os.close(end)


def _hold(path: Path, ready: int, hold: int) -> None:
    run_ranks(WORLD, _wait, str(path), ready, hold, timeout=3600)


def _wait(rank: int, world: int, path: str, ready: int, hold: int) -> None:
    from commprof import hooks

    hooks.attach(path, quiet=True)
    _train(_ddp(), STEPS)
    os.write(ready, b".")
    os.read(hold, 1)
    hooks.detach()


def _rank(rank: int, world: int, path: str, how: str, options: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    import commprof

    commprof.attach(path, quiet=True, **options)
    if how == "plain":
        for _ in range(5):
            dist.all_reduce(torch.ones(100))
    elif how == "fsdp":
        _train(_fsdp(), STEPS)
    else:
        _train(_ddp(), STEPS)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    commprof.detach()


def layers() -> Any:
    """Return a model with three blocks of 8,320 elements and a head of 65 elements."""
    import torch

    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)) for _ in range(3)]
    return torch.nn.Sequential(*blocks, torch.nn.Linear(64, 1))


def _ddp() -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(layers(), bucket_cap_mb=CAPACITY_MB)


def _fsdp() -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = layers(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _train(model: Any, steps: int) -> None:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def import_flight(base: Path) -> None:
    """Import a dump of the Flight Recorder of each rank. The run has no steps, no purposes, and wall-clock times."""
    from commprof.imports.formats import import_files

    files = []
    for rank in range(WORLD):
        entries = [
            {
                "record_id": n, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": n + 1,
                "p2p_seq_id": 0, "op_id": n, "profiling_name": "gloo:all_reduce", "input_sizes": [[1000]],
                "input_dtypes": ["Float"], "output_sizes": [[1000]], "output_dtypes": ["Float"], "state": "completed",
                "time_created_ns": 1_795_300_000_000_000_000 + 1_000_000 * n + rank, "retired": True, "is_p2p": False,
                "frames": [{"name": "step", "filename": "train.py", "line": 7}],
            }
            for n in range(6)
        ]  # fmt: skip
        dump = {
            "version": "2.10",
            "entries": entries,
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(WORLD)))}},
        }
        files.append(base / f"flight_{rank}")
        files[-1].write_text(json.dumps(dump))
    import_files(files, base / "imported-flight")


def import_kineto(base: Path) -> None:
    """Import a trace of torch.profiler of each rank. The run has host times and kernel times of NCCL."""
    from commprof.imports.formats import import_files

    files = []
    for rank in range(WORLD):
        events: list[dict[str, Any]] = []
        for n in range(6):
            said = {
                "Collective name": "allreduce", "dtype": "Float", "In msg nelems": 1000, "Out msg nelems": 1000,
                "Group size": WORLD, "Process Group Name": "0", "Process Group Description": "default_pg",
                "Process Group Ranks": str(list(range(WORLD))), "Seq": n + 1, "External id": n,
            }  # fmt: skip
            at = 100 + 1000 * n + rank
            place = {"ph": "X", "pid": 77, "tid": 1, "args": said}
            events.append(place | {"cat": "cpu_op", "name": "record_param_comms", "ts": at, "dur": 20})
            events.append(place | {"cat": "kernel", "name": "ncclDevKernel", "ts": at + 100, "dur": 200.5})
        groups = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": WORLD, "ranks": list(range(WORLD))}]
        trace = {
            "schemaVersion": 1,
            "distributedInfo": {
                "backend": "nccl",
                "rank": rank,
                "world_size": WORLD,
                "pg_config": groups,
            },
            "baseTimeNanoseconds": 1_795_300_000_000_000_000,
            "traceEvents": events,
        }
        files.append(base / f"kineto-{rank}.json")
        files[-1].write_text(json.dumps(trace))
    import_files(files, base / "imported-kineto")


def import_inspector(base: Path) -> None:
    """Import the log of NCCL's Inspector of each rank. The run has kernel times, but no host times."""
    from commprof.imports.formats import import_files

    files = []
    for rank in range(WORLD):
        lines = [
            {
                "header": {"id": "0xabc", "rank": rank, "n_ranks": WORLD, "nnodes": 1},
                "metadata": {
                    "inspector_output_format_version": "v4.0", "dump_timestamp_us": 5_000_000 + n,
                    "hostname": "node1", "pid": 100 + rank,
                },
                "coll_perf": {
                    "coll": "AllReduce", "coll_sn": n, "coll_msg_size_bytes": 4000, "coll_exec_time_us": 50 + n,
                    "event_trace_ts": {"coll_start_ts": 1_000 * n, "coll_stop_ts": 1_000 * n + 50},
                },
            }
            for n in range(1, 7)
        ]  # fmt: skip
        files.append(base / f"node1-pid{100 + rank}.log")
        files[-1].write_text("\n".join(map(json.dumps, lines)))
    import_files(files, base / "imported-inspector")


def import_comms_logger(base: Path) -> None:
    """Import the output of DeepSpeed's comms logger. The run has one rank and the latencies of calls, but no groups."""
    from commprof.imports.formats import import_files

    head = "[INFO] [logging.py:96:log_dist] [Rank 0] comm op: all_reduce | time (ms):"
    rates = "msg size: 1.5 MB | algbw (Gbps): 20.00 | busbw (Gbps): 20.00"
    lines = [
        f"[2026-01-02 03:04:0{5 + n},500] {head} {total:.2f} | {rates}"
        for n, total in enumerate((1.5, 4.0, 8.0))
    ]
    (base / "comms.txt").write_text("\n".join(lines))
    import_files([base / "comms.txt"], base / "imported-comms")


def hostile_run() -> SyntheticRun:
    """Return a run with hostile values.

    Names contain markup or 10,000 characters, some times are negative, and a step ends before it begins.
    """
    config = {"zero_optimization": {"stage": 2, HOSTILE[:200]: HOSTILE}}
    run = SyntheticRun(2, backend="nccl", script=HOSTILE, config=config)
    run.add_parameters({HOSTILE: 100})
    run.add_step(0, begin_ns=-5_000_000, duration_ns=100, loss=float("nan"))
    run.add_step(1, begin_ns=-4_000_000, duration_ns=-100, loss=float("inf"))
    for number, op in enumerate(("all_reduce", "reduce") * 2):
        run.add_collective(
            op, payload_bytes=400, step=number // 2, pg=HOSTILE, peer=0, purpose="gradient_reduce", bucket=0,
            issue_ns=-4_000_000 + number, parameters=HOSTILE, call_site=HOSTILE, group_desc=HOSTILE, module=HOSTILE,
        )  # fmt: skip
    run.add("buckets", rank=0, attempt=0, pid=1000, step=0, micro_step=0, bucket=0, numel=100, bytes=400, capacity=0,
            dtype=HOSTILE, owners=HOSTILE, parameters=HOSTILE, flush_reason=HOSTILE, time_ns=-1)  # fmt: skip
    run.add("matches", state="missing", rank=0, attempt=0, record_pid=1000, seq=0, pg=HOSTILE, op="all_reduce",
            record_bytes=400, reason=HOSTILE)  # fmt: skip
    return run
