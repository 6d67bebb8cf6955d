"""Test the assignment of layers to stages."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from zero_runtime.errors import ConfigError
from zero_runtime.pipeline.model.stage_partition import balanced, uniform


def spread(weights, bounds):
    sums = [sum(weights[start:stop]) for start, stop in pairwise(bounds)]
    return max(sums) - min(sums)


@pytest.mark.parametrize("layers", range(1, 9))
def test_uniform(layers):
    for stages in range(1, layers + 1):
        sizes = [stop - start for start, stop in pairwise(uniform(layers, stages))]
        assert sum(sizes) == layers
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(
    "weights",
    [[7, 1, 1, 1], [1, 1, 1, 7], [0, 0, 1, 0, 1, 0], [5, 4, 3, 2, 1, 9, 3], [1] * 7, [3, 0, 0, 3, 1]],
)
def test_balanced_has_no_lighter_stage_than_need_be(weights):
    """With two stages, every split can be tried, and the smallest difference is expected."""
    for stages in range(1, len(weights)):
        bounds = balanced(weights, stages)
        assert bounds[0] == 0
        assert bounds[-1] == len(weights)
        assert bounds == sorted(set(bounds))
        ways = [(0, *cuts, len(weights)) for cuts in combinations(range(1, len(weights)), stages - 1)]
        if stages == 2:
            assert spread(weights, bounds) == min(spread(weights, way) for way in ways)


def test_as_many_layers_as_stages():
    assert balanced([9, 0, 1], 3) == uniform(3, 3) == [0, 1, 2, 3]


@pytest.mark.parametrize("deal", [lambda: uniform(2, 3), lambda: balanced([1, 2], 3)])
def test_fewer_layers_than_stages(deal):
    with pytest.raises(ConfigError, match="2 layers cannot be assigned to 3 stages"):
        deal()
