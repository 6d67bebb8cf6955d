"""The version of zero_runtime, which is that of the distribution it comes in."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    try:
        return version("commprof")
    except PackageNotFoundError:
        return "0+unknown"


VERSION = _installed()
