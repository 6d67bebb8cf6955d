"""Warm steps: the training steps from which the values of a typical step are computed. Pure."""

from __future__ import annotations

import pandas as pd


def warm_steps(times: pd.DataFrame) -> pd.DataFrame:
    """Return the steps that ended, without the first step of each attempt, which is warm-up.

    If there are no other steps, the first steps are returned.

    Args:
        times: The steps, with the columns attempt, step and duration_ns.
    """
    ended = times[times["duration_ns"].notna()]
    later = ended[ended["step"] > ended.groupby("attempt")["step"].transform("min")]
    return (later if len(later) else ended).reset_index(drop=True)
