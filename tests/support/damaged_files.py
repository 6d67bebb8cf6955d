"""Runs of two ranks, and the damage that may happen to one of their files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

from support.rank_files import write_rank

CONFIG = {"zero_optimization": {"stage": 2}, "train_batch_size": 2}
EVENTS = [
    {"kind": "metrics", "step": 0, "name": "loss", "value": 1.5, "time_ns": 5},
    {
        "kind": "parameters",
        "name": "w",
        "shape": "8",
        "dtype": "float32",
        "numel": 8,
        "requires_grad": True,
        "module": "m",
    },
    {
        "kind": "buckets",
        "step": 0,
        "micro_step": 0,
        "bucket": 0,
        "numel": 8,
        "bytes": 32,
        "dtype": "fp32",
        "time_ns": 6,
    },
    {"kind": "note", "text": "a note"},
    {"kind": "unseen", "pg": "0", "unseen": 0},
]


def unfinalised_run(run: Path, records: int = 40) -> Path:
    """Write a run in the state in which two ranks and the launcher leave it, not finalized."""
    from commprof.trace.manifest import Manifest, create_run

    about = {"script": "train.py", "nproc": 2, "world_size": 2, "config": CONFIG, "state": "complete"}
    create_run(run, Manifest(started_realtime_ns=1_700_000_000_000_000_000, **about))
    (run / "config.json").write_text(json.dumps(CONFIG))
    for rank in range(2):
        stem = write_rank(run, rank, 2, records)
        with stem.with_name(stem.name + ".events").open("a") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in EVENTS)
    counted = {"host": "h", "device": "lo", "kind": "interface", "sent_bytes": 1, "received_bytes": 2}
    sampled = {"host": "h", "source": "proc", "device": "cpu", "name": "busy", "value": 1.0, "step": None}
    for name, row in (("wire.jsonl", counted), ("samples.jsonl", sampled)):
        lines = [json.dumps({**row, "time_ns": 5000 * time}) + "\n" for time in range(20)]
        (run / name).write_text("".join(lines))
    (run / "processes.jsonl").write_text(json.dumps({"pid": 7, "note": "a process"}) + "\n")
    for file in run.iterdir():
        os.utime(file, (1, 1))
    return run


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def random_bytes(file: Path) -> None:
    file.write_bytes(Random(file.name).randbytes(max(file.stat().st_size, 4096)))


def one_byte_changed(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 0x55
    file.write_bytes(content)


def directory_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()


def missing(file: Path) -> None:
    file.unlink()


def pipe_instead(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES: list[Callable[[Path], None]] = [
    truncated,
    emptied,
    random_bytes,
    one_byte_changed,
    directory_instead,
    missing,
    pipe_instead,
]


def contents(place: Path) -> dict[str, bytes]:
    """Return the bytes of every regular file below ``place``, by relative path."""
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }
