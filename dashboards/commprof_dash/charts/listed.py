"""Wraps the many values of a trace in arrays of objects, which plotly does not check one by one, unlike lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt


def listed(values: Iterable[Any]) -> npt.NDArray[np.object_]:
    """``values``, numbers or text or rows of equally many: the browser gets the list that it would get of a list."""
    return np.array(list(values), object)
