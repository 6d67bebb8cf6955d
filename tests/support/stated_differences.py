"""Reads docs/deepspeed-differences.md: the differences from DeepSpeed that a recorded run can show.

The last column of the first table states the effect of a difference: ``other messages``, ``other losses``,
``accepted here`` (refused or broken by DeepSpeed), ``refused here``, or ``-`` if a run does not show the
difference. The first column contains the settings in backquotes and, if necessary, the stages. The second
column begins with ``refused unless`` a key is true if that key removes the difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from zero_runtime.configuration import all_keys

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "deepspeed-differences.md"
KINDS = ("other messages", "other losses", "accepted here", "refused here", "-")
UNKNOWN = "any unknown key"
_ANY = object()


class Difference(NamedTuple):
    """One row of the table.

    The difference exists for configs that have one of ``settings``, have one of ``stages``, and in which the key
    ``unless`` is not true. ``shown`` is the effect in a run.
    """

    text: str
    settings: tuple[tuple[str, Any], ...]
    stages: frozenset[int]
    unless: str | None
    shown: str

    def holds_for(self, config: Mapping[str, Any]) -> bool:
        if config.get("zero_optimization", {}).get("stage", 0) not in self.stages:
            return False
        if self.unless is not None and _is_set(config, self.unless, True):
            return False
        if self.text == UNKNOWN:
            return _has_unknown_key(config)
        return any(_is_set(config, name, value) for name, value in self.settings)


@cache
def stated_differences() -> tuple[Difference, ...]:
    """Return the rows of the first table of the document."""
    lines = DOCUMENT.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| key |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 4 and cells[3] in KINDS, (
            f"a row needs four cells, the last one of {KINDS}: {line}"
        )
        settings = re.findall(r"`([a-z_0-9.]+)(?:: ([^`]+))?`", cells[0])
        parsed = tuple((name, json.loads(value) if value else _ANY) for name, value in settings)
        assert cells[3] != "accepted here" or not any(name in all_keys.BLOCKS for name, _ in parsed), (
            f"every config with the block would be accepted; name its key, or say '-': {line}"
        )
        named = re.search(r"at stages? ([0-3, and]+)", cells[0])
        stages = frozenset(map(int, re.findall("[0-3]", named[1]))) if named else frozenset(range(4))
        unless = re.match(r"refused unless `([a-z_0-9.]+)` is true", cells[1])
        rows.append(Difference(cells[0], parsed, stages, unless[1] if unless else None, cells[3]))
    return tuple(rows)


def shown_difference(config: Mapping[str, Any], succeeded: bool) -> str | None:
    """Return the effect by which zero_runtime differs from a run of DeepSpeed with ``config``; None if there is none.

    Args:
        config: The configuration of the run.
        succeeded: Whether the run of DeepSpeed succeeded.
    """
    shown = {row.shown for row in stated_differences() if row.holds_for(config)}
    possible = {"other messages", "other losses", "refused here"} if succeeded else {"accepted here"}
    return next(iter(sorted(shown & possible)), None)


def _is_set(config: Mapping[str, Any], name: str, value: Any) -> bool:
    found: Any = config
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return False
        found = found[part]
    return value is _ANY or found == value


def _has_unknown_key(config: Mapping[str, Any]) -> bool:
    blocks = {name: config if not name else config.get(name) or {} for name in all_keys.BLOCKS}
    return any(
        not {*given} <= {*all_keys.BLOCKS[name]}
        for name, given in blocks.items()
        if isinstance(given, Mapping)
    )
