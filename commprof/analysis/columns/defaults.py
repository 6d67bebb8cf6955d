"""How many rows answers give at most, where their caller says nothing else."""

from __future__ import annotations

from typing import Final

MOST_BARS: Final = 2_000  # of a timeline: a browser draws and moves so many without delay
MOST_LATE: Final = 200  # collectives that are told one by one
