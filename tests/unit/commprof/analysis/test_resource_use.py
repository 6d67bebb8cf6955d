"""Test the resources that a run used over its steps: memory, processors and communication."""

from __future__ import annotations

import pandas as pd
import pytest

from commprof.analysis.columns import answers
from commprof.analysis.columns.frames import from_rows
from commprof.analysis.compare.step_resources import resource_use
from commprof.cli import rendering
from commprof.cli.rendering import plain
from commprof.cli.sections.resources import resource_parts
from commprof.schema import SAMPLES
from commprof_dash.charts import resource_charts

MIB = 2**20


def times(*steps):
    rows = [
        {
            "attempt": 0, "step": number, "ranks": 2, "begin_ns": 100 * number, "end_ns": 100 * number + 100,
            "duration_ns": 100, "micro_steps": 1, "collectives": 0, "payload_bytes": 0, "wire_bytes": 0.0, **step,
        }
        for number, step in enumerate(steps)
    ]  # fmt: skip
    return from_rows(rows, answers.STEP_TIMES.columns)


def samples(*rows):
    named = ("host", "source", "device", "name", "value", "time_ns")
    return from_rows([dict(zip(named, row, strict=True)) for row in rows], SAMPLES.columns)


def known(value):
    return None if pd.isna(value) else value


def test_shares_are_of_the_step_and_samples_of_the_step_they_were_taken_in():
    steps = times(
        {"rss_bytes": 5 * MIB, "cpu_ns": 150, "exposed_ns": 25},
        {"rss_bytes": 7 * MIB, "cpu_ns": 50, "exposed_ns": None},
    )
    gpu = "gpu_utilization_percent"
    read = samples(
        ("a", "nvml", "0", gpu, 40.0, 10), ("a", "nvml", "1", gpu, 60.0, 90), ("a", "nvml", "0", gpu, 10.0, 150),
        ("a", "nvml", "0", "power", 300.0, 50),
    )  # fmt: skip
    found = resource_use(steps, read).to_dict("records")
    assert [each["cores"] for each in found] == [1.5, 0.5]
    assert [known(each["communication_share"]) for each in found] == [0.25, None]
    assert [each["gpu_share"] for each in found] == [pytest.approx(0.5), pytest.approx(0.1)]
    assert [each["rss_bytes"] for each in found] == [5 * MIB, 7 * MIB]


def test_samples_of_several_hosts_are_on_no_one_clock():
    gpu = "gpu_utilization_percent"
    read = samples(("a", "nvml", "0", gpu, 40.0, 10), ("b", "nvml", "0", gpu, 60.0, 20))
    assert resource_use(times({}), read)["gpu_share"].isna().all()


def test_a_step_that_never_ended_has_no_shares():
    found = resource_use(times({"duration_ns": None, "end_ns": None, "cpu_ns": 5}), samples())
    assert found["cores"].isna().all() and found["communication_share"].isna().all()


def test_the_report_leaves_the_first_step_out_of_medians():
    steps = times(*({"rss_bytes": size * MIB, "cpu_ns": 100} for size in (90, 10, 30, 20)))
    (table,) = resource_parts(plain(resource_use(steps, samples())))
    assert table.title == "Resources over the run, 3 steps after the first"
    memory, cores = table.rows
    assert memory == (
        "resident memory, largest rank", *(rendering.number_of_bytes(size * MIB) for size in (20, 30, 90, 20)),
    )  # fmt: skip
    assert cores == ("cores busy, mean rank", "1.00", "1.00", "1.00", "1.00")


def test_the_report_counts_the_steps_after_the_first_that_ended():
    """The count equals the count in the report's tables of traffic.

    A step in which a run failed does not count, and each attempt has its own first step.
    """
    sizes = [{"rss_bytes": size * MIB} for size in (10, 30, 20, 90)]
    sizes[-1] |= {"duration_ns": None, "end_ns": None}
    (table,) = resource_parts(plain(resource_use(times(*sizes), samples())))
    assert table.title == "Resources over the run, 2 steps after the first"
    assert table.rows[0][2:] == tuple(rendering.number_of_bytes(size * MIB) for size in (30, 10, 20))
    attempts = times(*sizes[:3]).assign(attempt=[0, 1, 1])
    (table,) = resource_parts(plain(resource_use(attempts, samples())))
    assert table.title == "Resources over the run, 1 step after the first"


def test_nothing_is_said_of_what_is_not_known():
    assert resource_parts(plain(resource_use(times({}, {}), samples()))) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_chart_draws_what_is_known(scheme):
    steps = times({"rss_bytes": MIB, "cpu_ns": 100}, {"rss_bytes": 3 * MIB, "cpu_ns": 30})
    figure = resource_charts.over_steps(resource_use(steps, samples()), scheme)
    assert [(trace.name, list(trace.y), trace.yaxis) for trace in figure.data] == [
        ("resident memory, largest rank", [MIB, 3 * MIB], "y"),
        ("cores busy, mean rank", [1.0, 0.3], "y2"),
    ]
    assert figure.layout.yaxis.range[1] >= 3 * MIB and figure.layout.yaxis2.range[1] >= 1
