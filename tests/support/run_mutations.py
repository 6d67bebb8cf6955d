"""Mutations of run directories that simulate accidents and attacks. Each mutation changes one thing in a run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DEEP = 100_000
HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    7,
    3.5,
    2**31,
    2**62,
    2**70,
    -(2**63),
    10**300,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "0",
    "<script>alert(1)</script>",
    "\ud800",
    "\x1b[31mred\x00",
    "../../../etc/passwd",
    "x" * 100_000,
    [],
    [1, "a", None],
    {},
    {"a": {"b": [1]}},
]

Mutation = Callable[[Path, Random], None]


def files_of(run: Path, *suffixes: str) -> list[Path]:
    """Return the regular files of ``run`` with one of ``suffixes``; all regular files if no suffix is given."""
    return sorted(
        path
        for path in run.rglob("*")
        if path.is_file() and not path.is_symlink() and (not suffixes or path.suffix in suffixes)
    )


def _any(run: Path, rng: Random, *suffixes: str) -> Path:
    found = files_of(run, *suffixes) or files_of(run)
    small = [file for file in found if file.stat().st_size < 1 << 30]
    if not small:
        (run / "run.json").touch()
    return rng.choice(small or [run / "run.json"])


def truncate(run: Path, rng: Random) -> None:
    file = _any(run, rng)
    os.truncate(file, rng.randrange(file.stat().st_size + 1))


def flip_bits(run: Path, rng: Random) -> None:
    file = _any(run, rng)
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 1, 8, 64])):
        if data:
            data[rng.randrange(min(len(data), rng.choice([64, 8192, 1 << 30])))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def zero_a_block(run: Path, rng: Random) -> None:
    file = _any(run, rng)
    data = bytearray(file.read_bytes())
    begin = rng.randrange(len(data) + 1)
    end = min(len(data), begin + rng.choice([1, 104, 4096]))
    data[begin:end] = bytes(end - begin)
    file.write_bytes(data)


def empty(run: Path, rng: Random) -> None:
    _any(run, rng).write_bytes(b"")


def append_garbage(run: Path, rng: Random) -> None:
    with _any(run, rng).open("ab") as stream:
        stream.write(rng.randbytes(rng.choice([1, 104, 5000])))


def remove(run: Path, rng: Random) -> None:
    _any(run, rng).unlink()


def wrong_value_in_events(run: Path, rng: Random) -> None:
    file = _any(run, rng, ".events", ".jsonl")
    lines = file.read_bytes().splitlines()
    for _ in range(rng.choice([1, 3, 20]) if lines else 0):
        number = rng.randrange(len(lines))
        try:
            row = json.loads(lines[number])
        except (ValueError, RecursionError):
            continue
        _replace_somewhere(row, rng)
        lines[number] = json.dumps(row).encode()
    file.write_bytes(b"".join(line + b"\n" for line in lines))


def wrong_value_in_manifest(run: Path, rng: Random) -> None:
    file = run / "run.json"
    if not file.exists():
        file.write_text('{"schema_version": 1}')
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return  # an earlier mutation damaged the file
    for _ in range(rng.choice([1, 1, 3])):
        _replace_somewhere(content, rng)
    file.write_text(json.dumps(content))


def _replace_somewhere(value: Any, rng: Random) -> None:
    """Replace a random value inside of ``value`` by a hostile value."""
    while isinstance(value, dict | list) and value:
        key = rng.choice(sorted(value)) if isinstance(value, dict) else rng.randrange(len(value))
        if not isinstance(value[key], dict | list) or not value[key] or rng.random() < 0.3:
            value[key] = rng.choice(HOSTILE)
            return
        value = value[key]


def manifest_is_something_else(run: Path, rng: Random) -> None:
    nested = b"[" * DEEP + b"]" * DEEP
    text = rng.choice(
        [b"[]", b"3", b"null", b'"run"', b"\xff\xfe", nested, b"{" * 5, b'{"schema_version": true}']
    )
    (run / "run.json").write_bytes(text)


def deep_line(run: Path, rng: Random) -> None:
    with _any(run, rng, ".events", ".jsonl").open("ab") as stream:
        stream.write(b'{"kind":"note","text":' + b"[" * DEEP + b"]" * DEEP + b"}\n")


def duplicate_lines(run: Path, rng: Random) -> None:
    file = _any(run, rng, ".events", ".jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines, *rng.choices(lines, k=30)]) if lines else b"")


def shuffle_lines(run: Path, rng: Random) -> None:
    file = _any(run, rng, ".events", ".jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    rng.shuffle(lines)
    file.write_bytes(b"".join(lines))


def same_id_twice(run: Path, rng: Random) -> None:
    file = _any(run, rng, ".events")
    if file.suffix != ".events":
        return
    signature = {"kind": "signature", "id": 1, "op": "reduce"}
    for line in file.read_bytes().splitlines():
        if line.startswith(b'{"kind":"signature"'):
            try:
                signature = json.loads(line)
            except (ValueError, RecursionError):
                continue
    with file.open("ab") as stream:
        stream.write(json.dumps({**signature, "op": "barrier", "payload_bytes": 0}).encode() + b"\n")


def swap_ranks(run: Path, rng: Random) -> None:
    suffix = rng.choice([".records", ".events", ".parquet"])
    found = [file for file in files_of(run, suffix) if file.name.startswith("rank-")]
    if len(found) < 2:
        found = [file for file in files_of(run) if file.name.startswith("rank-")]
    if len(found) >= 2:
        first, second = found[:2]
        between = first.with_name("between")
        first.rename(between)
        second.rename(first)
        between.rename(second)


def directory_instead(run: Path, rng: Random) -> None:
    file = _any(run, rng)
    file.unlink()
    file.mkdir()


def pipe_instead(run: Path, rng: Random) -> None:
    file = _any(run, rng)
    file.unlink()
    os.mkfifo(file)


def device_instead(run: Path, rng: Random) -> None:
    file = _any(run, rng)
    file.unlink()
    file.symlink_to(rng.choice(["/dev/zero", "/dev/null", "/proc/self/mem", "nowhere"]))


def link_outside(run: Path, rng: Random) -> None:
    """Move a file out of the run and replace it by a link. commprof must not change files outside of the run."""
    file = _any(run, rng)
    outside = run.parent.parent / "outside"
    outside.mkdir(exist_ok=True)
    shutil.move(file, outside / file.name)
    file.symlink_to(outside / file.name)


def directory_is_a_file(run: Path, rng: Random) -> None:
    shutil.rmtree(run / "collectives", ignore_errors=True)
    (run / "collectives").write_text("no directory")


def hostile_names(run: Path, rng: Random) -> None:
    for name in (
        "rank-00000-0-99999999999999999999.records",
        "rank-99999-0-1.events",
        "rank-00000-0-7.records",
    ):
        (run / name).write_bytes(rng.randbytes(200))
    (run / "<script>alert(1)<b>").write_text("x")
    if not (run / "collectives").is_file():  # an earlier mutation may have replaced the directory by a file
        (run / "collectives").mkdir(exist_ok=True)
        (run / "collectives" / "rank-<b>.parquet").write_bytes(b"PAR1")


def many_notes(run: Path, rng: Random) -> None:
    lines = b"".join(b'{"kind":"note","text":"note %d"}\n' % number for number in range(100_000))
    for file in files_of(run, ".events"):
        file.write_bytes(file.read_bytes() + lines)
    manifest = run / "run.json"
    if manifest.exists():
        try:
            content = json.loads(manifest.read_bytes())
            content["notes"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return
        content["notes"] = [f"note {number}" for number in range(100_000)]
        manifest.write_text(json.dumps(content))


def huge_hole(run: Path, rng: Random) -> None:
    os.truncate(_any(run, rng, ".records", ".parquet"), 1 << 42)


def unknown_kinds(run: Path, rng: Random) -> None:
    for file in files_of(run, ".events"):
        with file.open("ab") as stream:
            stream.write(b'{"kind":"of_a_later_version","x":1}\n' * 5)


def another_table(run: Path, rng: Random) -> None:
    """Replace a Parquet file by a different table, so that its content does not match its name."""
    found = files_of(run, ".parquet")
    if found:
        file = rng.choice(found)
        table = pa.table({"op": [1, 2], "a": ["x", None], "rank": [b"\xff", b"y"]})
        shutil.copyfile(rng.choice(found), file.with_name("other"))
        file.with_name("other").replace(file)
        if rng.random() < 0.5:
            pq.write_table(rng.choice([table, table.slice(0, 0)]), file)


def hostile_column(run: Path, rng: Random) -> None:
    """Replace all values of one column of a Parquet file by a value that no real run contains."""
    found = files_of(run, ".parquet")
    if not found:
        return
    file = rng.choice(found)
    try:
        table = pq.read_table(file)
    except (OSError, pa.ArrowException):
        return  # an earlier mutation damaged the file
    index = rng.randrange(table.num_columns)
    item = table.schema.field(index)
    value: Any = {"int64": 2**62, "int32": 2**31 - 1, "double": float("nan")}.get(str(item.type), "<b>\x00")
    if str(item.type) == "bool":
        value = None if item.nullable else True
    column = pa.array([value] * len(table), item.type)
    pq.write_table(table.set_column(index, item, column), file)


MUTATIONS: list[Mutation] = [
    truncate,
    flip_bits,
    zero_a_block,
    empty,
    append_garbage,
    remove,
    wrong_value_in_events,
    wrong_value_in_manifest,
    manifest_is_something_else,
    deep_line,
    duplicate_lines,
    shuffle_lines,
    same_id_twice,
    swap_ranks,
    directory_instead,
    pipe_instead,
    device_instead,
    link_outside,
    directory_is_a_file,
    hostile_names,
    many_notes,
    huge_hole,
    unknown_kinds,
    another_table,
    hostile_column,
]
