"""The dashboard in a real Chromium draws one-off traffic and executed bytes that are computed here by hand."""

from __future__ import annotations

import pytest

from commprof.analysis import api
from support.browser import served, watched
from support.runs import SyntheticRun

pytestmark = [pytest.mark.browser, pytest.mark.shared_answers]

STEPS = 5
SIZE = 1_200_000


def a_run() -> SyntheticRun:
    """Return a run of three gloo ranks.

    Each step reduces one bucket to rank 1, and the first step reduces two buckets. Step 3 also gathers a checkpoint.
    """
    run = SyntheticRun(world_size=3)
    for step in range(STEPS):
        begin = 10_000_000 * (step + 1)
        run.add_step(step, begin_ns=begin, end_ns=begin + 9_000_000, loss=1.0)
        for bucket in range(1 if step else 2):
            for rank in range(3):
                run.add(
                    "buckets", rank=rank, attempt=0, pid=run.pid(rank), step=step, micro_step=0, bucket=bucket,
                    numel=SIZE // 4, bytes=SIZE, capacity=SIZE // 4, dtype="float32", owners="1", parameters="w",
                    flush_reason="full", time_ns=begin,
                )  # fmt: skip
            run.add_collective(
                "reduce",
                payload_bytes=SIZE,
                bucket=bucket,
                peer=1,
                step=step,
                purpose="gradient_reduce",
                issue_ns=begin,
            )
        if step == 3:
            run.add_collective(
                "all_gather", payload_bytes=SIZE, step=step, purpose="checkpoint", issue_ns=begin + 1_000_000
            )
    return run


@pytest.fixture(scope="module")
def base_url(tmp_path_factory):
    base = tmp_path_factory.mktemp("steady")
    a_run().write(base / "run")
    with served(base) as url:
        yield url


def rows_of(page, card: str) -> list[list[str]]:
    texts = page.page.locator(f"#card-{card} tbody tr").all()
    return [[cell.strip() for cell in row.locator("td").all_text_contents()] for row in texts]


def check_width(page) -> None:
    """Assert that the page, drawn again for the window of a phone, is not wider than the window."""
    with page.page.expect_response(lambda answer: "_dash-update-component" in answer.url):
        page.page.set_viewport_size({"width": 400, "height": 900})
    page.settle()
    assert page.page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0


def test_the_overview_lists_what_was_sent_once(page, base_url):
    page.open(f"{base_url}/overview?run=run")
    once = [[api.format_bytes(2 / 3 * SIZE), api.format_bytes(SIZE), "1"]]
    more = [[api.format_bytes(8 / 9 * SIZE), api.format_bytes(SIZE), "1"]]  # a reduce on gloo with 3 ranks
    assert rows_of(page, "one-offs") == [
        ["step 0", "gradient_reduce", "reduce", *more[0]],
        ["step 3", "checkpoint", "all_gather", *once[0]],
    ]
    check_width(page)


def test_the_matrix_draws_what_gloo_runs_and_what_was_issued(page, base_url):
    # In a reduce, each rank sends 2/3 of the bucket to the previous rank of the ring. Then the other two ranks
    # send 1/3 to rank 1. The gather uses the opposite direction of the ring.
    sent = STEPS + 1
    ring, part, gather = sent * SIZE * 2 / 3, sent * SIZE / 3, SIZE * 2 / 3
    executed = {
        (0, 2): ring,
        (1, 0): ring,
        (2, 1): ring + part,
        (0, 1): part + gather,
        (1, 2): gather,
        (2, 0): gather,
    }
    issued = {(0, 1): sent * SIZE + gather, (2, 1): sent * SIZE, (1, 2): gather, (2, 0): gather}
    for measure, wanted in (("wire", executed), ("issued", issued)):
        page.open(f"{base_url}/matrix?run=run&measure={measure}&per=total")
        heat = page.page.evaluate("document.querySelector('#card-matrix .js-plotly-plot')._fullData[0].z")
        drawn = {
            (i, j): 2**value for i, row in enumerate(heat) for j, value in enumerate(row) if value is not None
        }
        assert drawn == pytest.approx(wanted, rel=1e-9)
        text = page.page.inner_text("#card-model")
        assert ("against the order of the group" in text) == (measure == "wire")
    check_width(page)  # the list of four measures was once 80 pixels too wide


@pytest.mark.long
def test_compare_draws_each_rank_and_the_levels_of_a_step(page, base_url):
    page.open(f"{base_url}/compare?run=run")
    page.page.get_by_text("Bytes of each rank", exact=True).click()
    page.settle()
    read = "(name) => document.querySelector(name + ' .js-plotly-plot')._fullData.map((trace) => Array.from(trace.x))"
    sent, received = page.page.evaluate(read, "#card-ranks")
    assert sent == pytest.approx([SIZE, SIZE * 2 / 3, SIZE])
    assert received == pytest.approx([SIZE * 2 / 3, SIZE * 4 / 3, SIZE * 2 / 3])
    assert "modelled for the executed operations" in page.page.text_content("#card-ranks")
    *levels, (step_ns,) = page.page.evaluate(read, "#card-levels")
    assert sorted(value for values in levels for value in values if value) == pytest.approx(
        [SIZE * 2 / 3, SIZE * 8 / 9]
    )
    assert step_ns == 9_000_000


@pytest.mark.long
def test_the_buckets_of_a_step_have_both_bytes(page, base_url):
    page.open(f"{base_url}/buckets?run=run")
    tiles = page.page.locator(".tile").all_inner_texts()
    wire = next(text for text in tiles if "WIRE BYTES OF THE STEP" in text.upper())
    assert wire.split("\n")[1] == api.format_bytes(SIZE * 8 / 9)
    assert f"{api.format_bytes(SIZE * 2 / 3)} as issued" in wire
    assert next(text for text in tiles if "BUCKETS OF THE STEP" in text.upper()).split("\n")[1] == "1"
    row = rows_of(page, "buckets")[0]
    assert {api.format_bytes(SIZE * 8 / 9), api.format_bytes(SIZE * 2 / 3)} <= set(row)


@pytest.mark.long  # the tests above already check two of these pages
@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1280, "light")])
def test_nothing_is_wider_than_the_window(browser, base_url, width, scheme):
    view = watched(browser, viewport={"width": width, "height": 900}, color_scheme=scheme)
    for path in ("/overview", "/matrix", "/buckets", "/compare"):
        view.open(f"{base_url}{path}?run=run")
        assert view.page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0, path
    view.close()
    assert view.errors == []
