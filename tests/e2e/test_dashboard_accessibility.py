"""axe-core finds no violation of accessibility rules on any page of the dashboard.

This includes pages that show a message instead of data, and open lists and menus.
"""

from __future__ import annotations

import pytest

from commprof_dash.pages import PAGES
from support.browser import served, watched
from support.detailed_runs import aligned_run, detailed_run
from support.runs import SyntheticRun

pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
pytestmark = [pytest.mark.browser, pytest.mark.shared_answers]

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
# axe finds no further differences in the remaining two combinations of color scheme and width.
LOOKS = [("light", 1280, 900), ("dark", 400, 900)]
ZOOMED = ("light", 720, 450)  # the size in CSS pixels of a window of 1440 x 900 at a zoom of 200 %
RUN_OF = {"/alignment": "aligned"}  # all other pages show the run called plain
ADDRESSES = {
    "chosen in the timeline": "/timeline?run=plain&from=0&to=30000000&record=0.0.1000.5",
    "what cannot be understood": "/matrix?run=plain&steps=abc",
    "counters that were not read": "/matrix?run=plain&measure=counters",
    "no buckets": "/buckets?run=bare",
    "not aligned": "/alignment?run=plain",
    "no such run": "/overview?run=gone",
    "a broken run": "/overview?run=broken",
    "one of two is broken": "/compare?run=plain&run=broken",
    "no such page": "/nowhere",
}


@pytest.fixture(scope="module")
def base_url(tmp_path_factory):
    base = tmp_path_factory.mktemp("accessibility")
    detailed_run().write(base / "plain")
    aligned_run(base / "aligned")
    SyntheticRun(2, state="failed", lost=3).write(base / "bare")
    (base / "broken").mkdir()
    (base / "broken" / "run.json").write_text("{")
    with served(base) as url:
        yield url


@pytest.fixture(scope="module")
def axe():
    from axe_playwright_python.sync_playwright import Axe

    return Axe()


@pytest.fixture(scope="module")
def view(browser):
    """Yield a page that all tests share, so that the scripts are loaded only once."""
    view = watched(browser, viewport={"width": 1280, "height": 900}, color_scheme="light")
    yield view
    view.close()


# Mantine adds an open list at the end of the body, so that no card cuts the list off. The input of the list refers to
# the list by aria-controls.
OF_OPEN_LISTS = frozenset({"region"})


def objections(axe, view, but: frozenset[str] = frozenset()) -> list[str]:
    """Return the violations that axe finds, one text for each rule that is not in ``but``.

    Each text describes the violation and its first place.
    """
    found = axe.run(
        view.page, options={"runOnly": {"type": "tag", "values": RULES}, "resultTypes": ["violations"]}
    )
    return [
        f"{rule['id']} at {len(rule['nodes'])} places: {rule['nodes'][0]['html'][:300]}: "
        f"{rule['nodes'][0]['failureSummary'][:300]}"
        for rule in found.response["violations"]
        if rule["id"] not in but
    ]


def begin_at(view, url: str, width: int = 1280) -> None:
    """Open ``url`` with the light color scheme in a window of this width."""
    view.page.emulate_media(color_scheme="light")
    view.page.set_viewport_size({"width": width, "height": 900})
    view.open(url)


def look(view, scheme: str, width: int, height: int = 900) -> None:
    """Change the color scheme and the size of the window, and wait until the page is drawn again."""
    view.page.emulate_media(color_scheme=scheme)
    view.page.set_viewport_size({"width": width, "height": height})
    view.page.wait_for_function(
        "(scheme) => document.documentElement.dataset.mantineColorScheme === scheme", arg=scheme
    )
    view.page.wait_for_timeout(150)  # the server draws the figures again for the color scheme
    view.settle()


def open_details(view) -> None:
    view.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    view.settle()


# The pages that `make test` checks. The long sets check all pages.
SAMPLE = ("/overview",)


@pytest.mark.parametrize(
    "path",
    [pytest.param(page.path, marks=[pytest.mark.long] * (page.path not in SAMPLE)) for page in PAGES],
)
def test_every_page_in_both_schemes_on_a_telephone_and_at_200_percent(axe, view, base_url, path):
    begin_at(view, f"{base_url}{path}?run={RUN_OF.get(path, 'plain')}")
    for seen in (*LOOKS, ZOOMED):
        look(view, *seen)
        open_details(view)
        assert objections(axe, view) == [], seen
    assert view.page.evaluate("document.documentElement.scrollWidth") <= 720, "something is beside the window"
    assert view.errors == []


@pytest.mark.parametrize(
    "what",
    [each if each == "a broken run" else pytest.param(each, marks=pytest.mark.long) for each in ADDRESSES],
)
def test_what_pages_say_instead(axe, view, base_url, what):
    begin_at(view, base_url + ADDRESSES[what])
    for scheme in ("light", "dark"):
        look(view, scheme, 1280)
        open_details(view)
        assert objections(axe, view) == [], scheme


@pytest.mark.long
def test_an_empty_directory(axe, view, tmp_path):
    with served(tmp_path) as url:
        for path in ("/", "/overview"):
            begin_at(view, url + path)
            assert objections(axe, view) == [], path


@pytest.mark.long
def test_open_lists_and_the_menu_of_a_telephone(axe, view, base_url):
    begin_at(view, f"{base_url}/matrix?run=plain")
    view.page.get_by_role("textbox", name="Operation").click()
    view.page.wait_for_selector("[role=option]:visible")
    assert objections(axe, view, OF_OPEN_LISTS) == [], "a list"
    begin_at(view, f"{base_url}/compare?run=plain")
    view.page.get_by_text("Choose runs").click()
    view.page.locator(".control-wide input").first.click()
    view.page.wait_for_selector("[role=option]:visible")
    assert objections(axe, view, OF_OPEN_LISTS) == [], "a list of several"
    begin_at(view, f"{base_url}/", width=400)
    view.page.get_by_role("button", name="Show the pages").click()
    view.page.wait_for_selector("nav a:visible")
    assert objections(axe, view) == [], "the menu"


def tab_to(page, what: str) -> None:
    """Press Tab until the element with the text or label ``what`` has the focus.

    Also assert that the focus is visible.
    """
    for _ in range(80):
        page.keyboard.press("Tab")
        named, outline = page.evaluate(
            """() => { const one = document.activeElement, label = one.labels?.[0];
              const ring = (each) => each && getComputedStyle(each).outlineStyle !== 'none';
              return [(one.ariaLabel || label?.innerText || one.innerText || '').trim(),
                ring(one) || ring(one.nextElementSibling) || ring(label)]; }"""
        )
        if named == what:
            assert outline, f"the focus on {what} is not seen"
            return
    raise AssertionError(f"Tab does not reach {what}")


@pytest.mark.long
def test_pages_are_reached_and_a_bucket_is_chosen_with_the_keyboard_only(view, base_url):
    begin_at(view, f"{base_url}/bandwidth?run=plain")
    tab_to(view.page, "Skip to the page")
    view.page.keyboard.press("Enter")
    assert view.page.evaluate("document.activeElement.closest('#page') !== null")
    view.page.evaluate("document.activeElement.blur(); window.getSelection().removeAllRanges()")
    tab_to(view.page, "Buckets")
    view.page.keyboard.press("Enter")
    view.page.wait_for_selector(".told:has-text('Bucket 0')")
    tab_to(view.page, "0")
    view.page.keyboard.press("ArrowRight")
    view.page.wait_for_selector(".told:has-text('Bucket 1')")
    assert "head.weight" in view.page.inner_text(".told:has-text('Bucket 1')")
