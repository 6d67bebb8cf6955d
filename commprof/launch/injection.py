"""What makes any Python process below a program record itself, and what those processes reported back.

The environment carries it: a private directory first on PYTHONPATH, whose sitecustomize arms the recorder. So ranks are
reached through any launcher that passes its environment on; ``python -I`` and ``-E`` ignore PYTHONPATH and are not.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from commprof.recorder.options import DEFAULTS, OPTIONS_VARIABLE, Options, from_json

DIRECTORY: Final = Path(__file__).resolve().parent / "inject"
NOTES: Final = "processes.jsonl"
RUN_VARIABLE: Final = "COMMPROF_RUN"
WIRE_VARIABLE: Final = "COMMPROF_WIRE"
WATCHED_FILE_VARIABLE: Final = "COMMPROF_WATCHED_FILE"


def injected(
    environment: Mapping[str, str],
    run: Path,
    *,
    watched_file: Path | None = None,
    wire: bool = False,
    recording: Options = DEFAULTS,
) -> dict[str, str]:
    """``environment`` with the recorder in it, for processes that record into ``run``.

    Args:
        watched_file: have each process note whether it opened this file.
        wire: have one rank of each host read the interface counters at each step.
        recording: how to record; where it is silent, what ``environment`` says already holds.
    """
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path != str(DIRECTORY)]
    # An empty entry means the working directory, so an empty variable must not become one.
    inherited = os.pathsep.join(paths) if environment.get("PYTHONPATH") else ""
    changed = {
        **environment,
        RUN_VARIABLE: str(run.absolute()),
        "PYTHONPATH": f"{DIRECTORY}{os.pathsep}{inherited}" if inherited else str(DIRECTORY),
    }
    changed.pop(WATCHED_FILE_VARIABLE, None)
    changed.pop(WIRE_VARIABLE, None)
    if recording.changed():
        changed[OPTIONS_VARIABLE] = json.dumps({**_inherited(environment), **recording.changed()})
    if wire:
        changed[WIRE_VARIABLE] = "1"
    if watched_file is not None:
        changed[WATCHED_FILE_VARIABLE] = str(watched_file.absolute())
    return changed


def _inherited(environment: Mapping[str, str]) -> dict[str, Any]:
    """The options that the environment carries already, as far as they can be used."""
    return from_json(environment.get(OPTIONS_VARIABLE))[0].changed()


def notes(run: Path) -> list[dict[str, Any]]:
    """What the processes below ``run`` noted: ``{"pid", "state", ...}``, state started, armed, fault or config_opened."""
    found = []
    try:
        lines = (run / NOTES).read_text(errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            note = json.loads(line)
        except ValueError:
            continue
        if isinstance(note, dict):
            found.append(note)
    return found


def forget_notes(run: Path) -> None:
    """Remove the notes, once the records themselves say which processes were reached."""
    with contextlib.suppress(OSError):
        (run / NOTES).unlink()


def explain_silence(reported: list[dict[str, Any]]) -> str:
    """Why nothing was recorded, as far as the processes' notes tell."""
    states = {note.get("state") for note in reported}
    if "fault" in states:
        text = next(note.get("text", "") for note in reported if note.get("state") == "fault")
        return f"the recorder could not be installed: {text}"
    if "armed" in states:
        return "torch.distributed was imported, but init_process_group was never called"
    if "started" in states:
        return "no process of the program imported torch.distributed"
    return (
        "no Python process of the program could be reached: it is not Python, or runs with python -I or -E, "
        "or its launcher does not pass PYTHONPATH on"
    )
