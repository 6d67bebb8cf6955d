"""The table of memory and samples per second.

One command writes it, and the Compare page shows the same values.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from dash import dcc
from plotly.utils import PlotlyJSONEncoder

from commprof_dash.app import draw_page, find_page
from commprof_dash.data import Runs
from support.command import ROOT, execute

SMALL = ("--steps", "3", "--width", "32", "--layers", "2", "--micro-batch", "1")
PAGE = "# Memory\n\n<!-- table -->\nold\n<!-- /table -->\n\nAfter it.\n"

pytestmark = pytest.mark.ranks


def make(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    words = (str(ROOT / "benchmarks" / "memory_table.py"), *words, *SMALL)
    return execute([sys.executable, *words], cwd, timeout=300)


@pytest.mark.long
def test_a_table_of_two_configurations_and_the_compare_page(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    words = ("--only", "ZeRO-1", "--out", "runs", "--json", "figures.json", "--docs", "page.md")
    done = make(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in lines] == [
        "configuration", "-" * len(lines[1].split("|")[1]), "ZeRO-1", "ZeRO-1, bf16 communication",
    ]  # fmt: skip
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    plain, short = figures["ZeRO-1"], figures["ZeRO-1, bf16 communication"]
    for row in (plain, short):
        assert 100 * 2**20 < row["after_step_bytes"] <= row["peak_bytes"] < 2**31
        assert row["samples_per_second"] > 0
    # Gradients take half the bytes, and parameters stay in fp32. An all_reduce sends as much as two
    # all_gathers.
    assert 0.6 < short["wire_bytes_per_step"] / plain["wire_bytes_per_step"] < 0.75

    page = (tmp_path / "page.md").read_text()
    assert all(line in page for line in lines) and "old" not in page and page.endswith("\n\nAfter it.\n")
    assert "cores" in page

    figures, text = compare_page(tmp_path / "runs")
    assert all(f"communication_data_type={dtype}" in text for dtype in ("fp32", "bf16"))
    assert "stage=1" not in text  # all runs have this setting, so the page does not list it
    assert list(figures["memory"].data[0].x) == [row["after_step_bytes"] for row in (plain, short)]
    assert list(figures["samples"].data[0].x) == pytest.approx(
        [row["samples_per_second"] for row in (plain, short)]
    )


def compare_page(directory):
    """Return the figures of the Compare page by name, and the whole page as text."""
    _, drawing = draw_page(find_page("/compare"), Runs(directory), "/compare", "", "light")
    parts = [part for root in drawing.body for part in (root, *root._traverse())]
    figures = {part.id["name"]: part.figure for part in parts if isinstance(part, dcc.Graph)}
    text = json.dumps(list(drawing.body), cls=PlotlyJSONEncoder)
    return figures, text


@pytest.mark.long
def test_a_directory_that_is_taken(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").write_text("x")
    done = make(tmp_path, "--only", "ZeRO-1", "--out", "runs")
    assert done.returncode != 0 and "Choose another --out" in done.stderr
