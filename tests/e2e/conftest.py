"""The one browser of all tests here: imported into each file it would be one for each, and Playwright runs only once."""

from support.browser import browser

__all__ = ["browser"]
