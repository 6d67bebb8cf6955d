"""Measures the effect of 2 MiB pages on a training step on a CPU: zero_runtime with THP_MEM_ALLOC_ENABLE=1 and 0.

Two gloo ranks of each variant exist at the same time and take turns to train a GPT. Each pair of blocks gives a ratio
of the step times. The peaks of resident memory are those of the rank with more memory.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from offload import SHAPES, begin, config, resident_peak
from results import arguments, median_interval, publish
from step_time import Pair

from zero_runtime.startup.huge_pages import VARIABLE, huge_pages_state

MODEL = "100 M"
CASES = (("none", 2), ("none", 3), ("cpu", 2), ("cpu", 3), ("nvme", 3))
PLACES = {"none": "memory", "cpu": "host memory", "nvme": "files"}
SMALL, HUGE = "4 KiB", "2 MiB"


def side_by_side(
    given: dict[str, Any], rounds: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the step times of each block in ms, and the peaks of resident memory in MiB, both by page size."""
    with tempfile.TemporaryFile("w+") as log:
        pairs = {
            SMALL: Pair(sys.executable, "zero_runtime", log, {VARIABLE: "0"}),
            HUGE: Pair(sys.executable, "zero_runtime", log, {VARIABLE: "1"}),
        }
        try:
            for pair in pairs.values():
                begin(pair, SHAPES[MODEL], given)
            blocks: dict[str, list[float]] = {name: [] for name in pairs}
            for number in range(-1, rounds):
                for name in list(pairs) if number % 2 else reversed(pairs):
                    answers = pairs[name].ask({"steps": steps})
                    if number >= 0:
                        blocks[name].append(1e3 * max(median(each["seconds"]) for each in answers))
            peaks = {name: resident_peak(pair) for name, pair in pairs.items()}
            for pair in pairs.values():
                pair.tell({"end": True})
        finally:
            for pair in pairs.values():
                pair.end()
    return blocks, peaks


def main() -> None:
    """Measure, print the table and write it."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="of a block")
    parser.add_argument("--path", default=".", help="folder for the files of offload, on a disk")
    args = parser.parse_args()
    rows, figures = [], {"state": huge_pages_state()}
    with tempfile.TemporaryDirectory(prefix="huge-pages-", dir=args.path) as path:
        for device, stage in CASES:
            blocks, peaks = side_by_side(config(stage, device, path), args.rounds, args.steps)
            ratio = median_interval([b / a for a, b in zip(blocks[SMALL], blocks[HUGE], strict=True)])
            name = f"stage {stage}, optimizer in {PLACES[device]}"
            figures[name] = {"ms": blocks, "ratio": ratio, "peak_mib": peaks}
            rows.append([
                name, *(f"{median(blocks[pages]):.0f}" for pages in (SMALL, HUGE)), ratio.text(),
                *(f"{peaks[pages]:.0f}" for pages in (SMALL, HUGE)),
            ])  # fmt: skip
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    publish(
        args,
        f"Pages of 2 MiB: a training step of {MODEL} parameters in bf16, median (95 % interval)",
        [
            "configuration",
            f"ms, pages of {SMALL}",
            f"ms, {HUGE}",
            "ratio",
            f"peak RSS MiB, {SMALL}",
            f"peak, {HUGE}",
        ],
        rows,
        figures,
    )


if __name__ == "__main__":
    main()
