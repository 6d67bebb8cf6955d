"""Test user-written queries, from the command and from a notebook.

The answers are correct, and a query cannot read anything except the run.
"""

from __future__ import annotations

import csv
import io
import json

import pytest

import commprof
from commprof.analysis import api
from commprof.cli import main
from commprof.errors import UsageError
from support.runs import SyntheticRun


def command(*words):
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code or 0


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    synthetic = SyntheticRun(world_size=2)
    synthetic.add_step(0, loss=1.5)
    for size in (2**53 + 1, 16):
        synthetic.add_collective("all_reduce", payload_bytes=size, purpose="gradient_reduce")
    synthetic.add_collective("broadcast", payload_bytes=8, step=-1, peer=0)
    return synthetic.write(tmp_path_factory.mktemp("query") / "run")


SQL = "select op, count(*) as records, sum(payload_bytes) as bytes from collectives group by op order by op"


def test_the_answer_as_a_table_csv_and_json(run, capsys):
    assert command("query", run, SQL) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()[2:4]] == [
        ["all_reduce", "4", str(2 * (2**53 + 17))],
        ["broadcast", "2", "16"],
    ]
    assert command("query", run, SQL, "--csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows[0] == {"op": "all_reduce", "records": "4", "bytes": str(2 * (2**53 + 17))}
    assert command("query", run, SQL, "--json") == 0
    assert json.loads(capsys.readouterr().out)[1] == {"op": "broadcast", "records": 2, "bytes": 16}


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_csv('/etc/passwd')",
        "select * from '/etc/passwd'",
        "select * from read_text('/etc/hostname')",
        "copy (select 1) to 'out.csv'",
        "attach 'other.duckdb'",
        "install httpfs",
        "set enable_external_access = true",
        "create table t as select 1",
        "select 1; select 2",
        "select * from no_such_table",
        "select no_such_column from collectives",
        "selekt",
        "",
    ],
)
def test_nothing_but_a_question_about_the_run(run, sql, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command("query", run, sql) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("commprof: error: ") and len(told.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_notebook_asks_the_same(run):
    opened = commprof.open(run)
    assert opened.query(SQL)["bytes"].tolist() == [2 * (2**53 + 17), 16]
    assert opened.traffic(by=["op", "purpose"]).equals(api.traffic(run, by=["op", "purpose"]))
    assert opened.table("steps")["loss"].tolist() == [1.5, 1.5]
    assert opened.overview()["records"] == 6
    assert opened.compare()["issued_op"].tolist() == ["all_reduce"]
    assert "2 ranks, 6 records" in repr(opened)
    for name in ("step_times", "exposure", "arrivals", "stragglers", "moved", "requested"):
        assert getattr(opened, name)().equals(getattr(api, name)(run)), name
    with pytest.raises(UsageError):
        opened.query("drop table collectives")


def test_an_aggregate_in_a_subquery_beside_a_common_table_expression_is_answered(run):
    sql = "with late as (select rank from steps) select rank from late where rank in (select max(rank) from collectives)"
    assert api.query(run, sql)["rank"].tolist() == [1]
