"""Compare records that are sorted by time while their files are read with records that the engine sorts."""

from __future__ import annotations

import random

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commprof.analysis import api
from commprof.analysis.columns.distinct_combinations import Combinations
from commprof.analysis.storage import index, span_source
from commprof.analysis.storage.record_spans import SPANS
from commprof.analysis.storage.span_source import SpanSource, in_time_order
from support.runs import SyntheticRun
from support.sample import examples
from support.simulated_jobs import MS, of_ddp, saved

times = st.lists(st.lists(st.integers(0, 12), max_size=20), max_size=5)


def rows_at(begins: list[int], stream: int) -> pa.Table:
    rows = [{"begin_ns": begin, "rank": stream, "seq": seq} for seq, begin in enumerate(begins)]
    return pa.Table.from_pylist(rows, SPANS)


@settings(deadline=None, max_examples=examples(40))
@given(times, st.integers(1, 7))
def test_streams_in_order_become_one_in_order(begins, size):
    tables = [rows_at(sorted(each), stream) for stream, each in enumerate(begins)]
    streams = [iter([rows.slice(i, size) for i in range(0, len(rows), size)]) for rows in tables]
    found = pa.concat_tables([SPANS.empty_table(), *in_time_order(streams)])
    keys = [(name, "ascending") for name in ("begin_ns", "rank", "seq")]
    assert found.to_pylist() == pa.concat_tables([SPANS.empty_table(), *tables]).sort_by(keys).to_pylist()


def a_run(path, in_order=True):
    """Write a run of three ranks on two clocks in two attempts.

    Each rank issues one call after the other. Some calls have equal times.
    """
    draw = random.Random(11)
    run = SyntheticRun(3)
    for attempt in range(2):
        at = 0
        for rank in range(3):
            run.add(
                "clocks", rank=rank, attempt=attempt, pid=run.pid(rank, attempt), host="h", clock="ab"[rank == 2],
                monotonic_ns=0, realtime_ns=0, uncertainty_ns=0,
            )  # fmt: skip
            run.add(
                "clock_offsets", rank=rank, attempt=attempt, pid=run.pid(rank, attempt), reference_rank=0, time_ns=0,
                host="h", offset_ns=7 * (rank == 2), error_ns=1, exchanges=1,
            )  # fmt: skip
        for _ in range(200):
            at += draw.choice([0, 0, 3, 900])
            run.add_collective(
                draw.choice(["all_reduce", "broadcast"]), attempt=attempt, issue_ns=at, host_ns=draw.randrange(50), peer=0,
                exposed_ns=draw.choice([None, 40]), bucket=draw.choice([None, 1]), payload_bytes=draw.choice([4, 8]),
            )  # fmt: skip
    if not in_order:
        rows = run.rows["collectives"]
        rows[0]["issue_ns"], rows[-1]["issue_ns"] = rows[-1]["issue_ns"], rows[0]["issue_ns"]
    return run.write(path)


@pytest.mark.long
@pytest.mark.parametrize("in_order", [True, False])
def test_the_records_of_an_index_are_the_same_whoever_puts_them_in_order(tmp_path, monkeypatch, in_order):
    monkeypatch.setattr(span_source, "_FEWEST_SCANNED", 0)
    monkeypatch.setattr(span_source, "_MOST_ROWS", 50)
    monkeypatch.setattr(span_source, "_ROWS_IN_ORDER", 9)
    quick, sorted_ = (a_run(tmp_path / name, in_order) for name in ("quick", "sorted"))
    assert SpanSource(api.open_run(quick), lambda *_: None).is_in_order is in_order
    found = records_of(quick)
    monkeypatch.setattr(span_source, "_MOST_OPEN", 0)
    pd.testing.assert_frame_equal(found, records_of(sorted_))
    assert len(found) == 1200


def records_of(run) -> pd.DataFrame:
    sql = "select r.rowid as place, r.*, k.* exclude (kind) from records r join kinds k using (kind) order by r.rowid"
    return index.index_of(run).ask(sql).to_pandas().drop(columns="kind")


def test_combinations_keep_their_numbers_and_tell_null_apart():
    schema = pa.schema([("text", pa.string()), ("number", pa.int32()), ("flag", pa.bool_())])
    kinds = Combinations(schema)
    first = pa.table([["a", None, "b", None], [1, None, 0, 0], [True, True, False, True]], schema=schema)
    assert kinds.number(first).tolist() == [0, 1, 2, 3]
    second = pa.table([["b", "a", "c"], [0, 1, None], [False, True, False]], schema=schema)
    coded = second.set_column(0, "text", second["text"].dictionary_encode())
    assert kinds.number(coded).tolist() == [2, 0, 4]
    assert kinds.number(first.slice(0, 0)).tolist() == []
    table = kinds.table()
    assert table["kind"].to_pylist() == [0, 1, 2, 3, 4]
    assert table.drop_columns("kind").to_pylist() == [*first.to_pylist(), second.to_pylist()[2]]
    assert Combinations(schema).table().num_rows == 0


@pytest.mark.parametrize("in_file", [False, True])
def test_the_last_bucket_of_ddp_has_the_wait_in_cpp(tmp_path, monkeypatch, in_file):
    """Without this wait, DDP's buckets ended on the timeline when they were issued, and nothing was exposed."""
    path = saved(of_ddp(late_ns=20 * MS, count=6), tmp_path / "run", count=6)
    if in_file:
        monkeypatch.setattr(index, "_FEWEST_IN_FILE", 0)
        monkeypatch.setattr(span_source, "_FEWEST_SCANNED", 0)
        assert api.index(path)["in_file"]
    bars = api.timeline(path, ranks=[0]).bars
    exposed = bars[bars["exposed_begin_ns"].notna()]
    assert exposed.groupby("step").size().tolist() == [1] * 6
    assert (exposed["end_ns"] >= exposed["exposed_end_ns"]).all()
    # Rank 0 waits for rank 1, which is 20 ms late, and for the transfer of three buckets.
    took = exposed["exposed_end_ns"] - exposed["exposed_begin_ns"]
    assert took.between(20 * MS, 26 * MS).all()
