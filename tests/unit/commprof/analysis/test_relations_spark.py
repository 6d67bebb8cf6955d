"""Test that DuckDB and Spark return the same rows for the same SQL texts, on runs of every kind."""

import math
import shutil
import sys
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from commprof.analysis.relations import relation_graph
from commprof.analysis.relations.evaluation import BY
from commprof.analysis.relations.sql_engine import evaluate
from commprof.errors import MissingExtraError, TraceError, UsageError
from commprof.schema import Op
from commprof.trace.reader import open_run
from commprof.trace.tables import empty_table, table_from_rows
from support import spark_session
from support.detailed_runs import detailed_run
from support.kinds_of_runs import KINDS, make_kinds
from support.random_records import random_records, random_steps
from support.runs import SyntheticRun

TABLES = ("collectives", "aggregates", "groups", "buckets", "steps")
BYS = ((), ("op",), ("step", "purpose"), BY)
VERSION_1 = Path(__file__).parents[3] / "golden" / "schema_1"
RELATIVE = 1e-12
pytestmark = pytest.mark.timeout(1800)  # Plans are made on one core, which other processes may share.


@pytest.fixture
def session():
    return spark_session.session()


def random_tables(seed: int, count: int = 300) -> dict[str, pa.Table]:
    """Return the tables of random records.

    The records include exchanges with unequal splits that all four ranks recorded, some of them unreadable.
    The tables also contain sums.
    """
    rows = random_records(seed, count).to_pylist()
    for number in range(12):
        for rank in range(4):
            sent = [(number + rank * other) % 5 * 100 for other in range(4)]
            got = [(number + other * rank) % 5 * 100 for other in range(4)]
            texts = (",".join(map(str, sent)), ",".join(map(str, got)))
            spoiled = {7: ("1,2", None), 8: ("1,x,3,4", "1,2,3,4"), 9: (None, None), 10: (None, texts[1])}
            input_splits, output_splits = spoiled.get(number, texts)
            changed = {
                "op": Op.ALL_TO_ALL, "rank": rank, "pid": 7, "seq": 1000 + number, "pg": "split", "pg_seq": number,
                "group_ranks": "0-3", "group_size": 4, "peer": -1, "payload_bytes": sum(sent), "is_p2p": False,
                "input_splits": input_splits, "output_splits": output_splits,
            }  # fmt: skip
            rows.append(rows[0] | changed)
    texts = {"a": "0-1", "b": "3,2"}
    rows = [row | {"group_ranks": texts.get(row["group_ranks"], row["group_ranks"])} for row in rows]
    return (
        {"collectives": table_from_rows("collectives", rows), "steps": random_steps(seed)}
        | summed_tables(seed)
        | bucket_tables(seed, rows)
    )


def bucket_tables(seed: int, rows: list[dict]) -> dict[str, pa.Table]:
    """Return the table of buckets, with one row for each bucket that the random records refer to."""
    keys = ("rank", "attempt", "pid", "step", "micro_step", "bucket")
    carried = {tuple(row[name] for name in keys): row for row in rows if row["bucket"] is not None}
    buckets = [
        dict(zip(keys, key, strict=True)) | {
            "numel": 10 + (seed + number) % 2, "bytes": 40, "capacity": None if number % 3 else 20, "dtype": "float32",
            "owners": None if number % 4 else "0,1", "parameters": None if number % 5 == 1 else f"p{number % 2}",
            "flush_reason": "full", "time_ns": number,
        }
        for number, key in enumerate(carried)
    ]  # fmt: skip
    return {"buckets": table_from_rows("buckets", buckets)}


def summed_tables(seed: int) -> dict[str, pa.Table]:
    run = SyntheticRun(2)
    for number, op in enumerate((Op.ALL_REDUCE, Op.REDUCE, Op.SEND, Op.RECV, Op.ALL_TO_ALL, Op.BARRIER)):
        for rank in range(2):
            run.add(
                "aggregates", rank=rank, attempt=0, pid=1, step=number // 3, phase="backward", op=op, group_ranks="0-1",
                group_size=2, pg="ab"[number % 2], is_p2p=op in (Op.SEND, Op.RECV), calls=3 + rank * number + seed,
                payload_bytes=1000 * number + 7 * rank, host_ns=100 + rank, exposed_ns=None if number % 2 else 10,
            )  # fmt: skip
    for rank, (pg, backend) in enumerate((("a", "cpu:gloo,cuda:gloo"), ("b", "cpu:gloo,cuda:nccl"))):
        run.add(
            "groups", rank=rank, attempt=0, pid=1, pg=pg, backend=backend, group_ranks="0-1", group_size=2, host=pg
        )  # fmt: skip
    for rank in (3, 2):  # These ranks are on one host. For the other group texts, the hosts are not known.
        run.add("groups", rank=rank, attempt=0, pid=1, pg="c", group_ranks="3,2", group_size=2, host="c")
    return run.tables("aggregates", "groups")


def assert_equal(found: pa.Table, expected: pa.Table) -> None:
    assert found.schema.remove_metadata() == expected.schema.remove_metadata()
    assert len(found) == len(expected)
    for ours, theirs in zip(in_order(found), in_order(expected), strict=True):
        for name, value in theirs.items():
            if isinstance(value, float) and isinstance(ours[name], float):
                assert math.isclose(ours[name], value, rel_tol=RELATIVE), (name, ours, theirs)
            else:
                assert ours[name] == value and isinstance(ours[name], type(value)), (name, ours, theirs)


def in_order(rows: pa.Table) -> list[dict]:
    def key(row):
        exact = [(name, value) for name, value in row.items() if not isinstance(value, float)]
        return repr(exact), [f"{value:.9g}" for value in row.values() if isinstance(value, float)]

    return sorted(rows.to_pylist(), key=key)


def compare(session, tables, names=None, bys=BYS) -> None:
    from commprof.analysis.relations.spark import SparkRelations

    relations = SparkRelations(session, tables)
    for name in names or relation_graph.names():
        depends = any("{by" in text.sql or "{req" in text.sql for text in _below(name))
        depends = depends and not relation_graph.requested(name, ())
        for by in bys if depends else bys[:1]:
            assert_equal(relations.table(name, by), evaluate(name, tables, by))


def _below(name: str) -> list[relation_graph.Relation]:
    own = relation_graph.relation(name)
    return [
        own,
        *(each for item in own.inputs if item.name in relation_graph.names() for each in _below(item.name)),
    ]


@pytest.mark.long
def test_random_records_of_every_kind_give_the_same_operations(session):
    tables = random_tables(1)
    expected = evaluate("operations", tables, ("op", "sender"))
    assert {row["op"] for row in expected.to_pylist()} >= {"send", "reduce", "all_to_all"}
    assert (
        expected["sender"].null_count < len(expected) and expected["wire_share"].to_pylist().count(None) == 0
    )
    assert isinstance(expected["wire_share"][0].as_py(), Decimal)
    compare(session, tables, ["operations"], [("op", "sender")])


@pytest.mark.long
def test_random_buckets_give_the_same_rows(session):
    compare(session, random_tables(2), ["bucket_contents", "bucket_times", "bucket_flushes"])


@pytest.mark.long
def test_a_run_of_schema_1_is_read_where_its_files_lie_with_null_in_newer_columns(session, tmp_path):
    """The path also contains characters that Spark would interpret as a pattern if they were not escaped."""
    path = shutil.copytree(VERSION_1 / "finalised", tmp_path / "run [1] {x} *?")
    run = open_run(path)
    tables = {name: run.scan(name, 0) for name in TABLES}
    compare(session, tables, ["deduplicated_collectives"])


def test_a_place_that_only_spark_reads_gives_the_same_rows(session, tmp_path):
    from commprof.analysis.relations.spark import SparkRelations

    path = shutil.copytree(VERSION_1 / "finalised", tmp_path / "run")
    (path / "aggregates.parquet").unlink(missing_ok=True)
    tables = {name: open_run(path).scan(name) for name in TABLES}
    relations = SparkRelations(session, place=f"file://{path}")
    for name in ("rank_operations", "summed_operations"):
        assert_equal(relations.table(name, ("op",)), evaluate(name, tables, ("op",)))


def test_a_damaged_file_is_one_line(session, tmp_path):
    from commprof.analysis.relations.spark import SparkRelations

    path = shutil.copytree(VERSION_1 / "finalised", tmp_path / "run")
    scan = open_run(path).scan("collectives", 0)
    file = max((path / "collectives").iterdir())
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(TraceError, match="cannot be evaluated on Spark") as raised:
        SparkRelations(session, {"collectives": scan}).table("rank_operations")
    assert "\n" not in str(raised.value)


def test_numbers_that_cannot_be_summed_are_one_line(session):
    from commprof.analysis.relations.spark import SparkRelations

    run = SyntheticRun(1)
    for _ in range(3):
        run.add_collective("all_reduce", payload_bytes=(1 << 62) + 1)
    with pytest.raises(TraceError, match="cannot be evaluated on Spark") as raised:
        SparkRelations(session, run.tables(*TABLES)).table("rank_operations")
    assert "\n" not in str(raised.value)


def test_a_table_that_begins_with_an_empty_chunk_has_its_rows(session):
    """The table of a run looks like this after the files of its ranks were concatenated."""
    tables = detailed_run(steps=2).tables(*TABLES)
    records = tables["collectives"]
    tables["collectives"] = pa.concat_tables(
        [empty_table("collectives"), records.slice(0, 9), records.slice(9)]
    )
    assert len(evaluate("rank_operations", tables, ("op",)))
    compare(session, tables, ["rank_operations"], [("op",)])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_random_records_give_the_same_rows_of_every_relation(session, seed):
    compare(session, random_tables(seed))


@pytest.mark.long
def test_runs_of_training_and_without_records_give_the_same_rows(session):
    for run in (detailed_run(seed=3), detailed_run(backend="gloo"), SyntheticRun(2)):
        compare(session, run.tables(*TABLES), bys=(BY,))


@pytest.mark.long
@pytest.mark.ranks
def test_recorded_runs_of_every_kind_give_the_same_rows(session, tmp_path):
    """The runs are of DDP, FSDP, one rank, sums, killed, imported, hostile, and without steps."""
    make_kinds(tmp_path)
    for kind in KINDS:
        if kind not in ("going", "broken"):
            run = open_run(tmp_path / kind)
            compare(session, {name: run.scan(name) for name in TABLES}, ["operations", "messages"], (BY,))
    for form in ("finalised", "recorded"):
        run = open_run(shutil.copytree(VERSION_1 / form, tmp_path / f"schema 1 {form}"))
        compare(session, {name: run.scan(name, 0) for name in TABLES}, bys=(BY,))


def test_without_java_one_line_says_what_to_install(monkeypatch, tmp_path):
    pytest.importorskip("pyspark")
    from commprof.analysis.relations import spark

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(UsageError, match=r"Java 17 or newer.*apt-get install openjdk-17-jre-headless"):
        spark.start()


def test_without_pyspark_one_line_names_the_extra(monkeypatch):
    from commprof.analysis.relations import spark

    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'commprof\[spark\]'"):
        spark.start()


def test_relations_that_are_named_more_than_once_are_evaluated_once():
    from commprof.analysis.relations.spark import _uses

    texts = relation_graph.steps("operations", ("op",))
    assert [step for step in texts if _uses(step, texts) > 1 and step != "operations"] == [
        "rank_operations", "agreement", "differing_records", "differing_members", "differing", "differing_exchanges",
        "rank_hosts",
    ]  # fmt: skip


def test_an_empty_table_has_the_columns_that_duckdb_gives(session):
    tables = {name: empty_table(name) for name in TABLES}
    compare(session, tables, ["summed_operations"])


def test_a_server_that_does_not_answer_is_one_line(monkeypatch):
    pytest.importorskip("pyspark")
    from pyspark.sql import SparkSession

    from commprof.analysis.relations import spark

    def refuse(builder):
        raise RuntimeError("no server at 127.0.0.1:1\nat line 2")

    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", refuse)
    with pytest.raises(UsageError, match=r"does not start at sc://127.0.0.1:1: no server at 127.0.0.1:1$"):
        spark.start("sc://127.0.0.1:1")
