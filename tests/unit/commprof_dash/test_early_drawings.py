"""Test pages that are drawn while the browser loads Dash's code.

Each drawing is used once, and only by a browser that requests exactly this drawing.
"""

import threading
import time

import pytest

from commprof_dash import app as dash_app
from commprof_dash import early_drawings
from commprof_dash.app import create_app
from commprof_dash.early_drawings import EarlyDrawings
from support.dash_requests import page_of
from support.runs import SyntheticRun


def await_no_thread():
    """Wait until no drawing thread is left.

    A thread would keep a DuckDB engine, which a forked process could not free.
    """
    until = time.monotonic() + 60
    while any(each.name == "commprof early drawing" for each in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.001)


class Drawings(EarlyDrawings):
    """Drawings that are texts. Each drawing is complete when ``begin`` returns."""

    def __init__(self):
        super().__init__(self._text)
        self.calls = []
        self._has_begun = threading.Semaphore(0)

    def _text(self, *words):
        self.calls.append(words)
        self._has_begun.release()
        return " ".join(words)

    def begin(self, pathname, search):
        super().begin(pathname, search)
        assert self._has_begun.acquire(timeout=60)
        await_no_thread()


@pytest.fixture
def drawings():
    return Drawings()


def test_a_page_is_drawn_before_the_browser_asks_and_taken_once(drawings):
    drawings.begin("/overview", "?run=a")
    assert drawings.take("/overview", "?run=a", "light wide") == "/overview ?run=a light wide"
    assert drawings.take("/overview", "?run=a", "light wide") is None
    assert drawings.calls == [("/overview", "?run=a", "light wide")]


def test_another_run_or_scheme_is_drawn_anew_and_the_next_page_in_that_scheme(drawings):
    drawings.begin("/overview", "?run=a")
    assert drawings.take("/overview", "?run=b", "light wide") is None
    assert drawings.take("/overview", "?run=a", "dark") is None
    drawings.begin("/compare", "")
    assert drawings.take("/compare", "", "dark") == "/compare  dark"


def test_a_page_is_not_drawn_early_beside_another_one():
    first, has_begun = threading.Event(), threading.Event()

    def draw(pathname, *_):
        has_begun.set()
        return first.wait(60)

    drawings = EarlyDrawings(draw)
    drawings.begin("/slow", "")
    assert has_begun.wait(60)
    drawings.begin("/quick", "")
    assert drawings.take("/quick", "", "light wide") is None
    first.set()
    assert drawings.take("/slow", "", "light wide") is True


def test_what_no_browser_asked_for_is_dropped(drawings, monkeypatch):
    drawings.begin("/overview", "?run=a")
    drawings.begin("/overview", "?run=b")
    assert drawings.take("/overview", "?run=a", "light wide") is None
    assert drawings.take("/overview", "?run=b", "light wide") == "/overview ?run=b light wide"
    drawings.begin("/overview", "?run=a")
    monkeypatch.setattr(early_drawings, "_SECONDS", 0.0)
    assert drawings.take("/overview", "?run=a", "light wide") is None


def test_without_a_thread_the_page_is_drawn_when_the_browser_asks(monkeypatch):
    drawings = EarlyDrawings(lambda *_: "drawn")

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        drawings.begin("/overview", "")
    assert drawings.take("/overview", "", "light wide") is None
    drawings.begin("/overview", "")
    assert drawings.take("/overview", "", "light wide") == "drawn"


def test_an_error_reaches_the_browser_and_the_thread_ends():
    def draw(pathname, search, scheme):
        raise OSError("the disk is gone")

    drawings = EarlyDrawings(draw)
    drawings.begin("/overview", "")
    with pytest.raises(OSError, match="the disk is gone"):
        drawings.take("/overview", "", "light wide")
    await_no_thread()


def test_a_browser_that_loads_a_page_has_it_drawn_once_from_its_request_for_html(tmp_path, monkeypatch):
    run = SyntheticRun(world_size=2)
    run.add_step(0, begin_ns=0, duration_ns=1_000)
    run.add_collective("all_reduce", payload_bytes=4096, step=0, purpose="gradient_reduce")
    run.write(tmp_path / "one")
    drawn, draw_page = [], dash_app.draw_page

    def counted(page, *words):
        drawn.append((page.path, words[2]))
        return draw_page(page, *words)

    monkeypatch.setattr(dash_app, "draw_page", counted)
    app = create_app(tmp_path)
    assert app.server.test_client().get("/matrix?run=one").status_code == 200
    until = time.monotonic() + 60
    while not drawn and time.monotonic() < until:
        time.sleep(0.01)
    assert drawn == [("/matrix", "?run=one")]
    assert "Bytes from rank to rank" in page_of(app, "/matrix", "?run=one", "light wide")
    assert drawn == [("/matrix", "?run=one")]
    page_of(app, "/matrix", "?run=one")
    assert len(drawn) == 2
    await_no_thread()
