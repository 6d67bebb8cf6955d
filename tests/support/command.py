"""Runs the commprof command as a user does: in a separate process, with its own directory and environment.

:func:`commprof` forks the process from the warm test process (``support.warm``), so that the process does not
repeat the imports. Tests of the start itself (entry point, imports, signals) call :func:`execute` with
``[sys.executable, "-m", "commprof", ...]``.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from support import warm

ROOT = Path(__file__).resolve().parents[2]
# The first directory on the PYTHONPATH of ranks. It saves each rank 2 seconds of CPU time at its start.
WITHOUT_DYNAMO = ROOT / "tests" / "support" / "without_dynamo"
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment(**variables: str) -> dict[str, str]:
    """Return the environment for a command.

    It contains the variables of this process except those of a launcher and of commprof, a PYTHONPATH with the
    sources, and ``variables``.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_A_LAUNCHER and not name.startswith("COMMPROF")
    }
    sources = os.pathsep.join(map(str, (WITHOUT_DYNAMO, ROOT, ROOT / "runtime", ROOT / "dashboards")))
    return kept | {"PYTHONPATH": sources, "OMP_NUM_THREADS": "1"} | variables


def execute(words: list[str], cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program until it exits, with the ``options`` of ``subprocess.run``."""
    given = {"env": environment(), "timeout": 200, **options}
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False, **given)


def commprof(
    *words: str,
    cwd: Path,
    env: dict[str, str] | None = None,
    timeout: float = 200.0,
    input: str | None = None,
    new_interpreters: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``commprof WORDS`` with ``input`` on its standard input, and return the completed process.

    Python programs that the command starts are also forked from the test process (``support.warm_programs``), unless
    ``new_interpreters`` is true.
    """
    variables = environment() if env is None else env
    return warm.commprof([*map(str, words)], Path(cwd), variables, timeout, input, new_interpreters)


def output(*words: str, cwd: Path, expected: int = 0, **options: Any) -> str:
    """Return what ``commprof WORDS`` prints. The exit code must be ``expected``."""
    done = commprof(*words, cwd=cwd, **options)
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout
