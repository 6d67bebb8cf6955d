"""Test the bounds of missing and extra lines.

Whichever lines are dropped or duplicated, the true count is within the bounds.
"""

from __future__ import annotations

import json
import random
import re

import pytest

from commprof.cli.application import invoke
from support import planted_nccl
from support.runs import SyntheticRun

MARK = re.compile(r"opCount")


def run_of(directory, shape: str):
    """Write a run and return its path and its complete log by file name.

    The records are all equal, alternate between two sizes, or belong to two groups.
    """
    made = SyntheticRun(world_size=2, backend="nccl")
    for number in range(24):
        size = {"equal": 4096, "alternating": (4096, 512)[number % 2]}.get(shape, 4096)
        op = "all_gather" if shape == "groups" and number % 3 == 0 else "all_reduce"
        pg = "7" if shape == "groups" and number % 3 == 0 else "0"
        made.add_collective(op, payload_bytes=size, pg=pg)
    path = made.write(directory / "run")
    (path / "nccl").mkdir()
    return path, planted_nccl.plant(made.table("collectives").to_pylist()).files


def spoiled(files, chance: random.Random, drop: int, double: int):
    places = [(name, i) for name, lines in files.items() for i, line in enumerate(lines) if MARK.search(line)]
    chosen = chance.sample(places, drop + double)
    dropped, doubled = set(chosen[:drop]), set(chosen[drop:])
    return {
        name: [
            line
            for i, line in enumerate(lines)
            for _ in range(0 if (name, i) in dropped else 2 if (name, i) in doubled else 1)
        ]
        for name, lines in files.items()
    }


def facts_of(path, files, capsys, *options):
    for name, lines in files.items():
        (path / "nccl" / name).write_text("\n".join(lines) + "\n")
    assert invoke(["align", str(path), "--force", *options]) == 0
    shown = capsys.readouterr().out
    return json.loads(shown) if "--json" in options else " ".join(shown.split())


@pytest.mark.sampled
@pytest.mark.parametrize("shape", ["equal", "alternating", "groups"])
@pytest.mark.parametrize(("drop", "double"), [(1, 0), (5, 0), (0, 3), (3, 2)])
def test_the_truth_lies_between_the_bounds(tmp_path, capsys, shape, drop, double):
    path, files = run_of(tmp_path, shape)
    chance = random.Random(f"{shape} {drop} {double}")
    for _ in range(4):
        facts = facts_of(path, spoiled(files, chance, drop, double), capsys, "--json")
        assert facts["missing_at_least"] <= drop <= facts["missing_at_most"]
        assert facts["extra_at_least"] <= double <= facts["extra_at_most"]
        assert facts["missing"] == facts["missing_at_least"] <= drop
        assert facts["extra"] == facts["extra_at_least"] <= double
        if not double:
            assert facts["missing_at_least"] == drop  # Every dropped line is reported.
        if not drop:
            assert facts["extra_at_least"] == double
        each = facts["communicators"]
        assert sum(row["missing"] + row["ambiguous_missing"] for row in each) == facts["missing_at_least"]


def test_one_line_lost_among_equal_neighbours_is_said(tmp_path, capsys):
    path, files = run_of(tmp_path, "equal")
    name = next(iter(files))
    last = max(i for i, line in enumerate(files[name]) if MARK.search(line))
    shown = facts_of(path, files | {name: [x for i, x in enumerate(files[name]) if i != last]}, capsys)
    assert "missing at least 1, extra 0 or more, ambiguous 47" in shown
    stored = json.loads(_stored(path, capsys))
    assert (stored["missing"], stored["missing_at_least"], stored["missing_at_most"]) == (1, 1, 24)
    assert stored["generated"]


def _stored(path, capsys) -> str:
    assert invoke(["align", str(path), "--json"]) == 0
    return capsys.readouterr().out
