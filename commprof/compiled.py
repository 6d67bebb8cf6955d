"""Loads the parts that are compiled from C at installation; each has an equivalent Python version.

Both give the same results, byte for byte (a test checks that). The compiled parts of the recorder cost the training less
time; the compiled scanner reads NCCL logs faster. Standard library only.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Final

# 0: use the Python parts although the compiled ones are installed.
COMPILED_VARIABLE: Final = "COMMPROF_COMPILED"


def compiled(name: str, version: int) -> ModuleType | None:
    """Return the compiled module ``name`` if it is built, has this ``version``, and is not switched off; else None.

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
