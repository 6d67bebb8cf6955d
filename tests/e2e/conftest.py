"""The one browser of all tests here: imported into each file it would be one for each, and Playwright runs only once."""

import pytest

from support.browser import Watched, browser

__all__ = ["browser"]

DESKTOP = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def desktop(browser):
    """One browser context for a file, so that plotly.js is loaded once."""
    context = browser.new_context(viewport=DESKTOP, color_scheme="light", accept_downloads=True)
    yield context
    context.close()


@pytest.fixture
def page(desktop, base_url):
    """A desktop page; afterwards nothing may have left the dashboard, nor gone wrong in the console."""
    view = Watched(desktop.new_page())
    yield view
    view.page.close()
    assert view.foreign_requests(base_url) == []
    assert view.errors == []
