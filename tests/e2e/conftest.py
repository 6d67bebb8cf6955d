"""The one browser of all tests here: imported into each file it would be one for each, and Playwright runs only once."""

import pytest

from support.browser import browser, watched

__all__ = ["browser"]

DESKTOP = {"width": 1280, "height": 900}


@pytest.fixture
def page(browser, base_url):
    """A desktop page; afterwards nothing may have left the dashboard, nor gone wrong in the console."""
    view = watched(browser, viewport=DESKTOP)
    yield view
    view.close()
    assert view.foreign_requests(base_url) == []
    assert view.errors == []
