"""Test ``commprof analyse``.

The output directory opens like the run and gives the same answers, whichever engine evaluated it.
"""

import json
from functools import partial

import pandas as pd
import pytest

from commprof.analysis import api
from commprof.analysis.storage import analysed, summaries
from commprof.analysis.storage.run_totals import summary_tables
from commprof.cli import execute
from commprof.trace.fingerprint import fingerprint
from commprof.trace.reader import open_run
from commprof_dash.app import draw_page
from commprof_dash.data import Runs
from commprof_dash.pages import PAGES
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
    for rank in range(4):  # These ranks have waits in C++.
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
    assert facts["fingerprint"] == fingerprint(run).inputs and facts["rows"] == rows
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
    assert "is not an analysis" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_master_needs_spark(run, tmp_path, capsys):
    assert execute(["analyse", str(run), "--out", str(tmp_path / "out"), "--master", "local[1]"]) == 2
    assert "--engine spark" in capsys.readouterr().err


def test_a_url_needs_spark(tmp_path, capsys):
    assert execute(["analyse", "s3a://bucket/run", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "s3a://bucket/run is not on this machine" in said
    assert "--engine spark" in said


def test_a_file_url_is_a_path(run, tmp_path):
    assert execute(["analyse", f"file://{run}", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "run.json").is_file()


@pytest.fixture
def store(tmp_path):
    """Return a URL under which Spark reads tmp_path and nothing else."""
    session = spark_session.session()
    # The name is unique because Spark caches the target of a name.
    name = "".join(filter(str.isalnum, str(tmp_path))).lower()
    link = f"fs.viewfs.mounttable.{name}.link./bucket"
    session.sparkContext._jsc.hadoopConfiguration().set(link, f"file://{tmp_path}")
    return f"viewfs://{name}/bucket"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_that_only_spark_reads(run, store, tmp_path, capsys):
    plain = {name: QUESTIONS[name](run) for name in ("traffic", "steps", "exposure_per_step", "buckets")}
    out, hidden = tmp_path / "out", tmp_path / "hidden"
    assert execute(["analyse", f"{store}/run", "--engine", "spark", "--out", str(out)]) == 0
    run.rename(hidden)
    for name, rows in plain.items():
        pd.testing.assert_frame_equal(QUESTIONS[name](out), rows, obj=name)
    assert json.loads((out / analysed.PROVENANCE).read_text())["run"] == f"{store}/run"
    capsys.readouterr()
    assert execute(["report", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"not evaluated, because the records are at {store}/run" in said and "missing" not in said
    assert execute(["verify", str(out)]) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert (
        f"Cannot tell: the records are at {store}/run and were not read." in said and "less than" not in said
    )
    assert execute(["export", str(out), "--out", str(tmp_path / "exported")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{store}/run/collectives" in said and f"{out}/collectives" in said
    (out / "collectives").symlink_to(hidden / "collectives")  # The link stands in for a mounted directory.
    pd.testing.assert_frame_equal(api.stragglers(out), api.stragglers(hidden))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_is_no_finalised_run_of_a_store_is_one_line(run, store, tmp_path, capsys):
    def refused(name):
        words = ["analyse", f"{store}/{name}", "--engine", "spark", "--out", str(tmp_path / "out")]
        assert execute(words) == 1
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and f"{store}/{name}" in said and not (tmp_path / "out").exists()
        return said

    assert "does not exist" in refused("none")
    (run / "rank-00000-0-1.records").write_bytes(b"some")
    assert "commprof finalise" in refused("run")
    (run / "rank-00000-0-1.records").unlink()
    (run / "run.json").unlink()
    assert "has no run.json" in refused("run")


@pytest.mark.long
def test_pages_of_a_run_whose_records_lie_elsewhere(run, tmp_path, caplog):
    """Pages that show sums still work.

    The other pages say where the records are, and nothing is logged as an error.
    """
    analysed.analyse(open_run(run), tmp_path / "runs" / "out")
    out = tmp_path / "runs" / "out"
    stems = sorted(file.stem for file in (run / "collectives").iterdir())
    (out / "collectives").unlink()
    (out / "elsewhere.json").write_text(json.dumps({"run": "s3a://bucket/run", "collectives": stems}))
    summaries.keep(out, summary_tables(open_run(run)), fingerprint(out).inputs)
    runs, shown = Runs(tmp_path / "runs"), {}
    for page in PAGES:
        _, drawing = draw_page(page, runs, page.path, "?run=out", "light")
        shown[page.path] = str(drawing)
    needing = {path for path, text in shown.items() if "s3a://bucket/run/collectives" in text}
    assert needing == {"/timeline", "/stragglers", "/bandwidth", "/records"} and not caplog.records
    assert "the records are at s3a://bucket/run" in shown["/overview"]


def test_a_damaged_place_of_the_records_is_one_line(run, tmp_path, capsys):
    out = tmp_path / "out"
    analysed.analyse(open_run(run), out)
    (out / "collectives").unlink()
    (out / "elsewhere.json").write_text("[]")
    assert execute(["report", str(out)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{out}/elsewhere.json does not say where the records lie" in said
