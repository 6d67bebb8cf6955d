"""The plan of a calibration: operations, sizes and iterations. Uses only the standard library."""

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
    """The plan of one calibration.

    Attributes:
        ops: The names of the operations, a subset of :data:`OPS`.
        sizes: The payloads in bytes (S of nccl-tests), in increasing order. The sweep rounds each payload down to a
            whole number of elements per rank, but to at least one element per rank.
        dtype: The element type, a key of :data:`DTYPES`.
        device: ``auto``, ``cpu`` or ``cuda``. ``auto`` uses GPUs if every rank of the host has one.
        backend: ``auto``, ``gloo`` or ``nccl``. ``auto`` uses nccl for GPUs.
        iterations: The maximum number of timed iterations per operation and size. Slow sizes get fewer iterations.
        warmup: The number of untimed iterations before the timed ones.
    """

    ops: tuple[str, ...] = OPS
    sizes: tuple[int, ...]
    dtype: str = "float32"
    device: str = "auto"
    backend: str = "auto"
    iterations: int = 20
    warmup: int = 3

    def to_json(self) -> str:
        """Return the plan as JSON text, which is passed to the ranks."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan that :meth:`to_json` wrote as ``text``."""
        values = json.loads(text)
        return Plan(**{**values, "ops": tuple(values["ops"]), "sizes": tuple(values["sizes"])})


def parse_ops(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the operations that ``--ops`` names, in the order of :data:`OPS`, or all operations if it names none.

    Raises:
        UsageError: an operation is not known.
    """
    named = [name.strip().replace("-", "_") for text in texts for name in text.split(",") if name.strip()]
    for name in named:
        if name not in OPS:
            near = get_close_matches(name, OPS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"--ops {name[:80]}: {hint}choose from {', '.join(OPS)}")
    return tuple(op for op in OPS if op in named) if named else OPS


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in bytes that ``text`` describes, in increasing order.

    ``A:B:FACTOR`` describes the sizes from A to B, where each size is FACTOR times the previous size. ``A:B`` uses
    the factor 4. ``A,B,C`` is a list of sizes. A size is a number with an optional unit K, M or G, which are powers of
    1024. ``KiB`` and ``KB`` mean the same.

    >>> parse_sizes("1K:64KiB"), parse_sizes("3000, 1M")
    ((1024, 4096, 16384, 65536), (3000, 1048576))

    Raises:
        UsageError: ``text`` has none of these forms, or it has a size that cannot be measured.
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
        raise UsageError(f"--sizes {text[:80]!r} contains no size; expected for example {DEFAULT_SIZES}")
    if len(sizes) > _MOST_SIZES:
        raise UsageError(f"--sizes {text[:80]}: more than {_MOST_SIZES} sizes; take a larger factor")
    return distinct


def _size(text: str, part: str) -> int:
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([kmg]?)(?:i?b)?\s*", part.lower())
    size = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not match or size < 1:
        raise UsageError(
            f"--sizes {text[:80]}: {part.strip()[:40]!r} is not a size; expected for example 1024, 64K or 16MiB"
        )
    if size > LARGEST_BYTES:
        raise UsageError(
            f"--sizes {text[:80]}: {part.strip()[:40]} is more than 64 GiB, the largest size of a calibration"
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
