"""Adds text columns that combine several number columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd


def text_column(frame: pd.DataFrame, write: Callable[[Mapping[str, Any]], str | None]) -> pd.Series[Any]:
    """Return the text that ``write`` returns for each row of ``frame``, or None."""
    texts = [write({str(name): value for name, value in row.items()}) for row in frame.to_dict("records")]
    return pd.Series(texts, index=frame.index, dtype="object")
