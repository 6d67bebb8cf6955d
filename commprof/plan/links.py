"""The rates of the links inside a host and between hosts, as ``--links`` gives them."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from commprof.errors import UsageError

_EXAMPLE: Final = "intra=450GB/s,inter=8x50GB/s"
_PREFIXES: Final = {"": 1e0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_RATE: Final = re.compile(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]i?)?(bit|b)/s", re.IGNORECASE)


class Links(NamedTuple):
    """Rates in bytes per second; None where one is not given.

    Attributes:
        intra: of one rank to others of its host.
        inter: of one host to other hosts, all of its links together.
    """

    intra: float | None = None
    inter: float | None = None


def parse_links(text: str) -> Links:
    """Parse ``intra=450GB/s,inter=8x50GB/s``: the rate of a rank inside its host, and links x rate of a host.

    >>> parse_links("intra=450GB/s,inter=8x400Gbit/s")
    Links(intra=450000000000.0, inter=400000000000.0)

    Raises:
        UsageError: the text has another form.
    """
    rates: dict[str, float] = {}
    for word in text.split(","):
        name, equals, rate = word.strip().partition("=")
        match = _RATE.fullmatch(rate.strip())
        if not equals or name not in Links._fields or name in rates or match is None:
            raise UsageError(f"--links is {text!r}, with {word.strip()!r}; expected {_EXAMPLE}")
        scale = _PREFIXES[(match[3] or "").lower()] / (8 if match[4].lower() == "bit" else 1)
        rates[name] = int(match[1] or 1) * float(match[2]) * scale
        if not rates[name] > 0:
            raise UsageError(f"--links is {text!r}: {word.strip()} is no rate; expected more than 0 bytes/s")
    return Links(**rates)
