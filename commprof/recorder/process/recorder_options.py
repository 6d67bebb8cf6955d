"""The options of a recording: their text forms, defaults and checks. Standard library only.

Ranks receive the options as JSON in the environment. There, an invalid value must never stop a training, so it is
ignored and a note names it. The command line refuses an invalid value immediately.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

OPTIONS_VARIABLE: Final = "COMMPROF_OPTIONS"
SAMPLERS: Final = ("nvml", "interfaces", "proc", "stacks")
BEFORE_THE_FIRST: Final = -1  # the step during initialization
SMALLEST_MAX_BYTES: Final = 1_000_000

_UNITS: Final = {
    **{name: 1000 ** (power + 1) for power, name in enumerate(("kb", "mb", "gb", "tb"))},
    **{name: 1024 ** (power + 1) for power, name in enumerate(("kib", "mib", "gib", "tib"))},
    "": 1,
    "b": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a session.

    Attributes:
        steps: The steps to record: from ``first`` (-1: including initialization) up to but not including ``end`` (None:
            to the end). None records all steps.
        warmup: The number of first steps that are not recorded. If it is not 0, initialization is not recorded either.
        aggregate: Whether to record sums over the collectives of each step instead of the single collectives.
        max_bytes: The most bytes that a rank writes while it runs. Beyond this limit only sums are recorded.
        complete: Whether to record all operators of c10d, below all issuers. This is slower.
        watchdog: The seconds without progress after which all ranks are dumped; None for never.
        samplers: The samplers that run beside the training, from ``SAMPLERS``.
        sample_every: The sampling interval in seconds.
        completion_every: Record the completion time of every Nth sampled CPU call; 0 records none.
        selfcheck: Whether to compare the groups' own counts with the records once per step.
        clocks: Whether to compare the clocks of the hosts. Rank 0 then listens on a port. In a job on one host, no data
            is sent.
        quiet: Whether to suppress the line that prints where the trace is. Dropped records are always reported.
    """

    steps: tuple[int, int | None] | None = None
    warmup: int = 0
    aggregate: bool = False
    max_bytes: int | None = None
    complete: bool = False
    watchdog: float | None = None
    samplers: tuple[str, ...] = ()
    sample_every: float = 1.0
    completion_every: int = 1
    selfcheck: bool = True
    clocks: bool = True
    quiet: bool = False

    @property
    def window(self) -> tuple[int, int | None] | None:
        """The half-open range of steps to record, by ``steps`` and ``warmup``; None: all, including initialization."""
        if self.steps is None and not self.warmup:
            return None
        first, end = self.steps or (BEFORE_THE_FIRST, None)
        return max(first, self.warmup if self.warmup else first), end

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from the defaults, as JSON values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = {name: value for name, value in values.items() if value != getattr(DEFAULTS, name)}
        if self.steps is not None:
            shown["steps"] = format_steps(self.steps)
        if self.samplers:
            shown["samplers"] = list(self.samplers)
        return shown

    def to_json(self) -> str:
        """Return the options in the form that :func:`from_json` reads."""
        return json.dumps(self.changed())


def from_json(text: str | None) -> tuple[Options, tuple[str, ...]]:
    """Return the options in ``text``, and a note for each part of the text that is ignored. Never raises."""
    try:
        content = json.loads(text or "{}")
        if not isinstance(content, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        return DEFAULTS, (f"{OPTIONS_VARIABLE} is ignored: it is not a JSON object ({error})",)
    return from_mapping(content)


def from_mapping(content: Mapping[str, Any]) -> tuple[Options, tuple[str, ...]]:
    """Return the options in ``content``, and a note for each option that is ignored. Never raises.

    Args:
        content: The values of the options by their names.
    """
    taken: dict[str, Any] = {}
    notes = []
    for name, value in content.items():
        reader = _READERS.get(name)
        if reader is None:
            notes.append(f"option {name!r} is ignored: there is no such option")
            continue
        try:
            taken[name] = reader(value)
        except ValueError as error:
            notes.append(f"option {name} {value!r} is ignored: {error}")
    options = Options(**taken)
    window = options.window
    if window is not None and window[1] is not None and window[0] >= window[1]:
        notes.append(f"the options steps and warmup are ignored: {describe_empty(options)}")
        options = replace(options, steps=None, warmup=0)
    return options, tuple(notes)


def describe_empty(options: Options) -> str:
    """Return the reason why ``options`` exclude every step."""
    end = options.steps[1] if options.steps is not None else None
    return f"the first {options.warmup} steps are left out, and recording ends before step {end}"


def parse_steps(value: object) -> tuple[int, int | None] | None:
    """Parse ``A:B``, which means steps A up to but not including B, like a slice in Python.

    ``:B`` begins at the start of the program, including initialization. ``A:`` continues to the end.

    >>> parse_steps("10:20"), parse_steps("10:"), parse_steps(":20")
    ((10, 20), (10, None), (-1, 20))

    Raises:
        ValueError: The value does not have this form, or the range contains no step.
    """
    if value is None:
        return None
    if isinstance(value, list | tuple) and len(value) == 2:
        value = ":".join("" if part in (None, BEFORE_THE_FIRST) else str(part) for part in value)
    match = re.fullmatch(r"\s*(\d{0,9})\s*:\s*(\d{0,9})\s*", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(
            "A:B was expected, two step numbers of 0 or more: from step A up to but not including step B. "
            "A left out: from the start, with initialisation; B left out: to the end"
        )
    first = int(match[1]) if match[1] else BEFORE_THE_FIRST
    end = int(match[2]) if match[2] else None
    if end is not None and max(first, 0) >= end:
        raise ValueError(
            f"no step is from {max(first, 0)} up to but not including {end}; the second number is left out, as in "
            "a slice of Python"
        )
    return first, end


def format_steps(steps: tuple[int, int | None]) -> str:
    """Return ``steps`` in the form that :func:`parse_steps` reads."""
    first, end = steps
    return f"{'' if first == BEFORE_THE_FIRST else first}:{'' if end is None else end}"


def parse_size(value: object) -> int | None:
    """Parse a number of bytes: ``500MB`` (powers of 1000), ``2GiB`` (powers of 1024), ``1000000``.

    >>> parse_size("500MB"), parse_size("1.5 GiB"), parse_size(2_000_000)
    (500000000, 1610612736, 2000000)

    Raises:
        ValueError: The value does not have this form, or is less than ``SMALLEST_MAX_BYTES``, which a run needs for the
            names in its files.
    """
    if value is None:
        return None
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text) if isinstance(text, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(
            "a number of bytes was expected, or one with kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB "
            "(powers of 1024): 500MB, 2GiB"
        )
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size < SMALLEST_MAX_BYTES:
        raise ValueError(f"at least {SMALLEST_MAX_BYTES} bytes (1MB) for each rank were expected")
    return size


def parse_count(value: object) -> int:
    """Parse an integer of 0 or more, which is given as a number or as text.

    Raises:
        ValueError: The value is not such an integer.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value.strip()):
        return int(value)
    raise ValueError("a whole number of 0 or more was expected")


def parse_seconds(value: object) -> float | None:
    """Parse a number of seconds greater than 0, which is given as a number or as text.

    Raises:
        ValueError: The value is not such a number.
    """
    if value is None:
        return None
    try:
        seconds = (
            float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else 0.0
        )
    except ValueError:
        seconds = 0.0
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError("a number of seconds above 0 was expected")
    return seconds


def parse_samplers(value: object) -> tuple[str, ...]:
    """Parse names of samplers, which are given as a list or as comma-separated text.

    Returns:
        The names without duplicates, in the order of ``SAMPLERS``.

    Raises:
        ValueError: A name is not the name of a sampler, or there is no name.
    """
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple):
        raise ValueError(f"a list was expected, of {', '.join(SAMPLERS)}")
    wanted = {str(name).strip() for name in names} - {""}
    unknown = sorted(wanted - {*SAMPLERS})
    if unknown or not wanted:
        named = f"{', '.join(unknown)}: there is no such sampler" if unknown else "no sampler is named"
        raise ValueError(f"{named}; there are {', '.join(SAMPLERS)}")
    return tuple(name for name in SAMPLERS if name in wanted)


def _parse_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false was expected")
    return value


DEFAULTS: Final = Options()
_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "steps": parse_steps,
    "warmup": parse_count,
    "aggregate": _parse_flag,
    "max_bytes": parse_size,
    "complete": _parse_flag,
    "watchdog": parse_seconds,
    "samplers": parse_samplers,
    "sample_every": lambda value: parse_seconds(value) or DEFAULTS.sample_every,
    "completion_every": parse_count,
    "selfcheck": _parse_flag,
    "clocks": _parse_flag,
    "quiet": _parse_flag,
}
