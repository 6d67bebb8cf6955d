"""The Bandwidth page in a real Chromium draws the values that the library returns for the same recorded run."""

from __future__ import annotations

import csv
import io
import random
import socket
from pathlib import Path

import pytest

from commprof.calibration.file import write_calibration
from commprof.calibration.results import Calibration, Timing
from support.browser import served, watched
from support.ranks import run_ranks

pytestmark = [pytest.mark.browser, pytest.mark.ranks, pytest.mark.shared_answers]

WORLD = 2
OPS = ("all_reduce", "broadcast")
DESKTOP = {"width": 1280, "height": 1000}

DRAWN = """(name) => document.querySelector(`#card-${name} .js-plotly-plot`)._fullData.map((trace) => ({
    name: trace.name, mode: trace.mode, dash: trace.line && trace.line.dash, colour: trace.line && trace.line.color,
    x: [...trace.x], y: [...trace.y]}))"""


def record(rank: int, world: int, out: str, sizes: list[int]) -> None:
    import torch
    import torch.distributed as dist

    from commprof import hooks

    hooks.attach(out, quiet=True)
    for step in range(3):
        hooks.step(step)
        for numel in sizes:
            dist.all_reduce(torch.ones(numel))
            dist.broadcast(torch.ones(numel), 0)
            dist.all_reduce(torch.ones(numel), async_op=True)  # the end of this call is not known
    dist.barrier()
    hooks.detach()


def calibration(path: Path) -> None:
    """Write a calibration of 1 us and 100 GB/s, which is faster than any machine that runs this test."""
    timings = {op: tuple(Timing(2**n, 1000 + 2**n // 100, 1, 1, 5) for n in range(10, 20, 3)) for op in OPS}
    made = Calibration(
        created="2026-01-02T03:04:05+00:00", torch="2.13.0", backend="gloo", backend_version=None, device="cpu",
        dtype="float32", world_size=WORLD, hosts=(socket.gethostname(),), machine={}, timings=timings,
    )  # fmt: skip
    write_calibration(path, made)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    seed = random.randrange(2**32)
    print(f"sizes drawn with seed {seed}")
    rng = random.Random(seed)
    base = tmp_path_factory.mktemp("bandwidth")
    (base / "runs").mkdir()
    sizes = sorted(rng.sample(range(200, 50_000), 3))
    run_ranks(WORLD, record, str(base / "runs" / "trained"), sizes)
    calibration(base / "runs" / "calibration-here.json")
    return base / "runs"


@pytest.fixture(scope="module")
def base_url(runs):
    with served(runs) as url:
        yield url


@pytest.fixture(scope="module", params=["light", pytest.param("dark", marks=pytest.mark.long)])
def view(browser, base_url, request):
    view = watched(browser, viewport=DESKTOP, color_scheme=request.param)
    yield view
    view.close()
    assert view.foreign_requests(base_url) == []
    assert view.errors == []


def answers(runs, calibrated=True):
    from commprof.analysis import api

    return api.bandwidth(runs / "trained", runs / "calibration-here.json" if calibrated else None)


def downloaded(view, card: str) -> list[dict[str, str]]:
    with view.page.expect_download() as waiting:
        view.page.click(f"#card-{card} .card-action")
    text = Path(waiting.value.path()).read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def cells(view, card: str) -> list[list[str]]:
    return view.page.eval_on_selector_all(
        f"#card-{card} tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )


def choose(view, key: str, value: str) -> None:
    """Choose ``value`` in the list that the address contains under ``key``."""
    view.page.locator(f"""[id='{{"key":"{key}","type":"control"}}']""").click()
    view.page.get_by_role("option", name=value, exact=True).click()
    view.page.wait_for_url(f"**{key}={value}*")


@pytest.mark.long
def test_points_curves_table_and_file_hold_the_answers_of_the_library_and_fit_a_telephone(
    view, base_url, runs
):
    view.open(f"{base_url}/bandwidth?run=trained")
    expected = answers(runs)
    timed = expected[expected["time_ns"].notna()]
    drawn = {trace["name"]: trace for trace in view.page.evaluate(DRAWN, "bandwidth")}
    for op in OPS:
        part = timed[timed["op"] == op].sort_values("payload_bytes")
        assert drawn[op]["x"] == part["payload_bytes"].tolist()
        assert drawn[op]["y"] == pytest.approx(part["busbw_bytes_per_s"].tolist())
        ceiling = drawn[f"{op}: ceiling, 2 ranks"]
        assert (ceiling["dash"], ceiling["colour"]) == ("dash", drawn[op]["colour"])
    rows = downloaded(view, "bandwidth")
    assert [(row["op"], int(row["payload_bytes"]), int(row["collectives"])) for row in rows] == [
        (row["op"], row["payload_bytes"], row["collectives"]) for row in expected.to_dict("records")
    ]
    assert [float(row["busbw_bytes_per_s"]) for row in rows] == expected["busbw_bytes_per_s"].tolist()
    view.page.click("#card-bandwidth summary")
    view.page.locator("#card-bandwidth tbody tr").first.wait_for()
    assert [row[0] for row in cells(view, "bandwidth")] == expected["op"].tolist()
    assert "9 of 27 collectives have no time" in view.page.inner_text("#body")
    # The server draws the page again for a narrow window.
    with view.page.expect_response(lambda answer: "_dash-update-component" in answer.url):
        view.page.set_viewport_size({"width": 400, "height": 900})
    view.settle()
    assert view.page.evaluate("document.documentElement.scrollWidth") <= 400, "a telephone scrolls sideways"
    view.page.set_viewport_size(DESKTOP)


@pytest.mark.long
def test_every_choice_is_in_the_address_and_back_undoes_it(view, base_url, runs):
    view.open(f"{base_url}/bandwidth?run=trained")
    choose(view, "op", "broadcast")
    view.settle()
    names = [trace["name"] for trace in view.page.evaluate(DRAWN, "bandwidth")]
    assert {name.partition(":")[0].partition(",")[0] for name in names} <= {
        "broadcast",
        "outlier",
        "impossible",
    }
    view.page.get_by_text("Algorithm bandwidth", exact=True).first.click()
    view.page.wait_for_url("**measure=algbw*")
    view.page.wait_for_selector("#card-bandwidth h2:has-text('Algorithm bandwidth')")
    view.settle()
    part = answers(runs)
    part = part[part["op"] == "broadcast"].sort_values("payload_bytes")
    drawn = {trace["name"]: trace["y"] for trace in view.page.evaluate(DRAWN, "bandwidth")}
    assert drawn["broadcast"] == pytest.approx(part["algbw_bytes_per_s"].dropna().tolist())
    choose(view, "calibration", "none")
    view.page.wait_for_selector("text=commprof calibrate --out")
    assert not any("ceiling" in trace["name"] for trace in view.page.evaluate(DRAWN, "bandwidth"))
    view.page.go_back()
    view.page.wait_for_selector("#card-ceiling")
    assert "op=broadcast" in view.page.url
