"""The pages, in the order of the navigation. A page is added by its module and a line here."""

from __future__ import annotations

from typing import Final

from commprof_dash.pages.alignment import page as alignment
from commprof_dash.pages.bandwidth import page as bandwidth
from commprof_dash.pages.buckets import page as buckets
from commprof_dash.pages.compare import page as compare
from commprof_dash.pages.matrix import page as matrix
from commprof_dash.pages.overview import page as overview
from commprof_dash.pages.page import Page
from commprof_dash.pages.plan import page as plan
from commprof_dash.pages.records import page as records
from commprof_dash.pages.runs import page as runs
from commprof_dash.pages.stragglers import page as stragglers
from commprof_dash.pages.timeline import page as timeline

PAGES: Final[tuple[Page, ...]] = (
    runs.PAGE,
    overview.PAGE,
    compare.PAGE,
    plan.PAGE,
    timeline.PAGE,
    matrix.PAGE,
    buckets.PAGE,
    alignment.PAGE,
    stragglers.PAGE,
    bandwidth.PAGE,
    records.PAGE,
)
HOME: Final = runs.PAGE
