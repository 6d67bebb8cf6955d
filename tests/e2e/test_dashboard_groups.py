"""The timeline of a run with tensor, data and pipeline groups has one lane for each group.

The lanes contain the data of the exported CSV, both for a short window and for the complete run.
"""

from __future__ import annotations

import csv
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from commprof.export.csv import export_csv
from support.browser import served
from support.runs import SyntheticRun

pytestmark = [pytest.mark.long, pytest.mark.browser, pytest.mark.shared_answers]

WORLD, STEPS, STEP_NS = 8, 60, 1_000_000
GRAPH = "#card-timeline .js-plotly-plot"
KINDS = {
    "tensor": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "data": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "pipe": ((0, 4), (1, 5), (2, 6), (3, 7)),
}


def write_groups(path: Path) -> Path:
    run = SyntheticRun(WORLD)
    for step in range(STEPS):
        run.add_step(step, begin_ns=step * STEP_NS, duration_ns=STEP_NS)
        for kind, op, place, host_ns in (
            ("tensor", "all_reduce", 50_000, 30_000),
            ("tensor", "all_gather", 100_000, 20_000),
            ("tensor", "reduce_scatter", 150_000, 10_000),
            ("pipe", "send", 300_000, 5_000),
            ("data", "all_reduce", 600_000, 100_000),
        ):
            for number, group in enumerate(KINDS[kind]):
                common = {
                    "step": step, "group": group, "group_desc": kind, "pg": f"{kind}{number}", "host_ns": host_ns,
                    "issue_ns": step * STEP_NS + place + 1000 * number, "payload_bytes": 4096,
                }  # fmt: skip
                if kind == "pipe":
                    run.add_collective("send", ranks=group[:1], peer=group[1], **common)
                    run.add_collective("recv", ranks=group[1:], peer=group[0], **common)
                else:
                    run.add_collective(op, **common)
    return run.write(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    base = tmp_path_factory.mktemp("groups")
    write_groups(base / "runs" / "shared")
    return base / "runs"


@pytest.fixture(scope="module")
def base_url(runs):
    with served(runs) as url:
        yield url


@pytest.fixture(scope="module")
def exported(runs, tmp_path_factory):
    """Return the rows of the exported collectives.csv: rank, seq, group, begin and end."""
    out = tmp_path_factory.mktemp("csv")
    export_csv(runs / "shared", out, tables=["collectives"])
    with (out / "collectives.csv").open(newline="") as stream:
        return [
            (
                int(row["rank"]),
                int(row["seq"]),
                row["group_desc"],
                int(row["issue_ns"]),
                int(row["return_ns"]),
            )
            for row in csv.DictReader(stream)
        ]


def test_from_afar_each_group_of_a_rank_is_as_busy_as_its_records(page, base_url, exported):
    length = max(row[4] for row in exported) - min(row[3] for row in exported)
    page.open(f"{base_url}/timeline?run=shared&from=0&to={length}")
    drawn = page.page.evaluate(
        """(graph) => { const shown = document.querySelector(graph), heat = shown._fullData[0],
            axis = shown._fullLayout.yaxis;
            return {type: heat.type, x: [...heat.x], y: [...heat.y], values: axis.tickvals, texts: axis.ticktext,
                sums: [...heat.z].map((row) => [...row].filter((v) => v === v && v !== null)
                    .reduce((sum, value) => sum + value % 1, 0))}; }""",
        GRAPH,
    )
    assert drawn["type"] == "heatmap"
    names = [text.rpartition("</b> ")[2] for text in drawn["texts"]]
    assert Counter(names) == dict.fromkeys(KINDS, WORLD)
    wanted = Counter()
    for rank, _, kind, begin, end in exported:
        wanted[rank, kind] += end - begin
    width = drawn["x"][1] - drawn["x"][0]
    for number, (place, name) in enumerate(zip(drawn["values"], names, strict=True)):
        (row,) = [i for i, (top, bottom) in enumerate(pairwise(drawn["y"])) if top < place < bottom]
        assert drawn["sums"][row] * width == pytest.approx(wanted[number // 3, name], rel=1e-6)


def test_nearby_the_records_of_each_group_stand_in_a_lane_of_their_own(page, base_url, exported):
    begin, end = 10 * STEP_NS, 14 * STEP_NS
    first = min(row[3] for row in exported)
    page.open(f"{base_url}/timeline?run=shared&from={begin}&to={end}")
    drawn = page.page.evaluate(
        """(graph) => document.querySelector(graph)._fullData.filter((trace) => trace.customdata).flatMap((trace) =>
            [...trace.base].map((base, i) => [trace.customdata[i][0][0], trace.customdata[i][0][3], Math.round(base),
                Math.round(trace.x[i]), trace.y[i]]))""",
        GRAPH,
    )
    inside = {
        (rank, seq): (kind, at - first, until - at)
        for rank, seq, kind, at, until in exported
        if until - first > begin and at - first < end
    }
    assert {(rank, seq): (at, length) for rank, seq, at, length, _ in drawn} == {
        key: row[1:] for key, row in inside.items()
    }
    lanes = {rank: {} for rank in range(WORLD)}
    for rank, seq, _, _, place in drawn:
        lanes[rank].setdefault(inside[rank, seq][0], set()).add(place)
    for places in lanes.values():
        assert {kind: len(where) for kind, where in places.items()} == dict.fromkeys(KINDS, 1)
        assert len(set.union(*places.values())) == len(KINDS)
    assert len({tuple(sorted(places, key=lambda kind: min(places[kind]))) for places in lanes.values()}) == 1
