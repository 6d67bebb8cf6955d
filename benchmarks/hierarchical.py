"""Compares collectives along the axes of a grid to plain collectives, on hosts that are connected by slow links.

The hosts are network namespaces of this machine with several ranks each. The ranks of a host communicate through the
loopback device. veth pairs to a bridge, with tbf on both ends, connect the hosts. The benchmark needs root. Plain and
composed collectives take turns in the same processes.

The predicted gain is the ratio of the bytes that the interface of the busiest host sent, according to its counter. This
gain would be reached if the link were the only limit. The time of a round is the median of its repetitions on the
slowest rank.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from hierarchical_rank import LAYERS, TRAINING, WIDTH
from rank_processes import PIPES, RankProcesses
from results import Spread, arguments, median_interval, publish

from support import hosts as network

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
# number of hosts, ranks per host, rate of each link, topologies that are compared with the plain collective
CLUSTERS = (
    (2, 2, "100mbit", ([2, 2],)),
    (2, 4, "100mbit", ([2, 4], [2, 2, 2])),
    (4, 2, "100mbit", ([4, 2], [2, 2, 2])),
)
MESSAGES = (("all_reduce", 4 * MIB), ("reduce_scatter", 4 * MIB), ("all_gather", 4 * MIB), (TRAINING, 0))
CANNOT = 3  # the exit code if this machine cannot create the hosts


class Ranks(RankProcesses):
    """The processes on all hosts, in rank order."""

    def __init__(self, machines: Sequence[network.Host], each: int) -> None:
        world = len(machines) * each
        words = [sys.executable, str(ROOT / "benchmarks" / "hierarchical_rank.py")]
        super().__init__(
            machines[rank // each].start(words, network.environment(machines, rank, each), **PIPES)
            for rank in range(world)
        )


def measure(ranks: Ranks, topologies: Sequence[Any], rounds: int, repeat: int) -> dict[str, dict[str, Any]]:
    """Measure all operations with all topologies.

    Returns:
        The operation and topology, as JSON -> the seconds of each round, the bytes sent by the busiest host, and the
        losses of rank 0.
    """
    found: dict[str, dict[str, Any]] = {}
    for operation, size in MESSAGES:
        for number in range(-1, rounds):  # the first round warms up
            for topology in (1, *topologies):
                request = {"operation": operation, "bytes": size, "topology": topology, "repeat": repeat}
                answers = ranks.ask(request)
                each = found.setdefault(
                    json.dumps([operation, topology]), {"seconds": [], "sent": [], "losses": []}
                )
                each["losses"] += answers[0]["losses"]
                if number >= 0:
                    each["seconds"].append(max(median(answer["seconds"]) for answer in answers))
                    each["sent"].append(max(answer["sent"] for answer in answers))
    return found


def summarise(
    found: Mapping[str, Mapping[str, Any]], cluster: str, topologies: Sequence[Any]
) -> tuple[list[list[str]], dict[str, Any]]:
    """Return the rows of the table for one cluster, and the figures of the cluster."""
    rows, figures = [], {}
    for operation, _ in MESSAGES:
        plain = found[json.dumps([operation, 1])]
        for topology in topologies:
            mine = found[json.dumps([operation, topology])]
            predicted = median(plain["sent"]) / median(mine["sent"])
            ratios = [a / b for a, b in zip(plain["seconds"], mine["seconds"], strict=True)]
            gain = median_interval(ratios)
            share = Spread(gain.median / predicted, gain.low / predicted, gain.high / predicted, gain.rounds)
            apart = max(
                (abs(a / b - 1) for a, b in zip(mine["losses"], plain["losses"], strict=True) if b),
                default=0.0,
            )
            name = " x ".join(map(str, topology))
            figures[f"{cluster}, {operation}, {name}"] = {
                "plain_ms": 1e3 * median(plain["seconds"]),
                "composed_ms": 1e3 * median(mine["seconds"]),
                "predicted": predicted,
                "gain": gain,
                "share": share,
                "loss_difference": apart,
            }
            rows.append(
                [
                    cluster,
                    operation,
                    name,
                    f"{1e3 * median(plain['seconds']):.0f}",
                    f"{1e3 * median(mine['seconds']):.0f}",
                    f"{median(plain['sent']) / MIB:.2f}",
                    f"{median(mine['sent']) / MIB:.2f}",
                    f"{predicted:.2f}",
                    gain.text(),
                    share.text(),
                    f"{apart:.0e}" if operation == TRAINING else "",
                ]
            )
    return rows, figures


def main() -> None:
    """Measure, print the table and write it."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--clusters", type=int, nargs="+", default=list(range(len(CLUSTERS))), help="by number"
    )
    args = parser.parse_args()
    if (why := network.why_impossible()) is not None:
        print(f"hierarchical: no hosts can be made here: {why}", file=sys.stderr)
        raise SystemExit(CANNOT)
    rows: list[list[str]] = []
    figures: dict[str, Any] = {}
    for number in args.clusters:
        count, each, rate, topologies = CLUSTERS[number]
        with network.hosts(count, rate) as machines, tempfile.TemporaryDirectory():
            ranks = Ranks(machines, each)
            try:
                ranks.answers()
                found = measure(ranks, topologies, args.rounds, args.repeat)
            finally:
                ranks.end()
        some, more = summarise(found, f"{count} hosts x {each}, {rate}", topologies)
        rows += some
        figures |= more
    publish(
        args,
        f"Collectives along the axes of a grid of ranks, emulated clusters, messages of {MESSAGES[0][1] // MIB} MiB; "
        f"{TRAINING}: ZeRO-2 reduce_scatter, {LAYERS * WIDTH * (WIDTH + 1) / 1e6:.2f} M parameters in fp32; "
        f"{args.rounds} rounds",
        [
            "hosts x ranks, links between hosts",
            "operation",
            "axes",
            "plain, ms",
            "along axes, ms",
            "sent by the busiest host, plain, MiB",
            "along axes, MiB",
            "gain that the bytes predict",
            "gain in time (95 % interval)",
            "of what the bytes predict",
            "largest relative difference of a loss",
        ],
        rows,
        figures,
    )


if __name__ == "__main__":
    main()
