"""Test the timeline and the records page without a browser.

The pages show the values of the library, whatever the address contains.
"""

from __future__ import annotations

import csv
import io
import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly.utils import PlotlyJSONEncoder

from commprof.analysis import api
from commprof_dash.app import create_app, draw_page, find_page
from commprof_dash.charts import timeline_chart
from commprof_dash.data import Runs
from commprof_dash.pages import index_wait
from commprof_dash.pages.records import data as records_data
from commprof_dash.pages.records import page as records
from commprof_dash.pages.timeline import data as timeline_data
from support.runs import SyntheticRun

pytestmark = pytest.mark.shared_answers

HOSTILE = "<script>alert(1)</script>"


def write_run(path, count=30, world=3):
    run = SyntheticRun(world)
    for step in range(3):
        run.add_step(step, begin_ns=step * 1_000_000, duration_ns=1_000_000)
        for number in range(count):
            for rank in range(world):
                run.add_collective(
                    ("all_reduce", "all_gather")[number % 2],
                    step=step,
                    ranks=(rank,),
                    issue_ns=step * 1_000_000 + number * 20_000 + rank * 3_000,
                    host_ns=15_000,
                    exposed_ns=9_000 if number % 3 else None,
                    payload_bytes=1 << (number % 20),
                    parameters=HOSTILE + "x" * 10_000 if number == 0 else f"layer.{number}",
                    bucket=number,
                    purpose="gradient_reduce",
                    phase="backward" if number % 2 else "forward",
                    intended_op="reduce_scatter" if number % 4 == 1 else None,
                )
    return run.write(path)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    write_run(base / "a")
    return base


def draw(directory, path):
    pathname, _, search = path.partition("?")
    heading, drawing = draw_page(find_page(pathname), Runs(directory), pathname, f"?{search}", "light")
    parts = [*heading, *drawing.controls, *drawing.body]
    return json.dumps(list(parts), cls=PlotlyJSONEncoder)


def test_bars_are_where_the_frame_says(directory):
    shown = api.timeline(directory / "a", 900_000, 2_100_000)
    figure = timeline_chart.figure(shown, "light")
    drawn = set()
    for trace in figure.data:
        if trace.name == timeline_chart.EXPOSED:
            continue
        for base, length, (key, _) in zip(trace.base, trace.x, trace.customdata, strict=True):
            drawn.add((*key, round(base), round(base + length)))
    names = ("rank", "attempt", "pid", "seq", "begin_ns", "end_ns")
    wanted = set(zip(*(shown.bars[name].tolist() for name in names), strict=True))
    assert drawn == wanted
    held = next(trace for trace in figure.data if trace.name == timeline_chart.EXPOSED)
    assert sum(held.x) == shown.bars["exposed_ns"].fillna(0).sum()
    assert "all_reduce" in {trace.name for trace in figure.data}
    assert "reduce_scatter as all_gather" in {trace.name for trace in figure.data}


def test_bars_of_different_ranks_share_no_row(directory):
    shown = api.timeline(directory / "a")
    rows = timeline_chart.rows_of(shown.bars, shown.ranks)
    by_rank = {row.rank: row for row in rows}
    for rank, place in zip(shown.bars["rank"], timeline_chart.places(shown.bars, rows), strict=True):
        assert by_rank[rank].top < place < by_rank[rank].top + by_rank[rank].height


def test_density_holds_the_share_and_the_operation(directory):
    shown = api.timeline(directory / "a", most_bars=0, pixels=40)
    heatmap = timeline_chart.figure(shown, "dark").data[0]
    ops = ["all_reduce", "all_gather"]
    width = shown.density["end_ns"][0] - shown.density["begin_ns"][0]
    for row, rank in enumerate(shown.ranks):
        mine = shown.density[shown.density["rank"] == rank]
        for cell, value in enumerate(heatmap.z[3 * row]):
            begin = heatmap.x[cell] + shown.run_begin_ns
            here = mine[mine["begin_ns"] == begin]
            total = here["busy_ns"].sum() / width
            assert (math.isnan(value) and not total) or value % 1 == pytest.approx(min(total, 0.999))
            if total:
                assert ops[int(value)] == here.sort_values("busy_ns")["op"].iloc[-1] or here[
                    "busy_ns"
                ].nunique() < len(here)


def write_groups(path):
    run = SyntheticRun(4)
    for number in range(600):
        pg, group, desc = (
            ("0", (0, 1, 2, 3), "undefined"),
            ("1", (0, 1), HOSTILE),
            ("2", (2, 3), HOSTILE),
            ("3", (0, 1, 2, 3), "data"),
        )[number % 4]
        run.add_collective(
            ("all_reduce", "all_gather")[number % 2],
            issue_ns=number * 5_000,
            host_ns=3_000 + 10 * number,
            exposed_ns=800,
            pg=pg,
            group=group,
            group_desc=desc,
        )
    return run.write(path)


def test_each_group_of_a_rank_has_a_lane(tmp_path):
    shown = api.timeline(write_groups(tmp_path / "groups"), most_bars=0, pixels=40)
    figure = timeline_chart.figure(shown, "light")
    texts = figure.layout.yaxis.ticktext
    assert texts[:3] == ("<b>rank 0</b> group 0", "data", "&lt;script&gt;ale...")
    heatmap, width = figure.data[0], shown.density["end_ns"][0] - shown.density["begin_ns"][0]
    # Each rank has 7 rows: three lanes with room between them, and the exposed time.
    assert len(heatmap.z) == 4 * 7 and len(heatmap.y) == 4 * 7 + 1
    for rank in range(4):
        mine = shown.density[shown.density["rank"] == rank]
        for lane in range(3):
            wanted = mine[mine["lane"] == lane].groupby("begin_ns")["busy_ns"].sum() / width
            drawn = heatmap.z[7 * rank + 2 * lane]
            assert sum(v % 1 for v in drawn if v == v) == pytest.approx(wanted.clip(upper=0.999).sum())
        held = mine.groupby("begin_ns")["exposed_ns"].sum() / width
        drawn = heatmap.z[7 * rank + 5]
        assert sum(v % 1 for v in drawn if v == v) == pytest.approx(held.clip(upper=0.999).sum())
    said = [text for row in heatmap.text for text in row if text]
    assert any(text.startswith("<b>rank 2, data (0-3)</b>: all_gather") for text in said)
    assert not any("<script" in text for text in said)


def test_bars_of_several_groups_stand_beside_their_names(tmp_path):
    shown = api.timeline(write_groups(tmp_path / "groups"), 0, 2_000_000)
    assert shown.bars is not None
    axis = timeline_chart.figure(shown, "light").layout.yaxis
    assert axis.ticktext[:3] == ("<b>rank 0</b> group 0", "data", "&lt;script&gt;ale...")
    # Each name is in the middle of the bars of its group.
    bars = shown.bars[shown.bars["rank"] == 0]
    of_rank = timeline_chart.places(bars, timeline_chart.rows_of(shown.bars, shown.ranks))
    for lane, value in enumerate(axis.tickvals[:3]):
        drawn = [place for place, each in zip(of_rank, bars["lane"], strict=True) if each == lane]
        assert value == (min(drawn) + max(drawn)) / 2


def test_bars_of_one_group_need_no_names(directory):
    axis = timeline_chart.figure(api.timeline(directory / "a"), "light").layout.yaxis
    assert axis.ticktext == ("rank 0", "rank 1", "rank 2")


def test_the_page_of_a_run_with_groups_names_them(tmp_path, monkeypatch):
    write_groups(tmp_path / "groups")
    most = api.timeline
    monkeypatch.setattr(api, "timeline", lambda *args, **more: most(*args, **(more | {"most_bars": 0})))
    text = draw(tmp_path, "/timeline?run=groups")
    assert "in each of its groups" in text
    assert "Busy time of the window by rank, group and operation" in text
    monkeypatch.setattr("commprof.analysis.browse.timeline.MOST_LANES", 8)
    assert "The groups of these ranks need 12 lanes: choose fewer ranks" in draw(
        tmp_path, "/timeline?run=groups"
    )
    assert "in each of its groups" in draw(tmp_path, "/timeline?run=groups&ranks=0-1")


def test_hover_says_bucket_parameters_bytes_and_purpose_as_text(directory):
    shown = api.timeline(directory / "a")
    texts = timeline_chart.hover_texts(shown.bars, shown.run_begin_ns, {})
    assert "bucket 3" in " ".join(texts)
    assert "gradient_reduce" in texts[0]
    assert "payload" in texts[0]
    assert not [text for text in texts if "<script" in text or len(text) > 700]


@pytest.mark.parametrize(
    ("begin", "end"), [(0, 1), (0, 10**9), (5 * 10**9, 5 * 10**9 + 300), (-50, 70_000), (10**15, 10**15 + 7)]
)
def test_ticks_are_within_and_differ(begin, end):
    values, texts = timeline_chart.time_ticks(begin, end)
    assert values and all(begin - 1 <= value <= end + 1 for value in values)
    assert len(set(texts)) == len(texts) or end - begin < 2


HELD_VIEWS = st.builds(
    timeline_data.View,
    st.none() | st.integers(-(10**6), 10**12),
    st.none() | st.integers(10**12 + 1, 10**13),
    st.sampled_from(["", "0-3", "0,2"]),
    st.none() | st.tuples(*[st.integers(0, 10**6)] * 4),
    st.none() | st.integers(0, 10**9),
    st.sampled_from(["", "ranks", "hosts"]),
    st.sampled_from(["", "rank", "lateness"]),
)


@given(HELD_VIEWS)
def test_a_view_is_the_same_after_the_browser_held_it(view):
    assert timeline_data.view_of(json.loads(json.dumps(view.stored()))) == view


@given(
    st.dictionaries(
        st.sampled_from(["from", "to", "ranks", "record", "step", "rows", "by"]), st.text(max_size=20)
    )
)
def test_any_text_is_a_view(values):
    timeline_data.view_of(values)


def test_ranks_are_chosen_by_text():
    known = range(10)
    assert timeline_data.chosen_ranks("0-2, 7", known) == [0, 1, 2, 7]
    for text in ("", "nonsense", "99", "-", "3-1"):
        assert timeline_data.chosen_ranks(text, known) == list(known)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "query",
    [
        "",
        "run=a&from=0&to=100000",
        "run=a&from=999999999999&to=1",
        "run=a&from=nan&to=inf",
        "run=a&to=-5",
        "run=a&from=99999999999999",
        "run=a&ranks=9999999999999,x-y",
        "run=a&record=0.0.1000.3",
        "run=a&record=0.0.1000.99999",
        "run=a&record=" + "9" * 400,
        "run=a&filter=op:=:all_reduce&filter=rank:between:0..x&sort=-payload_bytes&column=op&column=nope",
        "run=a&sort=nope&filter=nope&filter=:::",
    ],
)
def test_any_address_is_drawn(directory, query):
    for path in ("/timeline", "/records"):
        assert "could not be drawn" not in draw(directory, f"{path}?{query}")
    if "1000.3" in query:
        page = draw(directory, f"/timeline?{query}")
        assert "The same collective on 3 ranks" in page and "bucket 3 of step 0" in page


def test_a_run_without_records_says_so(tmp_path):
    SyntheticRun(2).write(tmp_path / "empty")
    for path in ("/timeline", "/records"):
        assert "No records" in draw(tmp_path, path)


def test_a_page_tells_how_far_the_index_is(directory, monkeypatch):
    monkeypatch.setattr(index_wait.builds, "wait_for", lambda path: "5 of 10 records (50 %) are in order")
    for path in ("/timeline", "/records"):
        page = draw(directory, path)
        assert "5 of 10 records" in page and index_wait.WAIT in page


def test_an_index_is_built_beside_the_page_and_its_failure_is_said(directory, monkeypatch):
    builds = timeline_data.Builds()
    ready = []
    monkeypatch.setattr(api, "has_index", lambda path: bool(ready))
    monkeypatch.setattr(api, "index", lambda path, told: told(1, 2))
    builds.wait_for(directory / "a")
    ready.append(True)
    assert builds.wait_for(directory / "a") is None
    broken = timeline_data.Builds()
    ready.clear()

    def fails(path, told):
        raise ValueError("no room")

    monkeypatch.setattr(api, "index", fails)
    with pytest.raises(RuntimeError, match="no room"):
        for _ in range(1000):
            broken.wait_for(directory / "a")
            time.sleep(0.01)


MODEL = {
    "op": {"filterType": "text", "type": "contains", "filter": "reduce"},
    "payload_bytes": {"filterType": "number", "type": "inRange", "filter": 4, "filterTo": 1024},
    "purpose": {"filterType": "text", "type": "blank"},
    "rank": {"filterType": "number", "type": "equals", "filter": 1},
}


def test_filters_are_the_same_after_the_address_held_them():
    texts = records_data.filter_texts(MODEL)
    assert texts == ("op:contains:reduce", "payload_bytes:between:4..1024", "purpose:is null:", "rank:=:1")
    assert records_data.filter_model(texts) == MODEL
    assert records_data.filters_of(texts, 0)[1] == api.Filter("payload_bytes", "between", ["4", "1024"])
    assert records_data.filters_of(["begin_ns:>=:100"], 50) == [api.Filter("begin_ns", ">=", 150)]


def test_rows_have_units_and_a_link(directory):
    path = directory / "a"
    page = api.records_page(path, limit=5)
    rows = records.rows_of(page.rows, "a", 0)
    assert rows[0]["payload_bytes"] == "1 B"
    assert rows[0]["link"].startswith("[show](/timeline?run=a&record=0.0.1000.0&from=")
    assert len(rows[0]["parameters"]) <= 300


@pytest.fixture(scope="module")
def client(directory):
    return create_app(directory).server.test_client()


def test_files_hold_what_the_library_says(directory, client):
    answer = client.get(
        "/records.csv?run=a&filter=op:%3D:all_reduce&sort=-payload_bytes&column=rank&column=seq&column=payload_bytes"
    )
    assert answer.status_code == 200 and "attachment" in answer.headers["Content-Disposition"]
    rows = list(csv.DictReader(io.StringIO(answer.get_data(as_text=True))))
    page = api.records_page(
        directory / "a", [api.Filter("op", "=", "all_reduce")], "-payload_bytes", limit=1000
    )
    assert [(int(row["rank"]), int(row["seq"]), int(row["payload_bytes"])) for row in rows] == list(
        zip(page.rows["rank"], page.rows["seq"], page.rows["payload_bytes"], strict=True)
    )
    text = client.get("/timeline.csv?run=a&from=0&to=500000").get_data(as_text=True)
    assert text == api.frame_csv(api.timeline(directory / "a", 0, 500_000).bars)


@pytest.mark.parametrize("path", ["/records.csv", "/timeline.csv"])
def test_files_of_what_is_not_there_are_refused(client, path):
    assert client.get(f"{path}?run=gone").status_code == 404
    assert client.get(f"{path}?run=../../etc").status_code == 404
    assert client.get(path).status_code == 404
    assert client.get(f"{path}?run=a", headers={"Host": "evil.example"}).status_code == 403
    assert client.get("/records.csv?run=a&filter=rank:%3D:one").status_code == 422
