"""The dashboard in a real Chromium draws the values of the exported CSV, for recorded runs with random sizes."""

from __future__ import annotations

import csv
import io
import json
import random
import time
from collections import defaultdict
from pathlib import Path

import pytest

from support.browser import drawn_bars, served, watched
from support.ranks import run_ranks
from support.runs import SyntheticRun

pytestmark = [pytest.mark.browser, pytest.mark.ranks, pytest.mark.shared_answers]

WORLD = 2
STEPS = 3
RUNS_MORE = (WORLD + 1) / WORLD  # executed bytes per issued byte of a reduce on gloo
DESKTOP = {"width": 1280, "height": 900}
HOSTILE = "<img src=x onerror=alert(1)>"


def name_of(how: str) -> str:
    """Return a run name that is as long as in a sweep, so that a phone must shorten it."""
    return f"sweep-of-reductions/{how}-use_multi_rank_bucket_allreduce_true-contiguous_gradients_true"


def record(rank: int, world: int, out: str, how: str, sizes: list[list[int]]) -> None:
    """Record steps that only communicate.

    Each step reduces buckets of the given sizes with the operation ``how``, then issues one all_gather and a barrier.
    """
    import torch
    import torch.distributed as dist

    from commprof import hooks

    hooks.attach(out, quiet=True)
    for step, buckets in enumerate(sizes):
        hooks.step(step)
        hooks.phase("backward")
        for bucket, numel in enumerate(buckets):
            flat = torch.ones(numel * world)
            if how == "reduce":
                with hooks.tag("gradient_reduce", bucket=bucket, owner=bucket % world):
                    dist.reduce(flat, bucket % world)
            elif how == "all_to_all":
                with hooks.tag("gradient_reduce", bucket=bucket, intended_op="reduce_scatter"):
                    dist.all_to_all_single(torch.empty_like(flat), flat)
            else:
                with hooks.tag("gradient_reduce", bucket=bucket):
                    dist.all_reduce(flat)
        hooks.phase("optimizer")
        with hooks.tag("parameter_gather"):
            dist.all_gather_into_tensor(torch.empty(buckets[0] * world), torch.ones(buckets[0]))
        hooks.metric("loss", 3.0 - step)
        dist.barrier()
    hooks.detach()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Record three runs whose configs differ, export them as CSV, and return the directory."""
    from commprof.export.csv import export_csv
    from commprof.trace.manifest import Manifest, create_run

    seed = random.randrange(2**32)
    print(f"sizes drawn with seed {seed}")
    rng = random.Random(seed)
    base = tmp_path_factory.mktemp("dashboard")
    for how in ("all_reduce", "reduce", "all_to_all"):
        path = base / "runs" / name_of(how)
        config = {"zero_optimization": {"stage": 2, "gradient_reduction": how, "note": HOSTILE}}
        manifest = Manifest(
            command=["train.py", HOSTILE],
            script="train.py",
            started_realtime_ns=time.time_ns(),
            world_size=WORLD,
            nproc=WORLD,
            config=config,
            config_path="ds.json",
        )
        create_run(path, manifest)
        sizes = [[rng.randrange(1, 200_000) for _ in range(rng.randrange(2, 5))] for _ in range(STEPS)]
        run_ranks(WORLD, record, str(path), how, sizes)
        export_csv(path, base / "csv" / how)
    return base


@pytest.fixture(scope="module")
def base_url(runs):
    with served(runs / "runs") as url:
        yield url


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def sent_model(op: str, payload: int, size: int) -> float:
    """Return the mean bytes that a rank sends, computed independently of commprof: doubled for all_reduce."""
    return {"all_reduce": 2.0, "barrier": 0.0}.get(op, 1.0) * (size - 1) / size * payload


def sums(export: Path) -> dict[str, dict[tuple[int, str], float]]:
    """Return the sum of each measure by step and series over an exported collectives.csv.

    Each collective is counted once.
    """
    seen = set()
    found: dict[str, dict[tuple[int, str], float]] = {
        name: defaultdict(float) for name in ("wire", "payload", "count")
    }
    for row in rows_of(export / "collectives.csv"):
        identity = (row["pg"], row["pg_seq"], row["op"])
        if int(row["step"]) < 0 or row["op"] == "barrier" or identity in seen:
            continue
        seen.add(identity)
        meant = row["intended_op"]
        key = (int(row["step"]), f"{meant} as {row['op']}" if meant else row["op"])
        payload = int(row["payload_bytes"])
        found["wire"][key] += sent_model(row["op"], payload, int(row["group_size"]))
        found["payload"][key] += payload
        found["count"][key] += 1
    return found


SERIES = {"all_reduce": "all_reduce", "reduce": "reduce", "all_to_all": "reduce_scatter as all_to_all"}


def expected_bars(base: Path, measure: str, shown: list[str], series: str) -> list[float]:
    """Return the mean of ``series`` over the steps after the first, for each of the runs ``shown``.

    The first step is not warm. On gloo, a reduce is a reduce_scatter whose parts are then sent to the root. Therefore
    its wire bytes are (n^2-1)/n^2 of the payload instead of (n-1)/n.
    """
    runs_more = RUNS_MORE if (measure, series) == ("wire", "reduce") else 1.0
    return [runs_more * mean_of(base, measure, how, series) for how in shown]


def mean_of(base: Path, measure: str, how: str, series: str) -> float:
    """Return the mean of ``series`` over the steps after the first."""
    found = sums(base / "csv" / how)[measure]
    return sum(found.get((step, series), 0.0) for step in range(1, STEPS)) / (STEPS - 1)


def shown_order(view, card: str = "reducing") -> list[str]:
    """Return the runs in the order of the rows, according to the labels of the figure."""
    texts = view.page.locator(f"#card-{card} .annotation-text").all_text_contents()
    labels = [text for text in texts if "gradient_reduction=" in text]
    return [label.rpartition("gradient_reduction=")[2].partition(",")[0] for label in labels]


def choose_measure(view, name: str) -> None:
    with view.page.expect_response(lambda answer: "_dash-update-component" in answer.url):
        view.page.get_by_text(name, exact=True).first.click()
    view.page.wait_for_function(
        "(text) => document.body.innerText.includes(text)", arg=f"{name} per step and"
    )
    view.settle()


@pytest.mark.long
def test_compare_draws_the_sums_of_the_exported_csv_in_every_measure(page, runs, base_url):
    page.open(f"{base_url}/compare")
    open_folds(page)
    order = shown_order(page)
    assert sorted(order) == sorted(SERIES)
    for measure, name in (("wire", None), ("payload", "Payload bytes"), ("count", "Collectives")):
        if name:
            choose_measure(page, name)
            assert f"measure={measure}" in page.page.url
        open_folds(page)
        drawn = drawn_bars(page.page, "reducing")
        assert set(drawn) == set(SERIES.values())
        for series in SERIES.values():
            assert drawn[series] == pytest.approx(expected_bars(runs, measure, order, series), rel=1e-12)
        others = drawn_bars(page.page, "others")
        assert others["all_gather"] == pytest.approx(
            expected_bars(runs, measure, order, "all_gather"), rel=1e-12
        )


def test_compare_draws_what_was_issued_beside_what_was_asked_for(page, runs, base_url):
    page.open(f"{base_url}/compare")
    drawn = drawn_bars(page.page, "levels")
    for how, series in SERIES.items():
        issued = mean_of(runs, "wire", how, series)
        executed = issued * (RUNS_MORE if how == "reduce" else 1.0)
        assert sorted(drawn[series]) == pytest.approx(sorted([issued, executed]), rel=1e-5)
    gathered = [mean_of(runs, "wire", how, "all_gather") for how in SERIES for _ in ("issued", "executed")]
    assert sorted(drawn["all_gather"]) == pytest.approx(sorted(gathered), rel=1e-5)
    assert len(drawn["step time"]) == len(SERIES)
    texts = page.page.locator("#card-levels .annotation-text").all_text_contents()
    assert texts.count("requested") == texts.count("executed") == len(SERIES)
    assert texts.count("not known") == len(SERIES)  # DeepSpeed has no such configuration keys
    page.page.get_by_text("Bytes of each rank", exact=True).first.click()
    page.settle()
    ranks = page.page.evaluate(
        "document.querySelector('#card-ranks .js-plotly-plot').calcdata.map((points) => points.length)"
    )
    assert ranks == [WORLD * len(SERIES)] * 2
    assert "Recommendation" in page.page.inner_text(".page-body")


@pytest.fixture(scope="module")
def grid_url(tmp_path_factory):
    """Serve synthetic runs with the four combinations of two configuration keys."""
    base = tmp_path_factory.mktemp("grid")
    for scatter in (True, False):
        for multi in (True, False):
            keys = {"stage": 2, "reduce_scatter": scatter, "use_multi_rank_bucket_allreduce": multi}
            run = SyntheticRun(2, config={"zero_optimization": keys})
            for step in range(2):
                run.add_step(step, duration_ns=1_000_000, loss=2.0)
                op = "reduce" if scatter and not multi else "all_reduce"
                run.add_collective(op, step=step, payload_bytes=4096, peer=0, purpose="gradient_reduce")
            run.write(base / f"{scatter}-{multi}")
    with served(base) as url:
        yield url


@pytest.mark.long
@pytest.mark.parametrize(("width", "columns"), [(400, 1), (1280, 2)])
def test_the_grid_of_the_two_keys_shares_its_axis_and_covers_nothing(browser, grid_url, width, columns):
    view = watched(browser, viewport={"width": width, "height": 900})
    view.open(f"{grid_url}/compare?view=grid")
    ranges = view.page.evaluate(
        "[...document.querySelectorAll('#card-levels .js-plotly-plot')].map((plot) => plot._fullLayout.xaxis.range[1])"
    )
    assert len(ranges) == 4 and len(set(ranges)) == 1
    lefts = view.page.evaluate(
        "[...document.querySelectorAll('#card-levels .grid-cell')].map((cell) => cell.getBoundingClientRect().left)"
    )
    assert len(set(lefts)) == columns
    assert view.page.locator("#card-levels .legend").count() == 1
    assert view.page.locator("#card-levels g.legend").count() == 0, "the legend of a figure would lie over it"
    assert_nothing_is_cut_or_covered(view)
    open_folds(view)
    assert_nothing_is_cut_or_covered(view)
    view.close()
    assert view.errors == []


@pytest.mark.long
def test_overview_says_the_verdict_and_the_time_that_was_exposed(page, runs, base_url):
    from commprof.analysis import api

    page.open(f"{base_url}/overview?run={name_of('reduce')}")
    page.page.get_by_text("Requested, issued, executed and moved in sentences").click()
    page.page.locator(".sentences").wait_for()
    text = page.page.text_content(".page-body")
    verdict = api.verify(runs / "runs" / name_of("reduce"))
    assert all(" ".join(sentence.split()) in " ".join(text.split()) for sentence in verdict.sentences)
    assert "commprof verify" in text
    exposed = drawn_bars(page.page, "exposure")["exposed"]
    wanted = api.exposure_per_step(runs / "runs" / name_of("reduce"))["exposed_ns"]
    assert exposed == pytest.approx([float(value) for value in wanted], rel=1e-12)


@pytest.mark.long
def test_the_numbers_beside_the_bars_are_those_of_the_bars(page, base_url):
    page.open(f"{base_url}/compare?measure=count")
    totals = [sum(values) for values in zip(*drawn_bars(page.page, "reducing").values(), strict=True)]
    texts = page.page.locator("#card-reducing .annotation-text").all_text_contents()
    numbers = [float(text) for text in texts if "=" not in text]
    assert numbers == pytest.approx(totals, abs=0.05)


def test_overview_draws_every_step(page, runs, base_url):
    page.open(f"{base_url}/overview?run={name_of('all_to_all')}&measure=wire")
    assert_nothing_is_cut_or_covered(page)
    assert brightness(page) > 80, "the system is light"
    drawn = drawn_bars(page.page, "by-step")
    wanted = sums(runs / "csv" / "all_to_all")["wire"]
    for series in ("reduce_scatter as all_to_all", "all_gather"):
        assert drawn[series] == pytest.approx([wanted[step, series] for step in range(STEPS)], rel=1e-12)
    purposes = drawn_bars(page.page, "by-purpose")
    total = sum(sum(values) for values in purposes.values())
    after_the_first = sum(value for (step, _), value in wanted.items() if step)
    assert total == pytest.approx(after_the_first / (STEPS - 1), rel=1e-12)
    open_folds(page)
    assert_nothing_is_cut_or_covered(page)


@pytest.mark.long
def test_a_choice_is_in_the_address_and_back_undoes_it(page, base_url):
    first, second = name_of("reduce"), name_of("all_reduce")
    page.open(f"{base_url}/compare?run={first}&run={second}&measure=payload")
    assert len(shown_order(page)) == 2
    page.page.get_by_text("Choose runs").click()
    with page.page.expect_response(lambda answer: "_dash-update-component" in answer.url):
        page.page.locator(".control-wide button[class*=Pill]").first.click()
    page.page.wait_for_function("document.querySelectorAll('#card-settings tbody tr').length === 1")
    assert page.page.url.endswith(f"?run={second}&measure=payload")
    page.page.go_back()
    page.page.wait_for_function("document.querySelectorAll('#card-settings tbody tr').length === 2")
    assert f"run={first}&run={second}" in page.page.url


@pytest.mark.long
def test_several_runs_are_chosen_without_the_list_closing(page, base_url):
    page.open(f"{base_url}/compare?run={name_of('reduce')}")
    page.page.get_by_text("Choose runs").click()
    page.page.locator(".control-wide input").first.click()
    for expected in (2, 3):
        page.page.locator("[role=option]:visible").first.click()
        page.page.wait_for_function(
            "(rows) => document.querySelectorAll('#card-settings tbody tr').length === rows", arg=expected
        )
    assert page.page.url.count("run=") == 3


@pytest.mark.long
def test_settings_table_names_what_was_issued_and_for_what(page, base_url):
    page.open(f"{base_url}/compare")
    rows = page.page.locator("#card-settings tbody tr").all_inner_texts()
    row = next(text for text in rows if "gradient_reduction=all_to_all" in text)
    assert "reduce_scatter as all_to_all" in row


@pytest.mark.long
def test_toggle_redraws_the_figures_for_the_dark_scheme(page, base_url):
    page.open(f"{base_url}/compare")
    colour = "document.querySelector('#card-levels .js-plotly-plot')._fullLayout.font.color"
    light = page.page.evaluate(colour)
    page.page.locator("#scheme-toggle").click()
    page.page.wait_for_function(f"{colour} !== {json.dumps(light)}")
    assert page.page.evaluate("document.documentElement.dataset.mantineColorScheme") == "dark"
    assert page.page.evaluate("document.documentElement.dataset.agThemeMode") == "dark"
    page.settle()


@pytest.mark.long  # other tests check these pages with the light scheme and a width of 1280
@pytest.mark.parametrize(("width", "scheme"), [(420, "dark"), (1280, "light")])
def test_nothing_is_cut_or_covered_and_the_scheme_is_the_systems(browser, base_url, width, scheme):
    view = watched(browser, viewport={"width": width, "height": 900}, color_scheme=scheme)
    for path in ("/overview", "/compare"):
        view.open(base_url + path)
        assert_nothing_is_cut_or_covered(view)
        open_folds(view)
        assert_nothing_is_cut_or_covered(view)
    background = brightness(view)
    view.close()
    assert (background < 80) == (scheme == "dark")


def brightness(view) -> int:
    """Return the brightness of the background, from 0 to 255."""
    background = view.page.evaluate("getComputedStyle(document.body).backgroundColor")
    return max(int(part) for part in background.strip("rgb()").split(","))


SEEN_PLOTS = (
    "() => [...document.querySelectorAll('.js-plotly-plot')].filter((plot) => plot.checkVisibility())"
)


def assert_nothing_is_cut_or_covered(view) -> None:
    """Assert that no text of a visible figure is outside of the figure or covers a bar.

    Figures in closed folds are not checked, because they get their width only when the fold is opened.
    """
    assert view.page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    outside = view.page.evaluate(
        SEEN_PLOTS
        + """.flatMap((plot) => {
            const frame = plot.getBoundingClientRect();
            return [...plot.querySelectorAll('.annotation-text, .xtitle, .ytitle, .xtick text, .ytick text')]
                .filter((text) => {
                    const box = text.getBoundingClientRect();
                    return box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
                        || box.bottom > frame.bottom + 1;
                }).map((text) => text.textContent);
        })"""
    )
    covered = view.page.evaluate(
        SEEN_PLOTS
        + """.flatMap((plot) => {
            const bars = [...plot.querySelectorAll('.barlayer path')].map((bar) => bar.getBoundingClientRect());
            return [...plot.querySelectorAll('.annotation-text')].filter((text) => {
                const box = text.getBoundingClientRect();
                return bars.some((bar) => bar.width > 1 && box.left < bar.right - 1 && box.right > bar.left + 1
                    && box.top < bar.bottom - 3 && box.bottom > bar.top + 3);
            }).map((text) => text.textContent);
        })"""
    )
    assert outside == []
    assert covered == []


def open_folds(view) -> None:
    view.page.evaluate("document.querySelectorAll('.fold').forEach((fold) => { fold.open = true; })")
    view.settle()


DRAWN = """() => [...document.querySelectorAll('.fold[open] .js-plotly-plot')].map((plot) =>
    [plot.getBoundingClientRect().width, plot.querySelector('.main-svg').getBoundingClientRect().width])"""


def test_the_csv_of_a_figure_in_a_fold_holds_what_is_drawn_and_each_is_as_wide_as_its_card(page, base_url):
    page.open(f"{base_url}/compare?measure=wire")
    assert_nothing_is_cut_or_covered(page)
    page.page.get_by_text("Traffic by operation", exact=True).click()
    page.settle()
    drawn = drawn_bars(page.page, "reducing")
    with page.page.expect_download() as caught:
        page.page.locator("#card-reducing .card-action").click()
    assert caught.value.suggested_filename == "commprof-reducing.csv"
    rows = list(csv.DictReader(io.StringIO(Path(caught.value.path()).read_text())))
    for series in SERIES.values():
        values = sorted(float(row["wire_bytes_per_step"]) for row in rows if row["series"] == series)
        assert values == pytest.approx(sorted(value for value in drawn[series] if value), rel=1e-12)
    open_folds(page)
    page.page.wait_for_function(
        f"({DRAWN})().every(([room, drawn]) => room > 400 && Math.abs(room - drawn) < 2)"
    )
    assert len(page.page.evaluate(DRAWN)) >= 3
    assert_nothing_is_cut_or_covered(page)


@pytest.mark.long
def test_a_heading_sorts_the_table_and_the_chart_and_back_undoes_it(page, base_url):
    page.open(f"{base_url}/compare")
    given = shown_order(page)
    for column, key in (("Step time", "step_time_ns"), ("Setting", "setting")):
        for sort, direction in ((key, "ascending"), (f"-{key}", "descending")):
            page.page.get_by_role("button", name=column, exact=True).click()
            page.page.wait_for_selector(f"#card-settings th[aria-sort='{direction}']")
            assert page.page.url.endswith(f"?sort={sort}")
            page.settle()
            rows = page.page.locator("#card-settings tbody tr").all_inner_texts()
            order = [text.split()[0].rpartition("gradient_reduction=")[2] for text in rows]
            assert shown_order(page, "levels") == order
            if column == "Setting":
                assert order == sorted(SERIES, reverse=direction == "descending")
        page.page.go_back()
        page.page.wait_for_selector("#card-settings th[aria-sort='ascending']")
        page.page.go_back()
        page.page.wait_for_function("!document.querySelector('th[aria-sort=ascending]')")
        page.settle()
        assert shown_order(page) == given


@pytest.mark.long
def test_no_figure_offers_to_send_itself_anywhere(page, base_url):
    page.open(f"{base_url}/compare")
    contexts = page.page.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot')].map((plot) => plot._context.showSendToCloud)"
    )
    assert contexts
    assert not any(contexts)
    titles = page.page.evaluate(
        "[...document.querySelectorAll('.modebar-btn')].map((button) => button.dataset.title || '')"
    )
    assert not [title for title in titles if "cloud" in title.lower() or "share" in title.lower()]


@pytest.mark.long
def test_every_figure_has_its_table_and_its_csv(page, base_url):
    for path in ("/overview", "/compare"):
        page.open(base_url + path)
        open_folds(page)
        cards = page.page.locator(".card:has(.js-plotly-plot)")
        assert cards.count() >= 3
        for i in range(cards.count()):
            card = cards.nth(i)
            card.get_by_text("Table (").click()
            card.locator("tbody tr").first.wait_for()
            assert card.locator("a.card-action[download$='.csv']").count() == 1


@pytest.mark.long
def test_text_of_a_trace_is_shown_as_text(page, base_url):
    page.open(f"{base_url}/overview?run={name_of('reduce')}")
    assert HOSTILE in page.page.locator("#card-what-ran").inner_text()
    assert page.page.locator("img[src=x]").count() == 0


@pytest.mark.long
def test_unknown_runs_and_pages_are_said_in_the_page(page, base_url):
    page.open(f"{base_url}/compare?run={name_of('reduce')}&run=../../etc/passwd", ready=".message")
    assert "No such run" in page.page.inner_text("#page")
    assert "../../etc/passwd" in page.page.inner_text("#page")
    assert drawn_bars(page.page, "levels")
    page.open(f"{base_url}/overview?run=gone", ready=".message")
    assert "'gone'" in page.page.inner_text("#page")
    page.open(f"{base_url}/nowhere", ready=".message")
    assert "No such page" in page.page.inner_text("#page")


def test_empty_directory_says_what_to_type(browser, tmp_path):
    with served(tmp_path / "missing") as url:
        view = watched(browser, viewport=DESKTOP)
        for path in ("/overview", "/compare"):
            view.open(url + path, ready=".message")
            assert "commprof run" in view.page.inner_text("#page")
        view.close()
        assert view.errors == []


@pytest.mark.long
def test_a_broken_run_leaves_the_others_standing(browser, runs, tmp_path):
    good = tmp_path / "good"
    good.symlink_to(runs / "runs" / name_of("reduce"))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "run.json").write_text('{"schema_version": 999}')
    with served(tmp_path) as url:
        view = watched(browser, viewport=DESKTOP)
        view.open(f"{url}/overview?run=broken", ready=".message")
        assert "cannot be read" in view.page.inner_text("#page")
        assert "999" in view.page.inner_text("#page")
        view.open(f"{url}/compare", ready=".message")
        assert "broken cannot be read" in view.page.inner_text("#page")
        view.close()
        assert view.errors == []
