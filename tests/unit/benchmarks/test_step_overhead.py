"""Test the intervals that benchmarks/step_overhead.py computes, and how it removes the machine's influence."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from results import median_interval, pseudomedian_interval
from step_overhead import Block, adjusted


def test_the_interval_holds_the_true_value_in_95_of_100_trials_and_is_narrower_than_that_of_the_median():
    numbers = random.Random(0)
    trials = [[numbers.gauss(3, 1) for _ in range(40)] for _ in range(400)]
    found = [pseudomedian_interval(values) for values in trials]
    assert 0.92 < sum(each.low < 3 < each.high for each in found) / len(found) < 0.98
    medians = [median_interval(values) for values in trials]
    assert sum(each.high - each.low for each in found) < 0.85 * sum(each.high - each.low for each in medians)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("count", [100, 1074, 1075, 5000])
def test_the_interval_of_a_median_has_the_order_statistics_of_the_binomial(count):
    found = median_interval([float(number) for number in range(count)])
    low = count / 2 - 0.98 * count**0.5  # The expected position is the normal approximation of the binomial.
    assert found.low == pytest.approx(low, abs=1.5)
    assert found.low + found.high == count - 1


def test_one_wild_value_moves_it_little():
    numbers = random.Random(1)
    values = [numbers.gauss(3, 1) for _ in range(40)]
    assert pseudomedian_interval([*values, 1e6]).median == pytest.approx(
        pseudomedian_interval(values).median, abs=0.1
    )


@pytest.mark.parametrize("added", [1.0, 1.02])
def test_what_the_machine_does_to_blocks_is_taken_out_and_what_recording_does_stays(added):
    numbers = random.Random(2)

    def block(factor):
        speed = 1 + numbers.uniform(-0.1, 0.1)
        return Block(factor * speed * (1 + numbers.gauss(0, 0.002)), factor * speed, 0.03 * speed)

    pairs = [(block(1), block(added)) for _ in range(40)]
    found = adjusted(pairs, lambda each: each.cpu)
    assert found.low < added < found.high and found.high - found.low < 0.005
    plain = median_interval([on.cpu / off.cpu for off, on in pairs])
    assert plain.high - plain.low > 0.02
