"""Alignment and ledger of runs that were recorded on an H100 with NCCL 2.28.9.

Two ranks share one card, and each rank sets a different host (NCCL_HOSTID). ``h100/deepspeed_stage2`` is
DeepSpeed 0.19.8 with ``reduce_scatter: true``. ``h100/ddp_trace`` is DDP under NCCL_DEBUG=TRACE with all
subsystems. The expected counts are not taken from the records. They follow from the steps, layers and buckets
of the programs.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from commprof.align.matching import align_run
from commprof.ledger.verification import verify
from commprof.nccl.parser import parse_logs
from commprof.trace.reader import open_run

RUNS = Path(__file__).parent / "h100"
RANKS, PARAMETERS = 2, 53  # PARAMETERS: the number of tensors of the transformer
OPERATIONS = {
    # The parameters are broadcast before the first step. Each of the 6 steps reduces 5 buckets of 200,000 elements, the
    # overflow flag and the norm, and gathers the parameters once. The mean of the validation loss follows the steps.
    "deepspeed_stage2": {
        "broadcast": RANKS * PARAMETERS,
        "all_reduce": RANKS * (6 * (5 + 1 + 1) + 1),
        "all_gather": RANKS * 6,
    },
    # DDP compares the number and the shapes of the parameters and then broadcasts the parameters. The first step has 1
    # bucket, and the other 7 steps have 4 buckets. Two broadcasts after the first step contain the rebuilt buckets.
    "ddp_trace": {"all_gather": RANKS, "broadcast": RANKS * 4, "all_reduce": RANKS * (1 + 7 * 4)},
}


@pytest.fixture(params=sorted(OPERATIONS))
def recorded(request, tmp_path):
    """Return the name of a run and a copy of the run, because commprof may store answers in the directory of a run."""
    return request.param, Path(shutil.copytree(RUNS / request.param, tmp_path / "run"))


def test_every_line_of_a_real_log_is_recognized(recorded):
    _, run = recorded
    parsed = parse_logs(sorted((run / "nccl").iterdir()))
    assert [each.kind for each in parsed.kinds if not each.understood] == []


def test_every_operation_of_the_log_has_its_record(recorded):
    name, run = recorded
    opened = open_run(run)
    assert Counter(opened.table("collectives").column("op").to_pylist()) == OPERATIONS[name]
    report = align_run(opened)
    assert report.matched == sum(OPERATIONS[name].values())
    assert not (report.missing or report.extra or report.ambiguous or report.torn)


def test_the_ledger_closes_and_says_why_deepspeed_sent_all_reduce(recorded):
    name, run = recorded
    verdict = verify(open_run(run))
    assert verdict.state == "closed" and verdict.exit_code == 0
    if name == "deepspeed_stage2":
        (why,) = [text for text in verdict.sentences if "requested a reduce_scatter" in text]
        assert "use_multi_rank_bucket_allreduce: true turned it into all_reduce" in why
