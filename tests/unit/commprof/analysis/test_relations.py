"""Compare the relations that a user can query by name with plain loops over the records."""

import random
from collections import Counter, defaultdict

import pandas as pd
import pytest

import commprof
from commprof.analysis import api
from commprof.analysis.relations import relation_graph
from commprof.analysis.relations.evaluation import BY
from commprof.errors import UsageError
from commprof.schema import TABLES, Op, parse_splits
from support.detailed_runs import detailed_run
from support.runs import SyntheticRun

GROUP = (2, 0, 3, 1)
EMPTY_HERE = (
    "differing_operations",
    "differing_records",
    "exchanges",
    "group_members",
    "messages",
    "rank_hosts",
    "summed_operations",
)


@pytest.fixture
def run(tmp_path):
    return detailed_run(seed=5).write(tmp_path / "run")


def uneven_run(path):
    """Write a run of four ranks whose exchanges have splits.

    The order of the ranks in the group is not ascending.
    """
    run = SyntheticRun(4)
    splits = [[0, 8, 16, 24], [4, 4, 4, 4], [32, 0, 0, 0], [1, 2, 3, 4]]
    for number in range(3):
        for rank in range(4):
            sizes = [size * (number + 1) for size in splits[rank]]
            run.add_collective(
                "all_to_all",
                ranks=(rank,),
                payload_bytes=sum(sizes),
                group=GROUP,
                input_splits=",".join(map(str, sizes)),
            )
    return run.write(path)


def by_collective(records):
    """Return the records of each collective of a run in which each group name is used once."""
    found = defaultdict(list)
    for row in records:
        if row["op"] not in (Op.SEND, Op.RECV):
            found[row["attempt"], row["pg"], row["group_ranks"], row["pg_seq"]].append(row)
    return found


def test_every_relation_has_a_head_and_inputs_that_exist():
    for name in relation_graph.names():
        relation = relation_graph.relation(name)
        assert relation.title.endswith(".") and relation.grain.startswith("one row per"), name
        for each in relation.inputs:
            assert each.name in {*TABLES, *relation_graph.names(), *relation_graph.MADE}, (name, each)
        assert set(relation_graph.tables_of(name)) <= {*TABLES, *relation_graph.MADE}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", [*relation_graph.names(), *relation_graph.MADE])
def test_every_relation_can_be_asked_for(run, name):
    frame = commprof.open(run).relation(name).df()
    assert list(frame.columns)
    if name not in EMPTY_HERE:
        assert len(frame)


def test_deduplicated_collectives_are_those_of_a_loop_over_the_records(run):
    opened = commprof.open(run)
    expected = by_collective(opened.run.table("collectives").to_pylist())
    rows = opened.relation("deduplicated_collectives").df().to_dict("records")
    assert len(rows) == len(expected)
    for row in rows:
        members = expected[row["attempt"], row["pg"], row["group_ranks"], row["pg_seq"]]
        lowest = min(members, key=lambda member: member["rank"])
        assert row["records"] == len(members)
        assert row["op"] == lowest["op"] and row["step"] == lowest["step"]
        assert row["payload_bytes"] == max(member["payload_bytes"] for member in members)


def test_operations_by_some_columns_are_sums_of_those_by_all(run):
    opened = commprof.open(run)
    whole = opened.relation("operations").df()
    for by in (["op"], ["op", "purpose"], ["step", "group_ranks"]):
        few = opened.relation("operations", by=by).df()
        for name in ("collectives", "records", "payload_bytes"):
            assert few[name].sum() == whole[name].sum()
        assert set(by) <= set(few.columns) and "call_site" not in few.columns


def test_exchanges_are_the_recorded_splits(tmp_path):
    opened = commprof.open(uneven_run(tmp_path / "run"))
    expected = {
        (row["pg_seq"], row["rank"], receiver): float(size)
        for row in opened.run.table("collectives").to_pylist()
        for receiver, size in zip(GROUP, parse_splits(row["input_splits"], 4), strict=True)
    }
    rows = opened.relation("exchanges").df().to_dict("records")
    assert {(row["pg_seq"], row["sender"], row["receiver"]): row["sent_bytes"] for row in rows} == expected
    matrix = api.matrix(opened.run)
    for row in matrix.to_dict("records"):
        between = (row["sender"], row["receiver"])
        assert row["wire_bytes"] == sum(
            size for (_, *pair), size in expected.items() if tuple(pair) == between
        )


def test_a_rank_that_missed_the_last_collective_does_not_change_the_others(tmp_path):
    run = detailed_run(seed=5)
    last = max(
        (row for row in run.rows["collectives"] if row["op"] not in (Op.SEND, Op.RECV) and row["rank"] == 1),
        key=lambda row: (row["pg"], row["group_ranks"], row["pg_seq"]),
    )
    before = api.traffic(run.write(tmp_path / "before"), by=("op",)).set_index("op")
    run.rows["collectives"].remove(last)
    after = api.traffic(run.write(tmp_path / "after"), by=("op",)).set_index("op")
    assert after["collectives"].equals(before["collectives"])
    assert after["payload_bytes"].equals(before["payload_bytes"])
    assert before["records"].sum() - after["records"].sum() == 1


def test_a_query_may_name_relations(run):
    found = api.query(run, "select op, sum(collectives) as n from operations group by op order by op")
    traffic = api.traffic(run, by=("op",))
    assert found["n"].tolist() == traffic["collectives"].tolist()
    every = api.query(run, "select * from operations")
    assert set(BY) <= set(every.columns)


def test_a_query_over_files_reaches_only_the_files_of_the_run(run, tmp_path, monkeypatch):
    monkeypatch.setattr("commprof.analysis.relations.evaluation._MOST_IN_MEMORY", 0)
    found = api.query(run, "select count(*) as n from collectives")
    assert found["n"][0] == len(api.open_run(run).table("collectives"))
    for other in (run / "run.json", tmp_path / "other.csv"):
        with pytest.raises(UsageError, match="cannot be answered"):
            api.query(run, f"select * from read_text('{other}'), collectives limit 1")


@pytest.mark.parametrize(
    ("name", "by", "message"),
    [
        ("operationz", None, "did you mean 'operations'"),
        ("operations", ["rank"], "cannot be summed by 'rank'"),
    ],
)
def test_an_unknown_name_is_told_in_one_line(run, name, by, message):
    with pytest.raises(UsageError, match=message) as told:
        commprof.open(run).relation(name, by=by)
    assert "\n" not in str(told.value)


def reducing_run(path, seed):
    """Write a run of four ranks in two groups.

    One to three operations reduce each bucket, and the times are random.
    """
    draw = random.Random(seed)
    run = SyntheticRun(4)
    for step in range(3):
        for ranks in ((0, 1), (2, 3)):
            for bucket in range(draw.randrange(1, 4)):
                for rank in ranks:
                    run.add(
                        "buckets", rank=rank, attempt=0, pid=run.pid(rank), step=step, micro_step=0, bucket=bucket,
                        numel=draw.choice([10, 10, 10, 12]), bytes=40, capacity=draw.choice([None, 20]), dtype="float32",
                        parameters="a", flush_reason="full", time_ns=1,
                    )  # fmt: skip
                for _ in range(draw.randrange(4)):
                    run.add_collective(
                        draw.choice(["all_reduce", "reduce", "reduce_scatter"]), ranks=ranks, group=ranks,
                        pg=f"pg{ranks[0]}", purpose="gradient_reduce", step=step, bucket=bucket, peer=ranks[0],
                        payload_bytes=draw.randrange(1000), issue_ns=draw.randrange(1000), host_ns=draw.randrange(1000),
                        exposed_ns=draw.choice([None, draw.randrange(100)]),
                    )  # fmt: skip
    return run.write(path)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("seed", range(3))
def test_bucket_flushes_are_those_of_a_loop_over_the_records(tmp_path, seed):
    opened = commprof.open(reducing_run(tmp_path / "run", seed))
    tables = {name: opened.run.table(name).to_pylist() for name in ("buckets", "collectives")}
    held, carried = defaultdict(list), defaultdict(list)
    groups = {rank: "0-1" if rank < 2 else "2-3" for rank in range(4)}
    for rows, found in ((tables["buckets"], held), (tables["collectives"], carried)):
        for row in rows:
            found[row["step"], row["bucket"], groups[row["rank"]]].append(row)
    reducing = {group for _, _, group in carried}
    flushes = opened.relation("bucket_flushes").df()
    assert len(flushes) == len(held) and reducing == {"0-1", "2-3"}
    for row in flushes.to_dict("records"):
        key = (row["step"], row["bucket"], row["group_ranks"])
        lowest, records = min(held[key], key=lambda each: each["rank"]), carried[key]
        assert (row["numel"], row["ranks"]) == (lowest["numel"], 2)
        assert row["alike"] == (len({each["numel"] for each in held[key]}) == 1)
        of_rank = defaultdict(list)
        for record in records:
            of_rank[record["rank"]].append(record)
        once = of_rank[lowest["rank"]]
        assert ("" if pd.isna(row["op"]) else row["op"]) == ", ".join(sorted({each["op"] for each in once}))
        assert (row["collectives"], row["payload_bytes"]) == (
            len(once),
            sum(each["payload_bytes"] for each in once),
        )
        wire = sum((1 if each["op"] == "all_reduce" else 0.5) * each["payload_bytes"] for each in once)
        assert row["wire_bytes"] == wire
        if not records:
            assert pd.isna(row["duration_ns"]) and row["executed_wire_bytes"] == 0
            continue
        lasted = [
            max(each["return_ns"] for each in some) - min(each["issue_ns"] for each in some)
            for some in of_rank.values()
        ]
        assert row["duration_ns"] == pytest.approx(sum(lasted) / 2, abs=0.5)


def test_arrivals_transfers_and_exposure_are_those_of_the_answers(run):
    opened = commprof.open(run)
    query = "select rank, count(*) as n from arrivals where is_last group by rank order by rank"
    last = api.query(run, query).to_dict("records")
    expected = Counter(int(rank) for rank in opened.arrivals().query("is_last == True")["rank"])
    assert {row["rank"]: row["n"] for row in last} == expected
    times = opened.relation("transfers").df()
    records = opened.run.table("collectives").to_pylist()
    several = {
        key for key, rows in by_collective(records).items() if len(rows) > 1 and rows[0]["payload_bytes"]
    }
    assert len(times[times["op"] != "send"]) == len(several)
    for name, by in (
        ("exposure_of_steps", ["attempt", "step"]),
        ("exposure_of_purposes", ["attempt", "step", "purpose"]),
    ):
        rows = opened.relation(name).df()
        assert rows["exposed_low_ns"].sum() == api.exposure(opened.run, by)["exposed_low_ns"].sum()
        assert len(rows) == len(rows[by].drop_duplicates())


@pytest.mark.parametrize("column", ["op", "intended_op"])
def test_what_reduces_a_bucket_may_be_any_operation(column):
    """DuckDB and Spark have no common function that joins texts in order, so the relation names each operation."""
    text = relation_graph.statement("bucket_flushes")
    for op in Op:
        assert f"max(case when {column} = '{op}' then {column} end)" in text
