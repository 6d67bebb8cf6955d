"""Functions that all benchmarks use: order statistics, a description of the machine, and the output of results."""

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
        """Return the text ``median (low to high)``."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    """Return the median with the minimum and maximum."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


def median_interval(values: Sequence[float]) -> Spread:
    """Return the median with its distribution-free interval of at least 95 % (order statistics of the binomial).

    With fewer than 6 values, this interval does not exist, and the whole range is returned.
    """
    ordered = sorted(values)
    n = len(ordered)
    # The largest k with P(X < k or X > n - k) <= 5 % for X ~ Binomial(n, 1/2). The computation uses integers, because
    # 0.5**n is 0 for n >= 1075.
    tail, k, ways = 0, 0, 1
    while 40 * (tail + ways) <= 2**n:
        tail += ways
        k += 1
        ways = ways * (n - k + 1) // k
    k = max(k, 1)
    return Spread(statistics.median(ordered), ordered[k - 1], ordered[n - k], n)


def pseudomedian_interval(values: Sequence[float]) -> Spread:
    """Return the median of the means of all pairs (Hodges and Lehmann).

    The interval is the 95 % interval of Wilcoxon's signed-rank test. For differences that are symmetric around one
    value, this estimate needs two thirds of the rounds that a median needs. It requires at least 20 values.
    """
    means = sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])
    n = len(values)
    # The rank sum is approximately normal: mean n (n + 1) / 4, variance n (n + 1) (2n + 1) / 24.
    k = max(1, round(n * (n + 1) / 4 - 1.96 * math.sqrt(n * (n + 1) * (2 * n + 1) / 24)))
    return Spread(statistics.median(means), means[k - 1], means[-k], n)


def machine() -> dict[str, Any]:
    """Return a description of the kind of this machine, without its name."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 1),
    }


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--record", action="store_true", help="append the table to benchmarks/RESULTS.md")
    return parser


def about() -> str:
    """Return the date and the kind of machine as one line."""
    kind, date = machine(), datetime.date.today().isoformat()
    return (
        f"{date}, {kind['cores']} cores, {kind['memory_gib']} GiB, {kind['processor']}, Python {kind['python']}, "
        f"load {kind['load_1min']}"
    )


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table as Markdown with aligned columns."""
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
    """Print the table and the JSON, and write them to the files that the arguments select."""
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
