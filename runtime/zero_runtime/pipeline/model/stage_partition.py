"""Partition of the layers of a model into stages of consecutive layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from zero_runtime.errors import ConfigError

Bounds = list[int]  # stage s has the layers from bounds[s] to bounds[s + 1]


def uniform(layers: int, stages: int) -> Bounds:
    """Return the partition with the same number of layers in each stage.

    If the layers do not divide evenly, the first stages have one more layer.
    """
    _check(layers, stages)
    size, more = divmod(layers, stages)
    return [stage * size + min(stage, more) for stage in range(stages + 1)]


def balanced(weights: Sequence[float], stages: int) -> Bounds:
    """Return the partition with the smallest difference between the heaviest and the lightest stage.

    This is the rule of DeepSpeed 0.19.8. Among equally good partitions, the function returns the one whose
    last stages begin latest. Every stage gets at least one layer.
    """
    count = len(weights)
    _check(count, stages)
    if count == stages:
        return list(range(count + 1))
    sums = [0.0, *accumulate(float(weight) for weight in weights)]
    infinity = float("inf")
    # best[j][i] describes the best partition of the first i layers into j stages:
    # (heaviest - lightest, heaviest, lightest, start of the last stage)
    empty = (infinity, infinity, infinity, 0)
    best = [[empty] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = (0.0, 0.0, infinity, 0)
    for stage in range(1, stages + 1):
        for stop in range(stage, count + 1):
            for start in range(stage - 1, stop):
                _, heaviest, lightest, _ = best[stage - 1][start]
                weight = sums[stop] - sums[start]
                heaviest, lightest = max(heaviest, weight), min(lightest, weight)
                if heaviest < infinity and heaviest - lightest <= best[stage][stop][0]:
                    best[stage][stop] = (heaviest - lightest, heaviest, lightest, start)
    bounds = [count]
    for stage in range(stages, 0, -1):
        bounds.append(best[stage][bounds[-1]][3])
    return bounds[::-1]


def _check(layers: int, stages: int) -> None:
    if stages < 1:
        raise ConfigError(f"a pipeline of {stages} stages: expected at least 1")
    if layers < stages:
        raise ConfigError(
            f"{layers} layers cannot be assigned to {stages} stages, each of which needs one; use at most {layers} stages, "
            "or divide the model into more layers"
        )


def unknown_method(method: object) -> ConfigError:
    """Return the error for an unknown partition method."""
    return ConfigError(
        f"partition_method is {method!r}; expected uniform, parameters, profile, or type: and a pattern of class names "
        "such as type:transformer"
    )
