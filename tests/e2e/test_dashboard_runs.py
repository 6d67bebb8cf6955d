"""The table of runs in a real Chromium fills automatically and can be searched, sorted, filtered, opened and ticked."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest

from commprof.analysis import api
from support.browser import served, watched
from support.runs import SyntheticRun

pytestmark = [pytest.mark.browser, pytest.mark.shared_answers]

DURATIONS = {"fast": 1_000_000, "slow": 9_000_000}
SWEEP = "sweep-of-stages"


def write_run(path, duration_ns, started, **options):
    run = SyntheticRun(2, started_realtime_ns=1_700_000_000_000_000_000 + started * 10**9, **options)
    for step in range(3):
        run.add_step(step, begin_ns=step * 10_000_000, duration_ns=duration_ns)
        run.add_collective(
            "all_reduce", step=step, payload_bytes=4000, purpose="gradient_reduce", exposed_ns=250_000
        )
    run.write(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    for number, (name, duration) in enumerate(DURATIONS.items()):
        write_run(base / name, duration, number)
    for stage in range(3):
        point = {"zero_optimization.stage": stage}
        write_run(
            base / SWEEP / f"stage-{stage}",
            (2 + stage) * 1_000_000,
            10 + stage,
            sweep={"name": SWEEP, "point": point, "repeat": 0},
            config={"zero_optimization": {"stage": stage}},
            state="failed" if stage == 2 else "complete",
        )
    return base


@pytest.fixture(scope="module")
def base_url(runs):
    with served(runs) as url:
        yield url


ROWS = """() => [...document.querySelectorAll('#runs-grid .ag-center-cols-container .ag-row')]
    .sort((one, other) => one.getAttribute('row-index') - other.getAttribute('row-index'))
    .map((row) => row.querySelector('[col-id=name]').innerText.replace(/^[^ ]* (sweep.*) \\(.*/, '$1'))"""


def wait_for_rows(page, names: list[str]) -> None:
    page.wait_for_function(f"(names) => JSON.stringify(({ROWS})()) === JSON.stringify(names)", arg=names)


def opened(view, base_url: str, query: str = "") -> None:
    view.open(f"{base_url}/{query}")
    view.page.wait_for_selector("#runs-grid .ag-row")


def filled(page) -> None:
    page.wait_for_function("!document.querySelector('#runs-states').innerText.includes('Reading')")


def wait_for_query(page, key: str, values: list[str]) -> None:
    page.wait_for_function(
        "([key, values]) => JSON.stringify(new URLSearchParams(location.search).getAll(key)) === JSON.stringify(values)",
        arg=[key, values],
    )


MEMBERS = [f"{SWEEP}/stage-{stage}" for stage in (2, 1, 0)]


def test_a_sweep_is_one_row_that_opens_and_the_address_holds_it(page, base_url):
    opened(page, base_url)
    wait_for_rows(page.page, [SWEEP, "slow", "fast"])
    toggle = page.page.get_by_role("button", name=f"{SWEEP} (3 runs)")
    toggle.click()
    wait_for_rows(page.page, [SWEEP, *MEMBERS, "slow", "fast"])
    wait_for_query(page.page, "open", [SWEEP])
    opened(page, base_url, f"?open={SWEEP}")
    wait_for_rows(page.page, [SWEEP, *MEMBERS, "slow", "fast"])
    page.page.locator("#runs-grid [col-id=name]", has_text=f"{SWEEP} (").focus()
    page.page.keyboard.press("Enter")
    wait_for_rows(page.page, [SWEEP, "slow", "fast"])


def test_the_numbers_are_those_of_the_library_and_sort_the_rows_and_the_words_are_explained(
    page, runs, base_url
):
    opened(page, base_url)
    filled(page.page)
    cell = "#runs-grid .ag-row[row-id='run:slow'] [col-id={}]"
    setting = api.compare([runs / "slow"]).iloc[0]
    assert page.page.inner_text(cell.format("step_time")) == api.format_ns(int(setting["step_time_ns"]))
    assert page.page.inner_text(cell.format("sent")) == api.format_bytes(
        setting["executed_wire_bytes_per_step"]
    )
    share = api.exposure_per_step(runs / "slow").set_index("purpose").loc["all", "exposed_share"]
    assert page.page.inner_text(cell.format("exposed")) == f"{100 * share:.1f} %"
    assert page.page.inner_text(cell.format("verdict")) == "cannot tell"
    explained = page.page.inner_text("#card-runs .legend-line")
    for words in (
        "closed, every byte is explained",
        "mismatch, two levels contradict",
        "cannot tell, no mismatch",
    ):
        assert words in explained
    header = page.page.locator(".ag-header-cell[col-id=step_time] .ag-header-cell-label")
    header.click()
    wait_for_rows(page.page, ["fast", SWEEP, "slow"])
    header.click()
    wait_for_rows(page.page, ["slow", SWEEP, "fast"])
    wait_for_query(page.page, "order", ["-step_time"])
    opened(page, base_url, "?order=-step_time")
    filled(page.page)
    wait_for_rows(page.page, ["slow", SWEEP, "fast"])


@pytest.mark.long
def test_the_search_and_the_filters_look_into_closed_sweeps(page, base_url):
    opened(page, base_url)
    page.page.locator("#runs-search").fill("stage=1")
    wait_for_rows(page.page, [f"{SWEEP}/stage-1"])
    wait_for_query(page.page, "find", ["stage=1"])
    opened(page, base_url, "?find=stage%3D1")
    wait_for_rows(page.page, [f"{SWEEP}/stage-1"])
    page.page.locator("#runs-search").fill("")
    wait_for_rows(page.page, [SWEEP, "slow", "fast"])
    page.page.get_by_label("State Filter Input", exact=True).fill("failed")
    wait_for_rows(page.page, [f"{SWEEP}/stage-2"])
    page.page.wait_for_function("window.location.search.includes('where=')")
    address = page.page.url
    page.page.get_by_role("link", name="Overview", exact=True).click()
    page.page.wait_for_function("document.querySelector('h1')?.innerText === 'Overview'")
    page.page.go_back()
    page.page.wait_for_selector("#runs-grid .ag-row")
    wait_for_rows(page.page, [f"{SWEEP}/stage-2"])
    assert page.page.url == address


@pytest.mark.long
def test_a_ticked_sweep_stands_for_its_runs_and_goes_to_compare(page, base_url):
    opened(page, base_url)
    page.page.locator(f"#runs-grid .ag-row[row-id='sweep:{SWEEP}'] input[type=checkbox]").check()
    page.page.locator("#runs-grid .ag-row[row-id='run:slow'] input[type=checkbox]").check()
    page.page.wait_for_function("document.querySelector('#runs-compare-count').innerText === '4 ticked'")
    wait_for_query(page.page, "tick", [*MEMBERS, "slow"])
    assert parse_qs(urlsplit(page.page.locator("#runs-compare").get_attribute("href")).query)["run"] == [
        *MEMBERS,
        "slow",
    ]
    page.page.get_by_role("link", name="slow", exact=True).click()
    page.page.wait_for_function("document.title === 'Overview \u00b7 slow \u00b7 commprof'")


def test_a_run_that_appears_is_added_and_the_rest_stays(page, runs, base_url):
    opened(page, base_url, f"?open={SWEEP}&order=name")
    wait_for_rows(page.page, ["fast", "slow", SWEEP, *reversed(MEMBERS)])
    write_run(runs / "late", 5_000_000, 100)
    wait_for_rows(page.page, ["fast", "late", "slow", SWEEP, *reversed(MEMBERS)])
    filled(page.page)
    assert page.page.inner_text("#runs-grid .ag-row[row-id='run:late'] [col-id=step_time]") == "5.00 ms"


MAIN = [
    "name", "state", "setting", "step_time", "exposed", "sent", "verdict", "duration", "started",
]  # fmt: skip
CUT = """() => [...document.querySelectorAll('#runs-grid .ag-cell')]
    .map((cell) => cell.querySelector('.ag-cell-value') || cell)
    .filter((cell) => cell.scrollWidth > cell.clientWidth + 1).map((cell) => cell.innerText)"""


def shown_columns(page) -> list[str]:
    return page.evaluate(
        "() => [...document.querySelectorAll('#runs-grid .ag-header-row-column .ag-header-cell[col-id]')]"
        ".map((head) => head.getAttribute('col-id')).filter((name) => !name.startsWith('ag-Grid'))"
    )


LAST_COLUMN_FITS = """() => {
    const right = (part) => document.querySelector(`#runs-grid ${part}`).getBoundingClientRect().right;
    return right(".ag-header-row-column .ag-header-cell[col-id=started]") <= right(".ag-body-viewport");
}"""


@pytest.mark.long
def test_the_main_columns_fit_a_window_of_1440_pixels_and_all_are_a_click_away(browser, base_url):
    view = watched(browser, viewport={"width": 1440, "height": 900})
    try:
        opened(view, base_url, f"?open={SWEEP}&find=")
        filled(view.page)
        assert shown_columns(view.page) == MAIN
        view.page.wait_for_function(LAST_COLUMN_FITS)  # for some frames, the columns are still moving
        assert view.page.evaluate(CUT) == []
        row = view.page.locator(f"#runs-grid .ag-row[row-id='sweep:{SWEEP}']")
        assert row.locator("[col-id=step_time]").inner_text() == "2.00 to 4.00 ms"
        view.page.get_by_role("button", name="All columns").click()
        view.page.wait_for_function("location.search.includes('columns=all')")
        view.page.get_by_role("button", name="Fewer columns").wait_for()
        # The sweep stays unfolded.
        view.page.wait_for_selector(f"#runs-grid .ag-row[row-id='run:{MEMBERS[0]}']")
        assert set(shown_columns(view.page)) == {
            *MAIN,
            "ranks",
            "steps",
            "records",
            "script",
            "dropped",
            "unseen",
        }
        view.page.get_by_role("button", name="Fewer columns").click()
        view.page.get_by_role("button", name="All columns").wait_for()
        assert shown_columns(view.page) == MAIN
        assert view.errors == []
    finally:
        view.close()


LONG_KEYS = {"stage": 2, "reduce_scatter": True, "use_multi_rank_bucket_allreduce": False}
LONG_SETTING = "stage=2, reduce_scatter=true, use_multi_rank_bucket_allreduce=false"


@pytest.mark.long
def test_a_wide_window_shows_all_columns_and_dropped_records_have_theirs_in_every_window(browser, tmp_path):
    write_run(tmp_path / "short", 1_000_000, 0, lost=7, config={"zero_optimization": LONG_KEYS})
    with served(tmp_path) as url:
        for width, expected in (
            (1440, {*MAIN, "dropped"}),
            (2100, {*MAIN, "dropped", "ranks", "script"}),
        ):
            view = watched(browser, viewport={"width": width, "height": 900})
            opened(view, url)
            view.page.wait_for_function(
                f"({len(expected)}) <= document.querySelectorAll('.ag-header-cell[col-id]').length"
            )
            assert expected <= set(shown_columns(view.page))
            assert ("ranks" in shown_columns(view.page)) is (width > 2000)
            check_breaks(view)
            view.close()
            assert view.errors == []


def check_breaks(view) -> None:
    """Assert that a long setting is wrapped only between the parts of its keys."""
    cell = view.page.locator("#runs-grid .ag-row [col-id=setting]").first
    cell.locator("wbr").first.wait_for(state="attached")
    assert cell.evaluate("cell => cell.textContent") == LONG_SETTING
    # The text between two possible breaks has one box, because it is on one line.
    boxes = cell.evaluate(
        "cell => [...cell.querySelector('.run-setting').childNodes].filter((node) => node.nodeType === 3)"
        ".flatMap((node) => "
        "node.data.split(' ').map((word, place, words) => { const range = document.createRange(); "
        "const begin = words.slice(0, place).join(' ').length + (place ? 1 : 0); range.setStart(node, begin); "
        "range.setEnd(node, begin + word.length); return word ? range.getClientRects().length : 1; }))"
    )
    assert set(boxes) == {1}
