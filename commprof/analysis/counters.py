"""What moved: the machine's own counters, and nothing else."""

from __future__ import annotations

from typing import Final

import pandas as pd
import pyarrow as pa

from commprof.analysis.answers import MOVED
from commprof.analysis.engine import ask
from commprof.analysis.frames import from_arrow

NO_READINGS: Final = (
    "no counters were read during the run (commprof run reads them; an attached script does not)"
)
ONE_READING: Final = "the counters were read only once, so no difference can be formed"


def moved(wire: pa.Table) -> pd.DataFrame:
    """Bytes that each interface of each host moved during the run (``queries/moved.sql``).

    The counters are those of the whole host: other processes and other traffic are in them.
    """
    return from_arrow(ask("moved", {"wire": wire}), MOVED.columns)


def why_not_moved(moved: pd.DataFrame) -> str | None:
    """Why there is no moved measure; None when there is one."""
    if moved.empty:
        return NO_READINGS
    return ONE_READING if bool((moved["readings"] < 2).all()) else None
