"""What makes any Python process below a program record itself, and what those processes reported back.

The environment carries it: a private directory first on PYTHONPATH, whose sitecustomize arms the recorder. So ranks are
reached through any launcher that passes its environment on. ``python -I``, ``-E`` and ``-S`` pass the directory by; with
the first two, ranks are reached through torch all the same where commprof is installed beside it
(:mod:`commprof.recorder.autoload`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from commprof.engine import Engine, variables
from commprof.recorder import autoload
from commprof.recorder.process.options import DEFAULTS, OPTIONS_VARIABLE, Options, from_json

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
    """``environment`` with the recorder in it, for processes that record into ``run``.

    Args:
        watched_file: have each process note whether it opened this file.
        wire: have one rank of each host read the interface counters at each step.
        recording: how to record; where it is silent, what ``environment`` says already holds.
        engine: what ``import deepspeed`` means in them; None leaves it as it is.
    """
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path != str(DIRECTORY)]
    # An empty entry means the working directory, so an empty variable must not become one.
    inherited = os.pathsep.join(paths) if environment.get("PYTHONPATH") else ""
    changed = {
        **environment,
        RUN_VARIABLE: str(run.absolute()),
        "PYTHONPATH": f"{DIRECTORY}{os.pathsep}{inherited}" if inherited else str(DIRECTORY),
    }
    changed.pop(autoload.SWITCH, None)  # this command says it: an earlier word must not undo it
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
    """Say what of ``environment`` is ignored, and where ``run`` is started within another recording.

    The processes of the job get the options without what is ignored, so that none of them says it again.
    """
    for note in from_json(environment.get(OPTIONS_VARIABLE))[1]:
        say(f"warning: {note}")
    _announce_nesting(environment, run, say)


def _announce_nesting(environment: Mapping[str, str], run: Path, say: Callable[[str], None]) -> None:
    """Say where ``run`` is started below another recorded program: its ranks are the inner recording's, not the outer's."""
    outer = environment.get(RUN_VARIABLE)
    if not outer or Path(outer) == run.absolute():
        return
    say(f"this is within the recording {outer}: what is started here is recorded into {run} only")
    try:
        with (Path(outer) / NOTES).open("a") as file:
            file.write(
                json.dumps({"pid": os.getpid(), "state": "nested", "text": str(run.absolute())}) + "\n"
            )
    except OSError:
        pass


def notes(run: Path) -> list[dict[str, Any]]:
    """What the processes below ``run`` noted: ``{"pid", "state", ...}``.

    The states: started, armed, fault, config_opened, nested.
    """
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


def explain_silence(reported: list[dict[str, Any]], exit_code: int = 0) -> str:
    """Why nothing was recorded, as far as the processes' notes and the program's exit code tell."""
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
            "What it printed above says why"
        )
    unreached = "runs with python -I, -E or -S, or its launcher does not pass PYTHONPATH and COMMPROF_RUN on"
    if "armed" in states:
        return (
            "torch.distributed was imported, but init_process_group was never called; or that was in a process "
            f"which could not be reached, since it {unreached}"
        )
    if "started" in states:
        return (
            "no process of the program imported torch.distributed; or that was in a process which could not be reached, "
            f"since it {unreached}"
        )
    return f"no Python process of the program could be reached: it is not Python, or {unreached}"
