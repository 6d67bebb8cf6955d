"""Predictions in a real Chromium.

Overview shows the changes that are worth trying. Compare shows predicted and measured step times side by side.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest

from commprof.analysis import api
from commprof.calibration.file import write_calibration
from commprof.calibration.results import Calibration, Timing
from commprof.cli import execute
from commprof.trace.predictions_file import PredictionsFile, write_predictions
from support.browser import served
from support.predictable_runs import CONFIG, MS, predictable_run
from support.runs import HOST, SyntheticRun

pytestmark = [pytest.mark.browser, pytest.mark.shared_answers]

CARD = "#card-promising"
READY = f"{CARD}:not(:has-text('a few seconds'))"
BUCKETS = "zero_optimization.reduce_bucket_size"
PREDICTED = {
    20_000: (150, 130, 170),
    80_000: (120, 110, 135),
}  # key: the bucket size; value: median, low and high in ms
BARS = """() => document.querySelector('#card-levels .js-plotly-plot')._fullData.filter((trace) => trace.xaxis === 'x2')
    .map((trace) => ({name: trace.name, x: [...trace.x], fill: trace.marker.color, outline: trace.marker.line.width}))"""
SPANS = """() => document.querySelector('#card-levels .js-plotly-plot')._fullLayout.shapes
    .filter((shape) => shape.xref === 'x2').map((shape) => [shape.x0, shape.x1])"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("predictions")
    predictable_run(base / "exposed", gradient_ms=12)
    predictable_run(base / "quiet", gradient_ms=0.2)
    predictable_run(base / "measured" / "run", gradient_ms=12)
    calibrate(base / "measured" / "calibration.json", HOST)
    predictable_run(base / "elsewhere" / "run", gradient_ms=12)
    calibrate(base / "elsewhere" / "calibration.json", "another-host")
    SyntheticRun(1, config=CONFIG).write(base / "single")
    for size in PREDICTED:
        zero = CONFIG["zero_optimization"] | {"reduce_bucket_size": size}
        predictable_run(
            base / "sweep" / str(size),
            gradient_ms=12 if size == 20_000 else 4,
            config=CONFIG | {"zero_optimization": zero},
            sweep={"name": "sweep", "point": {BUCKETS: size}, "repeat": 0},
        )
    settings = [
        {"set": {BUCKETS: size}, "step_ns": {"median": middle * MS, "low": low * MS, "high": high * MS}}
        for size, (middle, low, high) in PREDICTED.items()
    ]
    content = PredictionsFile({"settings": settings}, "2026-11-26T16:00:00+01:00", "exposed", "f" * 64, 2)
    write_predictions(base / "sweep", content)
    shutil.copytree(base / "sweep", base / "stopped", ignore=shutil.ignore_patterns("80000"))
    return base


@pytest.fixture(scope="module")
def base_url(base):
    with served(base) as url:
        yield url


def calibrate(path: Path, host: str) -> None:
    """Write a calibration in which each message of any operation takes 12 ms."""
    timings = {
        op: tuple(Timing(4**power, 12 * MS, 12 * MS, 12 * MS, 5) for power in range(3, 12))
        for op in ("all_reduce", "reduce", "all_gather", "all_to_all", "reduce_scatter")
    }
    machine = {"system": "Linux", "machine": "x86_64", "cpus": 2, "accelerator": None}
    write_calibration(
        path,
        Calibration(
            created="2026-11-26T16:00:00+01:00", torch="2.13.0", backend="gloo", backend_version=None, device="cpu",
            dtype="float32", world_size=2, hosts=(host,), machine=machine, timings=timings,
        ),
    )  # fmt: skip


def printed(capsys, run: Path, *words: str) -> dict:
    assert execute(["predict", str(run), *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def opened(page, base_url: str, run: str) -> str:
    page.open(f"{base_url}/overview?run={run}")
    page.page.wait_for_selector(READY, timeout=120_000)
    page.settle()
    return page.page.inner_text(CARD)


def rows(page) -> list[dict[str, str]]:
    with page.page.expect_download() as waiting:
        page.page.click(f"{CARD} .card-action")
    text = Path(waiting.value.path()).read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def check_same(page, text: str, told: dict) -> None:
    """Assert that the card and its file contain the changes that the command printed, in the same order."""
    changes = told["promising"]["changes"]
    assert changes
    listed = page.page.locator(f"{CARD} .changes li").all_inner_texts()
    for shown, row, change in zip(listed, rows(page), changes, strict=True):
        gain, step = change["gain_ns"], change["step_ns"]
        share = gain["median"] / told["recorded"]["step_ns"]
        assert f"{api.format_ns(gain['median'])} less ({share:.0%})" in shown
        assert f"{api.format_ns(gain['low'])} to {api.format_ns(gain['high'])}" in shown
        assert change["why"] in shown
        words = " ".join(f"--set {key}={json.dumps(value)}" for key, value in change["set"].items())
        assert words.replace('"', "") in shown
        assert [int(row[name]) for name in ("step_ns", "low_ns", "high_ns")] == [
            step[name] for name in ("median", "low", "high")
        ]
        assert int(row["recorded_step_ns"]) == told["recorded"]["step_ns"]
    assert f"{told['promising']['tried']} changes were predicted" in text


@pytest.mark.long
def test_the_card_has_what_the_command_prints_and_fits_a_telephone(page, base, base_url, capsys):
    text = opened(page, base_url, "exposed")
    told = printed(capsys, base / "exposed")
    assert [each["set"] for each in told["promising"]["changes"]] == [
        {"zero_optimization.overlap_comm": True}
    ]
    check_same(page, text, told)
    page.page.click(f"{CARD} summary")
    page.page.locator(f"{CARD} .command").first.wait_for()
    commands = page.page.locator(f"{CARD} .command").all_inner_texts()
    assert commands == [
        f"commprof predict {base / 'exposed'} --set zero_optimization.overlap_comm=true",
        f"commprof sweep --predict {base / 'exposed'} --set zero_optimization.overlap_comm=false,true --nproc 2 -- "
        "train.py --config ds.json",
    ]
    follows = "([one, other]) => !!(document.querySelector(one).compareDocumentPosition(document.querySelector(other)) & 4)"
    assert page.page.evaluate(follows, ["#card-by-step", CARD])  # the answer of the page is above this card
    for scheme in ("light", "dark"):  # both are drawn again: for a narrow window, then in other colors
        with page.page.expect_response(lambda answer: "_dash-update-component" in answer.url):
            page.page.emulate_media(color_scheme=scheme)
            page.page.set_viewport_size({"width": 400, "height": 844})
        page.page.wait_for_selector(READY, timeout=120_000)
        page.settle()
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 400, scheme


@pytest.mark.long
def test_a_calibration_beside_the_run_is_used_if_it_is_of_its_hosts(page, base, base_url, capsys):
    run = base / "measured" / "run"
    calibration = base / "measured" / "calibration.json"
    text = opened(page, base_url, "measured/run")
    told = printed(capsys, run, "--calibration", str(calibration))
    assert any(BUCKETS in each["set"] for each in told["promising"]["changes"])
    check_same(page, text, told)
    assert "more device memory" in text and "not predicted" not in text
    page.page.click(f"{CARD} summary")
    page.page.locator(f"{CARD} .command").first.wait_for()
    assert f"--calibration {calibration}" in page.page.locator(f"{CARD} .command").first.inner_text()
    assert "4 changes were not predicted" in opened(page, base_url, "elsewhere/run")


@pytest.mark.long
def test_a_line_says_that_no_change_is_better_or_that_none_can_be_predicted(page, base_url):
    text = opened(page, base_url, "quiet")
    assert "3 changes were predicted; none is faster than the recorded setting" in text
    assert "commprof calibrate --nproc 2 --out calibration.json" in text
    assert "No change can be predicted" in opened(page, base_url, "single")


@pytest.mark.long
def test_compare_draws_what_a_sweep_predicted_as_hollow_bars(page, base_url):
    names = "&".join(f"run=sweep/{size}" for size in PREDICTED)
    page.open(f"{base_url}/compare?{names}")
    solid, hollow = page.page.evaluate(BARS)
    assert (hollow["name"], solid["name"]) == ("predicted step time", "step time")
    expected = sorted(PREDICTED.values())
    assert sorted(hollow["x"]) == [middle * MS for middle, _, _ in expected]
    spans = [tuple(span) for span in page.page.evaluate(SPANS)]
    assert {(low * MS, high * MS) for _, low, high in expected} <= set(spans)
    assert hollow["fill"] == "rgba(0,0,0,0)" and hollow["outline"] > 0
    assert solid["fill"] != hollow["fill"]
    assert "predicted step time" in page.page.inner_text("#card-levels .legend")
    page.open(f"{base_url}/compare?run=exposed&run=quiet")
    assert [trace["name"] for trace in page.page.evaluate(BARS)] == ["step time"]


@pytest.mark.long
def test_a_setting_that_was_predicted_and_not_run_is_a_row_with_a_hollow_bar_only(page, base, base_url):
    page.open(f"{base_url}/compare?run=stopped/20000")
    assert "1 setting, 1 run, 1 predicted only" in page.page.inner_text("#card-levels h2")
    labels = page.page.locator("#card-levels .annotation-text").all_text_contents()
    assert labels.count("reduce_bucket_size=80000, predicted, not run") == 1 and labels.count("not run") == 1
    solid, hollow = page.page.evaluate(BARS)
    assert (len(solid["x"]), sorted(hollow["x"])) == (1, sorted(ms * MS for ms, _, _ in PREDICTED.values()))
    rows = page.page.locator("#card-settings tbody tr").all_inner_texts()
    assert [("not run" in row, "predicted 120 ms (110 ms to 135 ms)" in row) for row in rows] == [
        (False, False),
        (True, True),
    ]
    shutil.copytree(base / "sweep" / "80000", base / "stopped" / "80000")
    try:
        page.open(f"{base_url}/compare?run=stopped/20000")
        assert "predicted only" not in page.page.inner_text("#card-levels h2")
    finally:
        shutil.rmtree(base / "stopped" / "80000")
