"""A user on the Runs page gets the answers to typical questions with at most three clicks and without scrolling.

Each test prints its clicks and seconds (``pytest -rP``).
"""

from __future__ import annotations

import json
import shutil
import time
from contextlib import ExitStack

import pytest

from commprof.analysis import api
from support.browser import served, watched
from support.recording import record

pytestmark = [pytest.mark.browser, pytest.mark.ranks, pytest.mark.shared_answers]

SCREEN = {"width": 1440, "height": 900}
LAYERS, WIDTH = 10, 64
LAYER = WIDTH * WIDTH + WIDTH  # the elements of a layer, and of a bucket for one layer
ONE_LINE = 23  # the height in pixels of a one-line message
STEPS, LATE_FROM, LATE_SECONDS = 13, 7, 0.2
BUCKET = "zero_optimization.reduce_bucket_size"
MULTI = "zero_optimization.use_multi_rank_bucket_allreduce"


def train(rank: int, world: int, steps: int, multi: bool, bucket: int, late_from: int | None = None) -> None:
    """Train with zero_runtime. From step ``late_from`` on, the last rank is late."""
    import torch

    import zero_runtime

    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    zero = {
        "stage": 2,
        "reduce_scatter": True,
        "use_multi_rank_bucket_allreduce": multi,
        "reduce_bucket_size": bucket,
    }
    model = torch.nn.Sequential(*layers)
    engine, _, _, _ = zero_runtime.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": zero,
        },
    )
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        loss = engine(torch.randn(4, WIDTH, generator=generator)).square().mean()
        if late_from is not None and rank == world - 1 and step >= late_from:
            time.sleep(LATE_SECONDS)
        engine.backward(loss)
        engine.step()


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """Record a run, and copy it twice as the runs of a sweep."""
    base = tmp_path_factory.mktemp("slow")
    record(base / "slow", 2, train, STEPS, True, LAYER, LATE_FROM)
    for repeat in range(2):
        run = base / "keys" / f"{BUCKET}={LAYER}-{repeat}"
        shutil.copytree(base / "slow", run)
        file = run / "run.json"
        sweep = {"name": "keys", "point": {BUCKET: LAYER}, "repeat": repeat}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"sweep": sweep}))
    return base


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    """Record two sweeps with repeats.

    One sweep varies the key of DeepSpeed that decides between reduce and all_reduce. The second sweep varies the
    bucket size.
    """
    base = tmp_path_factory.mktemp("sweeps")
    for name, points in (
        ("keys", [{MULTI: value} for value in (True, False)]),
        ("sizes", [{BUCKET: LAYER * layers} for layers in (1, 5)]),
    ):
        for point in points:
            for repeat in range(2):
                run = base / name / f"{next(iter(point.values()))}-{repeat}".lower()
                record(run, 2, train, 5, point.get(MULTI, True), point.get(BUCKET, 2 * LAYER))
                file = run / "run.json"
                sweep = {"name": name, "point": point, "repeat": repeat}
                file.write_text(json.dumps(json.loads(file.read_text()) | {"sweep": sweep}))
    return base


class Visitor:
    """A user who starts on the Runs page and whose clicks are counted."""

    def __init__(self, view, url: str) -> None:
        self.view, self.clicks = view, 0
        view.open(url, ready=".ag-row")
        self.begin = time.monotonic()

    def click(self, locator) -> None:
        locator.click()
        self.clicks += 1

    def follow(self, name: str) -> None:
        """Click a link of the navigation, or the button Compare."""
        nav = self.view.page.get_by_role("link", name=name, exact=True)
        self.click(nav.last if name == "Compare" else nav.first)
        self.wait_for_page(name)

    def wait_for_page(self, title: str) -> None:
        self.view.page.wait_for_function(
            "(title) => document.title.startsWith(title)", arg=title, timeout=60_000
        )

    def tick(self, name: str) -> None:
        row = self.view.page.locator(".ag-row", has_text=name).first
        self.click(row.locator("input[type=checkbox]"))
        self.view.page.wait_for_function("location.search.includes('tick=')")

    def read(self, selector: str) -> str:
        """Return the text of an answer, and assert that it is visible without scrolling after at most three clicks."""
        answer = self.view.page.locator(selector).first
        answer.wait_for()
        print(f"{self.clicks} clicks, {time.monotonic() - self.begin:.1f} s")
        box = answer.bounding_box()
        assert self.view.page.evaluate("window.scrollY") == 0
        assert box["y"] >= 0 and box["y"] + box["height"] <= SCREEN["height"]
        assert self.clicks <= 3
        return " ".join(answer.inner_text().split())


@pytest.fixture(scope="module")
def address():
    """Yield a function that returns the address of the dashboard of a directory. The tests share these dashboards."""
    with ExitStack() as servers:
        addresses = {}

        def address_of(base) -> str:
            if base not in addresses:
                addresses[base] = servers.enter_context(served(base))
            return addresses[base]

        yield address_of


@pytest.fixture
def visit(browser, address):
    views = []

    def begin(base) -> Visitor:
        views.append(watched(browser, viewport=SCREEN))
        return Visitor(views[0], address(base))

    yield begin
    views[0].close()
    assert views[0].errors == []


@pytest.mark.long
def test_which_rank_is_slow_and_since_when(visit, slow):
    visitor = visit(slow)
    visitor.click(visitor.view.page.locator(".ag-row a", has_text="slow"))
    visitor.wait_for_page("Overview")
    visitor.follow("Stragglers")
    answer = visitor.read("#body .message")
    assert "Rank 1 is a straggler" in answer and f"from step {LATE_FROM} on" in answer
    chart = visitor.view.page.locator("#card-lateness-steps .js-plotly-plot")
    visitor.read("#card-lateness-steps .js-plotly-plot")
    assert f"rank 1 late from step {LATE_FROM} on" in chart.text_content()
    # On a busy machine, the other rank may be late too. Each further sentence takes one or two lines above the chart.
    told = visitor.view.page.locator("#body .message").bounding_box()
    assert told["y"] + told["height"] <= 600
    assert chart.bounding_box()["y"] + chart.bounding_box()["height"] <= 600 + told["height"] - ONE_LINE


def check_bucket_7(visitor) -> None:
    visitor.click(visitor.view.page.locator("#controls label", has_text="7").last)
    answer = visitor.read(".told:has-text('Bucket 7')")
    # Gradients arrive in reverse order of the layers, and each bucket has room for one layer. So bucket 7
    # contains layer 2 and was sent because the next gradient did not fit.
    assert "2.bias and 2.weight" in answer and f"{LAYER:,} elements" in answer and "did not fit" in answer


@pytest.mark.long
def test_what_does_bucket_7_of_a_run_hold(visit, slow):
    visitor = visit(slow)
    visitor.click(visitor.view.page.locator(".ag-row a", has_text="slow"))
    visitor.wait_for_page("Overview")
    visitor.follow("Buckets")
    check_bucket_7(visitor)


@pytest.mark.long
def test_what_bucket_7_of_a_run_in_a_closed_sweep_holds(visit, slow):
    visitor = visit(slow)
    visitor.click(visitor.view.page.get_by_role("button", name="keys (2 runs)"))
    visitor.click(visitor.view.page.locator(".ag-row a", has_text=f"{LAYER}-1"))
    visitor.wait_for_page("Overview")
    visitor.follow("Buckets")
    answer = visitor.read("#card-buckets tbody tr:has(a:text-is('7'))")
    assert answer.startswith("7 2.bias, 2.weight 100% next gradient did not fit 16.2 KiB all_reduce")


@pytest.mark.long
def test_what_bucket_7_of_a_ticked_run_holds_and_a_click_above_a_small_bar_chooses_its_bucket(visit, slow):
    visitor = visit(slow)
    visitor.tick("slow")
    visitor.follow("Buckets")
    check_bucket_7(visitor)
    visitor.view.settle()
    page = visitor.view.page
    page.locator("#card-bucket-times .nsewdrag").scroll_into_view_if_needed()
    plot = page.locator("#card-bucket-times .nsewdrag").bounding_box()
    at = plot["x"] + 5.5 / LAYERS * plot["width"], plot["y"] + 4
    page.mouse.move(at[0] - 5, at[1])
    page.mouse.move(*at)
    page.wait_for_timeout(300)  # plotly finds the element below the pointer
    page.mouse.click(*at)
    page.wait_for_selector(".told:has-text('Bucket 5')")
    page.wait_for_function("location.search.includes('bucket=5')")


@pytest.mark.long
def test_a_click_on_a_bar_chooses_its_bucket(visit, slow):
    visitor = visit(slow)
    visitor.tick("slow")
    visitor.follow("Buckets")
    visitor.view.settle()
    page = visitor.view.page
    page.locator("#card-bucket-sizes .nsewdrag").scroll_into_view_if_needed()
    plot = page.locator("#card-bucket-sizes .nsewdrag").bounding_box()
    page.mouse.move(plot["x"] + 7.4 / LAYERS * plot["width"], plot["y"] + 0.8 * plot["height"])
    page.wait_for_timeout(300)  # plotly finds the element below the pointer
    page.mouse.click(plot["x"] + 7.5 / LAYERS * plot["width"], plot["y"] + 0.8 * plot["height"])
    answer = page.locator(".told:has-text('Bucket 7')")
    answer.wait_for()
    assert "2.bias and 2.weight" in answer.inner_text()


@pytest.mark.long
@pytest.mark.parametrize(("sweep", "expected"), [("keys", "sends the least"), ("sizes", "bytes")])
def test_which_setting_to_take_and_whether_the_bucket_size_helped(visit, sweeps, sweep, expected):
    visitor = visit(sweeps)
    visitor.tick(sweep)
    visitor.follow("Compare")
    answer = visitor.read(".told")
    runs = sorted((sweeps / sweep).iterdir())
    sentence = api.advice(runs).sentences[0].partition(": ")[2]
    assert sentence.lower() in answer.lower() and expected in answer
    if sweep == "keys":
        assert "use_multi_rank_bucket_allreduce=false" in answer
    assert visitor.read("#card-levels .js-plotly-plot")


@pytest.mark.long
def test_why_it_is_an_all_reduce(visit, sweeps):
    visitor = visit(sweeps)
    visitor.click(visitor.view.page.get_by_role("button", name="keys (4 runs)"))
    visitor.click(visitor.view.page.locator(".ag-row a", has_text="keys/true-0"))
    visitor.wait_for_page("Overview")
    answer = visitor.read(".told:has-text('reduce_scatter \u2192 all_reduce')")
    assert "use_multi_rank_bucket_allreduce: true turned it into all_reduce" in answer
