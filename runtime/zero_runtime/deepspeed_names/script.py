"""Runs a script in this process as Python would."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from zero_runtime.deepspeed_names import as_deepspeed


def run(target: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """Run a script or module as ``__main__``, with DeepSpeed's names.

    Args:
        target: path of the script, or name of the module.
        arguments: its arguments.
        is_module: ``target`` is a module.
    """
    as_deepspeed()
    sys.argv = [target, *arguments]
    if is_module:
        # Python has put the working directory first, for -m of this command.
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if not Path(target).exists():
        sys.exit(f"zero_runtime: error: there is no script {target}")
    sys.path[0] = str(Path(target).resolve().parent)
    runpy.run_path(target, run_name="__main__")
