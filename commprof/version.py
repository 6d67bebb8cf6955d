"""The version of commprof; a module of its own, so that the modules that write it to files do not import the package."""

from __future__ import annotations

from typing import Final

__version__: Final = "0.1.0"
