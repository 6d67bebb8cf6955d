"""Many values of a trace: as arrays of objects, which plotly takes as they are; in lists it looks at each one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt


def listed(values: Iterable[Any]) -> npt.NDArray[np.object_]:
    """``values``, numbers or text or rows of equally many: the browser gets the list that it would get of a list."""
    return np.array(list(values), object)
