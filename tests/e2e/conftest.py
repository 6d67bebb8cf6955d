"""Provides one browser for all tests of this directory.

If each file imported the fixture, each file would start a browser, but Playwright can run only once in a process.
"""

import pytest

from support.browser import browser, watched

__all__ = ["browser"]

DESKTOP = {"width": 1280, "height": 900}


@pytest.fixture
def page(browser, base_url):
    """Yield a page of desktop size.

    After the test, assert that there were no requests to other hosts and no errors in the console.
    """
    view = watched(browser, viewport=DESKTOP)
    yield view
    view.close()
    assert view.foreign_requests(base_url) == []
    assert view.errors == []
