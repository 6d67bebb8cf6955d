"""Measures every page of a long run in a real browser: index, server, first useful paint, zoom.

The run is the run of ``finalise.py`` with an additional row for each bucket of each rank. It is not aligned with an
NCCL log. Targets: the index takes at most 3 s per million records and 1.5 GiB. The server answers in 300 ms. A page
is drawn in 1.5 s with plotly.js in the browser's cache. A zoom is drawn in 0.5 s.

``server: page`` is the time of the callback of a page when none of its answers is cached. The lower half of Overview
has a separate callback. Its verdict is computed by another process, and the benchmark waits for this process first.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import pyarrow as pa
from finalise import PER_STEP, TAGS, write_rank
from results import Spread, arguments, publish, spread

from commprof.analysis import api
from commprof.trace.finaliser import finalise
from commprof.trace.tables import write_table
from commprof_dash.data import Runs
from commprof_dash.pages import PAGES
from commprof_dash.pages.overview import data as overview_data
from commprof_dash.pages.overview import page as overview
from support.browser import open_browser, served, watched

INDEX_TARGET_S, SERVER_TARGET_MS, PAINT_TARGET_S, ZOOM_TARGET_S = 3.0, 300.0, 1.5, 0.5
_GRAPH: Final = "#card-timeline .js-plotly-plot"
_ROW: Final = ".ag-center-cols-container .ag-row[row-index='0'] [col-id='op']"
_DRAWN: Final = ".page-body .card, .page-body .message, .page-body .ag-row, .page-body table"
_WINDOW_DRAWN: Final = """([graph, before]) => {
    const range = document.querySelector(graph)?._fullLayout?.xaxis?.range;
    return range && range[0] !== before;
}"""


def timed(act: Callable[[], Any]) -> float:
    """Call ``act`` and return its duration in seconds."""
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def server_times(run: Path, records: int, rounds: int) -> dict[str, Spread]:
    """Return the durations of the queries of the callbacks, in ms. Each round queries a different part of the run."""
    facts = api.index(run)
    begin, span = facts["begin_ns"], facts["end_ns"] - facts["begin_ns"]
    gather = [api.Filter("op", "=", "all_gather")]
    questions: dict[str, Callable[[int], Any]] = {
        "timeline, whole run": lambda _: api.timeline(run, pixels=600),
        "timeline, a thirtieth": lambda i: _window(run, begin + i * span // 40, span // 30),
        "timeline, a thousandth": lambda i: _window(run, begin + i * span // 40, span // 1000),
        "timeline, 1000 records": lambda i: _window(run, begin + i * span // 40, span * 1000 // records),
        "records, row 900,000": lambda i: api.records_page(run, offset=min(900_000, records // 2) + 100 * i),
        "records, filter": lambda i: api.records_page(run, gather, offset=100 * i),
        "records, sort by payload, row 900,000": lambda i: _sorted(run, "-payload_bytes", records, i),
        "records, sort by wait_end_ns, row 900,000": lambda i: _sorted(run, "-wait_end_ns", records, i),
        "one record": lambda i: api.record(run, i % 4, records // 20 + i),
    }
    times = {}
    for name, ask in questions.items():
        times[name] = spread([1000 * timed(lambda i=i, ask=ask: ask(i)) for i in range(rounds)])  # type: ignore[misc]
    return times


def write_buckets(run: Path, ranks: int, steps: int) -> None:
    """Write a row for each bucket that ``finalise.py`` tags, for every rank and step."""
    bucket, step, rank = (
        each.ravel()
        for each in np.meshgrid(np.arange(TAGS), np.arange(steps), np.arange(ranks), indexing="ij")
    )
    count = len(rank)
    names = pa.array(
        [f"blocks.{number}.qkv.weight,blocks.{number}.projection.weight" for number in range(TAGS)]
    )
    table = pa.table(
        {
            "rank": rank.astype(np.int32),
            "attempt": np.zeros(count, np.int32),
            "pid": (4_000_000 + rank).astype(np.int32),
            "step": step.astype(np.int32),
            "micro_step": np.zeros(count, np.int32),
            "bucket": bucket.astype(np.int32),
            "numel": np.full(count, 1 << 18),
            "bytes": np.full(count, 1 << 20),
            "capacity": np.full(count, 1 << 18),
            "dtype": pa.array(["float32"]).take(pa.array(np.zeros(count, np.int64))),
            "owners": pa.array(["0"]).take(pa.array(np.zeros(count, np.int64))),
            "parameters": names.take(pa.array(bucket)),
            "flush_reason": pa.array(["full"]).take(pa.array(np.zeros(count, np.int64))),
            "time_ns": step * PER_STEP * 30_000 + bucket * 1000,
        }
    )
    write_table(run, "buckets", table)


def page_times(directory: Path, name: str, rounds: int) -> dict[str, Spread]:
    """Return the time until the server has rendered each page, in ms. Only the answers in the index are cached."""
    query = {"run": (name,)}
    drawn: dict[str, Callable[[Runs], Any]] = {
        f"page {page.title}": lambda runs, page=page: page.render(runs, query, "light")  # type: ignore[misc]
        for page in PAGES
    }
    drawn["page Overview, lower half"] = lambda runs: overview.rest(runs, name, "light")
    times = {}
    for what, draw in drawn.items():
        draw(Runs(directory))  # not timed, because the first call loads modules
        found = []
        for _ in range(rounds):
            api.answer_cache.clear()
            runs = Runs(directory)
            found.append(1000 * timed(lambda draw=draw, runs=runs: draw(runs)))  # type: ignore[misc]
        times[what] = spread(found)
    return times


def verdict_time(directory: Path, name: str, records: int) -> float:
    """Return the seconds until another process has computed the ledger of a large run."""
    runs, begin = Runs(directory), time.perf_counter()
    while overview_data.verdict(runs, name, records) is None:
        time.sleep(0.1)
    return time.perf_counter() - begin


def paint_times(directory: Path, name: str, rounds: int) -> dict[str, Spread]:
    """Return the seconds from the request of each page until the page is drawn."""
    found: dict[str, list[float]] = {f"{page.title}, first paint": [] for page in PAGES}
    with served(directory) as url, open_browser() as browser:
        view = watched(browser, viewport={"width": 1280, "height": 900}, accept_downloads=True)
        for number in range(rounds + 1):
            for page, times in zip(PAGES, found.values(), strict=True):
                seconds = timed(lambda page=page: view.open(f"{url}{page.path}?run={name}", ready=_DRAWN))  # type: ignore[misc]
                if number:
                    times.append(seconds)
    return {what: spread(times) for what, times in found.items()}


def _window(run: Path, begin: int, length: int) -> api.Timeline:
    return api.timeline(run, begin, begin + max(1, length), 600)


def _sorted(run: Path, sort: str, records: int, number: int) -> api.RecordsPage:
    return api.records_page(run, sort=sort, offset=min(900_000, records // 2) + 100 * number)


def browser_times(directory: Path, name: str, rounds: int) -> dict[str, Spread]:
    """Return the seconds from a request or a click until the timeline, the zoom or the records are drawn."""
    found: dict[str, list[float]] = {
        "timeline, first paint": [],
        "timeline, zoom": [],
        "records, first paint": [],
    }
    with served(directory) as url, open_browser() as browser:
        view = watched(browser, viewport={"width": 1280, "height": 900}, accept_downloads=True)
        page = view.page
        for number in range(rounds + 1):
            paint = timed(lambda: view.open(f"{url}/timeline?run={name}", ready=f"{_GRAPH} .main-svg"))
            zoom = timed(lambda: _zoom(page))
            rows = timed(lambda: (page.goto(f"{url}/records?run={name}"), page.wait_for_selector(_ROW)))
            if number:  # The first round is not counted, because it fills the caches of the browser.
                for times, seconds in zip(found.values(), (paint, zoom, rows), strict=True):
                    times.append(seconds)
    return {what: spread(times) for what, times in found.items()}


def _zoom(page: Any) -> None:
    before = page.evaluate("(graph) => document.querySelector(graph)._fullLayout.xaxis.range[0]", _GRAPH)
    page.get_by_label("Zoom in", exact=True).click()
    page.wait_for_function(_WINDOW_DRAWN, arg=[_GRAPH, before], polling=10)


def index_costs(run: Path) -> dict[str, float]:
    """Build the index of ``run`` in a new process, and return the seconds, CPU seconds and peak memory in MiB.

    The process that wrote the run is not used, so that its memory is not counted.
    """
    command = [sys.executable, __file__, "--measure-index", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure_index(run: Path) -> dict[str, float]:
    """Build the index of ``run`` in this process, and return the seconds, CPU seconds and peak memory in MiB."""
    cpu = time.process_time()
    seconds = timed(lambda: api.index(run))
    return {"seconds": seconds, "cpu_seconds": time.process_time() - cpu, "peak_mib": _peak_mib()}


def _peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def main() -> None:
    """Write the run, build its index, measure the server and the pages, and print the table."""
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--records", type=int, default=10_000_000, help="over all ranks")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--directory", type=Path, help="where to write the run; needs about 200 bytes a record"
    )
    parser.add_argument("--no-browser", action="store_true", help="leave out what needs Chromium")
    parser.add_argument("--measure-index", type=Path, metavar="RUN", help="used by the benchmark itself")
    args = parser.parse_args()
    if args.measure_index:
        print(json.dumps(measure_index(args.measure_index)))
        return
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        run = Path(folder) / "run"
        run.mkdir()
        each = args.records // args.ranks
        for rank in range(args.ranks):
            write_rank(run, rank, args.ranks, each)
        finalise(run)
        write_buckets(run, args.ranks, -(-each // PER_STEP))
        records = each * args.ranks
        costs = index_costs(run)
        index_s, cpu_s = (costs[name] / records * 1e6 for name in ("seconds", "cpu_seconds"))
        peak_mib = costs["peak_mib"]
        verdict_s = verdict_time(Path(folder), "run", records)
        server = server_times(run, records, args.rounds) | page_times(Path(folder), "run", args.rounds)
        shown = {}
        if not args.no_browser:
            shown = browser_times(Path(folder), "run", args.rounds) | paint_times(
                Path(folder), "run", args.rounds
            )
        index_file = run / "index.duckdb"
        size = index_file.stat().st_size if index_file.exists() else 0
    rows = [
        ["index, s per million records", f"{index_s:.2f}", f"{INDEX_TARGET_S}"],
        ["index, CPU s per million records", f"{cpu_s:.2f}", "-"],
        ["index, peak RSS, MiB", f"{peak_mib:.0f}", "1536"],
        ["verdict, beside the page, s", f"{verdict_s:.1f}", "-"],
    ]
    rows += [
        [f"server: {what}, ms", times.text(0), f"{SERVER_TARGET_MS:.0f}"] for what, times in server.items()
    ]
    rows += [
        [f"browser: {what}, s", times.text(), f"{ZOOM_TARGET_S if 'zoom' in what else PAINT_TARGET_S}"]
        for what, times in shown.items()
    ]
    publish(
        args,
        f"The dashboard over {records:,} records of {args.ranks} ranks; the index has {size / records:.0f} bytes a record",
        ["what", "median (low to high)", "target"],
        rows,
        {
            "records": records,
            "index_s_per_million": index_s,
            "index_cpu_s_per_million": cpu_s,
            "index_peak_mib": peak_mib,
            "verdict_s": verdict_s,
            "server_ms": server,
            "browser_s": shown,
        },
    )


if __name__ == "__main__":
    main()
