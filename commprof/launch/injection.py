"""Injects the recorder into all Python processes of a program through the environment, and reads their notes.

A private directory is the first entry of PYTHONPATH, and its sitecustomize arms the recorder. So the recorder reaches
ranks through any launcher that passes its environment on. ``python -I``, ``-E`` and ``-S`` ignore the directory. With
``-I`` and ``-E``, torch still starts the recorder if commprof is installed beside torch
(:mod:`commprof.recorder.autoload`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from commprof.deepspeed_provider import Engine, variables
from commprof.recorder import autoload
from commprof.recorder.process.recorder_options import DEFAULTS, OPTIONS_VARIABLE, Options, from_json

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
    engine: Engine | None = None,
) -> dict[str, str]:
    """Return ``environment`` with the variables that make processes record into ``run``.

    Args:
        environment: The environment of this process.
        run: The run directory.
        watched_file: A file. Each process writes a note if it opens this file.
        wire: Whether one rank of each host reads the interface counters at each step.
        recording: How to record. Options that are not set here keep their value from ``environment``.
        engine: The package that ``import deepspeed`` imports in the processes. None leaves the import unchanged.
    """
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path != str(DIRECTORY)]
    # An empty entry of PYTHONPATH means the working directory, so an empty variable must not add one.
    inherited = os.pathsep.join(paths) if environment.get("PYTHONPATH") else ""
    changed = {
        **environment,
        RUN_VARIABLE: str(run.absolute()),
        "PYTHONPATH": f"{DIRECTORY}{os.pathsep}{inherited}" if inherited else str(DIRECTORY),
    }
    changed.pop(autoload.SWITCH, None)  # an inherited value must not disable the recording
    changed.pop(WATCHED_FILE_VARIABLE, None)
    changed.pop(WIRE_VARIABLE, None)
    changed.update(variables(engine, environment.get("PATH", "")))
    options = {**from_json(environment.get(OPTIONS_VARIABLE))[0].changed(), **recording.changed()}
    changed.pop(OPTIONS_VARIABLE, None)
    if options:
        changed[OPTIONS_VARIABLE] = json.dumps(options)
    if wire:
        changed[WIRE_VARIABLE] = "1"
    if watched_file is not None:
        changed[WATCHED_FILE_VARIABLE] = str(watched_file.absolute())
    return changed


def announce(environment: Mapping[str, str], run: Path, say: Callable[[str], None]) -> None:
    """Report which recording options of ``environment`` are ignored, and whether ``run`` is within another recording.

    The processes of the job get the options without the ignored ones, so that none of them reports them again.
    """
    for note in from_json(environment.get(OPTIONS_VARIABLE))[1]:
        say(f"warning: {note}")
    _announce_nesting(environment, run, say)


def _announce_nesting(environment: Mapping[str, str], run: Path, say: Callable[[str], None]) -> None:
    """Report if ``run`` is started within another recording.

    The ranks are then recorded into the inner recording, not into the outer recording.
    """
    outer = environment.get(RUN_VARIABLE)
    if not outer or Path(outer) == run.absolute():
        return
    say(f"this command runs within the recording {outer}: its ranks are recorded into {run} only")
    try:
        with (Path(outer) / NOTES).open("a") as file:
            file.write(
                json.dumps({"pid": os.getpid(), "state": "nested", "text": str(run.absolute())}) + "\n"
            )
    except OSError:
        pass


def notes(run: Path) -> list[dict[str, Any]]:
    """Return the notes of the processes of ``run``: ``{"pid", "state", ...}``.

    The states are started, armed, fault, config_opened and nested.
    """
    reported = []
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
            reported.append(note)
    return reported


def forget_notes(run: Path) -> None:
    """Remove the notes of ``run``, because the records now show which processes were reached."""
    with contextlib.suppress(OSError):
        (run / NOTES).unlink()


def explain_silence(reported: list[dict[str, Any]], exit_code: int = 0) -> str:
    """Return why nothing was recorded, based on the notes of the processes and the program's exit code."""
    states = {note.get("state") for note in reported}
    if "fault" in states:
        text = next(note.get("text", "") for note in reported if note.get("state") == "fault")
        return f"the recorder could not be installed: {text}"
    if "nested" in states:
        inner = next(note.get("text", "") for note in reported if note.get("state") == "nested")
        return f"a commprof run within this one recorded its ranks, into {inner}"
    if exit_code and states & {"armed", "started"}:
        what = "called init_process_group" if "armed" in states else "imported torch.distributed"
        return (
            f"the program failed (exit code {exit_code}) before any process that the recorder reached had {what}. "
            "Its output above shows why"
        )
    unreached = "runs with python -I, -E or -S, or its launcher does not pass PYTHONPATH and COMMPROF_RUN on"
    if "armed" in states:
        return (
            "torch.distributed was imported, but init_process_group was never called; or the process that "
            f"called it could not be reached, because it {unreached}"
        )
    if "started" in states:
        return (
            "no process of the program imported torch.distributed; or the process that imported it could not be reached, "
            f"because it {unreached}"
        )
    return f"no Python process of the program could be reached: it is not Python, or {unreached}"
