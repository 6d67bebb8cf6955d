"""Open exports with the programs that they are for: polars, pandas, DuckDB, and Chakra's own reader."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import duckdb
import pandas as pd
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from commprof.analysis import api
from commprof.export.chakra import export_chakra
from commprof.export.csv import export_csv
from commprof.export.database import export_database
from commprof.export.parquet import export_parquet
from commprof.export.perfetto import export_perfetto
from support.runs import SyntheticRun

CHAKRA = Path(os.environ.get("COMMPROF_CHAKRA", "nowhere"))
SUM = "SELECT op, sum(payload_bytes)::BIGINT AS payload FROM {} GROUP BY op ORDER BY op"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    made = SyntheticRun(world_size=2)
    for step in range(3):
        made.add_step(step, loss=2.0)
        made.add_collective("all_reduce", payload_bytes=2**53 + 1, step=step, purpose="gradient_reduce")
        made.add_collective("all_gather", payload_bytes=300, step=step)
    return made.write(tmp_path_factory.mktemp("consumers") / "run")


@pytest.fixture(scope="module")
def expected(run) -> dict[str, int]:
    rows = api.table(run, "collectives")
    return {op: int(sum(int(each) for each in of["payload_bytes"])) for op, of in rows.groupby("op")}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_polars_and_pandas_and_duckdb_read_the_tables(run, expected, tmp_path, kind):
    polars = pytest.importorskip("polars")
    {"csv": export_csv, "parquet": export_parquet}[kind](run, tmp_path / "out")
    file = tmp_path / "out" / f"collectives.{kind}"
    frame = getattr(polars, f"read_{kind}")(file)
    sums = frame.group_by("op").agg(polars.col("payload_bytes").sum())
    assert dict(sums.iter_rows()) == expected
    with_pandas = getattr(pd, f"read_{kind}")(file)
    assert with_pandas.groupby("op")["payload_bytes"].sum().to_dict() == expected
    with duckdb.connect() as engine:
        assert dict(engine.sql(SUM.format(f"read_{kind}('{file}')")).fetchall()) == expected
    for table in (tmp_path / "out").glob(f"*.{kind}"):
        assert getattr(polars, f"read_{kind}")(table).height == len(getattr(pd, f"read_{kind}")(table))


def test_a_later_connection_reads_the_database(run, expected, tmp_path):
    export_database(run, tmp_path / "out")
    with duckdb.connect(str(tmp_path / "out" / "run.duckdb"), read_only=True) as database:
        assert dict(database.sql(SUM.format("collectives")).fetchall()) == expected
        frame = database.sql("SELECT * FROM runs").df()
    assert frame["run"].tolist() == ["run"] and frame["steps"].tolist() == [3]


# The rules of the Trace Event Format, as statements that select events that break a rule.
TRACE_RULES = {
    "a slice has a name, a begin and a length": "FROM events WHERE ph = 'X' AND (name IS NULL OR ts IS NULL OR dur < 0)",
    "slices of a thread lie apart or within each other": """FROM slices a JOIN slices b USING (pid, tid)
        WHERE a.ts < b.ts AND b.ts < a.ts + a.dur AND a.ts + a.dur < b.ts + b.dur""",
    "each thread of a slice has a name": """FROM slices WHERE (pid, tid) NOT IN (
        SELECT (pid, tid) FROM events WHERE ph = 'M' AND name = 'thread_name')""",
    "an arrow begins once, ends once and names both ends alike": """FROM (SELECT id, count(*) FILTER (ph = 's') AS begins,
        count(*) FILTER (ph = 'f') AS ends, count(DISTINCT (name, cat)) AS names FROM events WHERE ph IN ('s', 't', 'f')
        GROUP BY id) WHERE (begins, ends, names) != (1, 1, 1)""",
    "each end of an arrow is in a slice": """FROM events a WHERE ph IN ('s', 't', 'f') AND NOT EXISTS (
        FROM slices b WHERE a.pid = b.pid AND a.tid = b.tid AND a.ts BETWEEN b.ts AND b.ts + b.dur)""",
}


def test_duckdb_reads_the_trace_for_perfetto_and_no_event_breaks_a_rule_of_its_format(
    run, expected, tmp_path
):
    """trace_processor is in no package registry.

    Its Python package downloads the program from another server.
    """
    export_perfetto(run, tmp_path / "out")
    with duckdb.connect() as engine:
        engine.execute(f"""CREATE VIEW events AS SELECT unnest(traceEvents, max_depth := 2)
            FROM read_json('{tmp_path / "out" / "trace.json"}', maximum_object_size = 100000000)""")
        engine.execute("CREATE VIEW slices AS FROM events WHERE ph = 'X'")
        broken = {
            rule: engine.sql(f"SELECT count(*) {what}").fetchall()[0][0] for rule, what in TRACE_RULES.items()
        }
        assert broken == dict.fromkeys(TRACE_RULES, 0)
        sums = engine.sql("""SELECT name, sum(args.payload_bytes::BIGINT)::BIGINT FROM slices
            WHERE cat != 'step' GROUP BY name""").fetchall()
        assert dict(sums) == expected
        arrows = engine.sql("SELECT count(DISTINCT id) FROM events WHERE ph = 's'").fetchall()[0][0]
    assert arrows == 6  # There are two collectives in each of three steps.


@pytest.mark.skipif(
    not CHAKRA.is_dir() or shutil.which("protoc") is None,
    reason="needs protoc and COMMPROF_CHAKRA: a checkout of mlcommons/chakra, which no registry has",
)
def test_chakras_reader_decodes_each_trace_by_chakras_schema(run, tmp_path):
    export_chakra(run, tmp_path / "et")
    schema = CHAKRA / "schema" / "protobuf"
    described = tmp_path / "schema.bin"
    subprocess.run(["protoc", f"-I{schema}", f"--descriptor_set_out={described}", "et_def.proto"], check=True)
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(described.read_bytes()).file:
        pool.Add(file)
    name = "ChakraProtoMsg."
    metadata_of, node_of = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(name + each))
        for each in ("GlobalMetadata", "Node")
    )
    found = importlib.util.spec_from_file_location(
        "protolib", CHAKRA / "src" / "third_party" / "utils" / "protolib.py"
    )
    protolib = importlib.util.module_from_spec(found)
    found.loader.exec_module(protolib)
    groups = json.loads((tmp_path / "et" / "comm_groups.json").read_text())
    for rank in range(2):
        stream = protolib.openFileRd(str(tmp_path / "et" / f"trace.{rank}.et"))
        metadata, nodes = metadata_of(), []
        assert protolib.decodeMessage(stream, metadata) and metadata.version == "0.0.4"
        while protolib.decodeMessage(stream, node := node_of()):
            nodes.append(node)
        stream.close()
        kinds = node_of.DESCRIPTOR.fields_by_name["type"].enum_type.values_by_name
        sent = [node for node in nodes if node.type == kinds["COMM_COLL_NODE"].number]
        assert len(sent) == 6
        for node in sent:
            about = {each.name: getattr(each, each.WhichOneof("value")) for each in node.attr}
            assert groups[about["pg_name"]] == [0, 1]
        assert {dep for node in nodes for dep in node.data_deps} <= {node.id for node in nodes}
