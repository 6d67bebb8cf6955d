"""Test tables for terminals and pipes: no cell is truncated, broken or padded."""

import json
import math

import pandas as pd
import pytest

from commprof.cli import rendering
from commprof.cli.rendering import Heading, Rows

ROWS = Rows(
    (Heading("operation"), Heading("bytes", number=True)),
    [("reduce_scatter_with_a_long_name", "1,234,567 B"), ("all_reduce", "7 B")],
    title="A title that is longer than the table below it, and stays on one line",
)


def test_a_piped_table_has_one_line_for_each_row(capsys):
    rendering.show(ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ROWS.title
    assert lines[1].split() == ["operation", "bytes"]
    assert lines[3].split() == ["reduce_scatter_with_a_long_name", "1,234,567", "B"]
    assert lines[4].split() == ["all_reduce", "7", "B"]
    assert all(line == line.rstrip() for line in lines)


def test_a_narrow_terminal_cuts_no_word_and_no_number(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "dumb")
    rendering.show(ROWS)
    text = capsys.readouterr().out
    assert "reduce_scatter_with_a_long_name" in text
    assert "1,234,567 B" in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234, "1,234"), (0.25, "0.25"), (3.0, "3"), (None, "-"), (math.nan, "-"), (pd.NA, "-")],
)
def test_counts(value, text):
    assert rendering.count(value) == text


@pytest.mark.parametrize(
    ("center", "low", "high", "text"),
    [
        (67_900_000, 66_700_000, 69_100_000, "67.9 +-1.2 ms"),
        (67_900_000, 47_900_000, 87_900_000, "67.9 +-20 ms"),
        (1_500_000_000, 1_490_000_000, 1_510_000_000, "1.50 +-0.01 s"),
        (67_900_000, None, None, "67.9 ms"),
        (None, None, None, "-"),
        (0, 0, 0, "0 ns +-0 ns"),
    ],
)
def test_times_with_their_spread(center, low, high, text):
    assert rendering.spread(center, low, high) == text


def test_json_is_json(capsys):
    frame = pd.DataFrame({"a": [1, 2], "b": [math.nan, 0.5], "c": ["x", None]})
    rendering.show_json({"frame": frame, "nothing": pd.NA, "infinite": math.inf, "tuple": (1, "y")})
    assert json.loads(capsys.readouterr().out) == {
        "frame": [{"a": 1, "b": None, "c": "x"}, {"a": 2, "b": 0.5, "c": None}],
        "nothing": None,
        "infinite": None,
        "tuple": [1, "y"],
    }


def test_facts_leave_out_what_is_not_known():
    assert (
        rendering.facts([("run", "x"), ("setting", ""), ("final loss", "2.5")])
        == "run         x\nfinal loss  2.5"
    )
