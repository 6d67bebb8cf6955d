"""Test the cards of Compare and Overview about settings, ledgers and cost.

The tests check what the cards draw, and their texts if a value is not known.
"""

import json
import re
import time
from itertools import pairwise

import pandas as pd
import pytest
from dash import dcc
from plotly.utils import PlotlyJSONEncoder

from commprof.analysis import api
from commprof.errors import TraceError
from commprof_dash.app import draw_page, find_page
from commprof_dash.background import Background
from commprof_dash.charts import lane_charts, setting_charts
from commprof_dash.charts.exposure_chart import by_purpose
from commprof_dash.charts.series import Series
from commprof_dash.data import Runs
from commprof_dash.pages.compare import data as compare_data
from commprof_dash.pages.overview import cards as overview_cards
from commprof_dash.pages.overview import data as overview_data
from commprof_dash.pages.overview import page as overview
from support.runs import SyntheticRun

pytestmark = pytest.mark.shared_answers

HOSTILE = "<script>alert(1)</script>"


def write(
    path, op="all_reduce", steps=3, world_size=2, exposed_ns=None, metrics=None, duration_ns=1_000_000, **zero
):
    """Write a run of ``steps`` steps in which rank 0 is the root of a reduce."""
    run = SyntheticRun(
        world_size, config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2, **zero}}
    )
    for step in range(steps):
        run.add_step(step, duration_ns=duration_ns, rss_bytes=1 << 30, **(metrics or {}))
        run.add_collective(
            op,
            step=step,
            payload_bytes=4096,
            purpose="gradient_reduce",
            peer=0 if op == "reduce" else -1,
            exposed_ns=exposed_ns,
        )
    if not steps:
        run.add_collective(op, step=-1, payload_bytes=4096)
    return run.write(path)


def body(directory, path):
    """Return (texts and ids as JSON, figures by name) of a page."""
    pathname, _, search = path.partition("?")
    _, drawing = draw_page(find_page(pathname), Runs(directory), pathname, f"?{search}", "light")
    text = json.dumps(list(drawing.body), cls=PlotlyJSONEncoder)
    figures = {
        part.id["name"]: part.figure
        for root in drawing.body
        for part in root._traverse()
        if isinstance(part, dcc.Graph)
    }
    return text, figures


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    base = tmp_path_factory.mktemp("grid")
    for scatter in (True, False):
        for multi in (True, False):
            for how in ("auto", "reduce_scatter"):
                if not scatter and how == "reduce_scatter":
                    continue
                op = (
                    "reduce_scatter" if how != "auto" else "reduce" if scatter and not multi else "all_reduce"
                )
                write(
                    base / f"{scatter}-{multi}-{how}",
                    op,
                    reduce_scatter=scatter,
                    use_multi_rank_bucket_allreduce=multi,
                    gradient_reduction=how,
                )
    return base


@pytest.mark.long
def test_two_keys_make_a_grid_with_shared_axes_on_request(grid):
    text, figures = body(grid, "/compare")
    assert "levels" in figures and not any(name.startswith("levels-") for name in figures)
    text, figures = body(grid, "/compare?view=grid")
    cells = {name: figure for name, figure in figures.items() if name.startswith("levels-")}
    assert set(cells) == {"levels-0-0", "levels-0-1", "levels-1-0", "levels-1-1"}
    for axis in ("xaxis", "xaxis2"):
        assert len({tuple(figure.layout[axis].range) for figure in cells.values()}) == 1
    assert text.index("reduce_scatter=true, use_multi_rank_bucket_allreduce=true") < text.index(
        "reduce_scatter=false, use_multi_rank_bucket_allreduce=false"
    )
    # For n = 2, an all_reduce sends its 4096 bytes, and the other operations half of them. gloo runs a
    # reduce_scatter as an all_reduce.
    bars = {trace.name: list(trace.x) for trace in cells["levels-0-0"].data}
    times = {"step time": [1_000_000.0] * 2}
    assert bars == {"all_reduce": [4096.0] * 3, "reduce_scatter": [2048.0]} | times
    bars = {trace.name: list(trace.x) for trace in cells["levels-0-1"].data}
    assert set(bars) == {"reduce", "reduce_scatter", "all_reduce", "step time"}
    assert (bars["reduce"][0], bars["reduce_scatter"]) == (2048.0, [2048.0])
    notes = [note.text for note in cells["levels-1-1"].layout.annotations]
    assert "not known" in notes  # The requested bytes are not known.
    assert "gradient_reduction=auto" in notes and "gradient_reduction=reduce_scatter" not in notes


@pytest.mark.long
@pytest.mark.parametrize(
    "settings", [((True, True), (True, False), (False, True)), ((True, True), (True, False))]
)
def test_there_is_no_grid_with_a_hole_or_of_one_key(grid, settings):
    runs = "".join(f"&run={scatter}-{multi}-auto" for scatter, multi in settings)
    text, figures = body(grid, f"/compare?view=grid{runs}")
    assert "levels" in figures and "Grid of the two keys" not in text


@pytest.mark.long
def test_one_key_alone_makes_no_grid(tmp_path):
    write(tmp_path / "a", "reduce", gradient_reduction="reduce_to_owner")
    write(tmp_path / "b", "all_reduce", gradient_reduction="all_reduce")
    text, figures = body(tmp_path, "/compare")
    assert "levels" in figures and not any(name.startswith("levels-") for name in figures)
    assert "Set gradient_reduction=reduce_to_owner" in text
    assert "Step times cannot be compared" in text
    assert {trace.name: sorted(trace.x) for trace in figures["ranks"].data} == {
        "sent by a rank": [2048.0, 4096.0, 4096.0, 4096.0],
        "received by a rank": [2048.0, 4096.0, 4096.0, 4096.0],
    }
    assert list(figures["samples"].data[0].x) == [4000.0, 4000.0]
    assert "(config)" in " ".join(note.text for note in figures["samples"].layout.annotations)
    assert list(figures["memory"].data[0].x) == [1 << 30, 1 << 30]


def test_the_levels_of_large_runs_come_from_another_process(tmp_path, monkeypatch):
    path = write(tmp_path / "a")
    monkeypatch.setattr(compare_data, "MOST_RECORDS", 1)
    asked = []
    monkeypatch.setattr(
        Background, "ask", lambda self, key, answer, argument: asked.append((answer, argument))
    )
    text, figures = body(tmp_path, "/compare")
    assert "levels" not in figures
    assert "Closing the ledgers of these runs" in text
    assert asked[0] == (api.traffic_levels, [path])
    monkeypatch.setattr(Background, "ask", lambda self, key, answer, argument: answer(argument))
    assert "levels" in body(tmp_path, "/compare")[1]


def test_the_verdict_and_the_lower_half_of_a_large_run_come_later(tmp_path, monkeypatch):
    path = write(tmp_path / "a")
    monkeypatch.setattr(overview_data, "MOST_RECORDS", 1)
    monkeypatch.setattr(Background, "ask", lambda self, key, answer, argument: None)
    text, figures = body(tmp_path, "/overview")
    assert "The ledger is being closed" in text and f"commprof verify {path}" in text
    assert "exposure" not in figures and "by-step" in figures
    below = json.dumps(overview.rest(Runs(tmp_path), "a", "light"), cls=PlotlyJSONEncoder)
    assert "What recording cost" in below and "Resources over the run" in below


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return a directory with a single run, a."""
    base = tmp_path_factory.mktemp("alone")
    write(base / "a")
    return base


@pytest.mark.long
def test_another_process_answers_and_what_it_raises_is_raised(alone):
    path, beside = alone / "a", Background()
    assert beside.ask("verdict", api.verify, path) is None
    while (found := beside.ask("verdict", api.verify, path)) is None:
        time.sleep(0.05)
    assert found == api.verify(path)
    with pytest.raises(TraceError, match="does not exist"):
        while beside.ask("none", api.verify, alone / "b") is None:
            time.sleep(0.05)


def test_overview_has_the_verdict_with_its_command_and_unknown_times_are_not_zero(alone):
    path = alone / "a"
    text, figures = body(alone, "/overview")
    assert "Cannot tell whether the ledger closes" in text
    assert f"commprof verify {path}" in text
    verdict = api.verify(path)
    assert all(json.dumps(sentence)[1:-1] in text for sentence in verdict.sentences)
    exposed = figures["exposure"]
    assert all(len(trace.x or ()) == 0 for trace in exposed.data)
    assert [note.text for note in exposed.layout.annotations].count("not known") == 4
    assert "The exposed time is known for 0 of 4 records" in text
    assert "What recording cost" in text and "1.00 ms per rank" in text


def test_of_sums_alone_the_exposed_time_is_not_known():
    facts = {"summed": 60, "steps": 4}
    card = overview_cards.exposure(api.exposure_per_step(SyntheticRun().open()), facts, "light")
    assert "Not known: only sums" in json.dumps(card, cls=PlotlyJSONEncoder)


@pytest.mark.long
def test_overview_draws_exposed_time(tmp_path):
    write(tmp_path / "a", exposed_ns=250_000)
    _, figures = body(tmp_path, "/overview")
    bars = {trace.name: list(trace.x) for trace in figures["exposure"].data}
    # The values are of the purpose and of all purposes.
    assert bars["exposed"] == pytest.approx([250_000.0, 250_000.0], abs=2)


@pytest.mark.long
def test_a_run_without_steps_says_so(tmp_path):
    write(tmp_path / "a", steps=0)
    text, figures = body(tmp_path, "/overview")
    assert "has no training steps" in text
    assert "exposure" not in figures
    text, figures = body(tmp_path, "/compare")
    assert "levels" not in figures and "ranks" not in figures


@pytest.mark.long
def test_names_are_shown_as_text_in_figures(tmp_path):
    write(tmp_path / "a", gradient_reduction=HOSTILE)
    write(tmp_path / "b", gradient_reduction="x" * 10_000)
    _, figures = body(tmp_path, "/compare")
    for figure in figures.values():
        assert "<script>" not in str(figure.to_plotly_json())


def drawn(**parts):
    return lane_charts.figure(
        lane_charts.Lanes(["a", "b"], ["first", "second"], **parts),
        unit="bytes",
        title="Bytes",
        scheme="light",
    )


def test_lanes_never_lie_over_each_other():
    series = Series("all_reduce", "#d55e00", "")
    points = [lane_charts.Point(i, lane, 10.0, "") for i in range(2) for lane in range(2)]
    figure = drawn(bars=[lane_charts.Bars(series, points)])
    places = list(figure.data[0].y)
    assert places == sorted(places)
    gaps = [after - before for before, after in pairwise(places)]
    assert min(gaps) >= figure.data[0].width
    labels = [note for note in figure.layout.annotations if note.text in ("a", "b")]
    assert all(
        not any(abs(label.y + 8 - place) < figure.data[0].width / 2 for place in places) for label in labels
    )


def test_the_axis_reaches_the_end_of_every_bar_mark_and_interval():
    series = Series("all_reduce", "#d55e00", "")
    figure = drawn(
        bars=[lane_charts.Bars(series, [lane_charts.Point(0, 0, 4.0, ""), lane_charts.Point(0, 0, 5.0, "")])],
        marks=[lane_charts.Marks("mark", "#000000", "circle", [lane_charts.Point(1, 1, 7.0, "")])],
        spans=[(lane_charts.Point(0, 1, 1.0, ""), 11.0)],
    )
    assert figure.layout.xaxis.range[1] >= 11.0
    assert lane_charts.highest_of(lane_charts.Lanes(["a"], ["x"])) == 0.0


def levels_of(levels, times, scheme="dark"):
    """Return the chart of a setting named a.

    Each row of ``levels`` has the level, the series, the wire bytes, the moved bytes of a rank, and whether
    these are per run or per step.
    """
    columns = ["level", "series", "wire_bytes_per_step", "moved_bytes_of_rank", "moved_over"]
    frame = pd.DataFrame(levels, columns=columns).assign(label="a", moved_bytes=8192.0)
    names = [f"{kind}{end}_ns" for kind in ("step_time", "predicted") for end in ("", "_low", "_high")]
    rows = pd.DataFrame([times], columns=names).assign(label="a", repeats=3)
    ends = setting_charts.ends_of(frame, rows)
    return setting_charts.levels(frame, rows, {"a": "a (x3)"}, ends, scheme)


@pytest.mark.parametrize(("over", "symbol"), [("run", "diamond-open"), ("step", "diamond")])
def test_moved_bytes_are_marks_and_levels_that_are_not_known_are_said(over, symbol):
    levels = [
        ("requested", None, None, None, None),
        ("issued", "reduce", 4000.0, None, None),
        ("executed", "reduce", 3000.0, None, None),
        ("executed", None, None, None, None),
        ("moved", None, None, 4096.0, over),
    ]
    figure = levels_of(levels, (None,) * 6)
    texts = [note.text for note in figure.layout.annotations]
    assert texts.count("not known") == 2  # The requested bytes and the step time are not known.
    assert {"a (x3)", "<b>3.91 KiB</b>", "<b>&gt;= 2.93 KiB</b>", "4.00 KiB"} <= set(texts)
    assert [list(trace.x) for trace in figure.data] == [[4000.0, 3000.0], [4096.0]]
    assert figure.data[1].marker.symbol == symbol
    assert figure.layout.xaxis.range[1] >= 4096


def test_what_other_programs_moved_does_not_stretch_the_axis():
    levels = [("issued", "reduce", 1000.0, None, None), ("moved", None, None, 40_960.0, "run")]
    figure = levels_of(levels, (None,) * 6)
    assert [list(trace.x) for trace in figure.data] == [[1000.0], [1300.0]]
    assert "40.0 KiB \u2192" in [note.text for note in figure.layout.annotations]


def test_where_nothing_was_counted_no_row_has_a_place_for_it():
    figure = levels_of([("issued", "reduce", 8.0, None, None)], (100, 90, 130, None, None, None))
    assert "moved" not in [note.text for note in figure.layout.annotations]


def test_predicted_step_times_are_hollow_below_measured_ones():
    figure = levels_of([("issued", "reduce", 8.0, None, None)], (100, 90, 130, 120, 110, 140))
    bars = {trace.name: trace for trace in figure.data}
    measured, predicted = bars["step time"], bars["predicted step time"]
    assert (measured.x[0], predicted.x[0]) == (100.0, 120.0) and measured.y[0] < predicted.y[0]
    assert predicted.marker.color == "rgba(0,0,0,0)" != measured.marker.color
    assert predicted.marker.line.width > 0
    assert measured.xaxis == predicted.xaxis == "x2"
    spans = {(shape.x0, shape.x1) for shape in figure.layout.shapes}
    assert spans == {(90.0, 130.0), (110.0, 140.0)}
    measured_only = levels_of([("issued", "reduce", 8.0, None, None)], (100, 90, 130, None, None, None))
    assert "predicted step time" not in {trace.name for trace in measured_only.data}


def test_overlapped_time_is_a_bound_where_not_all_ends_are_known():
    frame = pd.DataFrame(
        {
            "purpose": ["all"],
            "exposed_ns": pd.array([None], "Int64"),
            "exposed_low_ns": pd.array([None], "Int64"),
            "exposed_high_ns": pd.array([None], "Int64"),
            "overlapped_ns": pd.array([None], "Int64"),
            "overlapped_at_most_ns": pd.array([2_000], "Int64"),
        }
    )
    texts = [note.text for note in by_purpose(frame, "light").layout.annotations]
    assert "not known" in texts
    assert "<b>&lt;= 2.00 us</b>" in texts


@pytest.mark.long
def test_the_table_says_what_a_step_of_each_setting_cost_and_is_sorted_as_asked(tmp_path):
    for number, (scatter, duration_ns) in enumerate(((True, 1_000_000), (False, 2_000_000))):
        write(
            tmp_path / str(number),
            exposed_ns=250_000,
            metrics={"loss": 1.25},
            duration_ns=duration_ns,
            reduce_scatter=scatter,
        )
    text, figures = body(tmp_path, "/compare?sort=-step_time_ns")
    for words in ("1.00 ms", "250 us, 25.0 %", "250 us, 12.5 %", "1.25", "1.00 GiB", "4000"):
        assert f'"{words}"' in text, words
    assert text.count('"aria-sort": "descending"') == 1
    rows = [note.text for note in figures["levels"].layout.annotations if "reduce_scatter=" in note.text]
    assert rows == ["reduce_scatter=false", "reduce_scatter=true"]
    _, figures = body(tmp_path, "/compare?sort=step_time_ns")
    rows = [note.text for note in figures["levels"].layout.annotations if "reduce_scatter=" in note.text]
    assert rows == ["reduce_scatter=true", "reduce_scatter=false"]
    assert 'aria-sort": "descending' not in body(tmp_path, "/compare?sort=nonsense")[0]


@pytest.mark.long
def test_repeats_are_one_chip_with_a_link_to_each(tmp_path):
    for number in range(3):
        write(tmp_path / f"run-{number}")
    write(tmp_path / "other", reduce_scatter=False)
    text, figures = body(tmp_path, "/compare")
    assert any(note.text.endswith("(x3)") for note in figures["levels"].layout.annotations)
    assert text.count('"x3"') == 1 and "2 settings, 4 runs" in text
    assert all(f"/overview?run=run-{number}" in text for number in range(3))


@pytest.mark.long
def test_exposed_time_that_no_step_tells_is_not_known(grid):
    assert re.search(r"[0-9] [mun]s, [0-9.]+ %", body(grid, "/compare")[0]) is None
    assert api.compare_both([grid / "True-True-auto"]).resources["exposed_ns"].isna().all()


@pytest.mark.long
def test_settings_that_differ_in_many_keys_have_short_labels_and_all_keys_in_the_table(tmp_path):
    keys = [f"option_{number}" for number in range(7)]
    for run, value in (("a", 1), ("b", 2)):
        write(tmp_path / run, "all_reduce", **dict.fromkeys(keys, value))
    text, _ = body(tmp_path, "/compare?run=a&run=b")
    assert "Labels name the keys that distinguish the settings" in text
    assert "option_0=1" in text
    assert "option_1=1" not in text
    assert all(f"zero_optimization.{key}" in text for key in keys[1:])


def write_shared(path):
    """Write a run of four ranks with halves of a model on pairs of ranks.

    The replicas of each half reduce the gradients of the half.
    """
    run = SyntheticRun(4)
    for step in range(2):
        run.add_step(step, duration_ns=1_000_000)
        for number, (pair, replicas) in enumerate((((0, 1), (0, 2)), ((2, 3), (1, 3)))):
            for name, group, purpose in (
                ("model", pair, "activation"),
                ("data", replicas, "gradient_reduce"),
            ):
                where = {"group": group, "pg": f"{name}{number}", "group_desc": name, "purpose": purpose}
                run.add_collective("all_reduce", step=step, payload_bytes=1 << 20, **where)
    return run.write(path)


@pytest.mark.long
def test_compare_tells_what_each_kind_of_group_carries(tmp_path):
    write(tmp_path / "flat")
    assert "card-groups" not in body(tmp_path, "/compare?run=flat")[0]
    write_shared(tmp_path / "shared")
    text, _ = body(tmp_path, "/compare?run=flat&run=shared")
    assert "card-groups" in text
    card = text[text.index("Traffic by group") : text.index("Bytes of each rank")]
    for told in ('"model"', '"data"', "1.00 MiB"):
        assert told in card


def test_the_figures_of_a_run_measure_as_its_comparison_does(tmp_path):
    write_shared(tmp_path / "shared")
    runs = Runs(tmp_path)
    by_step, by_purpose = runs.traffic_by_step("shared"), runs.traffic_by_purpose("shared")
    # An all_reduce on two ranks sends the payload. Each rank is in one group of either name.
    assert by_step.groupby("step")["wire_bytes_per_step"].sum().tolist() == [2 << 20, 2 << 20]
    assert by_purpose["wire_bytes_per_step"].sum() == 2 << 20
    assert runs.traffic_outside_steps("shared").empty
