"""Traffic matrix, Buckets, Stragglers and Alignment in a real Chromium draw the values that the api returns."""

from __future__ import annotations

import csv
import io

import pytest

from commprof.analysis import api
from commprof_dash.pages.compare import data as compare_data
from commprof_dash.pages.overview import data as overview_data
from support.browser import served, watched
from support.detailed_runs import aligned_run, detailed_run
from support.expert_runs import uneven_experts

pytestmark = [pytest.mark.browser, pytest.mark.shared_answers]

DESKTOP = {"width": 1280, "height": 900}
TEXT = {"light": "#212529", "dark": "#e4e6e9"}
CUT_WORDS = """() => [...document.querySelectorAll('.message p, .message li')]
    .filter(words => words.getBoundingClientRect().right > words.closest('.message').getBoundingClientRect().right)
    .map(words => words.innerText)"""
PATHS = ("/matrix", "/buckets", "/stragglers", "/alignment")
# JavaScript that returns the drawn traces of the first graph of a card.
TRACES = """(card) => document.querySelector(`#card-${card} .js-plotly-plot`)._fullData.map((trace) => ({
    name: trace.name,
    x: Array.from(trace.x ?? []), y: Array.from(trace.y ?? []),
    z: (trace.z ?? []).map((row) => Array.from(row)),
    median: Array.from(trace.median ?? []), text: trace.text,
}))"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    base = tmp_path_factory.mktemp("traffic")
    detailed_run().write(base / "plain")
    aligned_run(base / "aligned")
    uneven_experts().write(base / "experts")
    return base


@pytest.fixture(scope="module")
def base_url(runs):
    with served(runs) as url:
        yield url


def traces(view, card):
    return view.page.evaluate(TRACES, card)


def choose(view, label, option):
    """Choose ``option`` in the list called ``label`` with the mouse."""
    view.page.get_by_role("textbox", name=label).click()
    view.page.get_by_role("option", name=option, exact=True).click()
    view.settle()


def drawn_sizes(view):
    """Return the sizes of the cells of the matrix by row and column, computed from the drawn logarithms."""
    heat = traces(view, "matrix")[0]["z"]
    return {
        (i, j): pytest.approx(2**value, rel=1e-6)
        for i, row in enumerate(heat)
        for j, value in enumerate(row)
        if value is not None
    }


def check_charts_and_keys(view):
    """Assert that every chart has a name, a table and a file, and that Tab reaches the controls."""
    for card in view.page.locator(".card:has(.dash-graph)").all():
        assert card.get_by_role("img").first.get_attribute("aria-label")
        assert card.locator("details summary").count() == 1
        assert card.get_by_role("link", name="Download").count() == 1
    view.page.focus("#page")
    view.page.keyboard.press("Tab")
    focused = (
        "document.activeElement.getAttribute('aria-label') || document.activeElement.labels?.[0]?.innerText"
    )
    assert view.page.evaluate(focused) == "Run"


@pytest.mark.long
def test_the_matrix_and_its_controls(page, base_url, runs):
    def answered(**asked):
        frame = api.matrix(runs / "plain", **asked)
        return {(row.sender, row.receiver): row.wire_bytes for row in frame.itertuples()}

    page.open(f"{base_url}/matrix?run=plain&per=total")
    assert answered() == drawn_sizes(page)
    assert page.page.locator("#card-experts").count() == 0
    check_charts_and_keys(page)
    choose(page, "Operation", "reduce")
    page.page.wait_for_function("location.search.includes('op=reduce')")
    page.page.wait_for_function(
        "document.querySelector('#card-matrix .js-plotly-plot')?._fullData?.[0].z[0][2] === null"
    )
    assert answered(op="reduce") == drawn_sizes(page)
    page.page.get_by_role("textbox", name="Steps").fill("2-3")
    page.page.wait_for_function("location.search.includes('steps=2-3')")
    first = answered(op="reduce", steps=(2, 3))[1, 0]
    page.page.wait_for_function(
        "(size) => Math.abs(2 ** document.querySelector('#card-matrix .js-plotly-plot')?._fullData?.[0].z[1][0] - size) < 1",
        arg=first,
    )
    assert answered(op="reduce", steps=(2, 3)) == drawn_sizes(page)

    with page.page.expect_download() as download:
        page.page.click("#card-matrix .card-action")
    rows = list(csv.DictReader(io.StringIO(download.value.path().read_text())))
    assert {(int(row["sender"]), int(row["receiver"])): float(row["wire_bytes"]) for row in rows} == answered(
        op="reduce", steps=(2, 3)
    )
    page.page.go_back()
    page.page.wait_for_function("!location.search.includes('steps=2-3')")
    received = [float(value) for value in api.owners(runs / "plain")["received_bytes"]]
    page.page.wait_for_function(
        "(first) => document.querySelector('#card-owners .js-plotly-plot')?._fullData?.[0].y[0] === first",
        arg=received[0],
    )
    assert traces(page, "owners")[0]["y"] == received


@pytest.mark.long
def test_the_load_of_experts_and_the_choice_of_the_layer(page, base_url, runs):
    def loads(layer):
        frame = api.experts(runs / "experts").query("layer == @layer")
        return frame.pivot(index="expert", columns="step", values="load").to_numpy().tolist()

    page.open(f"{base_url}/matrix?run=experts")
    assert traces(page, "experts")[0]["z"] == loads("blocks.0.moe")
    rows = api.expert_imbalance(runs / "experts").query("layer == 'blocks.0.moe'")
    assert traces(page, "expert-imbalance")[0]["y"] == rows["imbalance"].tolist()
    assert traces(page, "expert-drops")[0]["y"] == pytest.approx((100 * rows["dropped_share"]).tolist())
    choose(page, "Experts of", "blocks.1.moe")
    page.page.wait_for_function("location.search.includes('layer=blocks.1.moe')")
    page.page.wait_for_selector("#card-experts >> text=load of blocks.1.moe")
    page.settle()
    assert traces(page, "experts")[0]["z"] == loads("blocks.1.moe")


@pytest.mark.long
def test_buckets_of_a_step_and_their_links(page, base_url, runs):
    page.open(f"{base_url}/buckets?run=plain")
    choose(page, "Step", "4")
    page.page.wait_for_function("location.search.includes('step=4')")
    page.page.wait_for_selector("#card-bucket-operations >> text=Bucket 0 of step 4")
    frame = api.bucket_flushes(runs / "plain")
    frame = frame[frame["step"] == 4]
    assert traces(page, "bucket-sizes")[0]["y"] == [float(size) for size in frame["bytes"]]
    page.page.click("#card-buckets td a >> text=1")
    page.page.wait_for_selector("#card-bucket-parameters >> text=Bucket 1 of step 4")
    names = page.page.locator("#card-bucket-parameters tbody tr td:nth-child(2)").all_inner_texts()
    assert names == list(api.bucket_content(runs / "plain", 4, 1).parameters["name"])


def test_stragglers_name_the_late_rank(page, base_url, runs):
    page.open(f"{base_url}/stragglers?run=plain")
    found = api.straggling(runs / "plain", first_step=False)
    assert api.stragglers(runs / "plain").attrs["statement"] in page.page.inner_text(".message-warning")
    assert traces(page, "lateness")[0]["median"] == [float(value) for value in found.lateness["median_ns"]]
    ranks = page.page.locator("#card-late-collectives tbody tr td:nth-child(2)").all_inner_texts()
    assert ranks == [str(rank) for rank in found.collectives["last_rank"][:50]]
    assert page.page.locator("#card-late-collectives a >> text=timeline").count() == 50
    first = f"The first 50 of {len(found.collectives)} rows; the CSV file has all."
    assert first in page.page.inner_text("#card-late-collectives")
    check_charts_and_keys(page)


@pytest.mark.long
def test_an_alignment_with_its_rings(page, base_url, runs):
    page.open(f"{base_url}/alignment?run=aligned")
    found = api.alignment(runs / "aligned")
    counts = found.counts.groupby("state")["lines"].sum().to_dict()
    assert {trace["name"]: sum(trace["y"]) for trace in traces(page, "states")} == counts
    states = page.page.locator("#card-side-by-side tbody tr td:nth-child(2)").all_inner_texts()
    first = found.divergences.iloc[0]
    assert states[min(3, first["matched_before"])] == first["state"]
    assert traces(page, "topology-ring")[1]["text"] == ["0", "2", "1", "3"]
    page.page.locator("#card-divergences a").last.click()
    last = found.divergences.iloc[-1]
    page.page.wait_for_selector(f"#card-side-by-side >> text=rank {last['rank']}, group")


@pytest.mark.long
@pytest.mark.parametrize("path", ["/buckets", "/alignment"])
def test_every_chart_has_a_name_and_its_table_and_keys_reach_the_controls(page, base_url, path):
    """Every chart has a name, a table and a file, and Tab reaches the controls.

    For the other pages, the tests that open these pages check this.
    """
    page.open(f"{base_url}{path}?run={'aligned' if path == '/alignment' else 'plain'}")
    check_charts_and_keys(page)


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.long)])
def test_a_telephone_has_no_sideways_scrolling(browser, base_url, scheme):
    view = watched(browser, viewport={"width": 400, "height": 800}, color_scheme=scheme)
    for path in PATHS:
        view.open(f"{base_url}{path}?run={'aligned' if path == '/alignment' else 'plain'}")
        assert view.page.evaluate("document.documentElement.scrollWidth") <= 400, path
        assert view.page.evaluate(CUT_WORDS) == [], path
        text = view.page.evaluate(
            "document.querySelector('.js-plotly-plot').layout.template.layout.font.color"
        )
        assert text == TEXT[scheme], path
    for path in (
        "/alignment?run=plain",
        "/bandwidth?run=plain",
    ):  # pages with messages that contain commands wider than the window
        view.open(base_url + path)
        assert view.page.evaluate(CUT_WORDS) == [], path
    view.close()
    assert view.errors == []


@pytest.mark.long
def test_of_large_runs_ledgers_and_the_lower_half_appear_when_they_are_there(
    page, base_url, runs, monkeypatch
):
    for module in (overview_data, compare_data):
        monkeypatch.setattr(module, "MOST_RECORDS", 1)
    page.open(f"{base_url}/overview?run=plain")
    page.page.wait_for_selector("#card-cost >> text=What recording cost")
    sentence = api.verify(runs / "plain").sentences[-1]
    page.page.wait_for_selector(f".lines li >> text={sentence}", timeout=60_000, state="attached")
    page.open(f"{base_url}/compare?run=plain")
    page.page.wait_for_selector("#card-levels .js-plotly-plot", timeout=60_000)
    assert "requested" in page.page.inner_text("#card-levels")
