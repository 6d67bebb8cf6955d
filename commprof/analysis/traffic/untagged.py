"""Call sites that issue collectives without a purpose. Pure."""

from __future__ import annotations

from typing import Final

import pandas as pd

from commprof.analysis.columns.detailed_answers import UNTAGGED
from commprof.analysis.columns.frames import from_rows

# The grouping columns of traffic() that are needed.
BY: Final = ("purpose", "phase", "op", "api", "call_site")


def none() -> pd.DataFrame:
    """Return the answer for a run whose collectives all have a purpose."""
    return from_rows([], UNTAGGED.columns)


def untagged(traffic: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of ``traffic`` by :data:`BY` without a purpose, in order of payload, largest first."""
    untagged_rows = traffic[traffic["purpose"].isna()]
    untagged_rows = untagged_rows.sort_values(
        ["payload_bytes", "collectives", "call_site"], ascending=[False, False, True], kind="stable"
    )
    return untagged_rows[list(UNTAGGED.names)].reset_index(drop=True)
