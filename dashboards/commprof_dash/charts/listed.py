"""Wraps the values of a trace in object arrays. Plotly checks each value of a list, but not those of such arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt


def listed(values: Iterable[Any]) -> npt.NDArray[np.object_]:
    """Return ``values`` as an array of objects. The browser receives the same data as from a list.

    The values are numbers, texts, or rows of equal length.
    """
    return np.array(list(values), object)
