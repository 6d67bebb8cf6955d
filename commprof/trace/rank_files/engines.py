"""Engines that a program has made, to train one after the other or together. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, Final

from commprof.trace.rank_files.events import Events

_OF_PARAMETER: Final = ("name", "numel", "stages", "param_group", "requires_grad")


def engines_of(events: Events) -> list[dict[str, Any]]:
    """What one rank published of several engines: the config of each, and after which step it was made.

    Each has ``after`` (a step; -1 for the first), ``config``, and ``same_model``: whether it has the parameters of those
    before it; where it says how its parameters were made also ``construction`` (:func:`commprof.hooks.describe_config`);
    where steps of several have one number also ``share_steps``. Of several that were made after the same step the last one
    trains, where they share no steps; those of models like its own stand before it. Empty where there is a single one.
    """
    configs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in events.rows["config"]:
        step = row.get("step")
        if isinstance(step, int) and isinstance(row.get("config"), dict):
            configs[max(step, -1)].append(row)
    published: dict[int, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for row in events.rows["parameters"]:
        step = row.get("step")
        # Text, since a damaged trace may hold anything.
        parameter_row = tuple(str(row.get(name)) for name in _OF_PARAMETER)
        published[max(step, -1) if isinstance(step, int) else -1][parameter_row] += 1
    share_steps = _share_steps(events.rows["step"])
    engines = [
        {
            "after": step,
            "config": row["config"],
            "same_model": not published[step] or published[step].keys() == published[min(configs)].keys(),
            **({"construction": row["construction"]} if row.get("construction") else {}),
            **({"share_steps": True} if share_steps else {}),
        }
        for step in sorted(configs)
        for row in (configs[step] if share_steps else _alike(configs[step], published[step]))
    ]
    return engines if len(engines) > 1 else []


def _share_steps(rows: list[dict[str, Any]]) -> bool:
    """Whether steps of several engines have one number: engines say when a step ends, and each says it once of a number."""
    told_steps = [row.get("step") for row in rows if row.get("ended") is True and row.get("is_told") is True]
    numbers = [step for step in told_steps if isinstance(step, int)]
    return len(set(numbers)) < len(numbers)


def _alike(engines: list[dict[str, Any]], published: Counter[tuple[str, ...]]) -> list[dict[str, Any]]:
    """Of the engines that were made after one step, those with a model like that of the one that trains, which is the last.

    An engine without an optimizer publishes no parameters, only how many elements they have.
    """
    engines = sorted(engines, key=lambda row: row.get("has_optimizer") is not False)
    with_optimizer = [row for row in engines if row.get("has_optimizer") is not False]
    is_repeated = set(published.values()) == {len(with_optimizer)}
    return [
        row
        for row in engines[:-1]
        if (is_repeated if row in with_optimizer else row.get("numel") == engines[-1].get("numel"))
    ] + engines[-1:]
