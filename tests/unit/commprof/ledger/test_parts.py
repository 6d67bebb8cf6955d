"""Test that the ledger of a run that is read in small parts equals the ledger of the same run in memory."""

from __future__ import annotations

import pytest

from commprof.analysis import api
from commprof.ledger.budget import budget_of
from support.runs import SyntheticRun

CONFIG = {"zero_optimization": {"stage": 2}}


def gradients_of(run: SyntheticRun, steps: int) -> None:
    run.add_parameters({"a.weight": 600, "b.weight": 400})
    run.add_collective(
        "broadcast", payload_bytes=2400, step=-1, phase="init", purpose="parameter_broadcast", peer=0
    )
    for step in range(steps):
        run.add_step(step)
        run.add_collective("all_reduce", payload_bytes=4000, step=step, purpose="gradient_reduce")
        run.add_collective(
            "all_gather", payload_bytes=4000, step=step, phase="optimizer", purpose="parameter_gather"
        )
        run.add_collective(
            "all_gather", payload_bytes=4000, step=step, phase="forward", purpose="parameter_gather"
        )


def uneven() -> SyntheticRun:
    """Return a run whose ranks differ.

    The run has messages, lengths that differ between ranks, concurrent groups, and a rank that issues
    different operations.
    """
    run = SyntheticRun(world_size=4, config=CONFIG)
    gradients_of(run, 6)
    for step in range(6):
        for rank, size in enumerate((100, 200, 300, 401)):
            run.add_collective(
                "all_to_all", payload_bytes=size, step=step, ranks=(rank,), pg="9", purpose="activation"
            )
        for pair in ((0, 1), (2, 3)):
            run.add_collective("all_reduce", payload_bytes=64, step=step, group=pair, pg="3")
        run.add_collective("send", payload_bytes=8, step=step, ranks=(0,), peer=1, pg="5", purpose="pipeline")
        run.add_collective("recv", payload_bytes=8, step=step, ranks=(1,), peer=0, pg="5", purpose="pipeline")
        run.add_collective("recv", payload_bytes=8, step=step, ranks=(3,), peer=2, pg="7")
    run.add_collective("all_reduce", payload_bytes=12, step=4, ranks=(2,), purpose="gradient_reduce")
    for place in range(3):
        run.add(
            "flight", rank=0, attempt=0, pid=run.pid(0), pg="3", seq=place, is_p2p=False, name="gloo:all_gather",
            op="all_gather",
        )  # fmt: skip
    return run


def logged() -> SyntheticRun:
    """Return a run with an NCCL log that differs from its records.

    One line has a different operation, one record has two lines, and one line has no record.
    """
    run = SyntheticRun(world_size=2, config=CONFIG, backend="nccl")
    gradients_of(run, 4)
    for row in list(run.rows["collectives"]):
        line = 10 + row["seq"]
        shown = "broadcast" if row["seq"] == 3 else row["op"]
        place = {"file": f"log.{row['rank']}", "line": line}
        run.add("nccl_ops", host="a", pid=1, op=shown, kind="coll", state="whole", **place)
        run.add(
            "matches", state="matched", op=row["op"], rank=row["rank"], attempt=0, record_pid=row["pid"], seq=row["seq"],
            pg="0", part=0, parts=1, **place,
        )  # fmt: skip
        if row["seq"] == 5:
            run.add(
                "matches", state="matched", op="broadcast", rank=row["rank"], attempt=0, record_pid=row["pid"],
                seq=row["seq"], pg="0", part=1, parts=2, file="elsewhere", line=1,
            )  # fmt: skip
    run.add("matches", state="extra", op="all_reduce", file="log.0", line=99)
    return run


@pytest.mark.parametrize("made", [uneven, logged])
def test_parts_change_nothing(made, tmp_path, monkeypatch):
    run = made()
    whole, path = run.open(), run.write(tmp_path / "run")
    monkeypatch.setattr("commprof.trace.reader._MOST_ROWS_AT_ONCE", 3)
    monkeypatch.setattr("commprof.trace.tables._COLUMN_PART_ROWS", 5)
    monkeypatch.setattr("commprof.trace.reader.Run.table", _only_small_tables)
    expected, found = api.verify(whole), api.verify(api.open_run(path))
    assert found.as_dict() == expected.as_dict()
    assert expected.as_dict()["state"] != "closed"
    assert _limits(budget_of(api.open_run(path))) == _limits(budget_of(whole))


def _only_small_tables(run, name):
    assert name not in ("collectives", "matches", "nccl_ops"), f"{name} was read as a whole"
    return run._read(name)


def _limits(budget: str) -> str:
    return budget.partition("\n")[2]  # Remove the line that contains the name of the run.
