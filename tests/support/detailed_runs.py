"""A small run with data for each detail page of the dashboard: messages, owners, buckets, a straggler, an alignment."""

from __future__ import annotations

import contextlib
import io
import random
from pathlib import Path

import pyarrow as pa

from support import planted_nccl
from support.runs import SyntheticRun

WORLD = 4
LATE = 2  # the straggler
LATENESS_NS = 700_000


def detailed_run(seed: int = 0, steps: int = 12, backend: str = "nccl") -> SyntheticRun:
    """Return a run of four ranks with two buckets per step, whose parts are reduced to their owners.

    Rank 2 arrives 0.7 ms late at every all_gather.
    """
    chance = random.Random(seed)
    run = SyntheticRun(WORLD, backend=backend, config={"zero_optimization": {"stage": 2}})
    run.add_parameters({"embedding.weight": 6000, "head.weight": 3000, "head.bias": 1000})
    run.add_collective(
        "broadcast", payload_bytes=40_000, step=-1, phase="init", purpose="parameter_broadcast", peer=0
    )
    for step in range(steps):
        begin = 10_000_000 * (step + 1)
        run.add_step(step, begin_ns=begin, duration_ns=9_000_000, loss=3.0 - step / 10)
        for bucket, (names, numel, reason) in enumerate(
            (("embedding.weight", 6000, "full"), ("head.weight,head.bias", 4000, "end_of_backward"))
        ):
            for rank in range(WORLD):
                run.add(
                    "buckets", rank=rank, attempt=0, pid=run.pid(rank), step=step, micro_step=0, bucket=bucket,
                    numel=numel, bytes=4 * numel, capacity=6000, dtype="float32", owners="0,1", parameters=names,
                    flush_reason=reason, time_ns=begin + 1000,
                )  # fmt: skip
            for owner, part in enumerate((numel // 4, numel - numel // 4)):
                run.add_collective(
                    "reduce", payload_bytes=4 * part, step=step, purpose="gradient_reduce", bucket=bucket, owner=owner,
                    peer=owner, issue_ns=begin + 100_000 * (2 * bucket + owner + 1), host_ns=50_000, parameters=names,
                )  # fmt: skip
        run.add_collective("send", payload_bytes=4096, step=step, ranks=(0,), peer=3, purpose="pipeline")
        run.add_collective("recv", payload_bytes=4096, step=step, ranks=(3,), peer=0, purpose="pipeline")
        for rank in range(WORLD):
            late = LATENESS_NS if rank == LATE else chance.randrange(1000)
            run.add_collective(
                "all_gather", payload_bytes=40_000, step=step, purpose="parameter_gather", ranks=(rank,),
                issue_ns=begin + 2_000_000 + late, host_ns=1_000_000 - late, exposed_ns=1_000_000 - late,
            )  # fmt: skip
    return run


def aligned_run(path: Path, drop: int = 3, is_marked: bool = True) -> Path:
    """Write the detailed run, aligned with a planted NCCL log, and return its directory.

    The run has a ring and a tree. Its sends and recvs are left out.

    Args:
        drop: The number of lines that are missing from the log.
        is_marked: Whether the log contains the lines that mark it as generated.
    """
    from commprof.cli.application import invoke

    run = detailed_run()
    # Sends and recvs outside of a group have separate communicators, which are not needed here.
    run.rows["collectives"] = [row for row in run.rows["collectives"] if row["op"] not in ("send", "recv")]
    written = run.write(path)
    logs = written / "nccl"
    logs.mkdir()
    planted = planted_nccl.plant(run.table("collectives").to_pylist(), drop=drop)
    for name, lines in planted.files.items():
        kept = [line for line in lines if is_marked or not line.startswith("# GENERATED")]
        (logs / name).write_text("\n".join(kept) + "\n")
    with contextlib.redirect_stdout(io.StringIO()):
        assert invoke(["align", str(written), "--json"]) == 0
    add_topology(written)
    return written


def add_topology(path: Path) -> None:
    """Add a ring 0, 2, 1, 3 and a tree with root 0 for the first communicator of the log."""
    from commprof.trace.reader import open_run
    from commprof.trace.tables import arrow_schema, write_table

    first = open_run(path).table("nccl_communicators").to_pylist()[0]
    at = {name: first[name] for name in ("host", "pid", "comm", "comm_epoch", "file")} | {"line": 1}
    rings = [at | {"channel": 0, "channels": 1, "ranks": "0 2 1 3"}]
    trees = [
        at | {"tree": 0, "rank": rank, "parent": parent, "children": children}
        for rank, parent, children in ((0, None, "1 2"), (1, 0, "3"), (2, 0, ""), (3, 1, ""))
    ]
    for name, rows in (("nccl_rings", rings), ("nccl_trees", trees)):
        schema = arrow_schema(name)
        filled = [{column: row.get(column) for column in schema.names} for row in rows]
        write_table(path, name, pa.Table.from_pylist(filled, schema=schema))
