"""How runs differ: the keys of their configurations, scripts and environments that have different values.

Pure: the input is manifests and the output is text. A sweep records which keys it varied, so the sweep point of each
run determines the keys and their order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import pandas as pd

from commprof.analysis.columns.frames import TEXT
from commprof.trace.manifest import Manifest

_MOST_NAMED: Final = 4  # if more keys differ, a label names only the keys that distinguish the settings
ABSENT: Final = "(absent)"
SAME: Final = "same settings"

# Last parts of keys that name a run or its output. Such keys do not change the training.
_NAMES_OF_PLACES: Final = ("path", "dir", "directory", "folder", "file", "filename", "job_name", "run_name")
# Last parts that are ambiguous alone. For example, `enabled` needs the section that it enables.
_NEEDS_SECTION: Final = frozenset({"enabled", "type", "device", "name", "params", "verbose", "dtype"})


Wrappers = Sequence[Mapping[str, Any]]  # for each run, the values by dotted key


class Setting(NamedTuple):
    """The values of one run for the keys that differ.

    ``values`` are texts by dotted key, and ``label`` is their short form.
    """

    label: str
    values: dict[str, str]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted keys. A list or an empty mapping is a value.

    >>> flatten({"a": {"b": 1, "c": {}}, "d": [2]})
    {'a.b': 1, 'a.c': {}, 'd': [2]}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def value_text(value: Any) -> str:
    """Return the text that represents a configuration value: JSON, but strings without quotes and 5e8 as 500000000.

    >>> [value_text(value) for value in (True, "auto", 5e8, 0.1, [1, 2], None)]
    ['true', 'auto', '500000000', '0.1', '[1, 2]', 'null']
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _identity(value: Any) -> str:
    """Return a text that is equal only for equal values. The string "true" and the value true give different texts."""
    return json.dumps(value) if isinstance(value, str) else value_text(value)


def _says_how(key: str) -> bool:
    last = key.rpartition(".")[2].lower()
    return not any(last == name or last.endswith(f"_{name}") for name in _NAMES_OF_PLACES)


def script_arguments(command: Sequence[str], script: str | None) -> dict[str, Any]:
    """Return the arguments of ``script`` in ``command``: options by name with dashes, other arguments by position.

    >>> script_arguments(["python", "train.py", "data", "--layers", "4", "--lr=0.1", "--fast"], "train.py")
    {'1': 'data', '--layers': '4', '--lr': '0.1', '--fast': True}
    """
    words = list(command)
    words = words[words.index(script) + 1 :] if script in words else []
    arguments: dict[str, Any] = {}
    option: str | None = None
    for position, word in enumerate(words, start=1):
        is_option = word.startswith("-") and not word.lstrip("-")[:1].isdigit()
        if is_option:
            name, equals, value = word.partition("=")
            arguments[name] = value if equals else True
            option = None if equals else name
        elif option is not None:
            arguments[option] = word if arguments[option] is True else f"{arguments[option]} {word}"
        else:
            arguments[str(position)] = word
    return arguments


def _facts(manifest: Manifest) -> dict[str, Any]:
    """Return facts other than the configuration that distinguish runs.

    These are the script, the engine, the world size, the arguments, and the tuning variables of NCCL.
    """
    facts: dict[str, Any] = {}
    if manifest.script is not None:
        facts["script"] = PurePath(manifest.script).name
    if manifest.engine is not None:
        facts["engine"] = manifest.engine
    if manifest.world_size is not None:
        facts["world_size"] = manifest.world_size
    for name, value in script_arguments(manifest.command, manifest.script).items():
        # The name of the configuration file differs in every run of a sweep. Its contents are compared key by key.
        if name != manifest.config_argument and _says_how(name.replace("-", "_")):
            facts[f"arguments.{name}"] = value
    for name, value in manifest.environment.items():
        if name.startswith("NCCL_") and not name.startswith("NCCL_DEBUG"):
            facts[f"environment.{name}"] = value
    return facts


def _values(manifest: Manifest) -> dict[str, Any]:
    config = {key: value for key, value in flatten(manifest.config or {}).items() if _says_how(key)}
    return config | flatten((manifest.sweep or {}).get("point") or {}) | _facts(manifest)


def _is_empty_section(key: str, of_runs: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether ``key`` is a section that has keys in some run.

    Such a section differs between runs if another run leaves it empty. The keys in the section then are the difference.
    """
    return any(other.startswith(f"{key}.") for values in of_runs for other in values)


def differing_keys(of_runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ between runs, in the order in which the keys first appear."""
    keys = dict.fromkeys(key for values in of_runs for key in values)
    missing = object()
    differing = []
    for key in keys:
        identities = {missing if key not in values else _identity(values[key]) for values in of_runs}
        if len(identities) > 1 and not _is_empty_section(key, of_runs):
            differing.append(key)
    return differing


def short_names(keys: Iterable[str], among: Iterable[str]) -> dict[str, str]:
    """Return, for each of ``keys``, its shortest suffix of complete parts that no other key of ``among`` ends with.

    >>> short_names(["zero_optimization.stage", "fp16.enabled"], ["zero_optimization.stage", "fp16.enabled"])
    {'zero_optimization.stage': 'stage', 'fp16.enabled': 'fp16.enabled'}
    """
    others = set(among)
    names = {}
    for key in keys:
        words = key.split(".")
        first = 2 if words[-1] in _NEEDS_SECTION else 1
        candidates = [".".join(words[-length:]) for length in range(min(first, len(words)), len(words) + 1)]
        names[key] = next(
            (
                name
                for name in candidates
                if not any(other != key and f".{other}".endswith(f".{name}") for other in others)
            ),
            key,
        )
    return names


def _swept_keys(manifests: Sequence[Manifest]) -> list[str]:
    """Return the keys that a sweep varied if all runs belong to this sweep, or no keys otherwise."""
    points = [(manifest.sweep or {}).get("point") for manifest in manifests]
    names = {(manifest.sweep or {}).get("name") for manifest in manifests}
    if len(names) != 1 or not all(points):
        return []
    return list(dict.fromkeys(key for point in points for key in flatten(point or {})))


def _keys_to_show(manifests: Sequence[Manifest], of_runs: Sequence[Mapping[str, Any]]) -> list[str]:
    differing = differing_keys(of_runs)
    swept = _swept_keys(manifests)
    if not swept:
        return differing
    # Other configuration keys that differ within a sweep follow from its keys. Facts such as the world size and the
    # script may differ because the caller chose so.
    facts = {key for manifest in manifests for key in _facts(manifest)}
    if len({manifest.engine for manifest in manifests} - {None}) < 2:
        # A run that failed before its engine started names no engine, which is not a difference in settings.
        facts.discard("engine")
    shown = [key for key in swept if key in differing] + [key for key in differing if key in facts]
    return shown or swept


def _keys_of_wrappers(
    keys: Sequence[str], of_runs: Sequence[Mapping[str, Any]], wrappers: Wrappers
) -> list[str]:
    """Return the keys of ``wrappers`` that distinguish runs with equal values of ``keys``.

    The result is empty if no such runs have different wrappers.
    """
    alike: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for values, own in zip(of_runs, wrappers, strict=True):
        setting = tuple(_identity(values[key]) if key in values else ABSENT for key in keys)
        alike.setdefault(setting, []).append(own)
    if not any(differing_keys(each) for each in alike.values()):
        return []
    # An argument that is equal in all wrappers that have it adds no information to the kind of wrapper.
    return [
        key
        for key in differing_keys(wrappers)
        if differing_keys([{key: own[key]} for own in wrappers if key in own])
    ]


def settings_of(
    manifests: Sequence[Manifest], names: Sequence[str], wrappers: Wrappers | None = None
) -> list[Setting]:
    """Return the setting of each run.

    Runs of different scripts differ in many keys. Their labels then name only the keys that are needed to distinguish
    the settings, and ``values`` contains all keys that differ.

    Args:
        manifests: The manifests of the runs.
        names: The names of the runs. If there is only one run, its name can be the label.
        wrappers: The wrappers of the model of each run (DDP, FSDP), with their arguments. They distinguish runs without
            any other difference. The program of such runs chose the wrapper in a way that no configuration, argument or
            variable shows.
    """
    of_runs = [_values(manifest) for manifest in manifests]
    keys = _keys_to_show(manifests, of_runs)
    if wrappers is not None and (more := _keys_of_wrappers(keys, of_runs, wrappers)):
        keys = [*keys, *more]
        of_runs = [{**values, **own} for values, own in zip(of_runs, wrappers, strict=True)]
    short = short_names(keys, {key for values in of_runs for key in values})
    texts = [
        {key: value_text(values[key]) if key in values else ABSENT for key in keys} for values in of_runs
    ]
    labels = _labels(texts, short)
    if len(keys) > _MOST_NAMED:
        few = _labels([{key: each[key] for key in telling_keys(texts)} for each in texts], short)
        if len(set(few)) == len(set(labels)):
            labels = few
    unnamed = SAME if len(names) > 1 else names[0] if names else ""
    return [Setting(label or unnamed, each) for label, each in zip(labels, texts, strict=True)]


def _labels(texts: Sequence[Mapping[str, str]], short: Mapping[str, str]) -> list[str]:
    """Return the label of each run. A label omits keys that the run lacks, unless the label would be empty."""
    labels = []
    for each in texts:
        named = {key: text for key, text in each.items() if text != ABSENT} or each
        labels.append(
            ", ".join(
                f"{short[key]} not set" if text == ABSENT else f"{short[key]}={text}"
                for key, text in named.items()
            )
        )
    return labels


def telling_keys(texts: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a few keys of ``texts``, in their order, whose values distinguish all texts that differ.

    The algorithm is greedy. In each round, it adds the key that distinguishes the most texts together with the keys
    chosen before. If several keys are equally good, it takes the first.

    >>> telling_keys([{"lr": "1", "stage": "1", "script": "a"}, {"lr": "1", "stage": "2", "script": "b"}])
    ['stage']
    """
    every = list(texts[0]) if texts else []
    distinct = len({tuple(each.values()) for each in texts})
    chosen: list[str] = []

    def told(keys: Sequence[str]) -> int:
        return len({tuple(each[key] for key in keys) for each in texts})

    while told(chosen) < distinct:
        chosen.append(max((key for key in every if key not in chosen), key=lambda key: told([*chosen, key])))
    return [key for key in every if key in chosen]


def in_order(manifests: Sequence[Manifest]) -> list[int]:
    """Return the positions of the runs in display order: in order of start for one sweep, otherwise unchanged."""
    positions = list(range(len(manifests)))
    if _swept_keys(manifests):
        positions.sort(key=lambda position: manifests[position].started_realtime_ns or 0)
    return positions


def settings_frame(settings: Sequence[Setting], names: Sequence[str]) -> pd.DataFrame:
    """Return one row per run: ``run``, ``label``, and a text column for the full name of each key that differs."""
    rows = [
        {"run": name, "label": setting.label, **setting.values}
        for setting, name in zip(settings, names, strict=True)
    ]
    keys = settings[0].values if settings else {}
    return pd.DataFrame(rows, columns=["run", "label", *keys], dtype=TEXT)
