"""A real Chromium and a served dashboard for tests. Tests that use them have the marker ``browser``."""

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
    # Tests leave a page before optimized scripts pay off. Without the optimizing compilers, a test takes 8 % less time.
    "--js-flags=--no-opt --no-maglev",
)
# dash-ag-grid reads the selected rows in a timer. The timer may fire after the browser has left the page of the
# table, and then AG Grid prints this warning.
ASKED_TOO_LATE = "warning #26 Grid API function getSelectedRows()"


def chromium() -> str | None:
    """Return the path of the Chromium on this machine; None if there is no Chromium."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def open_browser() -> Iterator[Any]:
    """Yield a Playwright browser.

    Raises:
        FileNotFoundError: this machine has no Chromium.
    """
    from playwright.sync_api import sync_playwright

    path = chromium()
    if path is None:
        raise FileNotFoundError(f"no Chromium on PATH; looked for: {', '.join(NAMES)}")
    # Chromium would use the proxy of the machine even for the loopback address.
    quiet = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS), env=quiet)
        try:
            yield browser
        finally:
            browser.close()


def _close_sockets(server: Any) -> None:
    """Stop the loop of ``server`` by closing every socket; call this in the thread of the server.

    This also closes the sockets of idle browsers and the temporary files with the rest of their responses.
    """
    for item in list(server._map.values()):
        item.handle_close()


_last_port: list[int] = [0]


def _free_port() -> int:
    """Return the port of the previous dashboard if the port is free again.

    Otherwise return 0, for which the system chooses a port.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", _last_port[0]))
        except OSError:
            return 0
    return _last_port[0]


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """Serve the dashboard of the runs below ``directory``, and yield its address without a trailing slash.

    The dashboard uses the port of the previous dashboard if that port is free. The browser then already has the
    scripts in its cache.
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
    """Yield the browser that all tests share. Skip the test with a reason if there is no Chromium."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if chromium() is None:
        pytest.skip(
            f"no Chromium on PATH (looked for {', '.join(NAMES)}); on Debian: apt-get install chromium"
        )
    with open_browser() as started:
        yield started


class Watched:
    """A page that collects its requests, failed responses, console errors, table warnings and uncaught exceptions.

    With ``free``, ``close`` adds the page to this list for the next test, after it has removed everything that the
    next test could see.
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
        """Close the page, or clean the page and keep it for the next test."""
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
        """Return the URLs of requests to other places than the dashboard at ``base``."""
        inside = (base + "/", "data:", "blob:")
        return [url for url in self.requests if not url.startswith(inside)]

    def open(self, url: str, ready: str = ".page-body > .card, .page-body > .message") -> None:
        """Open ``url`` and wait until the page is drawn."""
        self.page.goto(url)
        self.page.wait_for_selector(ready, timeout=60_000)
        self.settle()

    def settle(self) -> None:
        """Wait until the page is complete in three successive frames.

        A page is complete if every graph has drawn its data, every open fold has its content, and no callback is in
        progress. One frame is not enough, because a graph is briefly not on the page while its script is loading.
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


_free_pages: dict[Any, list[Any]] = {}  # key: the browser


def watched(browser: Any, viewport: dict[str, int], color_scheme: str = "light", **context: Any) -> Watched:
    """Return a page with this viewport and color scheme, which the caller must close.

    The page may be one that an earlier test used, because such a page has already loaded and compiled the scripts.
    If ``context`` contains further options, the page is new and has a separate browser context.
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
    """Return the sizes of the bars that plotly drew in the bar chart of ``card``, by series.

    The sizes are in the order of the rows, from the first row on.
    """
    return {
        series["name"]: [row["value"] for row in sorted(series["rows"], key=lambda row: row["position"])]
        for series in page.evaluate(DRAWN_BARS, card)
    }
