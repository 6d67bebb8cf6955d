"""Compare the answers from an index, which are computed part by part, with the answers from all records at once."""

from __future__ import annotations

import random
from functools import partial

import pandas as pd
import pyarrow as pa
import pytest

from commprof.align.ranks import collectives
from commprof.analysis import api
from commprof.analysis.relations.sql_engine import connect
from commprof.analysis.storage import index
from commprof.analysis.stragglers import straggling
from commprof.analysis.time import partitions
from commprof.trace.reader import Scan
from support.runs import SyntheticRun

WORLD = 4
OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "barrier")


def mixed_run(rng, records=260, reused=True):
    """Return a run with a mixture of records.

    The run has collectives of three groups, messages, a recv from any source, buckets, captured calls and a
    reused group name.
    """
    run = SyntheticRun(WORLD, config={"zero_optimization": {"stage": 2}})
    for step in range(6):
        run.add_step(step, begin_ns=step * 100_000, duration_ns=100_000)
    for number in range(records):
        step = number * 6 // records
        issue = number * 600_000 // records + rng.randrange(3000)
        group, ranks = rng.choice([("0", (0, 1, 2, 3)), ("1", (0, 1)), ("1", (2, 3)), ("2", (1, 2, 3))])
        op = rng.choice(OPS)
        run.add_collective(
            op,
            step=step,
            group=ranks,
            pg=group,
            peer=ranks[0] if op in ("broadcast", "reduce") else -1,
            payload_bytes=0 if op == "barrier" else rng.choice([4096, 65536]),
            issue_ns=issue,
            host_ns=rng.randrange(100, 9000),
            exposed_ns=rng.choice([None, 700]),
            purpose=rng.choice(["gradient_reduce", "parameter_gather"]),
            bucket=rng.choice([None, 0, 1, 2]),
            captured=rng.random() < 0.05,
            pg_seq=number // 2 if group == "2" and reused else None,  # In this case some numbers occur twice.
        )
    for number in range(60):
        sender, receiver = rng.sample(range(WORLD), 2)
        told = {"step": number // 10, "issue_ns": number * 10_000, "payload_bytes": rng.choice([64, 512])}
        run.add_collective("send", ranks=(sender,), peer=receiver, **told)
        run.add_collective("recv", ranks=(receiver,), peer=rng.choice([sender, sender, -1]), **told)
    for row in run.rows["collectives"]:
        late = rng.randrange(4000)
        for name in ("issue_ns", "return_ns", "wait_end_ns"):
            row[name] = None if row[name] is None else row[name] + late
    for step in range(6):
        for rank in range(WORLD):
            for bucket in range(3):
                run.add(
                    "buckets", rank=rank, attempt=0, pid=run.pid(rank), step=step, micro_step=0, bucket=bucket,
                    numel=10 + bucket, bytes=40, capacity=20, dtype="float32", owners="0", parameters=f"a.{bucket}",
                    flush_reason="full", time_ns=step * 100_000 + bucket,
                )  # fmt: skip
    return run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Return the same run twice: one with an index of parts with few rows, and one without an index."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    plain = mixed_run(random.Random(seed)).write(tmp_path / "plain")
    indexed = mixed_run(random.Random(seed)).write(tmp_path / "indexed")
    monkeypatch.setattr(index, "_FEWEST_IN_FILE", 0)
    original = partitions.conditions
    monkeypatch.setattr(
        partitions, "conditions", lambda ask, relation, most_rows=0: original(ask, relation, 100)
    )
    assert api.index(indexed)["in_file"]
    return plain, indexed


def sorted_rows(frame):
    return frame.sort_values(list(frame.columns)).reset_index(drop=True)


@pytest.mark.long
def test_answers_out_of_the_index_are_those_of_all_records(runs):
    plain, indexed = runs
    found, expected = api.straggling(indexed), api.straggling(plain)
    for name in straggling.Straggling._fields:
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert len(theirs), name
        pd.testing.assert_frame_equal(sorted_rows(mine), sorted_rows(theirs), obj=name)
    assert found.ranks.attrs == expected.ranks.attrs
    assert found.collectives["spread_ns"].is_monotonic_decreasing
    assert len(api.straggling(indexed, 3).collectives) == 3
    for steps in (None, (1, 3)):
        mine, theirs = api.bandwidth_both(indexed, steps=steps), api.bandwidth_both(plain, steps=steps)
        pd.testing.assert_frame_equal(mine.sizes, theirs.sizes)
        pd.testing.assert_frame_equal(sorted_rows(mine.collectives), sorted_rows(theirs.collectives))
    for ask in (
        api.bucket_flushes,
        api.bucket_means,
        api.bucket_steps,
        partial(api.bucket_flushes, step=2, bucket=1),
    ):
        assert len(ask(plain))
        pd.testing.assert_frame_equal(ask(indexed), ask(plain))
    content, theirs = (api.bucket_content(run, step=2, bucket=1) for run in (indexed, plain))
    pd.testing.assert_frame_equal(content.operations, theirs.operations)
    for by in (("op",), ("step", "purpose"), ("pg", "group_ranks")):
        pd.testing.assert_frame_equal(api.traffic(indexed, by), api.traffic(plain, by))


@pytest.mark.parametrize("seed", [2675342405, 3909471971, 3, 20])
def test_random_times_of_microseconds_blame_nobody(tmp_path, seed):
    said = api.stragglers(mixed_run(random.Random(seed)).write(tmp_path / "run")).attrs
    assert said == {"statement": None, "culprit": "nobody", "late": []}


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("reused", [True, False], ids=["numbers come twice", "numbers come once"])
def test_the_tables_of_an_index_are_the_same_however_they_are_worked_out(tmp_path, monkeypatch, reused):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    monkeypatch.setattr(index, "_FEWEST_IN_FILE", 0)
    quick, slow = (
        mixed_run(random.Random(seed), reused=reused).write(tmp_path / name) for name in ("quick", "slow")
    )
    found = tables_of(quick)
    monkeypatch.setattr(collectives, "_DENSE", 0)
    expected = tables_of(slow)
    assert found.keys() == expected.keys() > {"records", "operations", "bandwidth_times", "stragglers"}
    for name, frame in expected.items():
        pd.testing.assert_frame_equal(sorted_rows(found[name]), sorted_rows(frame), obj=name)


def tables_of(run):
    """Return all tables in the index of a run, without the fact that identifies the run's files."""
    made = index.index_of(run, write=True)
    names = made.ask("select table_name from information_schema.tables where table_schema = 'main'")
    wanted = {name: f"select * from {name}" for name in names["table_name"].to_pylist()}
    wanted["records"] = "select rowid as place, * from records"
    wanted["facts"] += " where name <> 'fingerprint'"
    return {name: made.ask(sql).to_pandas() for name, sql in wanted.items()}


@pytest.mark.long
def test_parts_hold_every_record_once_and_whole_collectives(runs):
    plain, _ = runs
    whole = api.open_run(plain).table("collectives")
    files = tuple(sorted((plain / "collectives").glob("*.parquet")))
    with connect() as engine:
        parts = list(partitions.of_scan(Scan(files, whole.slice(0, 0)), whole.column_names, engine))
    assert len(parts) > 5
    every = pa.concat_tables(parts)
    keys = ["rank", "attempt", "pid", "seq"]
    order = [(name, "ascending") for name in keys]
    assert every.sort_by(order).select(keys).to_pylist() == whole.sort_by(order).select(keys).to_pylist()
    place = {}
    for number, part in enumerate(parts):
        for row in part.to_pylist():
            if row["op"] in ("send", "recv"):
                key = ("to", row["peer"] if row["op"] == "send" else row["rank"])
            else:
                key = (row["pg"], row["group_ranks"], row["pg_seq"])
            assert place.setdefault(key, number) == number


@pytest.mark.long
def test_a_scan_of_many_rows_is_asked_part_by_part(runs, monkeypatch):
    plain, _ = runs
    expected = api.straggling(plain), api.arrivals(plain)
    monkeypatch.setattr("commprof.trace.reader._MOST_ROWS", 10)
    found = api.straggling(plain), api.arrivals(plain)
    for name in straggling.Straggling._fields:
        mine, theirs = getattr(found[0], name), getattr(expected[0], name)
        pd.testing.assert_frame_equal(sorted_rows(mine), sorted_rows(theirs), obj=name)
    keys = ["rank", "pid", "seq"]
    mine, theirs = (frame.sort_values(keys).reset_index(drop=True) for frame in (found[1], expected[1]))
    pd.testing.assert_frame_equal(mine.drop(columns="collective"), theirs.drop(columns="collective"))
    assert mine["collective"].nunique() == theirs["collective"].nunique()
