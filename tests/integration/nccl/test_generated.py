"""The reader of NCCL logs on a generated job of many communicators.

The tables must contain exactly the operations of the generator.
"""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.nccl_log import generate
from commprof.nccl.parser import parse_logs
from support.strict_nccl import TERM


@pytest.fixture(scope="module", params=["stream", "files"])
def job(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("generated") / "log"
    truth = generate(out, 6_000_000, ranks=8, layout=request.param, seed=11)
    return truth, parse_logs(out)


def test_operations_and_their_bytes(job):
    truth, parsed = job
    lines: Counter[str] = Counter()
    printed: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for row in parsed.ops.select(["op", "kind", "state", "bytes", "message_bytes"]).to_pylist():
        assert row["state"] == "whole"
        name = f"{row['op']} {row['kind']}"
        lines[name] += 1
        printed[name] += row["bytes"]
        whole[name] += row["message_bytes"]
    for found, expected in (
        (lines, truth.operations),
        (printed, truth.printed_bytes),
        (whole, truth.message_bytes),
    ):
        assert found == {
            f"{TERM[name.split()[0]]} {name.split()[1]}": number for name, number in expected.items()
        }


def test_lines_and_communicators(job):
    truth, parsed = job
    counts = parsed.counts
    assert (counts.bytes, counts.lines, counts.files) == (truth.bytes, truth.lines, truth.files)
    assert (counts.coll, counts.call) == (truth.of_kind("coll"), truth.of_kind("call"))
    assert (counts.init, counts.end) == (truth.other["inits"], truth.other["ends"])
    assert (counts.banner, counts.torch) == (truth.other["banners"], truth.other["torch_lines"])
    assert len(parsed.communicators) == truth.communicators
    assert len(parsed.processes) == 8
    assert (counts.torn, counts.unknown_op, counts.fragment, counts.overlong) == (0, 0, 0, 0)
    assert parsed.generated


def test_every_rank_is_known(job):
    _, parsed = job
    ops = parsed.ops.select(["rank", "global_rank", "nranks", "pid", "comm_epoch"]).to_pylist()
    assert {(row["pid"] - 41_000) // 17 == row["global_rank"] for row in ops} == {True}
    assert {row["nranks"] for row in ops} == {2, 4, 8}
    assert max(row["comm_epoch"] for row in ops) >= 1
    assert all(row["rank"] is not None for row in ops)
