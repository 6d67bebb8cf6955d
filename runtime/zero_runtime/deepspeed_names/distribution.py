"""The metadata by which ``importlib.metadata`` reports DeepSpeed as installed.

Before they import DeepSpeed, libraries query this metadata to find out whether it is installed, and in which version.
"""

from __future__ import annotations

from importlib.metadata import Distribution
from pathlib import Path
from typing import Any, Final

from zero_runtime.version import VERSION

DISTRIBUTION: Final = "deepspeed"
FOLLOWED: Final = "0.19.8"  # the version of DeepSpeed whose interface this runtime provides
NAMES_VERSION: Final = f"{FOLLOWED}+zero.runtime.{VERSION.replace('+', '.')}"


class NamesDistribution(Distribution):
    """The metadata of a package without files."""

    def read_text(self, filename: str) -> str | None:
        """Return the content of the file METADATA; None for any other file name."""
        if filename != "METADATA":
            return None
        return (
            f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {NAMES_VERSION}\n"
            f"Summary: DeepSpeed's names, given by zero_runtime {VERSION}\n"
        )

    def locate_file(self, path: Any) -> Path:
        """Return the path that a file of the package would have."""
        return Path(__file__).parent / path
