"""Default limits of the number of rows in answers."""

from __future__ import annotations

from typing import Final

MOST_BARS: Final = 2_000  # bars of a timeline that a browser draws and moves without delay
MOST_LATE: Final = 200  # single collectives
