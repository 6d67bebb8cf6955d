"""Golden traces: the messages that rank 0 of a small recorded run sends, as CSV files in ``tests/golden``."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden"
SHOWN = ("step", "phase", "purpose", "op", "module", "group_desc", "group_ranks", "payload_bytes")


def messages(run: Any, steps: tuple[int, ...] = (-1, 1)) -> list[tuple[str, ...]]:
    """Return the different messages that rank 0 sent in ``steps`` and their counts, sorted.

    Step -1 is the time before the first step. Messages outside of the steps after the first step are left out.
    """
    rows = [
        row
        for row in run.table("collectives").to_pylist()
        if row["rank"] == 0 and row["step"] in steps and row["after_step"] is None and row["op"] != "recv"
    ]
    counted = Counter(tuple("" if row[name] is None else str(row[name]) for name in SHOWN) for row in rows)
    return sorted((*key, str(count)) for key, count in counted.items())


def kept(name: str) -> list[tuple[str, ...]]:
    """Return the messages of the golden trace ``name``."""
    with (GOLDEN / f"{name}.csv").open(newline="") as file:
        heading, *rows = map(tuple, csv.reader(file))
    assert heading == (*SHOWN, "count")
    return rows


def keep(name: str, found: list[tuple[str, ...]]) -> None:
    """Overwrite the golden trace ``name``. Review the difference before you commit the file."""
    with (GOLDEN / f"{name}.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([(*SHOWN, "count"), *found])
