"""Default limits of the number of rows in answers, and thresholds from which on an answer leads to advice."""

from __future__ import annotations

from typing import Final

MOST_BARS: Final = 2_000  # bars of a timeline that a browser draws and moves without delay
MOST_LATE: Final = 200  # single collectives
UNEVEN_LOAD: Final = 1.5  # imbalance of experts: largest load over mean load, median of the steps
NOTABLE_DROPS: Final = 0.01  # share of the experts' choices that were dropped
