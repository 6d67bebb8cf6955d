"""Compares wall time and memory of short commands on the runs of the demo to the import of numpy and pyarrow.

In each round, all commands start in turn. The result of a round is the ratio to the import in the same round. "first"
uses an empty cache directory. "again" uses the cache directory that "first" has filled. The bytecode files exist.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from results import arguments, median_interval, publish

ROOT = Path(__file__).resolve().parent.parent
BASE = "python -c 'import numpy, pyarrow'"
TARGETS = {"report, again": 3, "verify, again": 3, "compare, again": 5}


class Measured(NamedTuple):
    """The wall time of one process in ms and its peak resident memory in MiB."""

    ms: float
    mib: float


def measure(words: list[str], cache: Path) -> Measured:
    """Run Python with ``words``. The exit codes 1 and 3, which are verdicts about a run, are accepted."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    took = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1, 3):
        raise SystemExit(f"{' '.join(words)}: exit code {process.returncode}")
    return Measured(took * 1000, usage.ru_maxrss / 1024)


def main() -> None:
    """Measure, print the table and write it."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--runs", type=Path, help="a directory of runs, as examples/demo.py makes; default: make one"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = args.runs
        if runs is None:
            runs = Path(scratch, "demo")
            demo = [sys.executable, str(ROOT / "examples" / "demo.py"), "--out", str(runs)]
            subprocess.run(demo, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        measured = measure_all(runs, Path(scratch), args.rounds)
    number = len(list(runs.rglob("run.json"))) if args.runs else 15
    base = [each.ms for each in measured[BASE]]
    ratios = {
        name: median_interval([each.ms / of for each, of in zip(values, base, strict=True)])
        for name, values in measured.items()
    }
    times = {name: median_interval([each.ms for each in values]) for name, values in measured.items()}
    peaks = {name: max(each.mib for each in values) for name, values in measured.items()}
    publish(
        args,
        f"Start time: commands on a run of 2 ranks and 12 steps, compare on {number} of them: median (95 % interval)",
        ["command", "ms", "import of numpy and pyarrow = 1", "target", "peak memory, MiB"],
        [
            [name, times[name].text(0), ratios[name].text(), str(TARGETS.get(name, "")), f"{peaks[name]:.0f}"]
            for name in measured
        ],
        {"ms": times, "ratio": ratios, "peak_mib": peaks},
    )


def measure_all(runs: Path, scratch: Path, rounds: int) -> dict[str, list[Measured]]:
    """Return the measurements of each round by command. The first round is a warm-up and is not included."""
    run = min(path.parent for path in runs.rglob("run.json"))
    program = ["-m", "commprof"]
    asked = {"report": [str(run)], "verify": [str(run)], "compare": [str(runs)]}
    commands = {
        BASE: ["-c", "import numpy, pyarrow"],
        "python -c pass": ["-c", "pass"],
        "commprof --help": [*program, "--help"],
        "commprof run --help": [*program, "run", "--help"],
    }
    found: dict[str, list[Measured]] = {}
    for number in range(rounds + 1):
        values = {name: measure(words, scratch / "none") for name, words in commands.items()}
        for verb, words in asked.items():
            values[f"{verb}, first"] = measure([*program, verb, *words], scratch / f"round{number}")
            values[f"{verb}, again"] = measure([*program, verb, *words], scratch / f"round{number}")
        if number:
            for name, value in values.items():
                found.setdefault(name, []).append(value)
    return found


if __name__ == "__main__":
    main()
