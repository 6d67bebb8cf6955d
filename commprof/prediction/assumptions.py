"""The changes of a prediction in addition to the config: the links, the number of ranks, and two bounds."""

from __future__ import annotations

from typing import Final, NamedTuple

from commprof.errors import UsageError
from commprof.prediction.durations import UNCHANGED, Link
from commprof.quantities import bytes_per_second, duration_ns


class Assumptions(NamedTuple):
    """The assumptions of a prediction that differ from the recorded run, apart from the config.

    Attributes:
        link: The change of bandwidth and latency.
        world: The number of ranks, or None for that of the run.
        comm_free: Whether messages take no time.
        no_straggler: Whether the compute time of every rank in a span is the mean over the ranks.
    """

    link: Link = UNCHANGED
    world: int | None = None
    comm_free: bool = False
    no_straggler: bool = False


AS_RECORDED: Final = Assumptions()


def parse_link(bandwidth: str | None, latency: str | None) -> Link:
    """Return the link of ``--bandwidth`` (``x4``, ``10Gbit`` or ``1.25GB/s``) and ``--latency`` (``50us``, added).

    >>> parse_link("x0.5", None).factor, parse_link("10Gbit", "50us").rate, parse_link(None, "50us").added_ns
    (0.5, 1250000000.0, 50000.0)

    Raises:
        UsageError: The text does not have one of these forms.
    """
    link = Link()
    if bandwidth is not None:
        if bandwidth.startswith("x"):
            link = link._replace(factor=_factor(bandwidth))
        else:
            rate = bytes_per_second(bandwidth)
            if rate is None:
                raise UsageError(
                    f"--bandwidth is {bandwidth!r}; expected the rate of a rank's link, such as 10Gbit or 1.25GB/s, or a "
                    "factor such as x4"
                )
            link = link._replace(rate=rate)
    if latency is not None:
        added_ns = duration_ns(latency)
        if added_ns is None:
            raise UsageError(
                f"--latency is {latency!r}; expected the time to add to each message, such as 50us"
            )
        link = link._replace(added_ns=float(added_ns))
    return link


def _factor(text: str) -> float:
    try:
        factor = float(text[1:])
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e6:
        raise UsageError(f"--bandwidth is {text!r}; expected a factor such as x4 or x0.5")
    return factor
