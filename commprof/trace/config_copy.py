"""Compares the copies of a config in a run directory: commprof reads the one in run.json; config.json is for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from commprof.trace.content import read_content

CONFIG_NAME: Final = "config.json"
_MOST_KEYS: Final = 3


def config_note(run: Path, config: Mapping[str, Any] | None) -> str | None:
    """Return a note if config.json differs from ``config``, the copy in run.json, and None if the two are equal.

    A difference means that one of the two files was edited after the run was recorded. If config.json is absent or
    cannot be read, the function returns None.
    """
    try:
        copy = json.loads(read_content(run / CONFIG_NAME))
    except (OSError, ValueError, RecursionError):
        return None
    if config is None or not isinstance(copy, dict) or copy == config:
        return None
    ours, theirs = _leaves(copy), _leaves(config)
    keys = [key for key in dict.fromkeys((*ours, *theirs)) if ours.get(key) != theirs.get(key)]
    listed = ", ".join(
        f"{key} is {ours.get(key, 'absent')} in {CONFIG_NAME} and {theirs.get(key, 'absent')} in run.json"
        for key in keys[:_MOST_KEYS]
    )
    more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
    return (
        f"{CONFIG_NAME} or run.json was edited after the run was recorded: {listed}{more}. commprof always uses the "
        "config in run.json"
    )


def _leaves(value: Any, prefix: str = "") -> dict[str, str]:
    """Return the values in all nested sections, as JSON text by dotted key."""
    if not isinstance(value, Mapping) or not value:
        return {prefix.removesuffix("."): json.dumps(value)}
    leaves: dict[str, str] = {}
    for key, inner in value.items():
        leaves |= _leaves(inner, f"{prefix}{key}.")
    return leaves
