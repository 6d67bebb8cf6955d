"""Test the metrics that an engine publishes: skipped steps, and persistent parameters that the program released."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

from commprof.ledger.records.issued import StepKey
from commprof.ledger.requests.engine_metrics import engine_metrics_of


def of(*rows):
    """Return the metrics of rows of step, name and value."""
    steps, names, values = zip(*rows, strict=True)
    columns = {"attempt": [0] * len(rows), "step": steps, "name": names, "value": values}
    return engine_metrics_of([pa.table(columns)])


def test_each_metric_says_its_own():
    found = of(
        (1, "overflow", 1.0),
        (2, "overflow", 0.0),
        (2, "skipped_steps", 1.0),
        (3, "released_share", 0.25),
        (3, "released_share", 0.5),  # A value of a different rank.
        (3, "evaluation_released_share", 1.0),
        (4, "loss", 1.0),
    )
    assert found.skipped == {StepKey(0, 1)} and found.released == {StepKey(0, 3): 0.5}
    assert found.evaluated == {StepKey(0, 3)}
    assert [found.skipped_before(StepKey(0, step)) for step in (1, 2)] == [0, 1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["overflow", "skipped_steps", "released_share", "evaluation_released_share"])
def test_a_metric_that_is_no_number_says_nothing(name, value):
    """A program may publish a metric with the same name: ``commprof.metric("skipped_steps", math.nan)``."""
    assert of((1, name, value)) == of((1, "loss", 1.0))
