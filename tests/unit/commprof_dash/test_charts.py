"""Test that the figures of charts contain exactly the numbers of the table."""

import math

import pandas as pd
import pytest

from commprof_dash.charts import axis_ticks, labels, loss_chart, series, time_charts, traffic
from commprof_dash.measures import COUNT, MEASURES, WIRE


def traffic_frame(rows):
    columns = ["label", "op", "intended_op", "purpose", "wire_bytes_per_step", "payload_bytes_per_step"]
    frame = pd.DataFrame(rows, columns=columns).assign(collectives_per_step=1.0)
    return series.with_series(frame)


FRAME = traffic_frame(
    [
        ("a=1", "all_reduce", None, "gradient_reduce", 100.5, 100.0),
        ("a=1", "all_reduce", None, "gradient_norm", 4.0, 4.0),
        ("a=2", "all_to_all", "reduce_scatter", "gradient_reduce", 50.0, 100.0),
        ("a=2", "all_gather", None, "parameter_gather", 7.0, 14.0),
    ]
)


def bars(figure):
    return {trace.name: list(trace.x) for trace in figure.data}


def test_a_series_is_the_operation_or_what_it_stands_for():
    assert list(FRAME["series"]) == ["all_reduce", "all_reduce", "reduce_scatter as all_to_all", "all_gather"]
    assert [series.is_reducing(name) for name in FRAME["series"]] == [True, True, True, False]
    assert series.series_name("all_gather", math.nan) == "all_gather"
    assert series.series_name("reduce", "reduce") == "reduce"


def test_a_stand_in_has_the_colour_of_what_it_stands_for_and_a_hatch():
    plain, stand_in = series.series_in_order(pd.Series(["reduce_scatter as all_to_all", "reduce_scatter"]))
    assert plain.colour == stand_in.colour
    assert not plain.hatch
    assert stand_in.hatch


def test_bars_by_setting_hold_the_sums_of_each_series():
    drawn = bars(traffic.by_setting(FRAME, ["a=1", "a=2"], WIRE, "light"))
    assert drawn == {
        "all_reduce": [104.5, 0.0],
        "reduce_scatter as all_to_all": [0.0, 50.0],
        "all_gather": [0.0, 7.0],
    }


def test_the_order_of_the_settings_is_the_order_asked_for():
    drawn = bars(traffic.by_setting(FRAME, ["a=2", "a=1"], WIRE, "light"))
    assert drawn["all_reduce"] == [0.0, 104.5]


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_the_axis_names_the_measure(measure):
    figure = traffic.by_setting(FRAME, ["a=1", "a=2"], measure, "dark")
    assert measure.name in figure.layout.xaxis.title.text


def test_the_number_at_each_bar_is_its_total_with_a_unit():
    figure = traffic.by_setting(FRAME, ["a=1", "a=2"], WIRE, "light")
    texts = [note.text for note in figure.layout.annotations]
    assert texts[2:] == ["<b>104 B</b>", "<b>57 B</b>"]


def test_purposes_stand_with_the_largest_first():
    figure = traffic.by_purpose(FRAME, WIRE, "light")
    assert [note.text for note in figure.layout.annotations][:3] == [
        "gradient_reduce",
        "parameter_gather",
        "gradient_norm",
    ]


def test_by_step_draws_each_step():
    frame = pd.DataFrame(
        {
            "step": [0, 1, 1],
            "series": ["all_reduce", "all_reduce", "all_gather"],
            "steps": 1,
            "collectives_per_step": [3.0, 4.0, 1.0],
        }
    )
    figure = traffic.by_step(frame, COUNT, "light")
    assert {trace.name: (list(trace.x), list(trace.y)) for trace in figure.data} == {
        "all_reduce": ([0, 1], [3.0, 4.0]),
        "all_gather": ([1], [1.0]),
    }


def setting_times(rows):
    columns = ["label", "step_time_ns", "step_time_low_ns", "step_time_high_ns"]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(columns[1:], "Int64"))


def test_step_times_carry_their_interval():
    figure = time_charts.by_setting(
        setting_times([("a", 100, 90, 130), ("b", 200, None, None), ("c", None, None, None)]), "light"
    )
    bar = figure.data[0]
    assert list(bar.x)[:2] == [100.0, 200.0]
    assert math.isnan(bar.x[2])
    assert list(bar.error_x.array) == [30.0, 0.0, 0.0]
    assert list(bar.error_x.arrayminus) == [10.0, 0.0, 0.0]
    assert [note.text for note in figure.layout.annotations][3:] == [
        "<b>100 ns</b>",
        "<b>200 ns</b>",
        "<b>no step time</b>",
    ]


def test_step_times_over_a_run_leave_gaps_out():
    frame = pd.DataFrame(
        {"step": [0, 1, 2], "duration_ns": [5, None, 7]}
        | {name: [None] * 3 for name in ("exposed_ns", "exposed_low_ns", "exposed_high_ns")}
    ).astype("Int64")
    figure = time_charts.over_steps(frame, "light")
    assert [(trace.name, list(trace.x), list(trace.y)) for trace in figure.data] == [
        ("step time, slowest rank", [0, 2], [5.0, 7.0])
    ]


def test_loss_has_a_line_for_each_setting():
    frame = pd.DataFrame({"label": ["a", "a", "b"], "step": [0, 1, 0], "loss": [2.0, 1.0, 3.0]})
    figure = loss_chart.curves(frame, ["b", "a"], "light")
    assert [(trace.name, list(trace.y)) for trace in figure.data] == [("b", [3.0]), ("a", [2.0, 1.0])]


def test_text_of_a_trace_is_escaped_and_wrapped():
    assert labels.escape("<b>x</b> & y") == "&lt;b&gt;x&lt;/b&gt; &amp; y"
    wrapped = labels.wrap("zero_optimization.reduce_scatter=true, " * 4, 40)
    assert all(len(line) <= 40 for line in wrapped.split("<br>"))
    assert wrapped.replace("<br>", " ").split() == ("zero_optimization.reduce_scatter=true, " * 4).split()
    assert len(labels.wrap("x" * 100_000)) < 500


@pytest.mark.parametrize("highest", [1, 3, 999, 1023, 1024, 5e5, 3.3e9, 7e17])
@pytest.mark.parametrize("ticks", axis_ticks.TICKS.values(), ids=["bytes", "ns", "count"])
def test_ticks_are_few_begin_at_zero_and_reach_the_end(ticks, highest):
    values, texts = ticks(highest)
    assert values[0] == 0
    assert texts[0] == "0"
    assert 2 <= len(values) <= 7
    assert highest * 0.6 <= values[-1] <= highest * 1.001
    assert len(set(texts)) == len(texts)


def test_ticks_are_round_in_their_unit():
    mebibyte = 1024.0**2
    values, texts = axis_ticks.bytes_ticks(4 * 1024**2)
    assert values == [0, mebibyte, 2 * mebibyte, 3 * mebibyte, 4 * mebibyte]
    assert texts == ["0", "1 MiB", "2 MiB", "3 MiB", "4 MiB"]
    assert axis_ticks.time_ticks(1e6)[1] == ["0", "0.25 ms", "0.50 ms", "0.75 ms", "1.00 ms"]


@pytest.mark.parametrize("highest", [0, math.nan, math.inf, -5])
def test_an_axis_of_nothing_is_still_an_axis(highest):
    assert axis_ticks.axis(highest, "bytes", "Wire bytes")["range"] == [0, 1.0]
