"""Test alignment on real multi-rank logs from public sources.

The runs were written by hand from a reading of the logs.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commprof.align.matching import align
from commprof.nccl.parser import parse_logs
from support.runs import SyntheticRun

ROOT = Path(__file__).resolve().parents[4]
LOGS = Path(os.environ.get("COMMPROF_NCCL_LOGS", ROOT.parent / "shared" / "data" / "nccl-logs"))
pytestmark = pytest.mark.skipif(
    not LOGS.is_dir(), reason=f"real NCCL logs are not at {LOGS}; set COMMPROF_NCCL_LOGS to their directory"
)


def ddp_of_two() -> SyntheticRun:
    """Return a DDP run of two ranks. The log is from rank 0.

    The run gathers shapes, reduces gradients in two buckets and broadcasts buffers.
    """
    run = SyntheticRun(world_size=2, backend="nccl")
    run.add_collective("all_gather", payload_bytes=16, dtype="int64")
    for size in (4 * 2_412_336, 4 * 2_514_096):
        run.add_collective("all_reduce", payload_bytes=size)
    run.add_collective("broadcast", payload_bytes=4 * 369_603, peer=0)
    run.add_collective("all_reduce", payload_bytes=4 * 2_412_336)
    return run


def aligned(run: SyntheticRun, name: str):
    return align(run.open(), parse_logs(LOGS / name).ops)


def test_ddp_on_two_gpus_one_call_without_its_coll_line():
    report = aligned(ddp_of_two(), "nccl_miner_two_gpu_2.23.4_call-coll-tuning-init-abort.log")
    rows = report.matches.to_pylist()
    own = [(row["state"], row["op"], row["seq"], row["line"]) for row in rows if row["rank"] == 0]
    # Line 53 is a CALL line whose COLL line is missing from the excerpt.
    assert own == [
        ("matched", "all_gather", 0, 44),
        ("matched", "all_reduce", 1, 53),
        ("matched", "all_reduce", 2, 55),
        ("matched", "broadcast", 3, 58),
        ("matched", "all_reduce", 4, 61),
    ]
    assert {row["state"] for row in rows if row["rank"] == 1} == {"missing"}
    assert {row["reason"] for row in rows if row["rank"] == 1} == {
        "the log has no operation of rank 1 (process 1001)"
    }
    assert report.extra == report.ambiguous == report.torn == 0
    assert report.comm_matches["confidence"].to_pylist() == ["certain"]


def test_a_record_that_the_log_has_not_is_the_only_one_that_is_missing():
    run = ddp_of_two()
    run.add_collective("all_reduce", payload_bytes=4 * 7)
    report = aligned(run, "nccl_miner_two_gpu_2.23.4_call-coll-tuning-init-abort.log")
    own = [row for row in report.matches.to_pylist() if row["rank"] == 0]
    assert [(row["state"], row["record_bytes"]) for row in own if row["state"] != "matched"] == [
        ("missing", 28)
    ]


def test_batched_messages_of_a_pipeline_of_three():
    """The middle rank sends to and receives from the first, the last and again the first rank, in batches."""
    run = SyntheticRun(world_size=3, backend="nccl")
    for batch, peer in enumerate((0, 2, 0), start=1):
        for op in ("send", "recv"):
            size = 2 * 8_388_608
            run.add_collective(
                op, payload_bytes=size, dtype="bfloat16", ranks=(1,), peer=peer, coalesce_id=batch, pg="pp"
            )
    report = aligned(run, "nccl_miner_picotron-pp_2.21_send-recv-call.log")
    assert report.counts == {"matched": 6, "missing": 0, "extra": 0, "ambiguous": 0, "torn": 0}
    rows = report.matches.to_pylist()
    assert [(row["op"], row["line"]) for row in rows] == [
        ("send", 18), ("recv", 24), ("send", 30), ("recv", 34), ("send", 40), ("recv", 44),
    ]  # fmt: skip
    assert {row["rank"] for row in rows} == {1}


def test_the_log_of_another_program_does_not_match():
    report = aligned(ddp_of_two(), "nccl_miner_picotron-pp_2.21_send-recv-call.log")
    assert report.matched == 0
    assert report.extra == 6
    assert any("another run" in note for note in report.notes)
