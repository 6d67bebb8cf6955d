"""Test user-written queries on Spark.

The answers equal those of DuckDB, and a query cannot read anything except the run.
"""

from __future__ import annotations

import pandas as pd
import pytest

from commprof.analysis import api
from commprof.cli import execute
from commprof.errors import UsageError
from support import spark_session
from support.runs import SyntheticRun

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
]  # Plans are made on one core, which other processes may share.

QUESTIONS = (
    "select op, sum(collectives) as n, sum(payload_bytes) as sent from operations group by op order by op",
    "select * from steps order by rank",
    "with late as (select rank, loss from steps where rank > 0) select rank, loss from late",
    "select rank, step, exposed_ns from process_exposure order by rank, step",
    "select count(*) as n, avg(payload_bytes) as mean from collectives having count(*) > 1",
)
REFUSED = (
    ("select * from parquet.`{file}`", "no table 'parquet"),
    ("select count(*) from collectives, csv.`/etc/passwd`", "no table 'csv"),
    ("select op from collectives where op in (select value from text.`/etc/passwd`)", "no table 'text"),
    ("with a as (select * from json.`/etc/passwd`) select * from a", "no table 'json"),
    ("select * from elsewhere", "no table 'elsewhere'"),
    ("select count(*) from arrivals", "does not evaluate 'arrivals'"),
    ("select nope from steps", "nope"),
    ("selec 1", "PARSE_SYNTAX_ERROR"),
    ("create table x as select 1", "only one SELECT"),
    ("insert overwrite directory '/tmp/x' using csv select 1", "only one SELECT"),
    ("set spark.sql.ansi.enabled", "only one SELECT"),
    ("select transform(op) using 'cat' from collectives", "only one SELECT"),
    ("select reflect('java.lang.System', 'getenv', 'HOME')", "the word 'reflect'"),
    ("select * from identifier('parquet.`/etc/passwd`')", "the word 'identifier'"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    synthetic = SyntheticRun(world_size=2)
    synthetic.hosts = {0: "a", 1: "b"}
    synthetic.add_step(0, loss=1.5)
    for size in (2**53 + 1, 16):
        synthetic.add_collective("all_reduce", payload_bytes=size, purpose="gradient_reduce")
    synthetic.add_collective("broadcast", payload_bytes=8, step=-1, peer=0)
    return synthetic.write(tmp_path_factory.mktemp("asked") / "run")


def test_spark_answers_as_duckdb_does(run):
    session = spark_session.session()
    for question in QUESTIONS:
        found, expected = api.query(run, question, session), api.query(run, question)
        pd.testing.assert_frame_equal(found, expected, rtol=1e-12)


def test_spark_reaches_nothing_but_the_run(run):
    session = spark_session.session()
    for question, said in REFUSED:
        with pytest.raises(UsageError) as refused:
            api.query(run, question.format(file=run / "steps.parquet"), session)
        assert said in str(refused.value) and "\n" not in str(refused.value), question


def test_the_command_prints_the_answer_and_nothing_else(run, capfd):
    spark_session.session()  # This call skips the tests if Java is missing.
    assert execute(["query", str(run), "select max(rank) as r from steps", "--engine", "spark", "--csv"]) == 0
    said = capfd.readouterr()
    assert (said.out.split(), said.err) == (["r", "1"], "")


def test_a_master_is_of_spark(run, capsys):
    assert execute(["query", str(run), "select 1", "--master", "local[1]"]) == 2
    assert "--engine spark" in capsys.readouterr().err
