"""Recorded on an H100 with NCCL 2.28.9: two ranks on one card, each of which named another host (NCCL_HOSTID).

``h100/deepspeed_stage2``: DeepSpeed 0.19.8 with ``reduce_scatter: true``. ``h100/ddp_trace``: DDP under NCCL_DEBUG=TRACE
with all subsystems. No expected count here comes from the records: the steps, layers and buckets of the programs give them.
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
RANKS, PARAMETERS = 2, 53  # tensors of the transformer
OPERATIONS = {
    # Parameters are broadcast before the first step. A step: 5 buckets of 200,000 elements, the overflow flag, the norm, and
    # one all_gather of the parameters; after 6 of them the mean of the validation loss.
    "deepspeed_stage2": {
        "broadcast": RANKS * PARAMETERS,
        "all_reduce": RANKS * (6 * (5 + 1 + 1) + 1),
        "all_gather": RANKS * 6,
    },
    # The number and the shapes of the parameters are compared, then they are broadcast. A first step with 1 bucket, 7 with
    # 4, and the new order of the buckets in two broadcasts after the first.
    "ddp_trace": {"all_gather": RANKS, "broadcast": RANKS * 4, "all_reduce": RANKS * (1 + 7 * 4)},
}


@pytest.fixture(params=sorted(OPERATIONS))
def recorded(request, tmp_path):
    """A run's name and a copy of it: answers may be kept beside a run."""
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
