"""An index that maps a combination of columns and a number to a value, for many rows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.sequences.group_ids import numbered, placed_by

Numbers: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]
Names: TypeAlias = tuple[Any, ...]


class Lookup:
    """A map from a combination of columns, such as a process, and a number to a value.

    The values are stored in arrays, because there may be millions.

    Args:
        combine: The ufunc that combines values which were added with the same key and number.
    """

    def __init__(self, combine: np.ufunc) -> None:
        self._combine = combine
        self._batches: dict[Names, list[tuple[Numbers, Numbers]]] = {}

    def add(self, rows: pa.Table, names: Sequence[str], number: str, values: Numbers) -> None:
        """Store one of ``values`` for each of ``rows``, under the columns ``names`` and ``number``.

        Rows whose ``number`` is null are skipped.
        """
        numbers, known = numbers_of(rows, number)
        for key, places in combinations(rows, names):
            places = places[known[places]]
            if len(places):
                self._batches.setdefault(key, []).append(self._combined(numbers[places], values[places]))

    def find(self, rows: pa.Table, names: Sequence[str], number: str) -> tuple[Numbers, Flags]:
        """Return the value of each of ``rows``, and whether a value was stored."""
        values, is_known = np.zeros(len(rows), np.int64), np.zeros(len(rows), bool)
        numbers, known = numbers_of(rows, number)
        for key, places in combinations(rows, names):
            if key not in self._batches:
                continue
            stored_numbers, stored_values = self._merged(key)
            at = np.minimum(np.searchsorted(stored_numbers, numbers[places]), len(stored_numbers) - 1)
            is_known[places] = known[places] & (stored_numbers[at] == numbers[places])
            values[places] = stored_values[at]
        return values, is_known

    def _merged(self, key: Names) -> tuple[Numbers, Numbers]:
        batches = self._batches[key]
        if len(batches) > 1:
            numbers, values = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
            self._batches[key] = batches = [self._combined(numbers, values)]
        return batches[0]

    def _combined(self, numbers: Numbers, values: Numbers) -> tuple[Numbers, Numbers]:
        order = np.argsort(numbers, kind="stable")
        numbers = numbers[order]
        starts = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]))
        return numbers[starts], self._combine.reduceat(values[order], starts)


def numbers_of(rows: pa.Table, name: str) -> tuple[Numbers, Flags]:
    """Return a column of integers with null as 0, and whether each value is not null."""
    column = rows[name].combine_chunks()
    known = column.is_valid().to_numpy(zero_copy_only=False)
    return pc.fill_null(column, 0).to_numpy(zero_copy_only=False).astype(np.int64, copy=False), known


def combinations(rows: pa.Table, names: Sequence[str]) -> Iterator[tuple[Names, Numbers]]:
    """Yield each combination of the columns ``names`` with the indices of its rows, in ascending order."""
    if not len(rows):
        return
    codes, keys = _coded(rows, names)
    order = placed_by(codes)
    bounds = np.flatnonzero(np.diff(codes[order])) + 1
    yield from zip(keys, np.split(order, bounds), strict=True)


def where(rows: pa.Table, names: Sequence[str], holds: Callable[..., bool]) -> Flags:
    """Return whether ``holds`` is true for the columns ``names`` of each row. It is called once per combination."""
    if not len(rows):
        return np.zeros(0, bool)
    codes, keys = _coded(rows, names)
    flags: Flags = np.array([holds(*key) for key in keys], bool)[codes]
    return flags


def each_for(rows: pa.Table, names: Sequence[str], value: Callable[..., str | None]) -> pa.Array:
    """Return the result of ``value`` for the columns ``names`` of each row. It is called once per combination."""
    if not len(rows):
        return pa.nulls(0, pa.string())
    codes, keys = _coded(rows, names)
    return pa.array([value(*key) for key in keys], pa.string()).take(pa.array(codes))


def _coded(rows: pa.Table, names: Sequence[str]) -> tuple[Numbers, list[Names]]:
    """Return the number of the combination of the columns ``names`` in each row, and all combinations by number."""
    chosen = rows.select(list(names))
    codes, first = numbered(chosen)
    return codes, [tuple(row.values()) for row in chosen.take(pa.array(first)).to_pylist()]
