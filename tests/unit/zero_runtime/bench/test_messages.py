"""Test ``python -m zero_runtime.bench comm``: collectives by operation and size, on real gloo ranks."""

from __future__ import annotations

import contextlib
import io
import json

import pytest

from support.ranks import run_ranks
from support.recording import record
from zero_runtime.bench.__main__ import main
from zero_runtime.bench.message_times import OPERATIONS

FEW = ["--iterations", "2", "--warmup", "1"]


def printed(rank, world, arguments):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert main(arguments) == 0
    return text.getvalue()


def test_recorded_it_is_what_the_page_bandwidth_shows(tmp_path):
    from commprof.analysis import api

    sizes = ["1k", "64k"]
    run, outcomes = record(
        tmp_path / "run", 2, printed, ["comm", "--sizes", *sizes, *FEW, "--json"], completion_every=1
    )
    first, second = (outcome["result"] for outcome in outcomes)
    assert second == ""
    found = json.loads(first)
    assert (found["world_size"], found["backend"], found["dtype"]) == (2, "gloo", "fp32")
    assert [(row["operation"], row["payload_bytes"]) for row in found["rows"]] == [
        (operation, size) for operation in OPERATIONS for size in (1024, 65536)
    ]
    for row in found["rows"]:
        assert row["busbw_bytes_per_s"] == pytest.approx(
            row["algbw_bytes_per_s"] * OPERATIONS[row["operation"]].factor(2), rel=1e-3
        )
    shown = api.bandwidth(run)
    assert {(row.op, row.payload_bytes) for row in shown.itertuples()} >= {
        (operation, size) for operation in OPERATIONS for size in (1024, 65536)
    }


def test_as_a_table_of_chosen_operations():
    shown, _ = run_ranks(2, printed, ["--ops", "all_gather", "--sizes", "10000", "--dtype", "bf16", *FEW])
    lines = shown.splitlines()
    assert lines[0].startswith("2 ranks, gloo, cpu, bf16")
    assert lines[-1].split()[:2] == ["all_gather", "10000"] and len(lines) == 4


def test_one_rank_is_told_to_start_several():
    assert run_ranks(1, one) == [2]


def one(rank, world):
    with contextlib.redirect_stderr(io.StringIO()) as text:
        code = main(["comm"])
    assert "start several" in text.getvalue()
    return code
