"""The version of zero_runtime, which is the version of the distribution commprof."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    try:
        return version("commprof")
    except PackageNotFoundError:
        return "0+unknown"


VERSION = _installed()
