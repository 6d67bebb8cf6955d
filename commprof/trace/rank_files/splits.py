"""Signatures of calls whose splits never repeat. They store numbers of rows, from which sizes are computed. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from commprof.schema import format_splits

_MOST: Final = 1 << 50  # A larger number is damaged.
_OWN: Final = (
    "id",
    "sizes",
    "numel",
    "input_bytes",
    "output_bytes",
    "payload_bytes",
    "input_splits",
    "output_splits",
)
_PLACES: Final = {name: place for place, name in enumerate(_OWN)}


class SplitSignature(Mapping[str, Any]):
    """The complete signature of a call with individual splits. It uses little memory, since a long job has millions.

    Args:
        like: The signature that has the same values in all columns that do not depend on the splits.
        line: The line of this signature. ``row_shapes``, ``row_bytes`` and ``rows`` (the number of rows) are given for
            the output and the input. ``splits`` has the number of rows received from, and sent to, each rank.

    Raises:
        ValueError, TypeError, KeyError: The line is damaged.
    """

    __slots__ = ("_own", "like")

    def __init__(self, like: Mapping[str, Any], line: Mapping[str, Any]) -> None:
        (received, sent), (output_rows, input_rows) = line["rows"], line["splits"]
        (output_shape, input_shape), (output_row, input_row) = line["row_shapes"], line["row_bytes"]
        numbers = (
            received,
            sent,
            output_row,
            input_row,
            *output_rows,
            *input_rows,
            *output_shape,
            *input_shape,
        )
        if set(map(type, numbers)) != {int} or not 0 <= min(numbers) <= max(numbers) < _MOST:
            raise ValueError("a number")
        numel, input_bytes, output_bytes = (
            sent * math.prod(input_shape),
            sent * input_row,
            received * output_row,
        )
        if max(numel, input_bytes, output_bytes) > _MOST:
            raise ValueError("a size")
        self.like = like
        self._own = (
            line["id"],
            f"{_shape(sent, input_shape)}->{_shape(received, output_shape)}",
            numel,
            input_bytes,
            output_bytes,
            input_bytes,
            format_splits([count * input_row for count in input_rows]),
            format_splits([count * output_row for count in output_rows]),
        )

    def __getitem__(self, name: str) -> Any:
        place = _PLACES.get(name)
        return self.like[name] if place is None else self._own[place]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of ``name``, or ``default``."""
        place = _PLACES.get(name)
        return self.like.get(name, default) if place is None else self._own[place]

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(self.like), **_PLACES})

    def __len__(self) -> int:
        return len(self.like.keys() | _PLACES.keys())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SplitSignature):
            return self is other or (self._own == other._own and self.like == other.like)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]


def _shape(rows: int, row: list[int]) -> str:
    return "x".join(map(str, (rows, *row)))
