"""Test that a run of schema version 1 opens and gives the same results as before.

Columns that version 1 did not have are null.
"""

import json
import shutil
from pathlib import Path

import duckdb
import pytest

import commprof
from commprof.analysis.time import partitions
from commprof.errors import SchemaError
from commprof.export.csv import export_csv
from commprof.schema import COLLECTIVES, GROUPS, SCHEMA_VERSION, TABLES
from commprof.trace.reader import Scan, open_run
from commprof.trace.tables import read_columns, write_parquet

VERSION_1 = Path(__file__).parents[3] / "golden" / "schema_1"
NEWER = [column.name for column in COLLECTIVES.columns if column.since > 1]
KEY = ["rank", "seq"]


@pytest.fixture(params=["finalised", "recorded"])
def old(request, tmp_path):
    """Return a run of two gloo ranks and 22 records of version 1.

    The run is in Parquet or in the files that ranks write.
    """
    return shutil.copytree(VERSION_1 / request.param, tmp_path / "run")


def finalised(tmp_path):
    return shutil.copytree(VERSION_1 / "finalised", tmp_path / "run")


def rows_of(table):
    return table.sort_by([(name, "ascending") for name in KEY]).to_pylist()


def test_what_version_2_added_is_declared():
    added = {
        (name, column.name) for name, table in TABLES.items() for column in table.columns if column.since > 1
    }
    assert SCHEMA_VERSION == 2
    assert added == {
        ("aggregates", "after_step"),
        ("collectives", "input_splits"),
        ("collectives", "output_splits"),
        ("collectives", "padding_bytes"),
        ("groups", "host"),
        ("parameters", "ep_size"),
        ("wire", "queued_bytes"),
    }
    assert all(column.nullable for table in TABLES.values() for column in table.columns if column.since > 1)


@pytest.mark.sampled
def test_records_and_figures_are_those_of_version_1(old):
    run = open_run(old)
    rows = run.table("collectives").to_pylist()
    assert run.health.state == "complete" and len(rows) == 22
    assert {row[name] for row in rows for name in NEWER} == {None}
    traffic = commprof.open(str(old)).traffic(by=["op"])
    assert dict(zip(traffic["op"], traffic["payload_bytes"], strict=True)) == {
        "all_reduce": 64,
        "all_to_all": 80,  # Two all_to_alls have 16 bytes. Two have 32 and 16 bytes on their two ranks.
        "barrier": 0,
        "broadcast": 40,
        "reduce_scatter": 32,
    }


def test_both_forms_of_the_old_run_hold_the_same_records(tmp_path):
    forms = [shutil.copytree(VERSION_1 / name, tmp_path / name) for name in ("finalised", "recorded")]
    before, now = (rows_of(open_run(form).table("collectives")) for form in forms)
    assert before == now
    assert {row["host"] for row in open_run(forms[0]).table("groups").to_pylist()} == {None}
    assert {row["host"] for row in open_run(forms[1]).table("groups").to_pylist()} == {"host"}


@pytest.mark.parametrize("is_mixed", [False, True])
def test_files_that_are_read_where_they_lie_have_null_there(tmp_path, is_mixed):
    """A large run is not loaded.

    An engine reads its files, or they are read column by column, whatever their version.
    """
    path = finalised(tmp_path)
    whole = open_run(path).table("collectives")
    if is_mixed:
        file = max((path / "collectives").iterdir())
        table = open_run(path).table("collectives")
        write_parquet(file, table.filter(duckdb.sql("select rank = 1 from whole").to_arrow_table()[0]))
    run = open_run(path)
    scan = run.scan("collectives", 0)
    assert isinstance(scan, Scan) and not scan.is_current
    with duckdb.connect() as engine:
        (found,) = partitions.of_scan(scan, COLLECTIVES.names, engine)
    assert rows_of(found) == rows_of(whole)
    for file in scan.files:
        wanted = ["rank", "seq", *NEWER]
        assert read_columns(file, wanted).column_names == wanted
        assert {row[name] for row in read_columns(file, wanted).to_pylist() for name in NEWER} == {None}


@pytest.mark.sampled
def test_an_export_has_empty_fields_there(old, tmp_path):
    export_csv([open_run(old)], tmp_path / "csv")
    header, *lines = (tmp_path / "csv" / "collectives.csv").read_text().splitlines()
    assert set(NEWER) <= set(header.split(",")) and len(lines) == 22
    assert json.loads((tmp_path / "csv" / "provenance.json").read_text())["schema_version"] == 2


def test_a_record_file_of_a_later_version_is_refused(tmp_path):
    path = shutil.copytree(VERSION_1 / "recorded", tmp_path / "run")
    for file in path.glob("*.records"):
        data = bytearray(file.read_bytes())
        data[8] = SCHEMA_VERSION + 1
        file.write_bytes(data)
    with pytest.raises(SchemaError, match="reads versions 1 to 2"):
        open_run(path).table("collectives")


def test_only_what_is_newer_may_be_missing_in_a_signature():
    from commprof.trace.rank_files.outside_rows import is_signature
    from support.rank_files import SIGNATURE

    assert is_signature(SIGNATURE)  # Version 1 writes this format.
    assert is_signature({**SIGNATURE, "input_splits": "8,24", "output_splits": None})
    assert not is_signature({**SIGNATURE, "input_splits": 8})
    assert not is_signature({name: value for name, value in SIGNATURE.items() if name != "peer"})
    assert GROUPS.column("host").nullable
