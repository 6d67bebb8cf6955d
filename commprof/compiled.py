"""Loads the modules that are compiled from C at installation. Each has an equivalent Python version.

Both versions give the same results, byte for byte (a test checks this). The compiled modules of the recorder slow down
the training less. The compiled scanner reads NCCL logs faster. Standard library only.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Final

# The value 0 selects the Python versions although the compiled modules are installed.
COMPILED_VARIABLE: Final = "COMMPROF_COMPILED"


def compiled(name: str, version: int) -> ModuleType | None:
    """Return the compiled module ``name`` if it is built, has this ``version``, and is not switched off; else None.

    Args:
        name: The full name of the module.
        version: The required ``VERSION`` of the module. A module that was built from an older source is not used.
    """
    if os.environ.get(COMPILED_VARIABLE) == "0":
        return None
    try:
        module = importlib.import_module(name)
    except Exception:  # not built, or built for another platform: the Python version is used
        return None
    return module if getattr(module, "VERSION", None) == version else None
