"""The pages, in the order of the navigation. A page is added by its module and a line here."""

from __future__ import annotations

from typing import Final

from commprof_dash.pages import (
    alignment,
    bandwidth,
    buckets,
    compare,
    matrix,
    overview,
    records,
    runs,
    stragglers,
    timeline,
)
from commprof_dash.pages.page import Page

PAGES: Final[tuple[Page, ...]] = (
    runs.PAGE,
    overview.PAGE,
    compare.PAGE,
    timeline.PAGE,
    matrix.PAGE,
    buckets.PAGE,
    alignment.PAGE,
    stragglers.PAGE,
    bandwidth.PAGE,
    records.PAGE,
)
HOME: Final = runs.PAGE
