"""A real Chromium and a served dashboard for tests. Tests that use them carry the marker ``browser``."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--js-flags=--no-opt --no-maglev",  # pages are left before compiled scripts pay: 8 % of the time of a test
)
# dash-ag-grid asks for the selected rows in a timer, which may end after the page with the table was left.
ASKED_TOO_LATE = "warning #26 Grid API function getSelectedRows()"


def chromium() -> str | None:
    """Path of the machine's Chromium; None when there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def open_browser() -> Iterator[Any]:
    """A Playwright browser. Raises FileNotFoundError when the machine has no Chromium."""
    from playwright.sync_api import sync_playwright

    path = chromium()
    if path is None:
        raise FileNotFoundError(f"no Chromium on PATH; looked for: {', '.join(NAMES)}")
    # It would follow the proxy of the machine even to the loopback address.
    quiet = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS), env=quiet)
        try:
            yield browser
        finally:
            browser.close()


def _close_sockets(server: Any) -> None:
    """End the loop of ``server``, in its own thread, by closing every socket: also those of idle browsers, with
    the temporary files that hold the rest of their answers.
    """
    for item in list(server._map.values()):
        item.handle_close()


_last_port: list[int] = [0]


def _free_port() -> int:
    """That of the dashboard before, if it is free again; 0, any other, if not."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", _last_port[0]))
        except OSError:
            return 0
    return _last_port[0]


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """The dashboard of the runs below ``directory``; the address without a trailing slash.

    Its port is that of the dashboard before it, if that is free: the browser has its scripts then.
    """
    from waitress.server import create_server

    from commprof_dash.app import create_app

    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    server = create_server(create_app(directory).server, host="127.0.0.1", port=_free_port(), threads=8)
    _last_port[0] = int(server.effective_port)
    thread = threading.Thread(target=server.run, name="dashboard", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.effective_port}"
    finally:
        server.trigger.pull_trigger(lambda: _close_sockets(server))
        thread.join(timeout=10)
        server.task_dispatcher.shutdown()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The shared browser; the test is skipped, with the reason, where there is no Chromium."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if chromium() is None:
        pytest.skip(
            f"no Chromium on PATH (looked for {', '.join(NAMES)}); on Debian: apt-get install chromium"
        )
    with open_browser() as started:
        yield started


class Watched:
    """A page whose requests, console errors, warnings of its tables and uncaught exceptions are kept, until it is closed.

    With ``free`` it is added to that list when it is closed, without anything that the next test could see.
    """

    def __init__(self, page: Any, free: list[Any] | None = None) -> None:
        self.page = page
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._free = free
        self._settled = 0
        self._listeners: dict[str, Any] = {
            "request": lambda request: self.requests.append(request.url),
            "pageerror": lambda error: self.errors.append(f"exception: {error}"),
            "console": lambda line: (
                (line.type == "error" or "AG Grid" in line.text)
                and ASKED_TOO_LATE not in line.text
                and self.errors.append(f"console: {line.text}")
            ),
            "response": lambda answer: (
                answer.status >= 400 and self.errors.append(f"{answer.status}: {answer.url}")
            ),
        }
        for event, listener in self._listeners.items():
            page.on(event, listener)

    def close(self) -> None:
        """Close the page, or clean it and leave it to the next test."""
        if self._free is None:
            self.page.context.close()
            return
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)
        for other in self.page.context.pages:
            if other != self.page:
                other.close()
        if self.page.url.startswith("http"):
            self.page.evaluate("localStorage.clear(); sessionStorage.clear();")
            self.page.goto("about:blank")
        self._free.append(self.page)
        self._free = None

    def foreign_requests(self, base: str) -> list[str]:
        """Requests that left the dashboard."""
        inside = (base + "/", "data:", "blob:")
        return [url for url in self.requests if not url.startswith(inside)]

    def open(self, url: str, ready: str = ".page-body > .card, .page-body > .message") -> None:
        """Go there and wait until the page is drawn."""
        self.page.goto(url)
        self.page.wait_for_selector(ready, timeout=60_000)
        self.settle()

    def settle(self) -> None:
        """Wait until every graph on the page has drawn its data, every open fold has its content, and no callback is under
        way, in three frames in turn: a graph whose script is still loaded is not on the page for a moment.
        """
        self._settled += 1
        self.page.wait_for_function(
            """(call) => {
                const calm = !document.querySelector('[data-dash-is-loading="true"]')
                    && [...document.querySelectorAll('details[data-fold][open]')].every((fold) => fold.children.length > 1)
                    && [...document.querySelectorAll('.dash-graph')].every((graph) => {
                        const plot = graph.querySelector('.js-plotly-plot');
                        return plot && plot.calcdata && plot.querySelector('.main-svg');
                    });
                const frames = window.calmFrames?.call === call ? window.calmFrames.frames : 0;
                window.calmFrames = {call, frames: calm ? frames + 1 : 0};
                return window.calmFrames.frames >= 3;
            }""",
            arg=self._settled,
            timeout=60_000,
        )


_free_pages: dict[Any, list[Any]] = {}  # by browser


def watched(browser: Any, viewport: dict[str, int], color_scheme: str = "light", **context: Any) -> Watched:
    """A page so wide and in this scheme, which a test before may have used: it has loaded and compiled the scripts then.

    With anything else for the ``context`` it is a new page in a context of its own. Close it in the end.
    """
    if context:
        return Watched(
            browser.new_context(viewport=viewport, color_scheme=color_scheme, **context).new_page()
        )
    free = _free_pages.setdefault(browser, [])
    page = free.pop() if free else browser.new_context(accept_downloads=True).new_page()
    page.set_viewport_size(viewport)
    page.emulate_media(color_scheme=color_scheme)
    return Watched(page, free)


DRAWN_BARS = """(name) => {
    const graph = document.querySelector(`#card-${name} .js-plotly-plot`);
    return graph.calcdata.filter((points) => points[0].trace.type === 'bar').map((points) => ({
        name: points[0].trace.name,
        rows: points.map((point) => ({position: point.p, value: point.s})),
    }));
}"""


def drawn_bars(page: Any, card: str) -> dict[str, list[float]]:
    """For each series of the bar chart in ``card``, the sizes of its bars from the first row on, as plotly drew them."""
    return {
        series["name"]: [row["value"] for row in sorted(series["rows"], key=lambda row: row["position"])]
        for series in page.evaluate(DRAWN_BARS, card)
    }
