"""Every page over every kind of run, as the server answers a browser: each says something, and nothing goes wrong."""

from __future__ import annotations

import json
import logging
import time

import pytest

from commprof_dash.app import create_app
from commprof_dash.pages import PAGES
from support.kinds_of_runs import KINDS, STEPS, going_run, make_kinds

pytestmark = pytest.mark.ranks

SAID = {  # by kind and page: words that have to be there, besides those of EVERYWHERE
    ("ddp", "/overview"): "Nothing is missing",
    ("ddp", "/buckets"): "Not the same buckets in every step",
    ("ddp", "/stragglers"): "How late each rank comes",
    ("ddp", "/alignment"): "Not aligned with an NCCL log",
    ("fsdp", "/overview"): "Nothing is missing",
    ("fsdp", "/buckets"): "its runtime names no capacity",
    ("one-rank", "/overview"): "Every record of its one rank is there",
    ("one-rank", "/matrix"): "This run has one rank",
    ("one-rank", "/stragglers"): "One rank of this run was recorded",
    ("sums", "/overview"): "only sums by step",
    ("sums", "/timeline"): "Only sums were kept",
    ("sums", "/stragglers"): "Only sums were kept",
    ("sums", "/bandwidth"): "Only sums were kept",
    ("sums", "/records"): "Only sums were kept",
    ("sums", "/buckets"): "no record carries the number of a bucket",
    ("sums", "/matrix"): "Bytes from rank to rank",
    ("killed", "/"): "killed",
    ("killed", "/overview"): "What is missing",
    ("killed", "/buckets"): "What each bucket holds",
    ("killed", "/records"): "records",
    ("imported-flight", "/overview"): "imported from torch's Flight Recorder",
    ("imported-flight", "/buckets"): "imported from a tool that does not know them",
    ("imported-flight", "/timeline"): "Window: 5.00 ms of 5.00 ms",
    ("imported-kineto", "/overview"): "imported from torch.profiler (Kineto)",
    ("imported-kineto", "/timeline"): "Window: 5.30 ms of 5.30 ms",
    ("imported-kineto", "/bandwidth"): "Bus bandwidth against size",
    ("no-steps", "/overview"): "no training steps",
    ("no-steps", "/compare"): "no whole training step",
    ("no-steps", "/buckets"): "No gradient buckets",
    ("nothing", "/overview"): "No records",
    ("nothing", "/timeline"): "No records",
    ("nothing", "/records"): "commprof doctor",
    ("nothing", "/matrix"): "Nothing was recorded that went between ranks",
}
EVERYWHERE = {"going": "This run is still going", "broken": "broken cannot be read"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    base = tmp_path_factory.mktemp("kinds")
    with going_run(base / "going"):
        make_kinds(base)
        yield create_app(base)


def drawn(app, path: str, search: str) -> str:
    """What the server sends for an address, as the text of its JSON; waits for the index of the run."""
    key = next(key for key in app.callback_map if "heading.children" in key)
    spec = app.callback_map[key]
    values = {"address.pathname": path, "address.search": search, "scheme.data": "light"}
    request = {
        "output": key,
        "outputs": [
            {"id": name, "property": kind}
            for name, kind in (part.rsplit(".", 1) for part in key.strip(".").split("..."))
        ],
        "inputs": [one | {"value": values.get(f"{one['id']}.{one['property']}")} for one in spec["inputs"]],
        "state": [[] for _ in spec["state"]],
        "changedPropIds": ["address.pathname"],
    }
    for _ in range(200):
        answer = app.server.test_client().post("/_dash-update-component", json=request)
        text = answer.get_data(as_text=True)
        assert answer.status_code == 200, text[:2000]
        if "Getting ready" not in text:
            return text
        time.sleep(0.05)
    raise AssertionError("the index of the run was never ready")


@pytest.mark.parametrize("path", [page.path for page in PAGES])
@pytest.mark.parametrize("kind", KINDS)
def test_every_page_says_something_of_every_kind_of_run(server, caplog, kind, path):
    caplog.set_level(logging.WARNING)
    text = drawn(server, path, f"?run={kind}")
    shown = " ".join(json.dumps(json.loads(text), ensure_ascii=False).split())
    assert "could not be drawn" not in shown
    assert [record.getMessage() for record in caplog.records if record.name.startswith("commprof")] == []
    assert '"card"' in shown or "message message-" in shown
    wanted = SAID.get((kind, path), "")
    if path not in ("/", "/compare"):
        wanted = wanted or EVERYWHERE.get(kind, "")
    assert wanted in shown


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
