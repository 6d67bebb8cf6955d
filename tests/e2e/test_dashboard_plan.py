"""The Plan page in a real Chromium draws the values of ``commprof plan --json``, and the address contains the form."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from commprof.calibration.file import write_calibration
from commprof.cli import execute
from support.browser import served, watched
from support.calibrations import made_calibration
from support.runs import SyntheticRun

pytestmark = [pytest.mark.browser, pytest.mark.shared_answers]

CONFIG = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
RECORDED = Path(__file__).resolve().parents[1] / "golden" / "h100" / "zero_stage2"
SETS = "zero_optimization.stage=1,2,3"
ADDRESS = f"config={quote(json.dumps(CONFIG))}&model=params:1e9&world=32&sequence=512&set={SETS}"

DRAWN = """(name) => document.querySelector(`#card-${name} .js-plotly-plot`)._fullData.map((trace) => ({
    name: trace.name, x: [...trace.x], y: [...trace.y], group: trace.stackgroup}))"""
AXIS = "(name) => document.querySelector(`#card-${name} .js-plotly-plot`)._fullLayout.xaxis.type"
LABELS = """(name) => [...document.querySelectorAll(`#card-${name} .xtick text`)].map((text) => text.textContent)"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("plan")
    run = SyntheticRun(2, config=CONFIG | {"zero_optimization": {"stage": 3}})
    run.add_parameters({"weight": 3_000_000})
    run.write(base / "trained")
    shutil.copytree(RECORDED, base / "timed")
    write_calibration(base / "calibration.json", made_calibration())
    return base


@pytest.fixture(scope="module")
def base_url(base):
    with served(base) as url:
        yield url


def field(page, key: str):
    return page.page.locator(f"""[id='{{"key":"{key}","type":"control"}}']""")


def form(page) -> dict[str, str]:
    """Return the values of the form fields in the address, by key."""
    values = parse_qs(urlsplit(page.page.url).query, keep_blank_values=True)
    return {key: value for key, (value,) in values.items()}


def printed(tmp_path, capsys, world: int, *more: str) -> list[dict]:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    words = ["--model", "params:1e9", "--world", str(world), "--sequence", "512", "--set", SETS]
    assert execute(["plan", str(path), *words, *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["settings"]


def drawn(page, name: str) -> dict[str, dict[int, int]]:
    return {
        trace["name"]: dict(zip(trace["x"], trace["y"], strict=True))
        for trace in page.page.evaluate(DRAWN, name)
        if trace["group"]
    }


def test_the_figures_and_files_hold_what_the_command_prints(page, base_url, tmp_path, capsys):
    page.open(f"{base_url}/plan?{ADDRESS}&setting=stage%3D3")
    assert [page.page.evaluate(AXIS, f"plan-{name}") for name in ("traffic", "memory")] == ["log", "log"]
    assert page.page.evaluate(LABELS, "plan-traffic") == [
        "1",
        "4",
        "16",
        "64",
        "256",
        "1K",
        "4K",
        "16K",
    ]
    traffic, memory = drawn(page, "plan-traffic"), drawn(page, "plan-memory")
    with page.page.expect_download() as waiting:
        page.page.click("#card-plan-memory .card-action")
    text = Path(waiting.value.path()).read_text(encoding="utf-8")
    rows = {(int(row["world"]), row["kind"]): row for row in csv.DictReader(io.StringIO(text))}
    for world in (1, 32, 16384):
        stage3 = printed(tmp_path, capsys, world)[2]
        parts = stage3["memory_bytes_per_rank"]["parts"]
        assert {kind: line[world] for kind, line in memory.items()} == {
            kind: part["device"] for kind, part in parts.items()
        }
        assert {kind: int(rows[world, kind]["device_bytes"]) for kind in parts} == {
            kind: part["device"] for kind, part in parts.items()
        }
        wire: dict[str, int] = {}
        for row in stage3["traffic"]:
            wire[row["purpose"]] = wire.get(row["purpose"], 0) + row["wire_bytes_per_rank"]
        assert {purpose: line[world] for purpose, line in traffic.items() if line.get(world)} == {
            purpose: num_bytes for purpose, num_bytes in wire.items() if num_bytes
        }


@pytest.mark.long
def test_a_field_is_written_to_the_address_back_undoes_it_and_a_config_that_is_typed_is_planned_or_refused(
    page, base_url
):
    page.open(f"{base_url}/plan?{ADDRESS}")
    field(page, "world").fill("128")
    page.page.wait_for_url("**world=128**")
    page.page.wait_for_selector("#card-plan-sizes .card-subtitle:has-text('at 128 ranks')")
    assert form(page)["set"] == SETS and json.loads(form(page)["config"]) == CONFIG
    assert form(page)["setting"] == ""  # so the figures still show the recommended setting
    page.page.go_back()
    page.page.wait_for_selector("#card-plan-sizes .card-subtitle:has-text('at 32 ranks')")
    assert field(page, "world").input_value() == "32"
    # A config that is typed into the form is either planned or refused with a one-line message.
    field(page, "config").fill('{"zero_optimization": {"stage": 2},}')
    page.page.wait_for_selector("text=The config is not JSON: line 1, column 35")
    field(page, "config").fill('{"zero_optimization": {"stage": 2}}')
    page.page.wait_for_selector("text=the config sets no train_micro_batch_size_per_gpu")
    assert field(page, "config").input_value() == form(page)["config"]


@pytest.mark.long
def test_the_config_of_a_run_and_the_setting_of_the_figures_are_chosen(page, base_url):
    page.open(f"{base_url}/plan?{ADDRESS}")
    field(page, "run").click()
    page.page.get_by_role("option", name="trained").click()
    # Choosing a run fills in the form again.
    page.page.wait_for_selector("text=trained/config.json --model run:")
    assert [field(page, key).input_value() for key in ("model", "world")] == ["run:trained", "2"]
    assert form(page) == {"run": "trained"}
    page.page.wait_for_selector("#card-plan-traffic")
    field(page, "setting").click()
    page.page.get_by_role("option", name="stage=1").click()
    page.page.wait_for_selector("#card-plan-traffic .card-subtitle:has-text('stage=1:')")
    assert (form(page)["run"], form(page)["setting"]) == ("trained", "stage=1")


def test_plan_opened_from_a_run_plans_that_run(page, base_url):
    page.open(f"{base_url}/overview?run=trained")
    page.page.get_by_role("link", name="Plan", exact=True).click()
    page.page.wait_for_selector("#body .message:has-text('3,000,000 parameters in 1 tensor; 2 ranks')")
    assert page.page.locator("text=This cannot be planned").count() == 0
    page.page.get_by_role("link", name="Overview", exact=True).click()
    page.page.wait_for_selector("#card-what-ran")
    assert form(page)["run"] == "trained"


@pytest.mark.long
def test_a_calibration_and_a_recorded_run_give_the_times_of_the_command(
    page, base, base_url, tmp_path, capsys
):
    page.open(f"{base_url}/plan?{ADDRESS}")
    for key, name in (("calibration", "calibration.json"), ("recorded", "timed"), ("backend", "gloo")):
        field(page, key).click()
        page.page.get_by_role("option", name=name, exact=True).click()
        page.page.wait_for_url(f"**{key}={name}**")
    field(page, "layers").fill("24")
    page.page.wait_for_selector("text=--layers 24 --sequence 512")
    page.page.wait_for_selector("text=The bounds of a step are narrowed by")
    with page.page.expect_download() as waiting:
        page.page.click("#card-settings .card-action")
    rows = list(csv.DictReader(io.StringIO(Path(waiting.value.path()).read_text(encoding="utf-8"))))
    words = ["--layers", "24", "--backend", "gloo", "--hosts", "4x8"]
    words += ["--calibration", str(base / "calibration.json"), "--recorded", str(base / "timed")]
    settings = printed(tmp_path, capsys, 32, *words)
    for row, setting in zip(rows, settings, strict=True):
        assert int(row["communication_ns"]) == setting["communication_ns"]["all"] > 0
        bounds = int(float(row["step_least_ns"])), int(float(row["step_most_ns"]))
        assert bounds == tuple(setting["step_ns"].values())
        assert int(row["device_bytes"]) == setting["memory_bytes_per_rank"]["peak"]["device"]


@pytest.mark.sampled
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_telephone_shows_it_without_scrolling_sideways(browser, base_url, scheme):
    view = watched(browser, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    try:
        view.open(f"{base_url}/plan?{ADDRESS}")
        assert view.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert view.errors == [] and view.foreign_requests(base_url) == []
    finally:
        view.close()
