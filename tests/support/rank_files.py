"""Writes the files of a rank in the format of the recorder, without torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from commprof.schema import SCHEMA_VERSION
from commprof.trace.rank_files.layout import RankFile
from commprof.trace.rank_files.segments import RETURN_WORD, WAIT_END_WORD, Token, mark_raised, pack_tail
from commprof.trace.rank_files.writer import EventFile, RecordFile

SIGNATURE = {
    "op": "all_reduce",
    "backend_method": "allreduce",
    "backend": "gloo",
    "device": "cpu",
    "reduce_op": "SUM",
    "dtype": "float32",
    "num_tensors": 1,
    "sizes": "8",
    "numel": 8,
    "input_bytes": 32,
    "output_bytes": 32,
    "payload_bytes": 32,
    "pg": "0",
    "peer": -1,
    "is_async": False,
    "is_p2p": False,
}


def write_rank(
    run: Path,
    rank: int = 0,
    world: int = 1,
    records: int = 10,
    ended: bool = True,
    raised: Collection[int] = (),
    first_pid: int = 4_000_000,
    **begin: Any,
) -> Path:
    """Write the files of one rank into ``run``, and return their path without suffix.

    The process id in the files belongs to no running process. The calls whose numbers are in ``raised`` raise an
    exception. Each of them is marked as raised only after the next call has been recorded.
    """
    run.mkdir(parents=True, exist_ok=True)
    identity = RankFile(rank, 0, first_pid + rank, 1)
    stem = run / identity.stem
    file, events = RecordFile(stem, identity), EventFile(stem)
    about = {
        "rank": rank,
        "attempt": 0,
        "pid": identity.pid,
        "part": 1,
        "world_size": world,
        "host": "h",
        "torch": "2",
    }
    events.write("begin", {"schema_version": SCHEMA_VERSION, **about, **begin})
    group = {"pg": "0", "group_desc": "default_pg", "group_ranks": f"0-{world - 1}" if world > 1 else "0"}
    events.write("group", {**group, "group_size": world, "group_rank": rank, "backend": "cpu:gloo"})
    events.write("signature", {"id": 1, **SIGNATURE})
    events.write("site", {"id": 2, "call_site": "train.py:7 step", "api": "all_reduce"})
    events.write("thread", {"id": 3, "name": "MainThread"})
    events.write("clock", {"monotonic_ns": 1, "realtime_ns": 1_700_000_000_000_000_000, "uncertainty_ns": 50})
    late: Token | None = None
    for n in range(records):
        if n % 5 == 0:
            events.write("step", {"step": n // 5, "micro_step": 0, "time_ns": 1000 * n + 1, "cpu_ns": n})
        words, base = file.append(1000 * n + 10, n, 1, 0, 2, 3, pack_tail(n // 5, 0, 0, 2, 0))
        words[base + RETURN_WORD] = 1000 * n + 20
        if n not in raised:
            words[base + WAIT_END_WORD] = 1000 * n + 90
        if late is not None:
            signature, number = mark_raised(late)
            events.write("raised", {"signature": signature, "pg_seq": number})
        late = (words, base, False) if n in raised else None
    if ended:
        events.write("end", {"time_ns": 1000 * records})
        file.close({"records": records, "lost": 0, "faults": 0, "recorder_ns": 1, "stopped_reason": None})
    else:
        file.drop()
    events.close()
    return stem
