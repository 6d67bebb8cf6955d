"""The rates of the links inside a host and between hosts, as ``--links`` gives them."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from commprof.errors import UsageError
from commprof.quantities import bytes_per_second

_EXAMPLE: Final = "intra=450GB/s,inter=8x50GB/s"
_LINKS: Final = re.compile(r"(?:(\d+)\s*x\s*)?(.*)")


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
        match = _LINKS.fullmatch(rate.strip())
        of_one = bytes_per_second(match[2]) if match else None
        if not equals or name not in Links._fields or name in rates or match is None or of_one is None:
            raise UsageError(
                f"--links is {text!r}, with {word.strip()!r}; expected {_EXAMPLE}, in GB/s (bytes) or Gbit/s and above 0"
            )
        rates[name] = int(match[1] or 1) * of_one
        if not rates[name]:
            raise UsageError(f"--links is {text!r}, with {word.strip()!r}; expected at least one link")
    return Links(**rates)
