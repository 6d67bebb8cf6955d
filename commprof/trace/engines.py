"""Engines that a program has made one after the other, each when the one before it had trained. Pure."""

from __future__ import annotations

from typing import Any, Final

from commprof.trace.events import Events

_OF_PARAMETER: Final = ("name", "numel", "stages", "param_group", "requires_grad")


def engines_in_turn(events: Events) -> list[dict[str, Any]]:
    """What one rank published of engines in turn: the config of each, and after which step it was made.

    Each has ``after`` (a step; -1 for the first), ``config``, and ``same_model``: whether it has the parameters of those
    before it. Of several that were made after the same step the last counts. Empty where there is a single one.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for row in events.rows["config"]:
        step, config = row.get("step"), row.get("config")
        if isinstance(step, int) and isinstance(config, dict):
            by_step[max(step, -1)] = config
    if len(by_step) < 2:
        return []
    published: dict[int, set[tuple[Any, ...]]] = {}
    for row in events.rows["parameters"]:
        step = row.get("step")
        told = tuple(row.get(name) for name in _OF_PARAMETER)
        published.setdefault(max(step, -1) if isinstance(step, int) else -1, set()).add(told)
    first = min(by_step)
    return [
        {
            "after": step,
            "config": by_step[step],
            "same_model": published.get(step, set()) == published.get(first, set()),
        }
        for step in sorted(by_step)
    ]
