"""Test the page Bandwidth without a browser.

The figures show the answers of the library, and every state says what to do.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from dash import dcc
from plotly.utils import PlotlyJSONEncoder

from commprof.analysis import api
from commprof.calibration.file import write_calibration
from commprof.calibration.results import Calibration, Timing
from commprof_dash.address import link
from commprof_dash.app import draw_page, find_page
from commprof_dash.charts.axis_ticks import log_axis
from commprof_dash.components.legend import legend
from commprof_dash.data import Runs
from commprof_dash.pages.bandwidth import data as bandwidth_data
from commprof_dash.theme import OP_COLOURS
from support.runs import SyntheticRun

pytestmark = pytest.mark.shared_answers

HOSTILE = "<script>alert(1)</script>"
SIZES = (1024, 65536, 1_000_000)


def calibration(**changes) -> Calibration:
    """Return a calibration of all_reduce on 2 ranks: 100 us and 1 GB/s."""
    timings = tuple(Timing(2**n, 100_000 + 2**n, 1, 1, 20) for n in range(10, 25, 2))
    values = {
        "created": "2026-01-02T03:04:05+00:00", "torch": "2.13.0", "backend": "gloo", "backend_version": None,
        "device": "cpu", "dtype": "float32", "world_size": 2, "hosts": ("host-a",), "machine": {},
        "timings": {"all_reduce": timings},
    }  # fmt: skip
    return Calibration(**{**values, **changes})


def write_run(path, **options):
    """Write a run with ten all_reduces of each size at twice the ceiling's time.

    One of them is 20 times slower. One more all_reduce took no time.
    """
    run = SyntheticRun(2, **options)
    for step in range(10):
        run.add_step(step)
        for size in SIZES:
            time = 2 * (100_000 + size) + 1_000 * step
            lasting = 20 * time if (step, size) == (4, SIZES[0]) else time
            begin = 10**9 * (step + 1) + size * 1000
            run.add_collective("all_reduce", step=step, payload_bytes=size, issue_ns=begin, host_ns=lasting)
    run.add_collective("all_reduce", step=9, payload_bytes=SIZES[0], issue_ns=10**12, host_ns=0)
    run.add_collective(
        "broadcast", step=9, payload_bytes=SIZES[0], issue_ns=2 * 10**12, host_ns=9, peer=0, is_async=True
    )
    return run.write(path)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    write_run(base / "sweep" / "a")
    write_calibration(base / "sweep" / "calibration.json", calibration())
    write_calibration(base / "calibration-nccl.json", calibration(backend="nccl"))
    return base


def draw(directory, query="run=sweep/a", scheme="light"):
    _, drawing = draw_page(find_page("/bandwidth"), Runs(directory), "/bandwidth", f"?{query}", scheme)
    return [*drawing.controls, *drawing.body]


def text_of(components):
    return json.dumps(list(components), cls=PlotlyJSONEncoder)


def figure_of(components):
    return next(p.figure for root in components for p in root._traverse() if isinstance(p, dcc.Graph))


def traces_of(components):
    return {trace.name: trace for trace in figure_of(components).data}


@pytest.mark.parametrize("measure", ["busbw", "algbw"])
def test_the_points_are_the_answers_and_the_dashed_line_is_the_ceiling(directory, measure):
    traces = traces_of(draw(directory, f"run=sweep/a&measure={measure}"))
    expected = api.bandwidth(directory / "sweep" / "a")
    expected = expected[expected["time_ns"].notna()].sort_values("payload_bytes")
    reached = traces["all_reduce"]
    assert list(reached.x) == list(expected["payload_bytes"]) == list(SIZES)
    np.testing.assert_allclose(reached.y.astype(float), expected[f"{measure}_bytes_per_s"])
    assert reached.line.color == OP_COLOURS["all_reduce"]
    ceiling = traces["all_reduce: ceiling, 2 ranks"]
    assert ceiling.line.dash == "dash" and ceiling.line.color == reached.line.color
    for size, rate in zip(ceiling.x, ceiling.y, strict=True):
        assert rate == pytest.approx(size / (100_000 + size) * 1e9, rel=1e-3)


def test_the_legend_tells_the_groups_of_an_operation_apart(tmp_path):
    run = SyntheticRun(4)
    for group in ((0, 1), (2, 3)):
        for size in (1024, 4096):
            run.add_collective(
                "all_reduce", payload_bytes=size, group=group, pg=f"of {group[0]}", host_ns=9_000
            )
    run.write(tmp_path / "run")
    drawn = figure_of(draw(tmp_path, "run=run"))
    entries = [entry.children for entry in legend(drawn).children]
    lines = {trace.name: trace for trace in drawn.data}
    told = {text: swatch.children for swatch, text in entries}
    assert told == {"all_reduce, ranks 0-1": "\u25cf", "all_reduce, ranks 2-3": "\u25a0"}
    assert [lines[name].marker.symbol for name in told] == ["circle", "square"]


def test_outliers_and_impossible_times_are_marked_and_listed(directory):
    page = draw(directory)
    marks = traces_of(page)["outlier, not in the average"]
    assert list(marks.x) == [SIZES[0]]
    assert marks.y[0] == pytest.approx(SIZES[0] / (20 * (2 * (100_000 + SIZES[0]) + 4_000)) * 1e9)
    text = text_of(page)
    assert '"impossible"' in text and '"slow"' in text
    assert "0 ns" in text, "what took no time has no place on a logarithmic axis, but one in the table"


def test_the_calibration_nearest_to_the_run_is_taken_and_another_can_be_chosen(directory):
    assert '"value": "sweep/calibration.json"' in text_of(draw(directory))
    other = draw(directory, "run=sweep/a&calibration=calibration-nccl.json")
    assert "The calibration is for nccl" in text_of(other)
    assert [name for name in traces_of(other) if "ceiling" in name] == []
    none = draw(directory, "run=sweep/a&calibration=none")
    assert "No ceiling" in text_of(none) and "commprof calibrate --out" in text_of(none)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", ["gone.json", "../../etc/passwd", "/etc/passwd", HOSTILE, "x" * 10_000, "%00"]
)
def test_calibrations_that_are_not_below_the_directory_are_not_read(directory, name):
    page = draw(directory, link("", run="sweep/a", calibration=name).removeprefix("?"))
    assert "No such calibration" in text_of(page)
    assert figure_of(page).data


def test_a_broken_calibration_says_why_and_the_run_is_drawn(tmp_path):
    write_run(tmp_path / "a")
    (tmp_path / "calibration.json").write_text("{")
    assert "No ceiling" in text_of(draw(tmp_path, "run=a"))
    chosen = draw(tmp_path, "run=a&calibration=calibration.json")
    assert "cannot be read" in text_of(chosen) and "no JSON" in text_of(chosen)
    assert figure_of(chosen).data


def test_a_calibration_that_is_made_anew_is_seen(tmp_path):
    write_run(tmp_path / "a")
    runs = Runs(tmp_path)

    def ceilings() -> int:
        _, drawing = draw_page(find_page("/bandwidth"), runs, "/bandwidth", "?run=a", "light")
        return sum("ceiling" in trace.name for trace in figure_of(drawing.body).data)

    assert ceilings() == 0
    write_calibration(tmp_path / "calibration.json", calibration())
    assert ceilings() == 1
    write_calibration(tmp_path / "calibration.json", calibration(backend="nccl"), force=True)
    assert ceilings() == 0


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"op": "all_reduce", "group": (0,), "payload_bytes": 8}, "from one rank to another"),
        ({"op": "barrier", "dtype": None}, "from one rank to another"),
        ({"op": "all_reduce", "payload_bytes": 8, "is_async": True}, "one asynchronous call in 251"),
        ({"op": "all_reduce", "payload_bytes": 8, "device": "cuda:0"}, "one asynchronous call in 251"),
    ],
)
def test_a_run_without_bandwidths_says_what_to_do(tmp_path, columns, said):
    run = SyntheticRun(2)
    run.add_collective(**columns)
    run.write(tmp_path / "a")
    assert said in text_of(draw(tmp_path, "run=a"))


def test_a_choice_that_leaves_nothing_says_so(directory):
    for query in ("op=gather", "group=7-9", f"op={HOSTILE}"):
        assert "Nothing is chosen" in text_of(draw(directory, f"run=sweep/a&{query}"))


def test_steps_can_be_chosen_and_a_long_run_begins_with_its_last_ones(directory, monkeypatch):
    page = draw(directory, "run=sweep/a&steps=4-5")
    assert '"This run is long' not in text_of(page)
    part = api.bandwidth(directory / "sweep" / "a", steps=(4, 5))
    assert list(traces_of(page)["all_reduce"].y) == part["busbw_bytes_per_s"].dropna().tolist()
    assert "Write one step" in text_of(draw(directory, "run=sweep/a&steps=x"))
    monkeypatch.setattr(bandwidth_data, "MOST_RECORDS", 20)
    text = text_of(draw(directory))
    assert "steps 7 to 9 are shown" in text, "64 records in 10 steps: three of them hold about 20"
    assert "are shown" not in text_of(draw(directory, "run=sweep/a&steps=all"))


def test_the_last_steps_of_a_long_run_are_those_that_it_recorded(tmp_path, monkeypatch):
    """With --warmup 100, the steps of the run are 100 to 109."""
    run = SyntheticRun(2)
    for step in range(100, 110):
        run.add_step(step)
        run.add_collective("all_reduce", step=step, payload_bytes=1024, issue_ns=10**9 * step, host_ns=9_000)
    run.write(tmp_path / "run")
    monkeypatch.setattr(bandwidth_data, "MOST_RECORDS", 10)
    text = text_of(draw(tmp_path, "run=run"))
    assert "steps 105 to 109 are shown" in text and "there is no bandwidth" not in text


def test_hostile_names_and_times_are_shown_as_text(tmp_path):
    run = SyntheticRun(2, backend=HOSTILE)
    for number in range(12):
        run.add_collective(
            "all_reduce", payload_bytes=2**62 if number else 1, issue_ns=10**9 * number, host_ns=-(10**6) if number else 5,
            group_ranks=HOSTILE, pg="x" * 10_000,
        )  # fmt: skip
    run.write(tmp_path / "a")
    write_calibration(tmp_path / "calibration.json", calibration())
    page = draw(tmp_path, "run=a")
    assert "could not be drawn" not in text_of(page)
    assert HOSTILE not in json.dumps(figure_of(page).to_plotly_json(), default=str)


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1024, 2**24), (1e-9, 1e300), (5, 7), (0, 0)])
def test_logarithmic_axes_have_a_few_readable_ticks_within_their_range(low, high):
    axis = log_axis(low, high, "Payload")
    assert axis["range"][0] < axis["range"][1] and all(map(math.isfinite, axis["range"]))
    assert 1 <= len(axis["tickvals"]) <= 20
    assert len(set(axis["ticktext"])) == len(axis["tickvals"])
