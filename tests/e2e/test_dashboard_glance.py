"""In a real Chromium of 1440 x 900 pixels, every page shows its answer without scrolling."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from commprof.analysis import api
from commprof.cli import execute
from support.browser import served, watched
from support.detailed_runs import aligned_run, detailed_run
from support.runs import SyntheticRun

pytestmark = [pytest.mark.browser, pytest.mark.shared_answers]

SCREEN = {"width": 1440, "height": 900}
WIDE = 1200  # the width in pixels from which on the server draws for a wide window
KEYS = ("reduce_scatter", "use_multi_rank_bucket_allreduce")
NAMES = ("true", "false")
MIB = 1 << 20
SETTINGS = "&".join(
    f"run={scatter}-{multi}-{repeat}" for scatter in NAMES for multi in NAMES for repeat in range(2)
)
BOTTOM = "(query) => document.querySelector(query).getBoundingClientRect().bottom"


def write_setting(path, scatter: bool, multi: bool) -> None:
    """Write a run of two ranks with the two keys of DeepSpeed and the operations that DeepSpeed issues for them."""
    keys = {"stage": 2} | dict(zip(KEYS, (scatter, multi), strict=True))
    run = SyntheticRun(2, config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": keys})
    run.add_parameters({"weight": MIB // 4})
    op = "reduce" if scatter and not multi else "all_reduce"
    for step in range(4):
        run.add_step(step, duration_ns=10_000_000, loss=2.0, rss_bytes=1 << 30)
        run.add_collective(
            op, step=step, payload_bytes=MIB, peer=0, purpose="gradient_reduce", exposed_ns=1_234_000
        )
        run.add_collective(
            "all_gather", step=step, payload_bytes=MIB, purpose="parameter_gather", exposed_ns=1_000
        )
    run.write(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("glance")
    for scatter in (True, False):
        for multi in (True, False):
            for repeat in range(2):
                write_setting(base / f"{scatter}-{multi}-{repeat}".lower(), scatter, multi)
    detailed_run().write(base / "late")
    aligned_run(base / "aligned")
    SyntheticRun(2, state="failed").write(base / "failed")
    return base


@pytest.fixture(scope="module")
def base_url(base):
    with served(base) as url:
        yield url


@pytest.fixture
def view(browser, base_url):
    view = watched(browser, viewport=SCREEN)
    yield view
    view.close()
    assert view.errors == []
    assert view.foreign_requests(base_url) == []


def awaited_drawing(view):
    """Wait until the server has drawn the page again."""
    return view.page.expect_response(lambda answer: "_dash-update-component" in answer.url)


@pytest.fixture(scope="module")
def opened_once(browser, base_url):
    """Open the page of an address only once for several tests.

    These tests only read the page or change the size of its window.
    """
    views = {}

    def open_once(address: str, viewport: dict[str, int] = SCREEN):
        view = views.get(address)
        if view is None:
            view = views[address] = watched(browser, viewport=viewport)
            view.open(base_url + address)
        elif view.page.viewport_size != viewport:
            is_wide, was_wide = (size["width"] >= WIDE for size in (viewport, view.page.viewport_size))
            with awaited_drawing(view) if is_wide != was_wide else nullcontext():
                view.page.set_viewport_size(viewport)
            view.settle()
        return view

    yield open_once
    for view in views.values():
        view.close()
        assert view.errors == []
        assert view.foreign_requests(base_url) == []


def test_compare_answers_without_scrolling_and_takes_two_screens(opened_once):
    view = opened_once(f"/compare?{SETTINGS}")
    assert "Set reduce_scatter=true, use_multi_rank_bucket_allreduce=false" in view.page.inner_text(".told")
    assert view.page.evaluate(BOTTOM, ".told") <= 600
    assert view.page.evaluate(BOTTOM, "#card-levels .js-plotly-plot") <= SCREEN["height"]
    assert view.page.evaluate("document.documentElement.scrollHeight") <= 2 * SCREEN["height"]
    labels = view.page.locator("#card-levels .annotation-text").all_text_contents()
    assert sum("(x2)" in label for label in labels) == 4  # the repeats of a setting share one row
    assert view.page.locator("#card-settings summary").all_inner_texts() == ["x2"] * 4


def test_on_a_telephone_every_setting_is_seen_and_no_title_is_squeezed(opened_once):
    view = opened_once(f"/compare?{SETTINGS}", {"width": 400, "height": 900})
    inside = (
        "[...document.querySelectorAll('#card-settings tbody td')].every((cell) => {"
        " const box = cell.getBoundingClientRect(), card = cell.closest('.card').getBoundingClientRect();"
        " return box.left >= card.left && box.right <= card.right && box.bottom <= card.bottom; })"
    )
    assert view.page.evaluate(inside)
    first = view.page.locator("#card-settings tbody tr").first.inner_text()
    for heading in ("Gradient reduction", "Executed", "Step time"):
        assert view.page.evaluate(
            "(name) => [...document.querySelectorAll('#card-settings tbody tr:first-child td')]"
            ".some((cell) => getComputedStyle(cell, '::before').content.includes(name))",
            heading,
        )
    assert "1.50 MiB" in first
    widths = view.page.evaluate(
        "['h2', '.card-head'].map((one) => document.querySelector('#card-levels ' + one).clientWidth)"
    )
    assert widths[0] == widths[1]
    assert view.page.evaluate("document.documentElement.scrollWidth") <= 400


def test_overview_answers_in_its_first_600_pixels(opened_once, base):
    view = opened_once("/overview?run=true-true-0")
    lines = {text.split("\n")[0]: text for text in view.page.locator(".told").all_inner_texts()}
    ledger = api.verify(base / "true-true-0")
    chip = {"closed": "Ledger closed", "mismatch": "Ledger does not close"}[str(ledger.state)]
    assert list(lines) == ["Nothing is missing", chip, "reduce_scatter \u2192 all_reduce", "What to set"]
    assert ledger.remedy in lines["What to set"]
    assert "zero_optimization.gradient_reduction: reduce_scatter" in lines["What to set"]
    assert (
        "of the issued payload is explained" in ledger.sentences[-1] and ledger.sentences[-1] in lines[chip]
    )
    assert "use_multi_rank_bucket_allreduce" in lines["reduce_scatter \u2192 all_reduce"]
    tiles = {text.split("\n")[0]: text for text in view.page.locator(".tile").all_inner_texts()}
    assert "10.0 ms" in tiles["Step time"]
    assert "1.50 MiB" in tiles["Wire bytes per step"]
    bottoms = view.page.evaluate(
        "[...document.querySelectorAll('.tile, .told')].map((one) => one.getBoundingClientRect().bottom)"
    )
    assert max(bottoms) <= 600


@pytest.mark.parametrize("width", [1440, 1920])
def test_the_tiles_of_overview_take_the_width_of_the_page(opened_once, width):
    view = opened_once("/overview?run=true-true-0", {"width": width, "height": 900})
    rights = view.page.evaluate(
        "['.tile:last-child', '#card-by-step', '#page'].map((one) => {"
        " const box = document.querySelector(one).getBoundingClientRect(); return box.right; })"
    )
    tiles, card, page = rights
    assert tiles == card and width - page <= 20 and page - card <= 24


@pytest.mark.long
def test_overview_names_the_straggler_in_its_first_600_pixels(view, base_url):
    view.open(f"{base_url}/overview?run=late")
    line = view.page.locator(".told", has_text="There is a straggler")
    assert "rank 2" in line.inner_text().lower()
    assert line.bounding_box()["y"] + line.bounding_box()["height"] <= 600


def test_a_run_without_a_step_has_one_line_in_the_place_of_empty_cards(view, base_url):
    view.open(f"{base_url}/overview?run=failed")
    assert view.page.locator(".tile").count() == 0
    lines = view.page.locator(".told").all_inner_texts()
    assert sum("Failed, exit code 1" in text for text in lines) == 1
    assert sum("no training steps" in text for text in lines) == 1
    titles = view.page.locator(".card h2").all_inner_texts()
    assert not {"Traffic by purpose", "Step time and exposed communication", "Resources over the run"} & set(
        titles
    )


def test_the_exposed_time_is_that_of_the_report_on_both_pages(opened_once, base, capsys):
    assert execute(["report", str(base / "true-true-0")]) == 0
    report = " ".join(capsys.readouterr().out.split())
    view = opened_once("/compare?run=true-true-0")
    shown = view.page.locator("#card-settings tbody td").all_inner_texts()
    (compared,) = [text for text in shown if text.endswith("%")]
    view = opened_once("/overview?run=true-true-0")
    _, time, share = view.page.locator(".tile", has_text="Exposed communication").inner_text().split("\n")
    assert compared == f"{time}, {share.removesuffix(' of the step')}"
    assert all(f" {part} " in report for part in compared.split(", "))
    assert time != "not known"


# The selector of the answer of each page, and a text that the answer contains. The text of a chart is that of its card.
ANSWERS = {
    "/": (  # the fourth row; the rows above contain settings of three lines
        ".ag-row:has-text('false-false-1'):has-text('10.0 ms')",
        "false-false-1 complete stage=2, reduce_scatter=false, use_multi_rank_bucket_allreduce=false 10.0 ms",
    ),
    "/plan": ("#body .message", "Use stage="),
    "/matrix": ("#card-matrix .card-subtitle", "Most: 58.6 KiB from rank 0 to 1"),
    "/buckets": (".told", "embedding.weight (1 parameter, 6,000 elements)"),
    "/alignment": ("#body .message", "Records and log differ"),
    "/stragglers": ("#body .message", "Rank 2"),
    "/bandwidth": (".told", "Bus bandwidth: all_gather of 39.1 KiB on ranks 0-3"),
    "/records": (".ag-row[row-index='0']", "0.019000 s 0 1 backward send"),
}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.long] * (path not in ("/plan", "/matrix"))) for path in ANSWERS],
)
def test_every_other_page_answers_in_its_first_600_pixels(view, base_url, path):
    place, text = ANSWERS[path]
    view.open(f"{base_url}{path}?run={'aligned' if path == '/alignment' else 'late'}", ready=place)
    view.page.wait_for_function("document.querySelector('#progress').innerText === ''")
    answer = view.page.locator(place).first
    assert text in " ".join(answer.inner_text().split())
    first_line = answer.evaluate(
        "(one) => { const range = document.createRange(); range.selectNodeContents(one);"
        " return range.getClientRects()[0].bottom; }"
    )
    assert first_line <= 600
    assert path == "/plan" or answer.bounding_box()["y"] + answer.bounding_box()["height"] <= 600


def test_the_columns_of_records_show_their_text_and_fit_the_page(view, base_url):
    """The text of the columns that are shown first is complete, for example a purpose such as "gradient_reduce"."""
    view.open(f"{base_url}/records?run=late&filter=purpose:=:parameter_broadcast", ready=".ag-row")
    cut = view.page.evaluate(
        "() => [...document.querySelectorAll('.ag-header-cell-text, .ag-row .ag-cell-value')]"
        ".filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.innerText)"
    )
    viewport = view.page.locator("#records-grid .ag-body-horizontal-scroll-viewport")
    assert cut == [] and viewport.evaluate("(one) => one.scrollWidth - one.clientWidth") <= 0


@pytest.mark.long
def test_the_timeline_is_in_the_window_and_begins_in_its_first_half(view, base_url):
    view.open(f"{base_url}/timeline?run=late")
    box = view.page.locator("#card-timeline .nsewdrag").first.bounding_box()
    assert box["y"] <= SCREEN["height"] / 2 and box["y"] + box["height"] <= SCREEN["height"]


@pytest.mark.long
def test_the_grid_is_offered_only_without_holes(view, base_url):
    view.open(f"{base_url}/compare?{SETTINGS}")
    with awaited_drawing(view):
        view.page.get_by_text("Grid of the two keys").click()
    view.page.wait_for_selector("#card-levels .grid-cell")
    view.page.wait_for_function("location.search.includes('view=grid')")
    assert view.page.locator("#card-levels .grid-cell").count() == 4
    three = "&".join(f"run={name}-0" for name in ("true-true", "true-false", "false-true"))
    view.open(f"{base_url}/compare?view=grid&{three}")
    assert view.page.get_by_text("Grid of the two keys").count() == 0
    assert view.page.locator("#card-levels .grid-cell").count() == 0
    assert view.page.locator("#card-levels .js-plotly-plot").count() == 1


@pytest.mark.long
def test_compare_on_a_telephone_is_no_wider_than_it(browser, base_url):
    view = watched(browser, viewport={"width": 400, "height": 844})
    view.open(f"{base_url}/compare")
    view.page.get_by_text("Choose runs").click()
    for scheme in ("light", "dark"):
        with awaited_drawing(view) if scheme == "dark" else nullcontext():
            view.page.emulate_media(color_scheme=scheme)
        view.settle()
        assert view.page.evaluate("document.documentElement.dataset.mantineColorScheme") == scheme
        assert view.page.locator(".control-wide").is_visible()
        assert view.page.evaluate("document.documentElement.scrollWidth") <= 400, scheme
    view.close()
    assert view.errors == []


@pytest.mark.long
def test_a_wide_window_has_long_labels_in_one_line_and_a_narrow_one_wraps_them(opened_once):
    view = opened_once(f"/compare?{SETTINGS}")
    lines = """() => Math.max(...[...document.querySelectorAll('#card-levels .annotation-text')]
        .filter((text) => text.textContent.includes('allreduce')).map((text) => text.querySelectorAll('.line').length))"""
    assert view.page.evaluate(lines) == 0, "one line has no parts"
    view.page.set_viewport_size({"width": 700, "height": 900})
    view.page.wait_for_function(f"({lines})() > 1")
    view.page.set_viewport_size(SCREEN)
    view.page.wait_for_function(f"({lines})() === 0")


def test_the_glossary_is_linked_and_defines_the_terms_of_a_chart(opened_once):
    view = opened_once("/compare?run=true-true-0")
    view.page.get_by_text("How to read this").first.click()
    with view.page.context.expect_page() as opened:
        view.page.locator("#card-levels").get_by_role("link", name="glossary").click()
    opened.value.wait_for_load_state()
    terms = opened.value.locator("dfn").all_inner_texts()
    assert {"wire bytes", "exposed communication"} <= {term.split(",")[0].split(" (")[0] for term in terms}
    assert (
        view.page.get_by_role("link", name="Glossary", exact=True).get_attribute("href")
        == "assets/glossary.html"
    )
