"""The parts that exist twice: in C, built where the package is installed, and in Python for everywhere else.

Both do the same, byte for byte (a test says so). The compiled parts of the recorder take less of the training's time; the
compiled scanner of NCCL logs takes less of the reader's. Standard library only.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Final

# Set to 0, the Python parts are taken although the compiled ones are there.
COMPILED_VARIABLE: Final = "COMMPROF_COMPILED"


def compiled(name: str, version: int) -> ModuleType | None:
    """The compiled module ``name``, if it was built, is of this ``version``, and may be used.

    Args:
        name: of the module, in full.
        version: its ``VERSION``; one that an older source was built from is not taken.
    """
    if os.environ.get(COMPILED_VARIABLE) == "0":
        return None
    try:
        module = importlib.import_module(name)
    except Exception:  # not built, or built for something else: the Python part does the same
        return None
    return module if getattr(module, "VERSION", None) == version else None
