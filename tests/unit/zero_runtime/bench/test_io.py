"""Test ``python -m zero_runtime.bench``: the list of benchmarks and the speed of a disk."""

from __future__ import annotations

import json

import pytest

from zero_runtime.bench.__main__ import BENCHMARKS, main
from zero_runtime.bench.io import Setting, Speed, fastest
from zero_runtime.offload.tensor_files import AsynchronousIO

SMALL = ["--size", "1m", "--blocks", "64k", "1m", "--threads", "1", "2", "--repeat", "1"]


def test_alone_it_lists_what_there_is(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    for name, (meaning, _) in BENCHMARKS.items():
        assert f"  {name} " in shown and meaning in shown


def test_every_way_is_measured_and_nothing_is_left(tmp_path, capsys):
    assert main(["io", "--path", str(tmp_path), *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ways = {(row["direct"], row["block_size"], row["threads"]) for row in found["rows"]}
    assert len(ways) == len(found["rows"]) in (4, 8)
    assert (False, 65536, 2) in ways
    assert all(row["write_bytes_per_s"] > 1e5 and row["read_bytes_per_s"] > 1e5 for row in found["rows"])
    best = found["aio"]
    assert {"block_size", "queue_depth", "intra_op_parallelism"} == set(best)
    assert list(tmp_path.iterdir()) == []


def test_the_table_names_the_fastest_way(tmp_path, capsys):
    assert main(["io", "--path", str(tmp_path), *SMALL]) == 0
    shown = capsys.readouterr().out
    assert shown.count("fastest") == 1 and '"aio": {"block_size": ' in shown


def test_the_fastest_way_takes_the_least_time_for_both():
    def speed(write, read):
        return Speed(Setting(True, AsynchronousIO()), write, read)

    rows = [speed(1e9, 1e8), speed(4e8, 4e8), speed(1e8, 1e10)]
    assert fastest(rows) is rows[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["oi"], "no benchmark 'oi'; expected one of: comm, io"),
        (["io", "--size", "5000"], "expected a multiple of 4096"),
        (["io", "--path", "/proc/nowhere"], "--path is '/proc/nowhere', where no folder can be made"),
    ],
)
def test_what_cannot_be_is_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
