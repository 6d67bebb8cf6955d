"""Finds the pages of the dashboard. Each folder with a module ``page`` is a page, which its ``PAGE`` declares."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from commprof_dash.pages.page import Page


def declared_pages() -> tuple[Page, ...]:
    """Return the ``PAGE`` of each folder, in the order of the navigation."""
    folders = [module.name for module in iter_modules(__path__) if module.ispkg]
    pages: list[Page] = [import_module(f"{__name__}.{folder}.page").PAGE for folder in folders]
    return tuple(sorted(pages, key=lambda page: page.order))


PAGES: Final = declared_pages()
