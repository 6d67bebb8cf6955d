"""The plan of a calibration: operations, sizes, iterations. Standard library only."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Final

from commprof.calibration.bandwidths import SEND_RECV
from commprof.errors import UsageError
from commprof.schema import Op

OPS: Final = (
    str(Op.ALL_REDUCE),
    str(Op.REDUCE),
    str(Op.BROADCAST),
    str(Op.ALL_GATHER),
    str(Op.REDUCE_SCATTER),
    str(Op.ALL_TO_ALL),
    SEND_RECV,
)
DTYPES: Final[dict[str, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
}  # bytes of an element
DEVICES: Final = ("auto", "cpu", "cuda")
BACKENDS: Final = ("auto", "gloo", "nccl")
DEFAULT_SIZES: Final = "1KiB:16MiB:4"
LARGEST_BYTES: Final = 64 * 2**30
_MOST_SIZES: Final = 256
_UNITS: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One calibration.

    Attributes:
        sizes: payload in bytes, S of nccl-tests, in rising order; each is rounded down to whole elements per rank.
        device: ``auto``, ``cpu`` or ``cuda``; ``auto`` takes GPUs if every rank of the host has one.
        backend: ``auto``, ``gloo`` or ``nccl``; ``auto`` takes nccl for GPUs.
        iterations: timed iterations of each operation and size, at most: slow sizes have fewer.
        warmup: iterations before them that are not timed.
    """

    ops: tuple[str, ...] = OPS
    sizes: tuple[int, ...]
    dtype: str = "float32"
    device: str = "auto"
    backend: str = "auto"
    iterations: int = 20
    warmup: int = 3

    def to_json(self) -> str:
        """The plan as text, for the ranks."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan in a text of :meth:`to_json`."""
        values = json.loads(text)
        return Plan(**{**values, "ops": tuple(values["ops"]), "sizes": tuple(values["sizes"])})


def parse_ops(texts: Sequence[str]) -> tuple[str, ...]:
    """The operations that ``--ops`` names, in the order of :data:`OPS`; all if it names none.

    Raises:
        UsageError: one is not known.
    """
    named = [name.strip().replace("-", "_") for text in texts for name in text.split(",") if name.strip()]
    for name in named:
        if name not in OPS:
            near = get_close_matches(name, OPS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"--ops {name[:80]}: {hint}choose from {', '.join(OPS)}")
    return tuple(op for op in OPS if op in named) if named else OPS


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes in bytes, rising: ``A:B`` and ``A:B:FACTOR`` from A to B, each FACTOR (4) times the last; or a list ``A,B,C``.

    A size is a number with K, M or G (powers of 1024; ``KiB`` and ``KB`` mean the same) or none.

    >>> parse_sizes("1K:64KiB"), parse_sizes("3000, 1M")
    ((1024, 4096, 16384, 65536), (3000, 1048576))

    Raises:
        UsageError: it has neither form, or a size that cannot be measured.
    """
    if ":" not in text:
        return _checked(text, [_size(text, part) for part in text.split(",") if part.strip()])
    fields = text.split(":")
    if len(fields) > 3:
        raise UsageError(f"--sizes {text[:80]}: A:B or A:B:FACTOR was expected, such as {DEFAULT_SIZES}")
    low, high = _size(text, fields[0]), _size(text, fields[1])
    factor = _factor(text, fields[2]) if len(fields) == 3 else 4.0
    if low > high:
        raise UsageError(f"--sizes {text[:80]}: the first size is larger than the last")
    sizes: list[int] = []
    size = float(low)
    while round(size) <= high and len(sizes) <= _MOST_SIZES:
        sizes.append(round(size))
        size *= factor
    return _checked(text, sizes)


def _checked(text: str, sizes: Sequence[int]) -> tuple[int, ...]:
    distinct = tuple(sorted(set(sizes)))
    if not distinct:
        raise UsageError(f"--sizes {text[:80]!r}: there is no size in it; {DEFAULT_SIZES} is an example")
    if len(sizes) > _MOST_SIZES:
        raise UsageError(f"--sizes {text[:80]}: more than {_MOST_SIZES} sizes; take a larger factor")
    return distinct


def _size(text: str, part: str) -> int:
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([kmg]?)(?:i?b)?\s*", part.lower())
    size = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not match or size < 1:
        raise UsageError(
            f"--sizes {text[:80]}: {part.strip()[:40]!r} is no size; 1024, 64K or 16MiB were expected"
        )
    if size > LARGEST_BYTES:
        raise UsageError(
            f"--sizes {text[:80]}: {part.strip()[:40]} is more than 64 GiB, which no run here sends"
        )
    return size


def _factor(text: str, part: str) -> float:
    try:
        factor = float(part)
    except ValueError:
        factor = 0.0
    if not 1.01 <= factor <= 1e6:
        raise UsageError(f"--sizes {text[:80]}: the factor {part[:40]!r} is not between 1.01 and 1,000,000")
    return factor
