"""Exports opened by the programs that they are for: polars, pandas, DuckDB, and Chakra's own reader."""

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
