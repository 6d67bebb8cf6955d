"""Test the ledger of runs that stored sums instead of records.

The result must equal the result from the records.
"""

from __future__ import annotations

import re

import pytest

from commprof.analysis import api
from commprof.cli import execute
from support.runs import SyntheticRun, with_sums

SIZES = {"a.weight": 600, "b.weight": 400}


def whole_run(**keys) -> SyntheticRun:
    """Return a ZeRO-2 run on 4 ranks that sends what its configuration requests, plus one broadcast per step.

    The two broadcasts before the first step have different sizes.
    """
    run = SyntheticRun(world_size=4, config={"zero_optimization": {"stage": 2}}, **keys)
    run.add_parameters(SIZES)
    for numel in SIZES.values():
        run.add_collective(
            "broadcast",
            payload_bytes=4 * numel,
            step=-1,
            phase="init",
            purpose="parameter_broadcast",
            peer=0,
            dtype="uint8",
        )
    for step in range(3):
        run.add_step(step)
        run.add_collective("all_reduce", payload_bytes=4000, step=step, purpose="gradient_reduce")
        run.add_collective("broadcast", payload_bytes=100, step=step, phase="forward", peer=0)
        run.add_collective(
            "all_reduce", payload_bytes=4, step=step, phase="optimizer", purpose="gradient_norm"
        )
        run.add_collective(
            "all_gather", payload_bytes=4000, step=step, phase="optimizer", purpose="parameter_gather"
        )
    return run


def issued(verdict):
    return [
        (row.when, row.steps, row.purpose, row.expected_op, row.issued_op, row.issued_count, row.issued_payload_bytes,
         row.issued_wire_bytes, row.executed_op, row.executed_wire_bytes, row.explained_bytes, row.explained_by)
        for row in verdict.rows
    ]  # fmt: skip


@pytest.mark.parametrize("steps", [None, (1, 2)], ids=["all of them", "after some records"])
def test_the_ledger_of_sums_is_that_of_the_records(steps):
    records, sums = whole_run().open(), with_sums(whole_run(), steps).open()
    expected, found = api.verify(records), api.verify(sums)
    assert issued(found) == issued(expected)
    assert (found.issued_bytes, found.explained_bytes) == (expected.issued_bytes, expected.explained_bytes)
    assert [item._replace(call_site=None) for item in found.unexplained] == [
        item._replace(call_site=None) for item in expected.unexplained
    ]
    assert expected.unexplained and expected.state == "mismatch"


def test_messages_count_at_their_sends():
    run = SyntheticRun(world_size=2)
    for op, rank, calls in (("send", 0, 3), ("recv", 1, 3)):
        run.add(
            "aggregates", rank=rank, attempt=0, pid=run.pid(rank), step=0, phase="forward", op=op, purpose="pipeline",
            pg="0", group_ranks="0-1", group_size=2, is_p2p=True, calls=calls, payload_bytes=100, input_bytes=0,
            output_bytes=0, host_ns=1,
        )  # fmt: skip
    verdict = api.verify(run.open())
    assert [(row.issued_op, row.issued_count, row.issued_payload_bytes) for row in verdict.rows] == [
        ("send", 3, 100)
    ]


def test_the_table_of_the_command_has_them(tmp_path, capsys):
    path = with_sums(whole_run()).write(tmp_path / "run")
    assert execute(["verify", str(path)]) in (1, 3)
    shown = capsys.readouterr().out
    assert re.search(r"issued +all_gather", shown) and not re.search(r"issued +nothing", shown)
    assert "parameter_gather" in shown
