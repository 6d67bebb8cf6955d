"""A function that runs a script in this process in the same way as Python does."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from zero_runtime.deepspeed_names import as_deepspeed


def run(target: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """Run a script or module as ``__main__``, with DeepSpeed's names.

    Args:
        target: The path of the script, or the name of the module.
        arguments: The arguments of the script or module.
        is_module: Whether ``target`` is a module.
    """
    as_deepspeed()
    sys.argv = [target, *arguments]
    if is_module:
        # Because this command itself runs with -m, Python already put the working directory first in sys.path.
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if not Path(target).exists():
        sys.exit(f"zero_runtime: error: there is no script {target}")
    sys.path[0] = str(Path(target).resolve().parent)
    runpy.run_path(target, run_name="__main__")
