"""Test that exports of records that are read in parts equal exports of records that are read at once."""

from __future__ import annotations

import duckdb
import pyarrow.parquet as pq
import pytest

from commprof.analysis import api
from commprof.errors import TraceError
from commprof.export import one_clock
from commprof.export.chakra import export_chakra
from commprof.export.csv import check_csv, export_csv
from commprof.export.database import export_database
from commprof.export.parquet import export_parquet
from commprof.export.perfetto import export_perfetto
from commprof.trace import reader, tables
from support.detailed_runs import detailed_run

ALIKE = {  # These files do not contain their creation time or creator.
    export_csv: "*.csv",
    export_perfetto: "trace.json",
    export_chakra: "trace.*.et",
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return detailed_run(steps=6).write(tmp_path_factory.mktemp("parts") / "run")


@pytest.fixture
def in_parts(monkeypatch):
    monkeypatch.setattr(reader, "_MOST_ROWS_AT_ONCE", 10)
    monkeypatch.setattr(reader, "_MOST_ROWS", 10)
    monkeypatch.setattr(tables, "_PART_ROWS", 7)
    monkeypatch.setattr(one_clock, "_FEWEST_SCANNED", 10)
    monkeypatch.setattr(one_clock, "_ROWS_AT_A_TIME", 5)


def contents(directory, pattern):
    return {file.name: file.read_bytes() for file in directory.glob(pattern)}


@pytest.mark.long
def test_files_are_the_same_byte_for_byte(path, tmp_path, request):
    for number, export in enumerate(ALIKE):
        export(path, tmp_path / f"whole-{number}")
    request.getfixturevalue("in_parts")
    for number, (export, pattern) in enumerate(ALIKE.items()):
        told = []
        export(path, tmp_path / f"parts-{number}", progress=told.append)
        mine, theirs = (contents(tmp_path / f"{kind}-{number}", pattern) for kind in ("parts", "whole"))
        assert mine == theirs
        assert theirs
        if export is export_csv:
            rows = [text for text in told if text.startswith("collectives.csv: ")]
            assert len(rows) > 5
            assert rows[-1] == f"collectives.csv: {len(api.table(path, 'collectives'))} rows"


def test_tables_hold_every_row_and_their_count(path, tmp_path, in_parts):
    records = len(api.table(path, "collectives"))
    found = {file.path.name: file.rows for file in export_parquet(path, tmp_path / "parquet")}
    assert found["collectives.parquet"] == records
    assert pq.read_table(tmp_path / "parquet" / "collectives.parquet").num_rows == records
    files = export_database([path, path], tmp_path / "duckdb", tables=["collectives", "steps"])
    with duckdb.connect(str(tmp_path / "duckdb" / "run.duckdb"), read_only=True) as database:
        held = database.execute('select count(*), count(distinct run) from "collectives"').fetchall()
        steps = database.execute('select count(*) from "steps"').fetchall()[0][0]
    assert held == [(2 * records, 2)]
    assert files[0].rows == 2 * records + steps


@pytest.mark.long
def test_a_check_finds_a_difference_in_the_middle(path, tmp_path, in_parts):
    out = tmp_path / "csv"
    export_csv(path, out)
    assert check_csv(out, path) == []
    file = out / "collectives.csv"
    lines = file.read_bytes().split(b"\r\n")
    lines[50] = lines[50].replace(b"default_pg", b"default_px")
    file.write_bytes(b"\r\n".join(lines))
    problems = check_csv(out, path)
    assert any("row 50" in text and "default_px" in text and "default_pg" in text for text in problems)


@pytest.mark.parametrize("export", [export_csv, export_parquet, export_database])
def test_a_file_that_is_damaged_ends_an_export_with_nothing_left(tmp_path, in_parts, export):
    run = detailed_run(steps=3).write(tmp_path / "run")
    file = sorted((run / "collectives").glob("*.parquet"))[-1]
    content = bytearray(file.read_bytes())
    middle = len(content) // 3
    content[middle : middle + 64] = bytes(64)
    file.write_bytes(content)
    with pytest.raises(TraceError):
        export(run, tmp_path / "out", tables=["collectives"])
    assert not list((tmp_path / "out").glob("*"))
