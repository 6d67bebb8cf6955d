"""The commprof command as a user gives it: a process of its own, in a directory and an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment(**variables: str) -> dict[str, str]:
    """This process's variables without those of a launcher or of commprof, with the sources, and ``variables``."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_A_LAUNCHER and not name.startswith("COMMPROF")
    }
    sources = os.pathsep.join(str(ROOT / part) for part in (".", "runtime", "dashboards"))
    return kept | {"PYTHONPATH": sources, "OMP_NUM_THREADS": "1"} | variables


def execute(words: list[str], cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; ``options`` are those of ``subprocess.run``."""
    given = {"env": environment(), "timeout": 200, **options}
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False, **given)


def commprof(*words: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command with ``words``, and how it ended."""
    return execute([sys.executable, "-m", "commprof", *words], cwd, **options)


def output(*words: str, cwd: Path, expected: int = 0) -> str:
    """What the command with ``words`` prints; it has to end with exit code ``expected``."""
    done = commprof(*words, cwd=cwd)
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout
