"""Test pages without a browser.

The tests check their texts, and that no user input and no file on disk makes them fail.
"""

import json
import os
import sys
from dataclasses import replace

import pytest
from dash import dcc
from plotly.utils import PlotlyJSONEncoder

from commprof.analysis import api
from commprof_dash import pages
from commprof_dash.address import link
from commprof_dash.app import create_app, draw_page, find_page
from commprof_dash.components.graph import GRAPH_CONFIG
from commprof_dash.data import Runs
from commprof_dash.pages import PAGES
from commprof_dash.pages.overview import data as overview_data
from commprof_dash.pages.runs.data import KnownFacts, range_text, read_some, table_rows
from support.runs import SyntheticRun, with_sums

pytestmark = pytest.mark.shared_answers

HOSTILE = "<script>alert(1)</script>"


def write_run(path, reduction="all_reduce", steps=3, **options):
    run = SyntheticRun(
        2, config={"zero_optimization": {"stage": 2, "gradient_reduction": reduction}}, **options
    )
    run.add_collective(
        "broadcast", step=-1, phase="init", payload_bytes=64, purpose="parameter_broadcast", peer=0
    )
    for step in range(steps):
        run.add_step(step, duration_ns=1_000_000 + step, loss=2.0 - step / 10)
        run.add_collective(reduction, step=step, payload_bytes=1000, purpose="gradient_reduce", peer=0)
        run.add_collective("all_gather", step=step, payload_bytes=500, purpose="parameter_gather")
    return run.write(path)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    write_run(base / "a", "all_reduce")
    write_run(base / "sweep" / "b", "reduce", started_realtime_ns=1_700_000_001_000_000_000)
    write_run(base / "nccl", backend="nccl")
    return base


def draw(directory, path, scheme="light"):
    pathname, _, search = path.partition("?")
    heading, drawing = draw_page(find_page(pathname), Runs(directory), pathname, f"?{search}", scheme)
    return [*heading, *drawing.controls, *drawing.body]


def text_of(component):
    """Return everything on the page as JSON, including texts and ids."""
    return json.dumps(list(component), cls=PlotlyJSONEncoder)


def figures_of(component):
    return {
        part.id["name"]: part
        for root in component
        for part in root._traverse()
        if isinstance(part, dcc.Graph)
    }


def test_every_page_draws_the_runs_of_a_directory(directory):
    assert set(figures_of(draw(directory, "/overview"))) == {
        "by-step",
        "by-purpose",
        "step-time",
        "exposure",
    }
    assert set(figures_of(draw(directory, "/compare"))) == {
        "levels",
        "reducing",
        "others",
        "loss",
        "ranks",
    }


def test_a_folder_with_a_page_is_in_the_navigation(tmp_path, monkeypatch):
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "__init__.py").touch()
    (tmp_path / "added" / "page.py").write_text(
        "from commprof_dash.pages.page import Drawing, Page\n"
        "PAGE = Page('/added', 'Added', 'Is it found?', order=25, render=lambda *_: Drawing([], []))\n"
    )
    monkeypatch.setattr(pages, "__path__", [*pages.__path__, str(tmp_path)])
    try:
        assert [page.path for page in pages.declared_pages()][:4] == ["/", "/overview", "/added", "/compare"]
    finally:
        for name in ("added", "added.page"):
            sys.modules.pop(f"commprof_dash.pages.{name}", None)


def test_all_runs_are_listed_with_their_health_and_the_ticked_ones_go_to_compare(directory):
    page = draw(directory, "/?tick=sweep/b&tick=gone&tick=a")
    text = text_of(page)
    assert '"/overview?run=sweep/b"' in text and '"/overview?run=a"' in text
    assert '"/compare?run=sweep/b&run=a"' in text and "2 ticked" in text
    assert "gradient_reduction=reduce" in text and "complete" in text


def test_runs_that_are_broken_or_lost_something_are_listed_as_such(tmp_path):
    write_run(tmp_path / "whole")
    write_run(tmp_path / "short", lost=7)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("not json")
    text = text_of(draw(tmp_path, "/"))
    assert "unreadable" in text and "is not valid JSON" in text and '"dropped_text": "7"' in text
    assert '"/overview?run=broken"' not in text, "a run that cannot be read is no link"


@pytest.mark.long
def test_a_sweep_is_one_row_with_the_ranges_of_its_runs(tmp_path):
    for number, reduction in enumerate(("all_reduce", "reduce", "all_reduce")):
        sweep = {"name": "of-two", "point": {"zero_optimization.gradient_reduction": reduction}, "repeat": 0}
        write_run(tmp_path / "of-two" / str(number), reduction, steps=3 + number, sweep=sweep, lost=number)
    write_run(tmp_path / "alone")
    runs, known = Runs(tmp_path), KnownFacts()
    rows = {row["id"]: row for row in table_rows(runs.listing(), known)}
    assert set(rows) == {"sweep:of-two", "run:of-two/0", "run:of-two/1", "run:of-two/2", "run:alone"}
    assert rows["run:alone"]["sweep"] is None and rows["run:of-two/1"]["sweep"] == "of-two"
    sweep = rows["sweep:of-two"]
    assert sorted(sweep["members"]) == ["of-two/0", "of-two/1", "of-two/2"]
    assert sweep["state"] == "3 complete" and sweep["setting"] == "2 settings"
    assert range_text("19.1 ms", "23.4 ms") == "19.1 to 23.4 ms"
    assert range_text("980 us", "1.20 ms") == "980 us to 1.20 ms"
    assert range_text("3", "5") == "3 to 5" and range_text("1.0 %", "1.0 %") == "1.0 %"
    assert sweep["steps_text"] == "3 to 5" and sweep["steps"] == 3 and sweep["dropped_text"] == "0 to 2"
    assert sweep["step_time_text"] == "...", "what the records say is read afterwards"
    names = [row["name"] for row in rows.values() if row["members"] is None]
    assert read_some(runs, known, names, 0.0) == (names[:1], names[1:])
    assert read_some(runs, known, names[1:], 60.0) == (names[1:], [])
    rows = {row["id"]: row for row in table_rows(runs.listing(), known)}
    setting = api.compare([tmp_path / "alone"]).iloc[0]
    alone = rows["run:alone"]
    assert alone["step_time"] == setting["step_time_ns"] / 1e6
    assert alone["sent"] == setting["executed_wire_bytes_per_step"] / 2**20
    assert alone["verdict"] == "cannot tell", "no parameters were published"
    assert alone["sent_text"] == api.format_bytes(setting["executed_wire_bytes_per_step"])
    assert " to " in rows["sweep:of-two"]["sent_text"], "gloo's reduce sends other bytes than its all_reduce"


def test_a_run_of_sums_has_its_step_time_and_its_bytes(tmp_path):
    run = SyntheticRun(world_size=2)
    for step in range(3):
        run.add_step(step, duration_ns=5_000_000)
        run.add_collective("all_reduce", payload_bytes=1 << 20, step=step)
    with_sums(run).write(tmp_path / "sums")
    runs, known = Runs(tmp_path), KnownFacts()
    assert read_some(runs, known, ["sums"], 60.0) == (["sums"], [])
    (row,) = table_rows(runs.listing(), known)
    assert (row["step_time_text"], row["sent_text"], row["exposed_text"]) == ("5.00 ms", "1.00 MiB", "-")


def test_what_cannot_be_read_has_no_facts_and_no_place_in_compare(tmp_path):
    write_run(tmp_path / "whole")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("not json")
    runs, known = Runs(tmp_path), KnownFacts()
    rows = {row["name"]: row for row in table_rows(runs.listing(), known)}
    assert rows["broken"]["href"] is None and rows["broken"]["verdict"] == "-"
    assert "is not valid JSON" in rows["broken"]["note"]


@pytest.mark.long
def test_the_newest_run_is_shown_when_none_is_named(directory):
    assert "sweep/b" in text_of(draw(directory, "/overview"))


def test_a_run_written_since_the_runs_were_listed_is_shown_when_it_is_named(tmp_path):
    write_run(tmp_path / "one")
    runs = Runs(tmp_path)
    assert runs.names() == ["one"]
    write_run(tmp_path / "two")
    _, drawing = draw_page(find_page("/overview"), runs, "/overview", "?run=two", "light")
    assert drawing.run == "two" and "No such run" not in text_of(drawing.body)


def test_a_run_in_a_folder_is_named_by_its_path(directory):
    page = draw(directory, link("/overview", run="sweep/b"))
    assert "by-step" in figures_of(page)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_are_of_the_scheme(directory, scheme):
    colours = {
        g.figure.layout.template.layout.font.color
        for g in figures_of(draw(directory, "/compare", scheme)).values()
    }
    assert colours == {{"light": "#212529", "dark": "#e4e6e9"}[scheme]}


@pytest.mark.long
def test_every_graph_has_the_one_config(directory):
    for path in [page.path for page in PAGES]:
        for graph in figures_of(draw(directory, path)).values():
            assert graph.config | {"scrollZoom": False} == GRAPH_CONFIG
    assert GRAPH_CONFIG["showSendToCloud"] is False


@pytest.mark.sampled
@pytest.mark.parametrize("path", [page.path for page in PAGES])
@pytest.mark.parametrize(
    "query",
    [
        "run=gone",
        "run=../../../etc/passwd",
        "run=%00",
        "run=",
        "measure=nonsense",
        "measure=",
        "run=a&run=a&run=gone",
        "%%%&&&===",
        "run=" + "x" * 5000,
        "run=<script>alert(1)</script>",
    ],
)
def test_nothing_in_the_address_brings_a_page_down(directory, path, query):
    page = text_of(draw(directory, f"{path}?{query}"))
    assert "could not be drawn" not in page
    if (
        "gone" in query and "run=a" not in query and path != "/"
    ):  # This page shows all runs, whatever the address names.
        assert "No such run" in page


# The page /plan needs no run.
@pytest.mark.parametrize("path", [page.path for page in PAGES if page.path != "/plan"])
def test_an_empty_and_a_missing_directory_say_what_to_type(tmp_path, path):
    for directory in (tmp_path, tmp_path / "missing"):
        page = text_of(draw(directory, path))
        assert "No runs yet" in page
        assert "commprof run train.py" in page


def test_an_unknown_page_is_said(directory):
    assert "No such page" in text_of(draw(directory, "/nowhere"))


BROKEN = {
    "newer": {"run.json": '{"schema_version": 999}'},
    "not JSON": {"run.json": "{"},
    "empty manifest": {"run.json": ""},
    "truncated records": {"rank-00000-0-1.records": "x"},
}


@pytest.mark.sampled
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_run_is_said_and_the_others_are_drawn(directory, tmp_path, what):
    write_run(tmp_path / "good")
    broken = tmp_path / "broken"
    broken.mkdir()
    for name, content in BROKEN[what].items():
        (broken / name).write_text(content)
    assert "could not be drawn" not in text_of(draw(tmp_path, "/?run=broken"))
    compared = draw(tmp_path, "/compare")
    assert "could not be drawn" not in text_of(compared)
    assert "reducing" in figures_of(compared)


@pytest.mark.parametrize("damage", ["collectives/rank-00000-0-1000.parquet", "steps.parquet"])
def test_a_damaged_table_is_said(tmp_path, damage):
    write_run(tmp_path / "run")
    (tmp_path / "run" / damage).write_bytes(b"PAR1 nonsense")
    for path in ("/overview", "/compare"):
        page = text_of(draw(tmp_path, path))
        assert "cannot be read" in page or "damaged" in page


@pytest.mark.sampled
@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_with_hardly_a_step_is_drawn(tmp_path, steps):
    write_run(tmp_path / "run", steps=steps)
    for path in ("/overview", "/compare"):
        assert "could not be drawn" not in text_of(draw(tmp_path, path))


@pytest.mark.long
def test_a_run_without_anything_is_drawn(tmp_path):
    SyntheticRun(2).write(tmp_path / "run")
    for path in ("/overview", "/compare"):
        assert "could not be drawn" not in text_of(draw(tmp_path, path))


def test_a_run_that_is_still_going_and_lost_records_says_so(tmp_path):
    write_run(tmp_path / "run", state="running", lost=3, unseen=2)
    page = text_of(draw(tmp_path, "/overview"))
    assert "3 dropped, 2 unseen" in page


def test_a_run_before_its_first_collective_lacks_nothing_yet(tmp_path, monkeypatch):
    SyntheticRun(2, recorded_ranks=()).write(tmp_path / "begun")
    of_an_ended_run = Runs.overview
    monkeypatch.setattr(Runs, "overview", lambda *of: of_an_ended_run(*of) | {"state": "running"})
    text = text_of(draw(tmp_path, "/overview?run=begun"))
    assert "No records yet" in text and "the first collective appears here" in text
    assert "What is missing" not in text and "was killed before that" not in text


def test_the_step_under_way_of_a_live_run_is_no_verdict(tmp_path, monkeypatch):
    """A page said "No records yet" and also that the ledger does not close.

    The reason was that half of the first step had been sent.
    """
    write_run(tmp_path / "run")
    answers, closed = Runs.overview, overview_data.verdict
    live = {"state": "running"}
    monkeypatch.setattr(Runs, "overview", lambda *of: answers(*of) | live)
    monkeypatch.setattr(overview_data, "verdict", lambda *of: replace(closed(*of), state="mismatch"))
    for whole_steps, told in ((0, "The ledger is not closed yet"), (3, "Ledger does not close so far")):
        live["whole_steps"] = whole_steps
        text = text_of(draw(tmp_path, "/overview"))
        assert told in text and text.count("Ledger does not close") == told.count("Ledger does not close")


def test_changes_are_predicted_once_a_run_has_ended(tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    assert "Changes worth trying" in text_of(draw(tmp_path, "/overview"))
    monkeypatch.setattr(Runs, "is_going", lambda runs, names: True)
    assert "Changes worth trying" not in text_of(draw(tmp_path, "/overview"))


def test_text_of_a_trace_stays_text(tmp_path):
    write_run(tmp_path / HOSTILE.replace("/", "-"), script=HOSTILE)
    for path in ("/overview", "/compare"):
        for graph in figures_of(draw(tmp_path, path)).values():
            assert "<script" not in graph.figure.to_json().replace("\\u003c", "<")


def test_an_answer_is_kept_until_a_file_changes(directory, tmp_path, monkeypatch):
    asked = []
    original = api.step_times
    monkeypatch.setattr(api, "step_times", lambda path: asked.append(path) or original(path))
    path = write_run(tmp_path / "run")
    runs = Runs(tmp_path)
    assert len(runs.step_times("run")) == len(runs.step_times("run")) == 3
    assert len(asked) == 1
    os.utime(path / "steps.parquet")
    runs.step_times("run")
    assert len(asked) == 2


@pytest.mark.long
def test_many_steps_are_drawn_as_means_of_neighbours(tmp_path):
    write_run(tmp_path / "run", steps=500)
    frame = Runs(tmp_path).traffic_by_step("run")
    reduced = frame[frame["series"] == "all_reduce"]
    assert len(reduced) <= 240
    assert int(reduced["steps"].sum()) == 500
    assert (reduced["wire_bytes_per_step"] == 1000).all()
    assert "Each bar is the mean of 3 steps" in text_of(draw(tmp_path, "/overview"))


@pytest.mark.parametrize(
    ("query", "name"),
    [("", "sweep/b"), ("?tick=a", "a"), ("?run=a&tick=sweep/b", "a"), ("?run=gone", "gone")],
)
def test_overview_keeps_its_run_as_the_other_pages_do(directory, query, name):
    _, drawing = draw_page(find_page("/overview"), Runs(directory), "/overview", query, "light")
    assert drawing.run == name


def test_a_step_that_was_repeated_after_a_restart_is_drawn_once(tmp_path):
    run = SyntheticRun(2)
    for attempt, steps in enumerate((range(3), range(2, 4))):
        for step in steps:
            run.add_step(step, duration_ns=1000 * (attempt + 1), attempt=attempt)
            run.add_collective("all_reduce", payload_bytes=1000, step=step, attempt=attempt)
    run.write(tmp_path / "run")
    frame = Runs(tmp_path).traffic_by_step("run")
    assert frame["step"].tolist() == [0, 1, 2, 3]
    assert frame["payload_bytes_per_step"].tolist() == [1000.0] * 4
    (times,) = figures_of(draw(tmp_path, "/overview"))["step-time"].figure.data
    assert (list(times.x), list(times.y)) == ([0, 1, 2, 3], [1000, 1000, 2000, 2000])


def test_bars_of_many_steps_begin_with_the_first_recorded_one(tmp_path):
    """With --warmup 100, the first bar must not be a mean over steps that were not recorded."""
    run = SyntheticRun(1)
    for step in range(100, 400):
        run.add_step(step)
        run.add_collective("all_reduce", payload_bytes=1000, step=step)
    run.write(tmp_path / "run")
    frame = Runs(tmp_path).traffic_by_step("run")
    assert frame["step"].iloc[0] == 100 and set(frame["steps"]) == {2}
    assert (frame["payload_bytes_per_step"] == 1000).all()


def test_findings_name_what_was_asked_for_and_what_was_issued(tmp_path):
    run = SyntheticRun(2, config={"zero_optimization": {"stage": 2, "reduce_scatter": True}})
    run.add_parameters({"w": 250})
    for step in range(2):
        run.add_step(step, duration_ns=1000)
        run.add_collective("all_reduce", step=step, payload_bytes=1000, purpose="gradient_reduce")
    run.write(tmp_path / "run")
    assert "requested reduce_scatter, issued all_reduce" in text_of(draw(tmp_path, "/compare"))


def test_wire_bytes_of_operations_that_were_not_seen_to_run_are_called_issued(directory):
    """NCCL has no log here, so the executed operations are not known."""
    assert "as issued, mean over all ranks" in text_of(draw(directory, "/overview?run=nccl"))
    assert "mean over all ranks of the job" in text_of(draw(directory, "/overview?run=sweep/b"))
    for query, heading in (
        ("run=nccl", "Wire bytes, as issued"),
        ("run=sweep/b", "Executed"),
        ("run=nccl&run=sweep/b", "Executed, or as issued"),
    ):
        (table,) = (
            part
            for root in draw(directory, f"/compare?{query}")
            for part in (root, *root._traverse())
            if getattr(part, "id", None) == "card-settings"
        )
        heads = [part.children for part in table._traverse() if getattr(part, "className", "") == "sort"]
        assert heads[2] == heading


def test_the_server_serves_everything_itself(directory):
    client = create_app(directory).server.test_client()
    page = client.get("/").get_data(as_text=True)
    assert 'lang="en"' in page
    addresses = [part.split('"')[1] for part in page.split("src=")[1:]]
    assert addresses
    assert not [address for address in addresses if "//" in address.removeprefix("/")]
    assert client.get("/_dash-layout").status_code == 200


@pytest.mark.long
def test_an_evaluation_is_not_listed_before_the_first_step(tmp_path):
    path = SyntheticRun(world_size=2)
    path.add_collective(
        "broadcast", step=-1, phase="init", payload_bytes=64, purpose="parameter_broadcast", peer=0
    )
    path.add_step(0)
    path.add_collective("all_reduce", step=0, payload_bytes=1000, purpose="gradient_reduce")
    for phase in ("evaluation", "other"):
        path.add_collective(
            "all_reduce", step=-1, after_step=0, phase=phase, payload_bytes=8, purpose="metric"
        )
    path.write(tmp_path / "run")
    frame = Runs(tmp_path).traffic_outside_steps("run")
    assert list(zip(frame["when"], frame["purpose"], frame["payload_bytes"], strict=True)) == [
        ("before the first step", "parameter_broadcast", 64),
        ("after the last step", "metric", 8),
        ("evaluation", "metric", 8),
    ]
    assert "Outside of the training steps" in text_of(draw(tmp_path, "/overview"))
