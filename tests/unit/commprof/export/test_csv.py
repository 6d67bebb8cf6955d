"""Test the files of ``export_csv()``, and that an export never overwrites files.

The files are read with Python's csv module.
"""

import csv
import errno
import hashlib
import json
import os
from pathlib import Path

import pandas as pd
import pytest

from commprof import schema
from commprof.analysis import api
from commprof.errors import TraceError, UsageError
from commprof.export.csv import export_csv
from support.runs import SyntheticRun

pytestmark = pytest.mark.shared_answers

COMPARED = {
    "comparison.csv",
    "traffic_by_setting.csv",
    "traffic_by_group.csv",
    "runs.csv",
    "exposure_per_step.csv",
    "one_offs.csv",
    "expert_imbalance.csv",
}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    run = SyntheticRun(world_size=3, config={"zero_optimization": {"stage": 2}}, lost=2)
    run.add_collective("broadcast", payload_bytes=3 * 2**60 + 1, step=-1, peer=0, dtype=None)
    for step in range(2):
        run.add_step(step, loss=1 / 3)
        for size in (36, 120):
            run.add_collective(
                "all_reduce", payload_bytes=size, step=step, call_site='a "b", c.py:3 f\n<lambda>'
            )
    run.add_collective("send", payload_bytes=40, ranks=(0,), peer=2, step=1)
    run.add_collective("recv", payload_bytes=40, ranks=(2,), peer=0, step=1)
    run.add_parameters({"emb\u00e9.weight": 7})
    return run.write(tmp_path_factory.mktemp("csv") / "run")


@pytest.fixture(scope="module")
def exported(run) -> Path:
    """Export all tables of the run, including tables without rows.

    Only tests that do not change the files use this fixture.
    """
    export_csv(run, run.parent / "out", empty=True)
    return run.parent / "out"


def test_there_is_a_file_for_every_table_with_the_columns_of_the_schema(run, tmp_path):
    files = export_csv(run, tmp_path / "out", empty=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *(f"{name}.csv" for name in schema.TABLES),
        *COMPARED,
        "data_dictionary.csv",
        "provenance.json",
    }
    assert {file.path for file in files} == set((tmp_path / "out").iterdir())
    for name, table in schema.TABLES.items():
        with (tmp_path / "out" / f"{name}.csv").open(encoding="utf-8", newline="") as stream:
            assert next(csv.reader(stream)) == list(table.names)


def test_tables_without_rows_are_left_out(run, tmp_path):
    files = export_csv(run, tmp_path / "out")
    assert all(file.rows != 0 for file in files)
    assert (
        not (tmp_path / "out" / "nccl_ops.csv").exists() and (tmp_path / "out" / "collectives.csv").exists()
    )
    export_csv(run, tmp_path / "out", force=True, empty=True)
    assert rows_of(tmp_path / "out" / "nccl_ops.csv") == []
    export_csv(run, tmp_path / "out", force=True)
    assert not (tmp_path / "out" / "nccl_ops.csv").exists(), "a file of an earlier export is removed"
    export_csv(run, tmp_path / "asked", tables=["nccl_ops"])
    assert (tmp_path / "asked" / "nccl_ops.csv").exists()


def test_the_comparison_has_moved_exposed_and_memory_and_null_for_an_absent_key(tmp_path):
    paths = []
    for name, zero in (("a", {"stage": 2, "reduce_scatter": True}), ("b", {"stage": 2})):
        made = SyntheticRun(world_size=2, config={"zero_optimization": zero})
        for step in range(3):
            made.add_step(step, begin_ns=1_000_000 * step, end_ns=1_000_000 * (step + 1), rss_bytes=7 << 20)
            made.add_collective("all_reduce", payload_bytes=64, step=step, exposed_ns=250_000)
        paths.append(made.write(tmp_path / name))
    export_csv(paths, tmp_path / "out")
    a, b = rows_of(tmp_path / "out" / "comparison.csv")
    assert (a["zero_optimization.reduce_scatter"], b["zero_optimization.reduce_scatter"]) == ("true", "")
    for row in (a, b):
        assert (row["rss_bytes"], row["rss_peak_bytes"], row["device_bytes"]) == (
            str(7 << 20),
            str(7 << 20),
            "",
        )
        assert (row["exposed_ns"], row["exposed_share"]) == ("250000", "0.25")
        assert row["moved_bytes_per_step"] == "" and float(row["executed_wire_bytes_per_step"]) == 64
    first, second = rows_of(tmp_path / "out" / "runs.csv")
    assert (first["run"], first["label"], first["state"]) == ("a", a["label"], "complete")
    assert (second["run"], second["world_size"], second["steps"]) == ("b", "2", "3")
    assert (first["step_time_ns"], first["exposed_ns"], first["rss_bytes"]) == (
        "1000000",
        "250000",
        str(7 << 20),
    )
    described = {(row["table"], row["column"]) for row in rows_of(tmp_path / "out" / "data_dictionary.csv")}
    assert {("comparison", name) for name in a} | {("runs", name) for name in first} <= described
    assert "(absent)" not in "".join(path.read_text() for path in (tmp_path / "out").glob("*.csv"))


@pytest.mark.long
def test_an_empty_table_is_its_header_alone(run, tmp_path):
    export_csv(run, tmp_path / "out", empty=True)
    assert (tmp_path / "out" / "nccl_ops.csv").read_bytes() == (
        ",".join(schema.NCCL_OPS.names) + "\r\n"
    ).encode()


def test_every_value_comes_back_as_it_was(run, exported):
    rows = rows_of(exported / "collectives.csv")
    assert [int(row["payload_bytes"]) for row in rows[:1]] == [3 * 2**60 + 1]
    expected = api.table(run, "collectives")
    assert len(rows) == len(expected)
    for column in schema.COLLECTIVES.columns:
        values = expected[column.name].tolist()
        for row, value in zip(rows, values, strict=True):
            text = row[column.name]
            if pd.isna(value):
                assert text == ""
            elif column.type == "bool":
                assert text == ("true" if value else "false")
            elif column.type.startswith("int"):
                assert int(text) == value
            else:
                assert text == value
    assert 'a "b", c.py:3 f\n<lambda>' in {row["call_site"] for row in rows}
    assert rows_of(exported / "parameters.csv")[0]["name"] == "emb\u00e9.weight"
    assert {float(row["loss"]) for row in rows_of(exported / "steps.csv")} == {1 / 3}


def test_sums_over_the_exported_file_equal_the_answers(run, tmp_path):
    """The sums are computed from the CSV with plain loops.

    They count distinct collectives and sends, with the wire formula of the schema.
    """
    export_csv(run, tmp_path / "out", tables=["collectives"])
    once = {}
    for row in rows_of(tmp_path / "out" / "collectives.csv"):
        if row["op"] != "recv":
            sender = row["rank"] if row["op"] == "send" else ""
            once[row["attempt"], row["pg"], row["is_p2p"], row["pg_seq"], sender] = row
    payload = sum(int(row["payload_bytes"]) for row in once.values())
    wire = sum(
        schema.wire_bytes(row["op"], int(row["payload_bytes"]), int(row["group_size"]))
        for row in once.values()
    )
    totals = api.traffic(run, by=())
    assert totals["collectives"].item() == len(once) == 6
    assert totals["payload_bytes"].item() == payload
    assert totals["wire_bytes"].item() == pytest.approx(wire, rel=1e-15)


def test_lines_end_as_rfc_4180_says(exported):
    data = (exported / "groups.csv").read_bytes()
    assert data.count(b"\r\n") == data.count(b"\n") == 1 + 3
    assert data.endswith(b"\r\n")


def test_the_dictionary_describes_every_column_of_every_table(exported):
    rows = rows_of(exported / "data_dictionary.csv")
    of_the_schema = [(row["table"], row["column"]) for row in rows if f"{row['table']}.csv" not in COMPARED]
    assert of_the_schema == [
        (name, column) for name, table in schema.TABLES.items() for column in table.names
    ]
    for name in COMPARED:
        with (exported / name).open(encoding="utf-8", newline="") as stream:
            said = [row["column"] for row in rows if f"{row['table']}.csv" == name]
            assert next(csv.reader(stream)) == said
    payload = next(row for row in rows if (row["table"], row["column"]) == ("collectives", "payload_bytes"))
    assert (payload["type"], payload["unit"], payload["nullable"]) == ("int64", "bytes", "false")
    op = next(row for row in rows if (row["table"], row["column"]) == ("collectives", "op"))
    assert "reduce_scatter" in op["values"].split(";")
    assert all(row["description"] for row in rows)


def test_provenance_says_what_ran_what_is_missing_and_what_each_file_holds(exported):
    content = json.loads((exported / "provenance.json").read_text())
    assert content["schema_version"] == schema.SCHEMA_VERSION
    assert content["run"]["script"] == "train.py"
    assert content["run"]["config"] == {"zero_optimization": {"stage": 2}}
    assert content["health"]["lost"] == 2
    assert content["health"]["missing_ranks"] == []
    listed = {entry["name"]: entry for entry in content["files"]}
    assert set(listed) == {f"{name}.csv" for name in schema.TABLES} | {"data_dictionary.csv", *COMPARED}
    for name, entry in listed.items():
        data = (exported / name).read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        assert entry["bytes"] == len(data)
        assert entry["rows"] == len(rows_of(exported / name))


def test_only_the_tables_asked_for(run, tmp_path):
    export_csv(run, tmp_path / "out", tables=["steps"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "steps.csv",
        "data_dictionary.csv",
        "provenance.json",
    }
    assert {row["table"] for row in rows_of(tmp_path / "out" / "data_dictionary.csv")} == {"steps"}


def test_an_unknown_table_is_refused_before_anything_is_made(run, tmp_path):
    with pytest.raises(UsageError, match=r"no table 'stepz'.*steps"):
        export_csv(run, tmp_path / "out", tables=["steps", "stepz"])
    assert not (tmp_path / "out").exists()


def test_a_directory_with_something_in_it_is_left_alone_unless_forced(run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "steps.csv").write_text("mine")
    (out / "notes.txt").write_text("mine too")
    with pytest.raises(UsageError, match=r"not empty.*--force"):
        export_csv(run, out)
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "steps.csv": "mine",
        "notes.txt": "mine too",
    }
    export_csv(run, out, force=True)
    assert (out / "notes.txt").read_text() == "mine too"
    assert len(rows_of(out / "steps.csv")) == 6


@pytest.mark.long
def test_an_empty_directory_may_be_filled(run, tmp_path):
    (tmp_path / "out").mkdir()
    assert export_csv(run, tmp_path / "out")


def test_places_that_are_no_directory_are_refused(run, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        export_csv(run, tmp_path / "file")
    with pytest.raises(TraceError, match="cannot be written"):
        export_csv(run, tmp_path / "file" / "below")
    (tmp_path / "out" / "steps.csv").mkdir(parents=True)
    with pytest.raises(UsageError, match="is a directory where a file"):
        export_csv(run, tmp_path / "out", force=True)


def test_a_full_disk_leaves_what_was_there(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "steps.csv").write_text("before")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TraceError, match=r"No space left on device.*make room"):
        export_csv(run, out, force=True)
    assert {path.name: path.read_text() for path in out.iterdir()} == {"steps.csv": "before"}


def test_a_run_that_is_none_is_refused(tmp_path):
    with pytest.raises(TraceError):
        export_csv(tmp_path / "nothing", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_same_run_gives_the_same_files(run, tmp_path):
    first, second = (export_csv(run, tmp_path / name) for name in ("a", "b"))
    assert [file.sha256 for file in first] == [file.sha256 for file in second]


def test_a_frame_as_text_keeps_integers_and_tells_null_from_empty():
    frame = pd.DataFrame(
        {
            "count": pd.Series([2**62 + 1, None], dtype="Int64"),
            "share": [0.1, float("nan")],
            "name, quoted": pd.Series(["", None], dtype="str"),
            "yes": [True, False],
        }
    )
    assert api.frame_csv(frame) == (
        'count,share,"name, quoted",yes\r\n4611686018427387905,0.1,"",true\r\n,,,false\r\n'
    )
    assert api.frame_csv(frame.iloc[:0]) == 'count,share,"name, quoted",yes\r\n'


def test_an_answer_as_text_reads_back_as_the_answer(run):
    frame = api.traffic(run, by=("step", "op"))
    rows = list(csv.DictReader(api.frame_csv(frame).splitlines(keepends=True)))
    assert [int(row["payload_bytes"]) for row in rows] == frame["payload_bytes"].tolist()
    assert [float(row["wire_bytes"]) for row in rows] == frame["wire_bytes"].tolist()
