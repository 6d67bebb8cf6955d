"""The Timeline and Records pages in a real Chromium draw, list and download the values that the library returns."""

from __future__ import annotations

import csv
import io
from itertools import pairwise
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from commprof.analysis import api
from support.browser import served, watched
from support.runs import SyntheticRun

pytestmark = [pytest.mark.browser, pytest.mark.shared_answers]

WORLD, STEPS, EACH = 4, 3, 10
WHOLE = f"&from=0&to={STEPS * 1_000_000}"
HOSTILE = "<img src=x onerror=alert(1)>"
GRAPH = "#card-timeline .js-plotly-plot"


def write_run(path: Path, each: int) -> None:
    run = SyntheticRun(WORLD)
    for step in range(STEPS):
        run.add_step(step, begin_ns=step * 1_000_000, duration_ns=1_000_000)
        for number in range(each):
            for rank in range(WORLD):
                run.add_collective(
                    ("all_reduce", "all_gather", "broadcast")[number % 3],
                    step=step,
                    ranks=(rank,),
                    peer=0,
                    issue_ns=step * 1_000_000 + number * (900_000 // each) + rank * 100,
                    host_ns=60_000 // each * 10,
                    exposed_ns=30_000 // each * 10 if number % 2 else None,
                    payload_bytes=1000 * (number + 1),
                    purpose="gradient_reduce",
                    bucket=number,
                    parameters=HOSTILE,
                )
    run.write(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    base = tmp_path_factory.mktemp("timeline")
    write_run(base / "few", EACH)
    write_run(base / "many", 300)
    return base


@pytest.fixture(scope="module")
def base_url(runs):
    with served(runs) as url:
        yield url


def drawn_records(page) -> set[tuple[int, ...]]:
    """Return rank, attempt, pid, seq, begin and length of each bar that plotly drew."""
    bars = page.evaluate(
        """(graph) => document.querySelector(graph)._fullData.filter((trace) => trace.customdata).flatMap((trace) =>
            [...trace.base].map((base, i) => [...trace.customdata[i][0], Math.round(base), Math.round(trace.x[i])]))""",
        GRAPH,
    )
    return {tuple(bar) for bar in bars}


def wanted_records(shown: api.Timeline) -> set[tuple[int, ...]]:
    frame = shown.bars
    names = ("rank", "attempt", "pid", "seq")
    keys = zip(*(frame[name].tolist() for name in names), strict=True)
    begins, ends = frame["begin_ns"].tolist(), frame["end_ns"].tolist()
    return {
        (*key, begin - shown.run_begin_ns, end - begin)
        for key, begin, end in zip(keys, begins, ends, strict=True)
    }


def window_of(url: str) -> tuple[int, int]:
    query = parse_qs(urlsplit(url).query)
    return int(query["from"][0]), int(query["to"][0])


def assert_window_is_drawn(page, runs: Path, name: str) -> api.Timeline:
    """Assert that the graph shows the window in the address, and return the data of this window."""
    first = api.timeline(runs / name).run_begin_ns
    begin, end = window_of(page.url)
    shown = api.timeline(runs / name, first + begin, first + end)
    page.wait_for_function(
        "([graph, begin, end]) => { const range = document.querySelector(graph)?._fullLayout?.xaxis.range;"
        " return range && Math.abs(range[0] - begin) < 1 && Math.abs(range[1] - end) < 1; }",
        arg=[GRAPH, begin, end],
    )
    page.wait_for_function(
        "([graph, count]) => document.querySelector(graph)?._fullData?.filter((t) => t.customdata)"
        ".reduce((sum, t) => sum + t.x.length, 0) === count",
        arg=[GRAPH, len(shown.bars)],
    )
    assert drawn_records(page) == wanted_records(shown)
    return shown


def click_on_graph(page, x: float, y: float) -> None:
    """Click on the graph after plotly has found the element at this position, which needs a resting mouse."""
    for number in range(200):
        page.mouse.move(x - number % 2, y)
        page.wait_for_timeout(50)
        if page.evaluate("(graph) => document.querySelector(graph)._hoverdata?.length > 0", GRAPH):
            break
    page.mouse.click(x, y)


def moved(page, act) -> None:
    before = page.url
    act()
    page.wait_for_function("(url) => window.location.href !== url", arg=before)


def test_bars_are_the_records_and_buttons_move_the_window(page, runs, base_url):
    page.open(f"{base_url}/timeline?run=few{WHOLE}")
    assert drawn_records(page.page) == wanted_records(api.timeline(runs / "few"))
    assert page.page.locator("img[src=x]").count() == 0
    for label in ("Zoom in", "Later", "Earlier", "Zoom out"):
        moved(page.page, page.page.get_by_label(label, exact=True).click)
        assert_window_is_drawn(page.page, runs, "few")
    page.open(page.page.url)  # the address contains the complete state
    assert_window_is_drawn(page.page, runs, "few")
    moved(page.page, page.page.get_by_label("Whole run").click)
    shown = api.timeline(runs / "few")
    assert window_of(page.page.url) == (0, shown.run_end_ns - shown.run_begin_ns)


@pytest.mark.long
def test_it_opens_on_the_steps_after_the_first_and_keys_and_a_drag_over_the_minimap_move_it(
    page, runs, base_url
):
    page.open(f"{base_url}/timeline?run=few")
    page.page.wait_for_function("window.location.search.includes('to=')")
    assert window_of(page.page.url) == (1_000_000, 3_000_000)
    assert_window_is_drawn(page.page, runs, "few")
    shown = api.timeline(runs / "few")
    length = shown.run_end_ns - shown.run_begin_ns
    box = page.page.locator("#timeline-minimap").bounding_box()
    frame = page.page.locator("#timeline-window").bounding_box()
    assert frame["x"] - box["x"] == pytest.approx(box["width"] * 1_000_000 / length, abs=4)
    spans = [window_of(page.page.url)]
    for key in "wdas":
        moved(page.page, lambda key=key: page.page.keyboard.press(key))
        assert_window_is_drawn(page.page, runs, "few")
        spans.append(window_of(page.page.url))
    lengths = [end - begin for begin, end in spans]
    assert lengths[1] == pytest.approx(0.6 * lengths[0], rel=0.01) and spans[1][0] > spans[0][0]
    assert lengths[2:4] == pytest.approx([lengths[1]] * 2, rel=0.01)
    assert spans[2][0] > spans[1][0] and spans[3][0] == pytest.approx(spans[1][0], abs=2)
    assert lengths[4] > lengths[3]
    page.page.locator("#timeline-ranks").fill("")
    before = page.page.url
    page.page.locator("#timeline-ranks").press("w")
    page.page.wait_for_timeout(500)
    assert page.page.url == before, "a letter that is typed moves nothing"

    def drag():
        page.page.mouse.move(box["x"] + 0.1 * box["width"], box["y"] + 20)
        page.page.mouse.down()
        page.page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 20, steps=4)
        page.page.mouse.up()

    moved(page.page, drag)
    assert window_of(page.page.url) == pytest.approx((0.1 * length, 0.3 * length), abs=0.01 * length)
    assert_window_is_drawn(page.page, runs, "few")
    frame = page.page.locator("#timeline-window").bounding_box()
    assert frame["x"] - box["x"] == pytest.approx(0.1 * box["width"], abs=4)
    assert frame["width"] == pytest.approx(0.2 * box["width"], abs=6)


def write_wide_run(path: Path, world: int) -> None:
    """Write a run of ``world`` ranks with 8 ranks per host, in which the last rank of host 1 is late."""
    run = SyntheticRun(world)
    run.hosts = {rank: f"host-{rank // 8}" for rank in range(world)}
    for step in range(STEPS):
        run.add_step(step, begin_ns=step * 1_000_000, duration_ns=1_000_000)
        for rank in range(world):
            late = 200_000 if rank == 15 else 0
            issued, waited = step * 1_000_000 + 300_000 + late + rank, 250_000 - late
            run.add_collective(
                "all_reduce", step=step, ranks=(rank,), issue_ns=issued, host_ns=waited, exposed_ns=waited,
                payload_bytes=1000, purpose="gradient_reduce",
            )  # fmt: skip
    run.write(path)


HEAT = "(graph) => document.querySelector(graph)._fullData[0]"


def heat_labels(page) -> list[str]:
    return page.evaluate("(graph) => document.querySelector(graph)._fullLayout.yaxis.ticktext", GRAPH)


def wait_for_labels(page, first: str, rows: int) -> None:
    page.wait_for_function(
        "([graph, first, rows]) => { const plot = document.querySelector(graph);"
        " return plot?._fullLayout?.yaxis.ticktext?.[0].includes(first)"
        " && (!rows || plot._fullData[0].z.length === rows); }",
        arg=[GRAPH, first, rows],
    )


@pytest.mark.long
def test_many_ranks_are_a_heat_map_the_latest_first_that_folds_by_host_and_unfolds(page, runs, base_url):
    write_wide_run(runs / "wide", 48)
    page.open(f"{base_url}/timeline?run=wide")
    wait_for_labels(page.page, "rank 15", 48)
    heat = page.page.evaluate(HEAT, GRAPH)
    assert heat["type"] == "heatmap" and heat["meta"]["unfolds"][0] == "8-15"
    exposed = [sum(value for value in row if value and value == value) for row in heat["z"]]
    assert exposed[0] < 0.5 * min(exposed[1:]), "the late rank waits for nobody"
    moved(page.page, page.page.get_by_text("By rank", exact=True).click)
    wait_for_labels(page.page, "rank 0", 48)
    moved(page.page, page.page.get_by_text("Hosts", exact=True).click)
    wait_for_labels(page.page, "host-0", 6)
    assert heat_labels(page.page) == [f"host-{number}" for number in range(6)]
    page.open(page.page.url)  # the address contains the complete state
    wait_for_labels(page.page, "host-0", 6)
    # Click on a colored cell in the row of host 1.
    box = page.page.locator(f"{GRAPH} .nsewdrag").first.bounding_box()
    moved(
        page.page,
        lambda: click_on_graph(page.page, box["x"] + 0.2 * box["width"], box["y"] + box["height"] * 1.5 / 6),
    )
    wait_for_labels(page.page, "rank 8", 0)
    assert {bar[0] for bar in drawn_records(page.page)} == set(range(8, 16))
    assert parse_qs(urlsplit(page.page.url).query)["ranks"] == ["8-15"]


@pytest.mark.long
def test_1024_ranks_are_hosts_and_each_a_row_that_is_seen_when_they_are_unfolded(page, runs, base_url):
    write_wide_run(runs / "thousand", 1024)
    page.open(f"{base_url}/timeline?run=thousand")
    wait_for_labels(page.page, "host-1", 128)
    assert heat_labels(page.page)[0] == "host-1", "the host of the late rank is the first"
    moved(page.page, page.page.get_by_role("radiogroup", name="Rows", exact=True).get_by_text("Ranks").click)
    wait_for_labels(page.page, "rank 15", 1024)
    page.settle()
    heat = page.page.evaluate(HEAT, GRAPH)
    exposed = [sum(value for value in row if value and value == value) for row in heat["z"]]
    assert exposed[0] < 0.5 * min(exposed[1:]), "the late rank waits for nobody"
    rows = page.page.locator(f"{GRAPH} .nsewdrag").first.bounding_box()["height"]
    assert rows >= 1024, "a row has a pixel of its own"
    ticks = page.page.locator(f"{GRAPH} .yaxislayer-above text").all()
    boxes = [tick.bounding_box() for tick in ticks]
    assert all(first["y"] + first["height"] <= next_one["y"] + 1 for first, next_one in pairwise(boxes))
    page.page.locator("#timeline-ranks").fill("8-15")
    moved(page.page, lambda: page.page.locator("#timeline-ranks").press("Enter"))
    wait_for_labels(page.page, "rank 8", 0)


@pytest.mark.long
def test_the_lanes_grow_with_the_window(page, base_url):
    heights = [0.0]
    for window in (700, 1000, 1300):
        page.page.set_viewport_size({"width": 1280, "height": window})
        if window == 700:
            page.open(f"{base_url}/timeline?run=few")
        # plotly draws again some time after the window has changed.
        page.page.wait_for_function(
            "([graph, before]) => document.querySelector(graph + ' .nsewdrag').getBoundingClientRect().height > before",
            arg=[GRAPH, heights[-1]],
        )
        heights.append(page.page.locator(f"{GRAPH} .nsewdrag").first.bounding_box()["height"])
        # The strip of phases and steps above the ranks has a constant height.
        assert (
            page.page.evaluate("(graph) => document.querySelector(graph)._fullLayout.margin.t", GRAPH) == 42
        )
        assert page.page.evaluate("document.documentElement.scrollHeight") <= max(window, 900)
    assert heights[1] < heights[2] < heights[3]


@pytest.mark.long
def test_a_drag_and_the_wheel_zoom(page, runs, base_url):
    page.open(f"{base_url}/timeline?run=few{WHOLE}")
    box = page.page.locator(f"{GRAPH} .nsewdrag").first.bounding_box()
    middle = box["y"] + box["height"] / 2

    def drag():
        page.page.mouse.move(box["x"] + 200, middle)
        page.page.mouse.down()
        page.page.mouse.move(box["x"] + 500, middle, steps=4)
        page.page.mouse.up()

    moved(page.page, drag)
    shown = assert_window_is_drawn(page.page, runs, "few")
    share = (shown.end_ns - shown.begin_ns) / (shown.run_end_ns - shown.run_begin_ns)
    assert share == pytest.approx(300 / box["width"], rel=0.05)
    page.page.mouse.move(box["x"] + 300, middle)
    moved(page.page, lambda: page.page.mouse.wheel(0, -300))
    again = assert_window_is_drawn(page.page, runs, "few")
    assert again.end_ns - again.begin_ns < shown.end_ns - shown.begin_ns


@pytest.mark.long
def test_a_step_and_ranks_are_gone_to(page, runs, base_url):
    page.open(f"{base_url}/timeline?run=few")

    def go():
        page.page.locator("#timeline-step").fill("1")
        page.page.locator("#timeline-step").press("Enter")

    moved(page.page, go)
    assert window_of(page.page.url) == (1_000_000, 2_000_000)
    assert_window_is_drawn(page.page, runs, "few")

    def choose():
        page.page.locator("#timeline-ranks").fill("1-2")
        page.page.locator("#timeline-ranks").press("Enter")

    moved(page.page, choose)
    page.page.wait_for_function("document.body.innerText.includes('2 of 4 ranks are shown')")
    assert {bar[0] for bar in drawn_records(page.page)} == {1, 2}


@pytest.mark.long
def test_many_records_are_drawn_as_density_until_they_are_few(page, runs, base_url):
    page.open(f"{base_url}/timeline?run=many{WHOLE}")
    shown = api.timeline(runs / "many", pixels=600)
    assert shown.bars is None
    heat = page.page.evaluate(
        """(graph) => { const trace = document.querySelector(graph)._fullData[0];
            return {type: trace.type, sums: [...trace.z].map((row) => [...row].filter((v) => v === v && v !== null)
                .reduce((sum, value) => sum + value % 1, 0))}; }""",
        GRAPH,
    )
    assert heat["type"] == "heatmap"
    width = shown.density["end_ns"][0] - shown.density["begin_ns"][0]
    for row, rank in enumerate(shown.ranks):
        part = shown.density[shown.density["rank"] == rank].groupby("begin_ns")["busy_ns"].sum() / width
        assert heat["sums"][3 * row] == pytest.approx(part.clip(upper=0.999).sum(), rel=1e-6)
    # A click on a cell of the first rank zooms in.
    box = page.page.locator(f"{GRAPH} .nsewdrag").first.bounding_box()
    click_on_graph(page.page, box["x"] + 200, box["y"] + 8)
    page.page.wait_for_function("!window.location.search.includes('from=0&')")
    assert_window_is_drawn(page.page, runs, "many")


def test_a_record_is_told_with_its_partners_and_links(page, runs, base_url):
    page.open(f"{base_url}/timeline?run=few&from=0&to=300000")
    box = page.page.locator(f"{GRAPH} .barlayer .trace").first.locator("path").first.bounding_box()
    place = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    moved(page.page, lambda: click_on_graph(page.page, *place))
    assert "into step 0" in page.page.inner_text("#timeline-hover")
    assert page.page.locator(f"{GRAPH} .hoverlayer .hovertext").count() == 0, (
        "a box would cover the neighbours"
    )
    page.page.wait_for_selector(".record")
    text = page.page.inner_text(".record")
    assert "The same collective on 4 ranks" in text
    assert HOSTILE in text
    assert page.page.locator(".record a[href^='/buckets']").count() == 1
    outlined = page.page.evaluate(
        "(graph) => document.querySelector(graph)._fullData.find((t) => t.name === 'same collective').x.length",
        GRAPH,
    )
    assert outlined == WORLD
    moved(page.page, page.page.locator(".record a[href^='/records']").click)
    page.page.wait_for_selector(".ag-row[row-index='0']")
    page.page.wait_for_function("document.body.innerText.includes('1 of 120 records fit')")


@pytest.mark.long
def test_the_scheme_is_changed_without_losing_the_window(page, runs, base_url):
    page.open(f"{base_url}/timeline?run=few")
    moved(page.page, page.page.get_by_label("Zoom in", exact=True).click)
    shown = assert_window_is_drawn(page.page, runs, "few")
    colour = page.page.evaluate("(graph) => document.querySelector(graph)._fullLayout.font.color", GRAPH)
    page.page.locator("#scheme-toggle").click()
    page.page.wait_for_function(
        "([graph, colour]) => ![undefined, colour].includes(document.querySelector(graph)?._fullLayout?.font.color)",
        arg=[GRAPH, colour],
    )
    assert_window_is_drawn(page.page, runs, "few")
    page.page.locator("#scheme-toggle").click()
    assert window_of(page.page.url) == (
        shown.begin_ns - shown.run_begin_ns,
        shown.end_ns - shown.run_begin_ns,
    )


@pytest.mark.long
def test_the_file_of_the_timeline_is_what_is_drawn(page, runs, base_url):
    page.open(f"{base_url}/timeline?run=few&from=0&to=1000000")
    page.page.locator("#card-timeline summary").click()
    page.page.locator("#card-timeline tbody tr").first.wait_for()
    assert page.page.locator("#card-timeline tbody tr").count() == len(drawn_records(page.page))
    with page.page.expect_download() as caught:
        page.page.locator("#card-timeline a.card-action").click()
    rows = list(csv.DictReader(io.StringIO(Path(caught.value.path()).read_text())))
    names = ("rank", "attempt", "pid", "seq")
    assert {tuple(int(row[name]) for name in names) for row in rows} == {
        bar[:4] for bar in drawn_records(page.page)
    }


def shown_rows(page, column: str) -> list[str]:
    """Return the texts of the visible cells of a column, from top to bottom."""
    rows = page.evaluate(
        """(column) => [...document.querySelectorAll('.ag-center-cols-container .ag-row')]
            .map((row) => [Number(row.getAttribute('row-index')), row.querySelector(`[col-id="${column}"]`)?.innerText])""",
        column,
    )
    return [text for _, text in sorted(rows)]


def wait_for_rows(page, column: str, wanted: list[str]) -> None:
    page.wait_for_function(
        """([column, wanted]) => { const rows = [...document.querySelectorAll('.ag-center-cols-container .ag-row')]
            .sort((a, b) => a.getAttribute('row-index') - b.getAttribute('row-index'))
            .map((row) => row.querySelector(`[col-id="${column}"]`)?.innerText);
            return JSON.stringify(rows.slice(0, wanted.length)) === JSON.stringify(wanted); }""",
        arg=[column, wanted],
    )


@pytest.mark.long
def test_the_grid_filters_sorts_and_scrolls_on_the_server(page, runs, base_url):
    page.open(f"{base_url}/records?run=many&filter=")
    path = runs / "many"
    total = STEPS * 300 * WORLD
    page.page.wait_for_function(
        f"document.querySelector('#records-counted').innerText === '{total:,} records'"
    )
    wait_for_rows(page.page, "op", api.records_page(path, limit=5).rows["op"].tolist())
    header = page.page.locator(".ag-header-cell[col-id='payload_bytes'] .ag-header-cell-label")
    for wanted in ("payload_bytes", "-payload_bytes"):
        moved(page.page, header.click)
        first = api.records_page(path, sort=wanted, limit=5).rows["payload_bytes"]
        wait_for_rows(page.page, "payload_bytes", [api.format_bytes(value) for value in first])
        assert f"sort={wanted}" in page.page.url
    moved(page.page, lambda: page.page.get_by_label("op Filter Input", exact=True).fill("gather"))
    filters = [api.Filter("op", "contains", "gather")]
    fit = api.records_page(path, filters, "-payload_bytes", limit=5)
    page.page.wait_for_function(f"document.body.innerText.includes('{fit.total:,} of {total:,} records fit')")
    wait_for_rows(page.page, "op", fit.rows["op"].tolist())
    page.page.evaluate("document.querySelector('.ag-body-viewport').scrollTop = 1e9")
    last = api.records_page(path, filters, "-payload_bytes", fit.total - 1, 1).rows["payload_bytes"][0]
    page.page.wait_for_function(
        "([index, text]) => document.querySelector(`.ag-center-cols-container .ag-row[row-index='${index}'] "
        "[col-id='payload_bytes']`)?.innerText === text",
        arg=[fit.total - 1, api.format_bytes(last)],
    )
    with page.page.expect_download() as caught:
        page.page.locator("#records-file").click()
    rows = list(csv.DictReader(io.StringIO(Path(caught.value.path()).read_text())))
    whole = api.records_page(path, filters, "-payload_bytes", limit=10_000).rows
    assert [int(row["begin_ns"]) for row in rows] == whole["begin_ns"].tolist()
    assert [int(row["payload_bytes"]) for row in rows] == whole["payload_bytes"].tolist()
    page.open(page.page.url)  # the address contains the filter and the order
    wait_for_rows(page.page, "op", fit.rows["op"].tolist())


@pytest.mark.long
def test_both_pages_are_drawn_in_the_dark(browser, runs, base_url):
    view = watched(browser, viewport={"width": 420, "height": 900}, color_scheme="dark")
    view.open(f"{base_url}/timeline?run=few{WHOLE}")
    assert drawn_records(view.page) == wanted_records(api.timeline(runs / "few"))
    view.open(f"{base_url}/records?run=few&filter=")
    wait_for_rows(
        view.page, "rank", [str(rank) for rank in api.records_page(runs / "few", limit=4).rows["rank"]]
    )
    colour = view.page.evaluate(
        "getComputedStyle(document.querySelector('.ag-root-wrapper')).backgroundColor"
    )
    assert max(int(part) for part in colour.removeprefix("rgb(").rstrip(")").split(",")[:3]) < 80
    assert view.page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    assert view.errors == []
    view.close()


@pytest.mark.long
def test_columns_are_chosen(page, base_url):
    page.open(f"{base_url}/records?run=few&column=rank&column=op")
    page.page.wait_for_selector(".ag-row[row-index='0'] [col-id='op']")
    heads = page.page.locator(".ag-header-row-column .ag-header-cell").evaluate_all(
        "cells => cells.map((cell) => cell.getAttribute('col-id'))"
    )
    assert heads == ["link", "rank", "op"]
    page.page.locator("#records-columns").click()
    moved(page.page, page.page.locator("[role=option]:visible", has_text="dtype").click)
    page.page.wait_for_selector(".ag-row[row-index='0'] [col-id='dtype']")
    assert "column=dtype" in page.page.url


def test_records_begin_with_the_second_step_and_a_click_opens_all_about_a_row(page, runs, base_url):
    page.open(f"{base_url}/records?run=few")
    later = api.records_page(runs / "few", [api.Filter("step", ">=", "1")], limit=1)
    page.page.wait_for_function(f"document.body.innerText.includes('{later.total} of 120 records fit')")
    # The address contains the filter of the table.
    page.page.wait_for_function("new URLSearchParams(location.search).get('filter') === 'step:>=:1'")
    page.page.locator(".ag-center-cols-container .ag-row[row-index='0'] [col-id='op']").click()
    page.page.wait_for_selector(".mantine-Drawer-content .record")
    text = page.page.inner_text(".mantine-Drawer-content")
    assert "The same collective on 4 ranks" in text and HOSTILE in text
    page.page.keyboard.press("Escape")
    page.page.wait_for_selector(".mantine-Drawer-content", state="hidden")
    page.open(f"{base_url}/records?run=few&step=2")
    one = api.records_page(runs / "few", [api.Filter("step", "=", "2")], limit=1)
    page.page.wait_for_function(f"document.body.innerText.includes('{one.total} of 120 records fit')")


def test_a_record_is_opened_and_left_with_the_keyboard_alone(page, base_url):
    """The keyboard alone opens and closes a record.

    The test waits for the record of the first row before it sets the focus. AG Grid replaces a row when its record
    arrives, and the new row does not have the focus.
    """
    page.open(f"{base_url}/records?run=few")
    row = page.page.locator(".ag-center-cols-container .ag-row[row-index='0'][row-id]")
    row.locator("[col-id='op']").focus()
    page.page.keyboard.press("Enter")
    page.page.wait_for_selector(".mantine-Drawer-content .record")
    page.page.keyboard.press("Escape")
    page.page.wait_for_selector(".mantine-Drawer-content", state="hidden")
    row.locator("[col-id='link'] a").wait_for()
    row.locator("[col-id='link']").focus()
    page.page.keyboard.press("Enter")
    page.page.wait_for_function("location.pathname === '/timeline' && location.search.includes('record=')")
