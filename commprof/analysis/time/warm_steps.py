"""Warm steps: the training steps behind the figures of a typical step. Pure."""

from __future__ import annotations

import pandas as pd


def warm_steps(times: pd.DataFrame) -> pd.DataFrame:
    """The steps that ended, without the first of each attempt, which warms up; the first ones if there are no others.

    Args:
        times: columns attempt, step and duration_ns.
    """
    ended = times[times["duration_ns"].notna()]
    later = ended[ended["step"] > ended.groupby("attempt")["step"].transform("min")]
    return (later if len(later) else ended).reset_index(drop=True)
