"""What the benchmarks share: order statistics, the machine's kind, a table, JSON, a line in RESULTS.md."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("RESULTS.md")


@dataclass(frozen=True, slots=True)
class Spread:
    """Order statistics of repeated measurements."""

    median: float
    low: float
    high: float
    rounds: int

    def text(self, digits: int = 2) -> str:
        """``median (low to high)``."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    """Median with minimum and maximum."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


def median_interval(values: Sequence[float]) -> Spread:
    """Median with its distribution-free interval of at least 95 % (order statistics of the binomial).

    With fewer than 6 values no such interval exists and the whole range is given.
    """
    ordered = sorted(values)
    n = len(ordered)
    # The widest k with P(X < k or X > n - k) <= 5 % for X ~ Binomial(n, 1/2). In integers: 0.5**n is 0 from n = 1075 on.
    tail, k, ways = 0, 0, 1
    while 40 * (tail + ways) <= 2**n:
        tail += ways
        k += 1
        ways = ways * (n - k + 1) // k
    k = max(k, 1)
    return Spread(statistics.median(ordered), ordered[k - 1], ordered[n - k], n)


def pseudomedian_interval(values: Sequence[float]) -> Spread:
    """Median of the means of all pairs (Hodges and Lehmann), with the 95 % interval of Wilcoxon's signed-rank test.

    For differences that lie evenly about one value it needs two thirds of the rounds of a median. At least 20 values.
    """
    means = sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])
    n = len(values)
    # The rank sum is about normal: mean n (n + 1) / 4, variance n (n + 1) (2n + 1) / 24.
    k = max(1, round(n * (n + 1) / 4 - 1.96 * math.sqrt(n * (n + 1) * (2 * n + 1) / 24)))
    return Spread(statistics.median(means), means[k - 1], means[-k], n)


def machine() -> dict[str, Any]:
    """What kind of machine this is: nothing that names it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 1),
    }


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--record", action="store_true", help="append the table to benchmarks/RESULTS.md")
    return parser


def about() -> str:
    """The date and the kind of machine, in a line."""
    kind, date = machine(), datetime.date.today().isoformat()
    return (
        f"{date}, {kind['cores']} cores, {kind['memory_gib']} GiB, {kind['processor']}, Python {kind['python']}, "
        f"load {kind['load_1min']}"
    )


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as Markdown, its columns aligned."""
    table = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    text = "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in table
    )
    first, _, rest = text.partition("\n")
    return first + "\n|" + "|".join("-" * (w + 2) for w in widths) + "|\n" + rest


def publish(
    args: argparse.Namespace,
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    figures: Mapping[str, Any],
) -> None:
    """Print the table and the JSON; write both where the arguments say."""
    text, kind = markdown(header, rows), about()
    print(f"{title}\n{kind}\n\n{text}\n")
    date = datetime.date.today().isoformat()
    document = {"title": title, "date": date, "machine": machine(), "figures": _plain(figures)}
    print(json.dumps(document))
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    if args.record:
        with RESULTS.open("a") as file:
            file.write(f"\n## {title}\n\n{kind}\n\n{text}\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Spread):
        return asdict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
