"""Compare the index of a run with a plain recomputation in Python, and test its file.

The file is built once and completely, and no answer requires the file.
"""

from __future__ import annotations

import bisect
import csv
import io
import itertools
import json
import os
import random
import threading

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commprof.analysis import api
from commprof.analysis.browse import record_details, timeline
from commprof.analysis.browse.density import binned, folded
from commprof.analysis.storage import index
from commprof.analysis.storage.record_spans import own_parts
from commprof.errors import TraceError, UsageError
from commprof.schema import COLLECTIVES
from commprof.trace import fingerprint
from commprof.trace.reader import Run
from support.runs import SyntheticRun
from support.sample import examples

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
ENDS = ("issue_ns", "return_ns", "wait_end_ns", "device_end_ns")


def busy_run(rng, world=3, records=300, span=100_000):
    run = SyntheticRun(world, config={"zero_optimization": {"stage": 2}})
    for step in range(4):
        run.add_step(step, begin_ns=step * span // 4, duration_ns=span // 4)
    for number in range(records):
        begin = rng.randrange(span)
        host = rng.choice([None, rng.randrange(1, 3000)])
        run.add_collective(
            rng.choice(OPS),
            step=begin * 4 // span,
            phase=rng.choice(["forward", "backward"]),
            payload_bytes=rng.choice([4, 400, 4096]),
            issue_ns=begin,
            host_ns=host,
            exposed_ns=rng.choice([None, rng.randrange(1, 900)]),
            pg=rng.choice(["0", "1"]),
            group=rng.choice([tuple(range(world)), (0, world - 1)]),
            purpose=rng.choice([None, "gradient_reduce"]),
            bucket=number if number % 3 else None,
            parameters=f"layer.{number % 5}.weight",
            peer=0,
        )
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return busy_run(random.Random(seed)).write(tmp_path_factory.mktemp("index") / "run")


def plain_rows(run):
    """Return every record as in the files, with its end."""
    rows = api.open_run(run).table("collectives").to_pylist()
    for row in rows:
        row["begin_ns"] = row["issue_ns"]
        row["end_ns"] = max(row[name] for name in ENDS if row[name] is not None)
    return sorted(
        rows, key=lambda row: (row["begin_ns"], row["rank"], row["attempt"], row["pid"], row["seq"])
    )


def union(spans):
    """Return the length of the union of the spans, computed with a sweep."""
    total, reached = 0, None
    for begin, end in sorted(spans):
        if reached is None or begin > reached:
            reached = begin
        total += max(0, end - reached)
        reached = max(reached, end)
    return total


spans_of_time = st.lists(st.tuples(st.integers(-500, 500), st.integers(0, 200)), max_size=30)


@given(spans_of_time)
def test_own_parts_add_up_to_the_union_and_do_not_overlap(spans):
    begin = np.array([b for b, _ in spans], np.int64)
    end = begin + np.array([n for _, n in spans], np.int64)
    length = own_parts(begin, end)
    assert int(length.sum()) == union(zip(begin.tolist(), end.tolist(), strict=True))
    parts = sorted((e - n, e) for e, n in zip(end.tolist(), length.tolist(), strict=True) if n)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(parts))


@settings(max_examples=examples(60))
@given(spans_of_time, st.integers(1, 97), st.integers(1, 40), st.integers(-400, 400))
def test_bins_hold_what_the_intervals_have_in_them(spans, width, bins, origin):
    begin = np.array([b for b, _ in spans], np.int64)
    end = begin + np.array([n for _, n in spans], np.int64)
    row = np.arange(len(spans)) % 2
    found = binned(begin, end, row, 2, origin, width, bins)
    for r in range(2):
        for place in range(bins):
            low, high = origin + place * width, origin + (place + 1) * width
            wanted = sum(
                max(0, min(e, high) - max(b, low)) for b, e in zip(begin[r::2], end[r::2], strict=True)
            )
            assert found[r, place] == wanted


@given(st.lists(st.integers(0, 9), min_size=24, max_size=24))
def test_folding_keeps_the_sum(values):
    cells = np.array(values).reshape(2, 12)
    assert folded(cells, 4).sum(axis=1).tolist() == cells.sum(axis=1).tolist()
    assert folded(cells, 4).shape == (2, 3)


@pytest.mark.parametrize("pixels", [1, 7, 50, 300, 5000])
def test_density_of_the_whole_run_is_conserved_at_every_level(run, pixels):
    rows = plain_rows(run)
    found = api.timeline(run, pixels=pixels, most_bars=0)
    assert found.bars is None
    for rank in range(3):
        mine = [row for row in rows if row["rank"] == rank]
        part = found.density[found.density["rank"] == rank]
        assert int(part["busy_ns"].sum()) == union((row["begin_ns"], row["end_ns"]) for row in mine)
        held = [
            (row["wait_end_ns"] - row["exposed_ns"], row["wait_end_ns"]) for row in mine if row["exposed_ns"]
        ]
        assert int(part["exposed_ns"].sum()) == union(held)
    assert (found.density["busy_share"] <= 1).all()


def test_a_moment_counts_for_what_began_first(tmp_path):
    run = SyntheticRun(1)
    run.add_collective("all_reduce", issue_ns=0, host_ns=60)
    run.add_collective("broadcast", issue_ns=40, host_ns=60, peer=0)
    frame = api.timeline(run.write(tmp_path / "run"), most_bars=0, pixels=1).density
    assert dict(zip(frame["op"], frame["busy_ns"], strict=True)) == {"all_reduce": 60, "broadcast": 40}


def grouped_run(order=(0, 1, 2, 3)):
    """Return a run of four ranks, each in its own groups and in a group of all ranks.

    ``order`` gives the role of each rank.
    """
    run, rng = SyntheticRun(4), random.Random(7)
    groups = {"0": (0, 1, 2, 3), "1": (0, 1), "2": (2, 3), "10": (0, 2), "11": (1, 3)}
    for _ in range(400):
        begin, pg = rng.randrange(1_000_000), rng.choice(list(groups))
        run.add_collective(
            rng.choice(OPS),
            issue_ns=begin,
            host_ns=rng.randrange(1, 9000),
            exposed_ns=rng.choice([None, 500]),
            pg=pg,
            group=tuple(sorted(order[rank] for rank in groups[pg])),
            group_desc="model" if pg in "12" else "data",
            peer=0,
        )
    return run


@pytest.mark.sampled
@pytest.mark.parametrize("pixels", [7, 300, 100_000])
def test_lanes_of_groups_add_up_to_the_rank(tmp_path, monkeypatch, pixels):
    path = grouped_run().write(tmp_path / "run")
    found = api.timeline(path, pixels=pixels, most_bars=0)
    monkeypatch.setattr(timeline, "MOST_LANES", 11)
    whole = api.timeline(path, pixels=pixels, most_bars=0)
    assert (len(found.lanes), found.hidden_lanes, whole.lanes, whole.hidden_lanes) == (12, 0, (), 12)
    assert whole.density["pg"].isna().all() and not whole.density["lane"].any()
    key = ["rank", "begin_ns", "end_ns", "op"]
    sums = [frame.groupby(key)[["busy_ns", "exposed_ns"]].sum() for frame in (found.density, whole.density)]
    pd.testing.assert_frame_equal(*sums)
    mine = found.density[found.density["rank"] == 2]
    named = mine.groupby("lane")[["pg", "group_desc", "group_ranks"]].agg(
        lambda one: "|".join(sorted(set(one)))
    )
    assert named.to_numpy().tolist() == [["0", "data", "0-3"], ["2", "model", "2-3"], ["10", "data", "0,2"]]
    records = api.timeline(path, most_bars=9999).bars
    # A collective of another group that began first may cover a part of this time.
    for group, part in mine.groupby("pg"):
        spans = records[(records["rank"] == 2) & (records["pg"] == group)]
        assert 0 < part["busy_ns"].sum() <= union(zip(spans["begin_ns"], spans["end_ns"], strict=True))


def test_lanes_of_other_ranks_are_those_of_the_ranks_that_play_their_parts(tmp_path):
    order = (2, 3, 0, 1)
    plain, swapped = (
        api.timeline(grouped_run(given).write(tmp_path / str(given[0])), pixels=50, most_bars=0)
        for given in ((0, 1, 2, 3), order)
    )
    held = ["rank", "pg", "begin_ns", "op", "busy_ns", "exposed_ns"]
    moved = plain.density.assign(rank=plain.density["rank"].map(dict(enumerate(order))))
    frames = [frame[held].sort_values(held, ignore_index=True) for frame in (moved, swapped.density)]
    pd.testing.assert_frame_equal(*frames)


def test_a_rank_with_many_groups_has_lanes_for_the_busiest(tmp_path):
    run = SyntheticRun(2)
    for number in range(7):
        run.add_collective(
            "all_reduce", issue_ns=1000 * number, host_ns=100 + number, pg=str(number), group=(0, 1)
        )
    path = run.write(tmp_path / "run")
    for pixels in (1, 10_000):
        found = api.timeline(path, pixels=pixels, most_bars=0)
        assert [(lane.rank, lane.pg, lane.groups) for lane in found.lanes] == [
            (rank, pg, groups) for rank in (0, 1) for pg, groups in (("4", 1), ("5", 1), ("6", 1), (None, 4))
        ]
        mine = found.density[found.density["rank"] == 0].groupby("lane")["busy_ns"].sum()
        assert mine.tolist() == [104, 105, 106, 100 + 101 + 102 + 103]


def test_one_group_has_no_lanes_and_neither_have_ranks_of_one_each(run, tmp_path):
    alone = SyntheticRun(4)
    for pg, group in (("1", (0, 1)), ("2", (2, 3))):
        alone.add_collective("all_reduce", pg=pg, group=group)
    assert api.timeline(alone.write(tmp_path / "run"), most_bars=0).lanes == ()
    assert api.timeline(small_run(tmp_path / "small"), most_bars=0).lanes == ()
    assert {lane.rank for lane in api.timeline(run, most_bars=0, ranks=[1]).lanes} == {1}


def test_the_step_times_of_an_index_are_those_of_the_records(tmp_path, in_file):
    run = busy_run(random.Random(5))
    for step in range(4):
        run.add_step(step, begin_ns=step * 25_000, end_ns=step * 25_000 + 24_000)
    run.write(tmp_path / "run")
    expected = api.step_times(tmp_path / "run")
    assert len(expected) == 4 and api.step_numbers(tmp_path / "run") == expected["step"].tolist()
    api.answer_cache.clear()
    assert api.index(tmp_path / "run")["in_file"]
    opened = index.index_of(tmp_path / "run")
    assert opened.ask("select count(*) as steps from step_times")["steps"].to_pylist() == [4]
    pd.testing.assert_frame_equal(api.step_times(tmp_path / "run"), expected)


@pytest.mark.long
def test_an_index_of_another_version_is_built_again(tmp_path, in_file, monkeypatch):
    path = small_run(tmp_path / "run")
    with monkeypatch.context() as before:
        before.setattr(fingerprint, "VERSION", fingerprint.VERSION - 1)
        api.index(path)
    index._shelf.forget(path)
    assert not api.has_index(path)
    assert len(api.timeline(path).bars) == 2 and api.has_index(path)


@pytest.mark.sampled
@pytest.mark.parametrize("window", [(0, 100_000), (20_000, 21_000), (99_990, 100_500), (-50, -10)])
@pytest.mark.parametrize("ranks", [None, (0, 2), ()])
def test_bars_are_the_records_of_the_window(run, window, ranks):
    begin, end = window
    shown = (0, 1, 2) if ranks is None else ranks
    wanted = [
        (row["rank"], row["seq"], row["begin_ns"], row["end_ns"], row["op"], row["parameters"])
        for row in plain_rows(run)
        if row["begin_ns"] < end and row["end_ns"] >= begin and row["rank"] in shown
    ]
    found = api.timeline(run, begin, end, ranks=ranks)
    frame = found.bars
    names = ("rank", "seq", "begin_ns", "end_ns", "op", "parameters")
    assert list(zip(*(frame[name] for name in names), strict=True)) == wanted
    assert found.ranks == shown
    few = api.timeline(run, begin, end, ranks=ranks, most_bars=max(0, len(wanted) - 1))
    assert (few.bars is None) == bool(wanted)


def test_bars_of_one_lane_stand_apart_where_they_overlap(tmp_path):
    run = SyntheticRun(2)
    for begin in (0, 10, 20, 200):
        run.add_collective("all_reduce", issue_ns=begin, host_ns=100)
    run.add_collective("all_reduce", issue_ns=0, host_ns=10, group=(0,), pg="1")
    frame = api.timeline(run.write(tmp_path / "run")).bars
    mine = frame[frame["rank"] == 0]
    assert mine["lane"].tolist() == [0, 1, 0, 0, 0]
    assert mine["level"].tolist() == [0, 0, 1, 2, 0]


def test_exposed_parts_are_marked(tmp_path):
    run = SyntheticRun(1)
    run.add_collective("all_reduce", issue_ns=100, host_ns=5, exposed_ns=50)
    run.add_collective("all_reduce", issue_ns=500, host_ns=5)
    frame = api.timeline(run.write(tmp_path / "run")).bars
    assert frame["exposed_begin_ns"].tolist()[0] == 100 and frame["exposed_end_ns"].tolist()[0] == 150
    assert frame["exposed_end_ns"].isna().tolist() == [False, True]


def test_steps_and_phases_are_bands(run):
    bands = api.timeline(run, 25_000, 50_000).bands
    steps = bands[bands["kind"] == "step"]
    assert steps["step"].tolist() == [1]
    assert (steps["begin_ns"].tolist(), steps["end_ns"].tolist()) == ([25_000], [50_000])
    assert api.step_window(run, 2) == (50_000, 75_000)
    assert api.step_window(run, 99) is None
    assert api.warm_window(run, 2) == (25_000, 75_000)
    phases = bands[bands["kind"] == "phase"]
    assert set(phases["name"]) <= {"forward", "backward"}
    times = [row["begin_ns"] for row in plain_rows(run) if row["rank"] == 0]
    for _, band in phases.iterrows():
        inside = times[
            bisect.bisect_left(times, band["begin_ns"]) : bisect.bisect_right(times, band["end_ns"])
        ]
        assert inside and inside[0] == band["begin_ns"]


def test_a_run_without_steps_has_no_phase_before_the_first(tmp_path):
    for steps in (0, 1):
        run = SyntheticRun(2)
        if steps:
            run.add_step(0, begin_ns=5_000, duration_ns=1_000)
        run.add_collective("broadcast", step=-1, phase="init", issue_ns=1_000, host_ns=500, payload_bytes=64)
        path = run.write(tmp_path / str(steps))
        assert ("init" in set(api.timeline(path).bands["name"])) == bool(steps)


def test_a_window_without_length_is_said(run):
    with pytest.raises(UsageError, match="no length"):
        api.timeline(run, 10, 10)


def fits(row, one):
    value = row[one.column]
    if one.test == "is null":
        return value is None
    if one.test == "!=":
        return value != one.value
    if value is None:
        return one.test == "not contains"
    return {
        "=": lambda: value == one.value,
        "<": lambda: value < one.value,
        ">=": lambda: value >= one.value,
        "between": lambda: one.value[0] <= value <= one.value[1],
        "contains": lambda: str(one.value).lower() in str(value).lower(),
        "not contains": lambda: str(one.value).lower() not in str(value).lower(),
        "starts with": lambda: str(value).lower().startswith(str(one.value).lower()),
    }[one.test]()


FILTERS = [
    [],
    [api.Filter("op", "=", "all_reduce")],
    [api.Filter("op", "contains", "REDUCE"), api.Filter("rank", "=", 1)],
    [api.Filter("purpose", "is null")],
    [api.Filter("purpose", "!=", "gradient_reduce")],
    [api.Filter("purpose", "not contains", "grad"), api.Filter("payload_bytes", "between", (4, 400))],
    [api.Filter("begin_ns", "<", 50_000), api.Filter("exposed_ns", ">=", 100)],
    [api.Filter("parameters", "starts with", "layer.1"), api.Filter("is_async", "=", False)],
    [api.Filter("op", "=", "' or 1 = 1 --")],
]


SORTS = [None, "begin_ns", "-begin_ns", "op", "-payload_bytes", "exposed_ns", "-bucket", "rank", "purpose"]
CASES = [
    *((filters, sort) for filters in FILTERS for sort in (None, "exposed_ns")),
    *((FILTERS[2], sort) for sort in SORTS),
    *(([], sort) for sort in SORTS),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("filters", "sort"), CASES, ids=str)
def test_any_page_in_any_order(run, filters, sort, monkeypatch):
    from commprof.analysis.browse import record_pages

    # With this limit, deep pages are located in the same way as in a large run.
    monkeypatch.setattr(record_pages, "_FEW", 20)
    rows = [row for row in plain_rows(run) if all(fits(row, one) for one in filters)]
    if sort:
        name = sort.removeprefix("-")
        known = sorted(
            (row for row in rows if row[name] is not None), key=lambda row: row[name], reverse=sort[0] == "-"
        )
        rows = known + [row for row in rows if row[name] is None]
    for offset, limit in ((0, 10), (37, 250), (max(0, len(rows) - 5), 10), (10_000, 5)):
        page = api.records_page(run, filters, sort, offset, limit)
        assert page.total == len(rows)
        wanted = [(row["rank"], row["seq"]) for row in rows[offset : offset + limit]]
        assert list(zip(page.rows["rank"], page.rows["seq"], strict=True)) == wanted


def test_a_row_has_the_columns_and_values_of_the_run(run):
    rows = plain_rows(run)
    page = api.records_page(run, limit=len(rows)).rows
    for name in COLLECTIVES.names:
        found = [None if pd.isna(value) else value for value in page[name].astype(object)]
        assert found == [row[name] for row in rows], name


@pytest.mark.parametrize(
    "filters",
    [
        [api.Filter("nope", "=", 1)],
        [api.Filter("rank", "=", "one")],
        [api.Filter("rank", "like", 1)],
        [api.Filter("rank", "between", 1)],
        [api.Filter("rank", "=", 1 << 70)],
    ],
)
def test_a_wrong_filter_is_said(run, filters):
    with pytest.raises(UsageError):
        api.records_page(run, filters)


def test_csv_is_what_the_pages_hold(run):
    filters = [api.Filter("op", "=", "all_reduce")]
    for sort in (None, "-payload_bytes"):
        text = b"".join(
            api.records_csv(run, filters, sort, ["rank", "seq", "payload_bytes", "bucket"])
        ).decode()
        rows = list(csv.DictReader(io.StringIO(text)))
        page = api.records_page(run, filters, sort, limit=1000).rows
        assert [(int(row["rank"]), int(row["seq"])) for row in rows] == list(
            zip(page["rank"], page["seq"], strict=True)
        )
    nothing = b"".join(api.records_csv(run, [api.Filter("op", "=", "none")], None, ["rank"])).decode()
    assert list(csv.DictReader(io.StringIO(nothing))) == []


def test_one_record_with_its_bucket_lines_and_partners(tmp_path):
    run = SyntheticRun(3)
    for number in range(3):
        run.add_collective("all_reduce", payload_bytes=8, bucket=number, purpose="gradient_reduce")
    run.add_collective("send", group=(0, 1), ranks=(0,), peer=1, payload_bytes=4)
    run.add_collective("recv", group=(0, 1), ranks=(1,), peer=0, payload_bytes=4)
    for rank in range(3):
        run.add(
            "buckets", rank=rank, attempt=0, pid=run.pid(rank), step=0, micro_step=0, bucket=1, numel=2, bytes=8,
            dtype="float32", time_ns=1, parameters="a,b", flush_reason="full",
        )  # fmt: skip
    run.add(
        "matches",
        state="matched",
        rank=1,
        attempt=0,
        record_pid=run.pid(1),
        seq=1,
        op="all_reduce",
        file="n.log",
        line=7,
    )
    path = run.write(tmp_path / "run")
    found = api.record(path, rank=1, seq=1)
    assert found.row["bucket"] == 1 and found.bucket["parameters"] == "a,b"
    assert found.lines["line"].tolist() == [7]
    assert found.partners["rank"].tolist() == [0, 1, 2]
    assert found.partners["lateness_ns"].tolist() == [0, 1, 2]
    message = api.record(path, rank=0, seq=3)
    assert message.bucket is None and len(message.lines) == 0
    assert list(zip(message.partners["rank"], message.partners["op"], strict=True)) == [
        (0, "send"),
        (1, "recv"),
    ]
    assert api.record(path, rank=9, seq=0) is None


def test_the_bucket_of_a_record_is_looked_up_without_reading_all_buckets(tmp_path, monkeypatch):
    run = SyntheticRun(2)
    for step in range(4):
        run.add_collective("all_reduce", payload_bytes=8, bucket=0, step=step, purpose="gradient_reduce")
        for rank in range(2):
            run.add(
                "buckets", rank=rank, attempt=0, pid=run.pid(rank), step=step, micro_step=0, bucket=0, numel=2, bytes=8,
                dtype="float32", time_ns=step, parameters=f"of step {step}",
            )  # fmt: skip
            run.add(
                "matches", state="matched", rank=rank, attempt=0, record_pid=run.pid(rank), seq=step, op="all_reduce",
                file="n.log", line=10 * step + rank,
            )  # fmt: skip
    path = run.write(tmp_path / "run")
    monkeypatch.setattr(record_details, "_FEWEST_SCANNED", 0)
    read = []
    whole = Run.table
    monkeypatch.setattr(Run, "table", lambda self, name: read.append(name) or whole(self, name))
    found = api.record(path, rank=1, seq=2)
    assert (found.bucket["parameters"], found.bucket["time_ns"]) == ("of step 2", 2)
    assert found.lines["line"].tolist() == [21]
    assert not {"buckets", "matches"} & set(read)


@pytest.fixture
def in_file(monkeypatch):
    monkeypatch.setattr(index, "_FEWEST_IN_FILE", 0)


def small_run(path, op="all_reduce"):
    run = SyntheticRun(2)
    run.add_step(0)
    run.add_collective(op, payload_bytes=8, peer=0)
    return run.write(path)


def test_small_runs_leave_no_file(tmp_path):
    path = small_run(tmp_path / "run")
    before = sorted(path.rglob("*"))
    assert api.index(path)["in_file"] is False
    assert sorted(path.rglob("*")) == before


def test_the_file_is_built_once_with_progress_and_again_when_the_run_changes(tmp_path, in_file):
    path = small_run(tmp_path / "run")
    told = []
    assert api.index(path, lambda done, of: told.append((done, of)))["in_file"]
    assert told[-1] == (2, 2)
    file = path / "index.duckdb"
    assert not [child for child in path.iterdir() if child.name.startswith(".")]
    written = file.stat().st_mtime_ns
    api.timeline(path)
    assert file.stat().st_mtime_ns == written
    # A finalizer may write a different table of collectives.
    small_run(tmp_path / "other", "broadcast")
    for rank in (0, 1):
        name = f"collectives/rank-0000{rank}-0-100{rank}.parquet"
        (path / name).write_bytes((tmp_path / "other" / name).read_bytes())
    assert not api.has_index(path)
    assert api.index(path)["in_file"]
    assert set(api.timeline(path).bars["op"]) == {"broadcast"}
    assert file.stat().st_mtime_ns != written
    index._shelf.forget(path)
    file.unlink()
    assert set(api.records_page(path).rows["op"]) == {"broadcast"}


@pytest.mark.sampled
@pytest.mark.parametrize("content", [b"", b"nonsense", None])
def test_a_damaged_index_is_built_again(tmp_path, in_file, content):
    path = small_run(tmp_path / "run")
    api.index(path)
    file = path / "index.duckdb"
    whole = file.read_bytes()
    index._shelf.forget(path)
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    (path / ".index.duckdb-left").mkdir()  # A killed builder leaves such a directory.
    assert not api.has_index(path) and api.index(path)["in_file"]
    assert len(api.timeline(path).bars) == 2
    assert file.read_bytes()[:100] == whole[:100] or file.stat().st_size > 4096
    assert not (path / ".index.duckdb-left").exists()


@pytest.mark.long
def test_an_index_with_a_damaged_block_is_removed_and_built_again(tmp_path, in_file):
    path = small_run(tmp_path / "run")
    api.index(path)
    file = path / "index.duckdb"
    whole = file.read_bytes()

    def answers():
        return [api.records_page(path).rows.to_dict("list"), api.timeline(path).bars.to_dict("list")]

    right, found = answers(), 0
    for block in range(3 * 4096, len(whole), 1 << 18):
        index._shelf.forget(path)
        file.write_bytes(whole[: block + 4096] + bytes(range(64)) + whole[block + 4160 :])
        try:
            assert answers() == right
        except TraceError as error:
            found += 1
            text = str(error)
            assert (
                text.startswith(f"{file} has a damaged block: ")
                and "It was removed. Repeat the command" in text
            )
            assert not file.exists()
            assert answers() == right
    assert found
    index._shelf.forget(path)
    assert api.index(path)["in_file"]


def test_a_directory_that_cannot_be_written_to(tmp_path, in_file, monkeypatch):
    path = small_run(tmp_path / "run")

    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(index, "_write", refused)
    assert api.index(path)["in_file"] is False
    assert len(api.timeline(path).bars) == 2
    index._shelf.forget(path)
    monkeypatch.setattr(index, "MOST_IN_MEMORY", 1)
    with pytest.raises(TraceError, match="Copy the run"):
        api.index(path)


@pytest.mark.long
def test_where_the_run_cannot_be_written_to_the_index_lies_in_the_cache_directory(
    tmp_path, in_file, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "_MOST_CACHED", 1)
    original = index._write_to

    def refused(file, run, progress):
        if file.parent == run.path:
            raise OSError(30, "Read-only file system")
        original(file, run, progress)

    monkeypatch.setattr(index, "_write_to", refused)
    for name in ("first", "second"):
        path = small_run(tmp_path / name)
        before = sorted(path.rglob("*"))
        assert api.index(path)["in_file"] and api.has_index(path)
        index._shelf.forget(path)
        assert api.has_index(path) and len(api.timeline(path).bars) == 2
        assert sorted(path.rglob("*")) == before
        (file,) = (tmp_path / "cache" / "commprof" / "indexes").iterdir()  # The older index was deleted.
        assert file.stat().st_mode & 0o077 == 0 or file.parent.stat().st_mode & 0o077 == 0


def test_questions_write_no_index(tmp_path, in_file, monkeypatch):
    path = small_run(tmp_path / "run")
    before = sorted(path.rglob("*"))
    assert len(api.timeline(path).bars) == 2 and api.records_page(path).total == 2
    assert sorted(path.rglob("*")) == before
    index._shelf.forget(path)
    monkeypatch.setattr(index, "MOST_IN_MEMORY", 1)
    with pytest.raises(TraceError, match="Make it once: commprof finalise"):
        api.timeline(path)


def test_many_ask_and_one_builds(tmp_path, in_file, monkeypatch):
    path = small_run(tmp_path / "run")
    built = []
    original = index.fill_records
    monkeypatch.setattr(index, "fill_records", lambda *args: built.append(1) or original(*args))
    found = []

    def ask():
        api.index(path)
        found.append(len(api.timeline(path).bars))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [2] * 6
    assert built == [1]


def test_force_replaces_a_run_with_its_index(tmp_path, in_file):
    from commprof.trace.manifest import Manifest, create_run

    path = small_run(tmp_path / "run")
    api.index(path)
    create_run(path, Manifest(), force=True)
    assert [child.name for child in path.iterdir()] == ["run.json"]


def test_an_empty_run_and_hostile_times(tmp_path):
    assert len(api.timeline(SyntheticRun(1).write(tmp_path / "empty")).bars) == 0
    assert api.records_page(tmp_path / "empty").total == 0
    run = SyntheticRun(2)
    for begin in (-(1 << 62), 1 << 62, 0):
        run.add_collective("all_reduce", issue_ns=begin, host_ns=5, exposed_ns=1 << 40)
    path = run.write(tmp_path / "hostile")
    found = api.timeline(path)
    assert len(found.bars) == 6
    assert api.timeline(path, most_bars=0).density["busy_ns"].min() >= 0
    assert api.records_page(path, sort="-issue_ns").rows["issue_ns"].tolist()[0] == 1 << 62


def test_a_run_that_grows_is_seen_to(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "_LIVE_SECONDS", 0.0)
    path = small_run(tmp_path / "run")
    assert api.records_page(path).total == 2
    manifest = json.loads((path / "run.json").read_text())
    os.utime(path / "run.json")
    assert manifest["world_size"] == 2
    assert api.records_page(path).total == 2


def test_answers_are_the_same_with_the_index_as_without(tmp_path, in_file):
    path = busy_run(random.Random(5)).write(tmp_path / "run")

    def answers():
        per_step = api.exposure_per_step(path), api.exposure(path, ("attempt", "step"))
        compared = api.compare_both([path])
        return (
            api.traffic(path),
            api.traffic(path, ()),
            api.step_times(path),
            api.matrix(path, ("step",)),
            *per_step,
            compared.settings,
            compared.traffic,
            pd.DataFrame([api.overview(path)]),
        )

    before = answers()
    assert api.index(path)["in_file"]
    for with_index, without in zip(answers(), before, strict=True):
        pd.testing.assert_frame_equal(with_index, without)
