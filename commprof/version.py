"""The version of commprof.

It has a module of its own, so that modules that write the version to files do not need the package's attributes.
"""

from __future__ import annotations

from typing import Final

__version__: Final = "0.1.0"
