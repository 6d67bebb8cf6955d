"""Every page for every kind of run, as the server answers a browser.

Each page must show a statement, and none may fail.
"""

from __future__ import annotations

import csv
import json
import logging
import time

import pytest
from dash import dcc
from plotly.utils import PlotlyJSONEncoder

from commprof.export.csv import export_csv
from commprof_dash.app import create_app, draw_page, find_page
from commprof_dash.data import Runs
from commprof_dash.pages import PAGES
from support.dash_requests import page_of
from support.kinds_of_runs import KINDS, STEPS, WORLD, going_run, make_kinds

pytestmark = [pytest.mark.ranks, pytest.mark.shared_answers]

# The text that a page of a kind of run must contain, in addition to EVERYWHERE.
SAID = {
    ("ddp", "/overview"): "Nothing is missing",
    ("ddp", "/buckets"): "Not the same buckets in every step",
    ("ddp", "/stragglers"): "Lateness of each rank",
    ("ddp", "/alignment"): "Not aligned with an NCCL log",
    ("fsdp", "/overview"): "Nothing is missing",
    ("fsdp", "/buckets"): "its runtime names no capacity",
    ("one-rank", "/overview"): "every record of its one rank is there",
    ("one-rank", "/matrix"): "This run has one rank",
    ("one-rank", "/stragglers"): "Only one rank of this run was recorded",
    ("sums", "/overview"): "only sums by step",
    ("sums", "/timeline"): "Only sums were recorded",
    ("sums", "/stragglers"): "Only sums were recorded",
    ("sums", "/bandwidth"): "Only sums were recorded",
    ("sums", "/records"): "Only sums were recorded",
    ("sums", "/buckets"): "only sums were recorded, without bucket numbers",
    ("sums", "/matrix"): "Bytes from rank to rank",
    ("killed", "/"): "killed",
    ("killed", "/overview"): "What is missing",
    ("killed", "/buckets"): "What each bucket holds",
    ("killed", "/records"): "records",
    ("imported-flight", "/overview"): "Imported from torch's Flight Recorder",
    ("imported-flight", "/buckets"): "imported from a tool that does not record them",
    ("imported-flight", "/timeline"): "Window: 5.00 ms of 5.00 ms",
    ("imported-kineto", "/overview"): "Imported from torch.profiler (Kineto)",
    ("imported-kineto", "/timeline"): "Window: 5.30 ms of 5.30 ms",
    ("imported-kineto", "/bandwidth"): "Bus bandwidth against size",
    ("imported-inspector", "/overview"): "Imported from NCCL Inspector",
    ("imported-inspector", "/bandwidth"): "Bus bandwidth against size",
    ("imported-comms", "/overview"): "Imported from DeepSpeed's comms logger",
    ("imported-comms", "/stragglers"): "Only one rank of this run was recorded",
    ("no-steps", "/overview"): "no training steps",
    ("no-steps", "/compare"): "no whole training step",
    ("no-steps", "/buckets"): "No gradient buckets",
    ("nothing", "/overview"): "No records",
    ("nothing", "/timeline"): "No records",
    ("nothing", "/records"): "commprof doctor",
    ("nothing", "/matrix"): "No traffic between ranks was recorded",
}
EVERYWHERE = {"going": "This run is still being recorded", "broken": "broken cannot be read"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("kinds")
    with going_run(base / "going"):
        make_kinds(base)
        yield base


@pytest.fixture(scope="module")
def server(base):
    return create_app(base)


def drawn(app, path: str, search: str) -> str:
    """Return the JSON text that the server sends for an address, after the index of the run is ready."""
    for _ in range(200):
        text = page_of(app, path, search)
        if "Getting ready" not in text:
            return text
        time.sleep(0.05)
    raise AssertionError("the index of the run was never ready")


# The quick set has the pages in SAID and every page of one kind. The long set has every page of every kind.
EVERY_PAGE = [
    pytest.param(
        kind, page.path, marks=[pytest.mark.long] * (kind != "ddp" and (kind, page.path) not in SAID)
    )
    for kind in KINDS
    for page in PAGES
]


@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "path"), EVERY_PAGE)
def test_every_page_says_something_of_every_kind_of_run(server, caplog, kind, path):
    caplog.set_level(logging.WARNING)
    text = drawn(server, path, f"?run={kind}")
    shown = " ".join(json.dumps(json.loads(text), ensure_ascii=False).split())
    assert "could not be drawn" not in shown
    assert [record.getMessage() for record in caplog.records if record.name.startswith("commprof")] == []
    assert '"card"' in shown or "message message-" in shown
    wanted = SAID.get((kind, path), "")
    if path not in ("/", "/compare") and (kind, path) != ("going", "/plan"):
        wanted = wanted or EVERYWHERE.get(kind, "")
    assert wanted in shown


@pytest.mark.long
def test_the_files_of_every_kind_of_run_are_served_or_refused_in_words(server):
    client = server.server.test_client()
    for kind in KINDS:
        for path in ("/records.csv", "/timeline.csv"):
            answer = client.get(f"{path}?run={kind}")
            assert answer.status_code in (200, 404, 422), (kind, path)
            assert "Traceback" not in answer.get_data(as_text=True)


def test_the_rows_of_a_run_that_is_going_are_those_so_far(server):
    text = server.server.test_client().get("/records.csv?run=going").get_data(as_text=True)
    assert sum("gradient_reduce" in line for line in text.splitlines()) >= 2 * STEPS


def rows_of(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_buckets_of_ddp_and_fsdp_are_those_of_the_exported_tables(base, tmp_path, kind):
    export_csv(base / kind, tmp_path / "csv")
    last = STEPS - 1
    buckets = [
        row
        for row in rows_of(tmp_path / "csv" / "buckets.csv")
        if (row["rank"], row["step"]) == ("0", str(last))
    ]
    assert len(buckets) == len({row["bucket"] for row in buckets}) > 1
    reduced = [
        row
        for row in rows_of(tmp_path / "csv" / "collectives.csv")
        if row["step"] == str(last) and row["purpose"] == "gradient_reduce"
    ]
    address = f"?run={kind}&step={last}&bucket=1"
    _, drawing = draw_page(find_page("/buckets"), Runs(base), "/buckets", address, "light")
    parts = [part for root in drawing.body for part in root._traverse()]
    figures = {part.id["name"]: part.figure for part in parts if isinstance(part, dcc.Graph)}
    sizes = figures["bucket-sizes"].data[0]
    assert sizes.name == {"ddp": "all_reduce", "fsdp": "reduce_scatter"}[kind]
    assert dict(zip(sizes.x, sizes.y, strict=True)) == {row["bucket"]: float(row["bytes"]) for row in buckets}
    times = figures["bucket-times"].data[0]
    for label, drawn_ns in zip(times.x, times.y, strict=True):
        taken = [
            max(int(row[name]) for name in ("return_ns", "wait_end_ns", "device_end_ns") if row[name])
            - int(row["issue_ns"])
            for row in reduced
            if row["bucket"] == label
        ]
        assert len(taken) == WORLD and drawn_ns == pytest.approx(sum(taken) / WORLD, abs=1)
    text = json.dumps(list(drawing.body), cls=PlotlyJSONEncoder)
    chosen = next(row for row in buckets if row["bucket"] == "1")
    for name in chosen["parameters"].split(","):
        assert f'"{name}"' in text
    module = next(row["module"] for row in reduced if row["bucket"] == "1")
    assert ('"Module"' in text and f'"{module}"' in text) == (kind == "fsdp")
