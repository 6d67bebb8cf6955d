"""Finds the engines of a program that creates several, to train one after the other or together. Pure functions."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, Final

from commprof.trace.rank_files.events import Events

_OF_PARAMETER: Final = ("name", "numel", "stages", "param_group", "requires_grad")


def engines_of(events: Events) -> list[dict[str, Any]]:
    """Return the engines that one rank published, if there are several. The list is empty for a single engine.

    Each engine has these keys:

    * ``after``: the step after which the engine was created, -1 if before the first step.
    * ``config``: the config of the engine.
    * ``same_model``: whether the engine has the same parameters as the first engines, or published none.
    * ``construction``: how the parameters were constructed (:func:`commprof.hooks.describe_config`), if published.
    * ``share_steps``: true if steps of several engines have the same number, otherwise absent.

    If the engines share no steps and several were created after the same step, the last one trains. The list then
    contains this engine, preceded by the engines with the same kind of model.
    """
    configs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in events.rows["config"]:
        step = row.get("step")
        if isinstance(step, int) and isinstance(row.get("config"), dict):
            configs[max(step, -1)].append(row)
    published: dict[int, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for row in events.rows["parameters"]:
        step = row.get("step")
        # Converted to text, because values of a damaged trace may have any type.
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
    """Return whether steps of several engines have the same number.

    Each engine reports the end of each step once, so a number that is reported twice belongs to two engines.
    """
    told_steps = [row.get("step") for row in rows if row.get("ended") is True and row.get("is_told") is True]
    numbers = [step for step in told_steps if isinstance(step, int)]
    return len(set(numbers)) < len(numbers)


def _alike(engines: list[dict[str, Any]], published: Counter[tuple[str, ...]]) -> list[dict[str, Any]]:
    """Return the engines of one step that have the same kind of model as the engine that trains, which is the last one.

    An engine without an optimizer publishes only the number of elements of its parameters, and not the parameters.
    """
    engines = sorted(engines, key=lambda row: row.get("has_optimizer") is not False)
    with_optimizer = [row for row in engines if row.get("has_optimizer") is not False]
    is_repeated = set(published.values()) == {len(with_optimizer)}
    return [
        row
        for row in engines[:-1]
        if (is_repeated if row in with_optimizer else row.get("numel") == engines[-1].get("numel"))
    ] + engines[-1:]
