"""``commprof analyse``: a directory that opens as the run, with the same answers, whichever engine evaluated it."""

import json
from functools import partial

import pandas as pd
import pytest

from commprof.analysis import analysed, api, summaries
from commprof.analysis.fingerprint import fingerprint
from commprof.cli import execute
from commprof.trace.reader import open_run
from support import spark_session
from support.detailed_runs import detailed_run

STEPS = 4
QUESTIONS = {
    "traffic": partial(api.traffic, by=("op", "purpose")),
    "matrix": api.matrix,
    "steps": api.step_times,
    "exposure_per_step": api.exposure_per_step,
    "buckets": api.bucket_flushes,
    "stragglers": api.stragglers,
}


@pytest.fixture
def run(tmp_path):
    planted = detailed_run(seed=3, steps=STEPS)
    for rank in range(4):  # C++ waits
        place = {"rank": rank, "attempt": 0, "pid": planted.pid(rank), "step": 1, "place": "reducer"}
        planted.add("stalls", **place, since_ns=20_000_000, begin_ns=22_000_000, end_ns=23_000_000,
                    exposed_low_ns=10, exposed_high_ns=500_000)  # fmt: skip
    return planted.write(tmp_path / "run")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["duckdb", pytest.param("spark", marks=pytest.mark.long)])
def test_the_answers_of_an_analysis_are_those_of_the_run(run, tmp_path, engine):
    session = spark_session.session() if engine == "spark" else None
    plain = {name: question(run) for name, question in QUESTIONS.items()}
    out = tmp_path / "analysed"
    rows = analysed.analyse(open_run(run), out, session)
    assert rows["operations"] and rows["step_times"] == STEPS and len(summaries.read(out)) == len(rows)
    for name, question in QUESTIONS.items():
        pd.testing.assert_frame_equal(question(out), plain[name], obj=name)
    facts = json.loads((out / analysed.PROVENANCE).read_text())
    assert facts["fingerprint"] == fingerprint(run) and facts["rows"] == rows
    assert facts["engine"].startswith(f"{engine} ") and facts["run"] == str(run)


def test_the_command_never_overwrites_unasked(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert execute(["analyse", str(run), "--out", str(out)]) == 0
    assert "operations" in capsys.readouterr().err
    assert execute(["report", str(out)]) == 0
    assert execute(["analyse", str(run), "--out", str(out)]) == 2
    assert "--force" in capsys.readouterr().err
    assert execute(["analyse", str(run), "--out", str(out), "--force"]) == 0
    assert execute(["analyse", str(run), "--out", str(run), "--force"]) == 2
    assert "is no analysis" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_master_needs_spark(run, tmp_path, capsys):
    assert execute(["analyse", str(run), "--out", str(tmp_path / "out"), "--master", "local[1]"]) == 2
    assert "--engine spark" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["duckdb", "spark"])
def test_a_path_of_an_object_store_is_one_line(tmp_path, capsys, engine):
    words = ["analyse", "s3a://bucket/run", "--engine", engine, "--out", str(tmp_path / "out")]
    assert execute(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "s3a://bucket/run is not on this machine" in said


def test_a_file_url_is_a_path(run, tmp_path):
    assert execute(["analyse", f"file://{run}", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "run.json").is_file()
