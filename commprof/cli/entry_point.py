"""Checks that torch can start the recorder through commprof's entry point, which ``COMMPROF=1`` relies on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

from commprof.recorder import autoload

GROUP: Final = "torch.backends"
NAME: Final = "commprof"
VALUE: Final = "commprof.recorder.autoload:start"
SWITCH: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # a variable of torch; with 0, torch calls no entry point

_LOST: Final = "COMMPROF=1 records nothing, and commprof run does not reach programs run with python -I or -E"
_AGAIN: Final = "install commprof again (pip install --force-reinstall --no-deps commprof; pip install -e . in a checkout)"


class Answer(NamedTuple):
    """Whether the entry point works, and the sentence that reports it."""

    works: bool
    text: str


def examine(
    entries: Iterable[metadata.EntryPoint] | None = None, environment: Mapping[str, str] = os.environ
) -> Answer:
    """Check the entry points of the group ``torch.backends``. Load only the entry point of commprof.

    Args:
        entries: The entry points of the group. Default: the installed entry points.
        environment: The environment variables.
    """
    if entries is None:
        try:
            entries = metadata.entry_points(group=GROUP)
        except Exception as error:  # if a package has damaged metadata, torch also fails
            return _broken(f"the entry points {GROUP} cannot be read ({_said(error)})")
    ours = [entry for entry in entries if entry.name == NAME or entry.value.startswith("commprof.")]
    if not ours:
        return _broken(
            f"the entry point {GROUP} of commprof is not installed",
            "this installation is older than the entry point",
        )
    for entry in ours:
        wrong = _wrong_with(entry)
        if wrong is not None:
            return _broken(f"the entry point {GROUP} of commprof is broken: {wrong}")
    if environment.get(SWITCH, "1") == "0":
        return Answer(False, f"{SWITCH}=0 is set, so torch calls no entry point: {_LOST}. Unset it")
    return Answer(True, f"entry point {GROUP}: COMMPROF=1 records with any launcher")


def _wrong_with(entry: metadata.EntryPoint) -> str | None:
    if entry.value != VALUE:
        return f"it names {entry.value}, not {VALUE}"
    try:
        start: Callable[[], None] = entry.load()
    except Exception as error:
        return f"{entry.value} cannot be loaded ({_said(error)})"
    code = getattr(start, "__code__", None)
    if code is None or Path(code.co_filename).resolve() != Path(str(autoload.__file__)).resolve():
        return f"it starts a different installation of commprof ({getattr(code, 'co_filename', start)!s})"
    return None


def _broken(what: str, why: str = "") -> Answer:
    reason = f" ({why})" if why else ""
    return Answer(False, f"{what}{reason}, so {_LOST}: {_AGAIN}")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
