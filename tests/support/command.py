"""The commprof command as a user gives it: a process of its own, in a directory and an environment of its own.

:func:`commprof` forks the process from the warm test process (``support.warm``), which saves its imports. What tests the
start itself (entry point, imports, signals) calls :func:`execute` with ``[sys.executable, "-m", "commprof", ...]``.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from support import warm

ROOT = Path(__file__).resolve().parents[2]
# First on the PYTHONPATH of ranks: they need 2 seconds of CPU time less to start.
WITHOUT_DYNAMO = ROOT / "tests" / "support" / "without_dynamo"
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment(**variables: str) -> dict[str, str]:
    """This process's variables without those of a launcher or of commprof, with the sources, and ``variables``."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_A_LAUNCHER and not name.startswith("COMMPROF")
    }
    sources = os.pathsep.join(map(str, (WITHOUT_DYNAMO, ROOT, ROOT / "runtime", ROOT / "dashboards")))
    return kept | {"PYTHONPATH": sources, "OMP_NUM_THREADS": "1"} | variables


def execute(words: list[str], cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; ``options`` are those of ``subprocess.run``."""
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
    """The command with ``words``, and how it ended; ``input`` is typed on its standard input.

    The Python programs that it starts are forked from the test process as well (``support.warm_programs``), unless
    ``new_interpreters``.
    """
    variables = environment() if env is None else env
    return warm.commprof([*map(str, words)], Path(cwd), variables, timeout, input, new_interpreters)


def output(*words: str, cwd: Path, expected: int = 0, **options: Any) -> str:
    """What the command with ``words`` prints; it has to end with exit code ``expected``."""
    done = commprof(*words, cwd=cwd, **options)
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout
