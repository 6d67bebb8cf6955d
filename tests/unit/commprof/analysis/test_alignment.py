"""Test how a run is shown next to its NCCL log on pages.

The expected rows in order, the first divergence, the rings and the trees are written by hand.
"""

from commprof.analysis import api
from support.runs import SyntheticRun


def a_run():
    """Return a run of two ranks with planted differences between the records and the log of rank 0.

    On rank 0, the second record has no line, and a line that no rank issued follows the third line.
    """
    run = SyntheticRun(world_size=2, backend="nccl")
    for step in range(3):
        run.add_collective("all_reduce", payload_bytes=100 * (step + 1), step=step, purpose="gradient_reduce")
    for rank in range(2):
        file, pid = f"log.{rank}", run.pid(rank)
        at = {"host": "a", "comm": f"0x{rank}", "comm_epoch": 0}
        run.add(
            "comm_matches", pid=pid, rank=rank, pg="0", nranks=2, group_ranks="0-1", confidence="certain",
            basis="torch's line", comm_id="0xc", matched=2, missing=1, extra=1, ambiguous=0, torn=0, **at,
        )  # fmt: skip
        run.add("nccl_communicators", pid=pid, comm_id="0xc", operations=3, file=file, line=1, **at)
        both = {
            "record_pid": pid,
            "attempt": 0,
            "rank": rank,
            "pg": "0",
            "op": "all_reduce",
            "part": 0,
            "parts": 1,
        }
        line = {"file": file, "host": "a", "line_pid": pid, "comm": f"0x{rank}", "comm_epoch": 0}
        for seq, number in ((2, 12), (0, 10), (1, None if rank == 0 else 11)):
            found = line | {"line": number, "line_bytes": 100 * (seq + 1)} if number else {}
            state = "matched" if number else "missing"
            run.add("matches", state=state, seq=seq, record_bytes=100 * (seq + 1), **both, **found)
            if number:
                run.add(
                    "nccl_ops", op="all_reduce", kind="coll", count=25 * (seq + 1), dtype="float32", opcount=seq,
                    file=file, line=number, state="whole",
                )  # fmt: skip
    run.add(
        "matches", state="extra", op="all_reduce", line=13, line_bytes=7, reason="nobody issued it", file="log.0",
        host="a", line_pid=run.pid(0), comm="0x0", comm_epoch=0,
    )  # fmt: skip
    return run


def test_records_stand_beside_their_lines_in_order():
    rows = api.alignment(a_run().open()).rows
    assert rows[["rank", "position", "state"]].values.tolist() == [
        [0, 0, "matched"], [0, 1, "missing"], [0, 2, "matched"], [0, 3, "extra"],
        [1, 0, "matched"], [1, 1, "matched"], [1, 2, "matched"],
    ]  # fmt: skip
    first = rows.iloc[0]
    assert (first["step"], first["purpose"], first["elements"], first["line"]) == (
        0,
        "gradient_reduce",
        25,
        10,
    )
    extra = rows.iloc[3]
    assert (extra["pg"], extra["line_bytes"], extra["reason"]) == ("0", 7, "nobody issued it")


def test_the_first_divergence_and_the_counts():
    found = api.alignment(a_run().open())
    assert found.divergences[["rank", "pg", "matched_before", "state", "seq"]].values.tolist() == [
        [0, "0", 1, "missing", 1]
    ]
    counts = found.counts.set_index(["rank", "state"])["lines"].to_dict()
    assert counts == {(0, "extra"): 1, (0, "matched"): 2, (0, "missing"): 1, (1, "matched"): 3}


def test_no_row_of_matches_is_lost():
    run = a_run()
    assert int(api.alignment(run.open()).counts["lines"].sum()) == len(run.rows["matches"])


def test_a_run_without_an_alignment_has_no_rows():
    run = SyntheticRun(world_size=2)
    run.add_collective("all_reduce", payload_bytes=4)
    found = api.alignment(run.open())
    assert found.rows.empty and found.counts.empty and found.divergences.empty
    assert api.topology(run.open()).empty


def test_rings_and_trees_are_pairs_of_ranks_each_once():
    run = a_run()
    at = {"host": "a", "comm_epoch": 0, "file": "log", "line": 1}
    run.add("nccl_rings", pid=run.pid(0), comm="0x0", channel=0, channels=1, ranks="0 2 1", **at)
    for rank, previous, following in ((0, 1, 2), (2, 0, 1)):
        run.add(
            "nccl_rings", pid=run.pid(1), comm="0x1", channel=0, rank=rank, previous=previous, next=following, **at
        )  # fmt: skip
    run.add("nccl_trees", pid=run.pid(0), comm="0x0", tree=1, rank=0, parent=None, children="1 2", **at)
    run.add("nccl_trees", pid=run.pid(1), comm="0x1", tree=1, rank=1, parent=0, children="", **at)
    frame = api.topology(run.open())
    assert frame.values.tolist() == [
        ["0xc", "0", "ring", 0, 0, 2],
        ["0xc", "0", "ring", 0, 1, 0],
        ["0xc", "0", "ring", 0, 2, 1],
        ["0xc", "0", "tree", 1, 0, 1],
        ["0xc", "0", "tree", 1, 0, 2],
    ]


def test_an_alignment_is_read_where_it_lies_a_window_at_a_time(tmp_path, monkeypatch):
    path = a_run().write(tmp_path / "run")
    whole = api.alignment(path)
    monkeypatch.setattr("commprof.trace.reader._MOST_ROWS", 1)
    monkeypatch.setattr("commprof.analysis.browse.aligned_rows._FEWEST_SCANNED", 1)
    monkeypatch.setattr("commprof.trace.reader.Run.table", _only_small_tables)
    summary = api.alignment_summary(path)
    assert summary.counts.equals(whole.counts) and summary.divergences.equals(whole.divergences)
    assert api.alignment(path).rows.equals(whole.rows)
    window = api.alignment_window(path, 0, "0", at=2, before=1, limit=2)
    assert window.rows["position"].tolist() == [1, 2]
    assert window.rows.equals(whole.rows.iloc[1:3].reset_index(drop=True))
    assert (window.total, window.earlier, window.later) == (4, 0, 3)
    extra = api.alignment_window(path, 0, "0", "extra")
    assert extra.rows["line"].tolist() == [13] and (extra.earlier, extra.later) == (None, None)
    assert api.alignment_window(path, 7, "0").rows.empty
    pid = int(whole.rows["record_pid"].iloc[0])
    assert api.alignment_place(path, 0, 0, pid, 2) == (0, "0", 2)
    assert api.alignment_place(path, 0, 0, pid, 99) is None


def _only_small_tables(run, name):
    assert name not in ("collectives", "matches", "nccl_ops"), f"{name} was read as a whole"
    return run._read(name)
