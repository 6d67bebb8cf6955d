"""Measures how long it takes to finalize and open a long run: wall time, CPU time and memory for 1e7 records.

The records simulate a training on several ranks with 60 kinds of calls, 200 call sites, 90 tags, three process groups
and varying waits. The benchmark writes them as arrays, not one by one, into segments that the writer of the recorder
reserves. Each measurement runs in a separate process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from results import arguments, publish, spread

from commprof.schema import COMMIT, LAYERS, PHASES, SCHEMA_VERSION, STATUSES, Layer, Phase, Status
from commprof.trace.rank_files.layout import RankFile
from commprof.trace.rank_files.records import RECORD_DTYPE
from commprof.trace.rank_files.segments import pack_tail
from commprof.trace.rank_files.writer import EventFile, RecordFile

PER_STEP: Final = 500
SIGNATURES, SITES, TAGS, GROUPS = 60, 200, 90, 3
FINALISE_TARGET_S, OPEN_TARGET_S = 40.0, 0.3
_OPS: Final = ("all_reduce", "reduce", "all_gather", "reduce_scatter", "broadcast")
_METHODS: Final = {
    "all_reduce": "allreduce",
    "reduce": "reduce",
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "broadcast": "broadcast",
}


def _signature(number: int, world: int) -> dict[str, Any]:
    op = _OPS[number % len(_OPS)]
    size = 4096 * (1 + number % 37)
    return {
        "op": op,
        "backend_method": _METHODS[op],
        "backend": "gloo",
        "device": "cpu",
        "reduce_op": "SUM" if op in ("all_reduce", "reduce", "reduce_scatter") else None,
        "dtype": "float32",
        "num_tensors": 1,
        "sizes": str(size),
        "numel": size,
        "input_bytes": 4 * size,
        "output_bytes": 4 * size,
        "payload_bytes": 4 * size,
        "pg": str(number % GROUPS),
        "peer": number % world if op in ("reduce", "broadcast") else -1,
        "is_async": number % 3 == 0,
        "is_p2p": False,
    }


def _write_events(stem: Path, identity: RankFile, world: int, steps: int) -> None:
    events = EventFile(stem)
    about = {"rank": identity.rank, "attempt": 0, "pid": identity.pid, "part": 1}
    events.write("begin", {"schema_version": SCHEMA_VERSION, **about, "world_size": world, "host": "h"})
    for group in range(GROUPS):
        members = {"group_ranks": f"0-{world - 1}", "group_size": world, "group_rank": identity.rank}
        events.write(
            "group", {"pg": str(group), "group_desc": f"group {group}", **members, "backend": "cpu:gloo"}
        )
    for number in range(SIGNATURES):
        events.write("signature", {"id": 1 + number, **_signature(number, world)})
    for number in range(SITES):
        site = f"src/model/layer_{number // 8}.py:{40 + number} Layer{number % 8}.forward"
        events.write("site", {"id": 1000 + number, "call_site": site, "api": _OPS[number % len(_OPS)]})
    for number in range(TAGS):
        names = ",".join(f"blocks.{number}.{part}.weight" for part in ("qkv", "projection", "expand"))
        tag = {"purpose": "gradient_reduce", "bucket": number, "bucket_bytes": 1 << 20, "parameters": names}
        events.write("tag", {"id": 2000 + number, "owner": number % world, **tag})
    for number, name in enumerate(("MainThread", "autograd")):
        events.write("thread", {"id": 3000 + number, "name": name})
    events.write("clock", {"monotonic_ns": 1, "realtime_ns": 1_700_000_000_000_000_000, "uncertainty_ns": 50})
    for step in range(steps):
        time_ns = step * PER_STEP * 30_000
        events.write("step", {"step": step, "micro_step": 0, "time_ns": time_ns, "cpu_ns": time_ns})
        events.write("metrics", {"step": step, "name": "loss", "value": 1 / (step + 1), "time_ns": time_ns})
    events.write("end", {"time_ns": steps * PER_STEP * 30_000})
    events.close()


def _records(count: int, rank: int) -> np.ndarray[Any, Any]:
    """Return ``count`` records. Only their times differ between ranks."""
    rng = np.random.default_rng(rank)
    place = np.arange(count) % PER_STEP
    records = np.zeros(count, RECORD_DTYPE)
    records["issue_ns"] = np.cumsum(rng.integers(5_000, 55_000, count))
    records["return_ns"] = records["issue_ns"] + rng.integers(3_000, 20_000, count)
    records["wait_end_ns"] = records["return_ns"] + rng.lognormal(10, 1, count).astype(np.int64)
    signature = place * 7 % SIGNATURES
    records["signature"] = 1 + signature
    group = signature % GROUPS
    for number in range(GROUPS):
        mine = group == number
        records["pg_seq"][mine] = np.arange(int(mine.sum()))
    records["tag"] = np.where(place < TAGS, 2000 + place % TAGS, 0)
    records["call_site"] = 1000 + place % SITES
    records["thread"] = 3000 + (place % 5 == 0)
    records["step"] = np.arange(count) // PER_STEP
    records["phase"] = np.where(place < TAGS, PHASES.index(Phase.BACKWARD), PHASES.index(Phase.FORWARD))
    records["layer"] = LAYERS.index(Layer.PROCESS_GROUP)
    records["status"] = STATUSES.index(Status.INCOMPLETE)
    records["commit"] = COMMIT
    return records


def write_rank(run: Path, rank: int, world: int, count: int) -> None:
    """Write the files of one rank with ``count`` records.

    The files contain a made-up pid, so that commprof regards the process that wrote them as dead.
    """
    identity = RankFile(rank, 0, 4_000_000 + rank, 1)
    stem = run / identity.stem
    _write_events(stem, identity, world, -(-count // PER_STEP))
    file = RecordFile(stem, identity)
    data = memoryview(_records(count, rank)).cast("B")
    unwritten = (1, 0, 0, 0, 0, 0, pack_tail(0, 0, 0, 0, 0))
    while len(data):
        segment, base = file.append(*unwritten)  # opens another segment if the current segment is full
        begin = base * 8
        while segment.used < min(segment.end, begin + len(data)):
            segment.take(*unwritten)
        assert segment.map is not None, file.stopped_reason
        segment.map[begin : segment.used] = data[: segment.used - begin]
        data = data[segment.used - begin :]
    file.close({"records": count, "lost": 0, "faults": 0, "recorder_ns": 1, "stopped_reason": None})


def measure(what: str, run: str) -> dict[str, float]:
    """Run one measurement in this process; return seconds, CPU seconds, and peak resident memory in MiB."""
    from commprof.analysis import api
    from commprof.trace.finaliser import finalise

    actions = {
        "finalise": lambda: finalise(run),
        "open": lambda: api.open_run(run),
        "traffic": lambda: api.traffic(run, by=("op", "purpose")),
    }
    begin, cpu = time.perf_counter(), time.process_time()
    actions[what]()
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mib": peak / 1024}


def _measured(what: str, run: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", what, str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _row(what: str, wall: str, found: dict[str, float], target: str) -> list[str]:
    return [what, wall, f"{found['cpu_seconds']:.2f}", f"{found['peak_mib']:.0f}", target]


def main() -> None:
    """Write the run, measure, print the table and write it."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=10_000_000, help="over all ranks")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument(
        "--directory", type=Path, help="where to write the run; needs about 120 bytes a record"
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often the run is opened")
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "RUN"), help="used by the benchmark itself")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure)))
        return
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        run = Path(folder) / "run"
        run.mkdir()
        each = args.records // args.ranks
        for rank in range(args.ranks):
            write_rank(run, rank, args.ranks, each)
        raw = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
        finalised = _measured("finalise", run)
        size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
        opened = [_measured("open", run) for _ in range(args.rounds)]
        answered = _measured("traffic", run)
    records = each * args.ranks
    times = spread([one["seconds"] for one in opened])
    rows = [
        _row("finalise", f"{finalised['seconds']:.1f}", finalised, f"{FINALISE_TARGET_S:.0f}"),
        _row("open_run", times.text(3), opened[0], f"{OPEN_TARGET_S}"),
        _row("open_run and traffic by operation and purpose", f"{answered['seconds']:.1f}", answered, "-"),
    ]
    publish(
        args,
        f"A run of {records:,} records of {args.ranks} ranks: {raw / records:.1f} bytes a record while running, "
        f"{size / records:.1f} after finalising",
        ["what", "wall, s", "CPU, s", "peak RSS, MiB", "target, s"],
        rows,
        {
            "records": records,
            "raw_bytes": raw,
            "bytes": size,
            "finalise": finalised,
            "open_s": times,
            "traffic": answered,
        },
    )


if __name__ == "__main__":
    main()
