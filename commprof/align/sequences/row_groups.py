"""Groups of consecutive rows, and values over all rows of a group. Pure."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

_MOST_LENGTHS: Final = 64

Flags = npt.NDArray[np.bool_]
Values = Any  # an array of floats or integers, one for each row; unknown values are not-a-number


class Groups:
    """Groups of consecutive rows, and values over all rows of a group.

    Attributes:
        starts: The first row of each group.
        lengths: The number of rows of each group.
    """

    def __init__(self, *numbers: Values) -> None:
        differs = np.ones(len(numbers[0]), bool)
        differs[1:] = False
        for each in numbers:
            differs[1:] |= each[1:] != each[:-1]
        self.starts = np.flatnonzero(differs)
        self.lengths = np.diff(self.starts, append=len(differs))

    @property
    def size(self) -> Values:
        """The number of rows of its group, for each row."""
        return self.spread(self.lengths)

    def spread(self, values: Values) -> Values:
        """Repeat the value of each group for each of its rows."""
        return np.repeat(values, self.lengths)

    def reduced(self, how: np.ufunc, values: Values) -> Values:
        """Return one value for each group."""
        return how.reduceat(values, self.starts) if len(self.starts) else values

    def smallest(self, values: Values) -> Values:
        """Return the smallest value of the group, for each row."""
        return self.spread(self.reduced(np.minimum, values))

    def largest(self, values: Values) -> Values:
        """Return the largest value of the group, for each row."""
        return self.spread(self.reduced(np.maximum, values))

    def all(self, flags: Flags) -> Flags:
        """Return whether ``flags`` are true in all rows of the group, for each row."""
        every: Flags = self.spread(self.reduced(np.logical_and, flags))
        return every

    def mean(self, values: Values) -> Values:
        """Return the mean of the known values of the group, for each row."""
        known = ~np.isnan(values)
        with np.errstate(invalid="ignore"):
            sums = self.reduced(np.add, np.where(known, values, 0.0))
            return self.spread(sums / self.reduced(np.add, known.astype(np.int64)))

    def in_order(self, values: Values) -> Values:
        """Return the rows by group and ``values``, stable for equal values."""
        kinds = np.unique(self.lengths)
        if len(kinds) > _MOST_LENGTHS:
            return np.lexsort((values, self.spread(np.arange(len(self.starts)))))
        order = np.empty(len(values), np.int64)
        for length in kinds.tolist():  # groups of one length are the rows of a matrix, which sort far faster
            rows = self.starts[self.lengths == length][:, None] + np.arange(length)
            order[rows] = rows[:, :1] + np.argsort(values[rows], axis=1, kind="stable")
        return order
