"""Wall time of `commprof --help`, against an empty interpreter started in turn with it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from results import arguments, publish, spread


def seconds(command: list[str]) -> float:
    """Wall seconds of a whole process."""
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    program = Path(sys.executable).with_name("commprof")
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "commprof --help": [str(program), "--help"],
        "commprof run --help": [str(program), "run", "--help"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(args.rounds + 1):
        for name, command in commands.items():
            times[name].append(seconds(command) * 1000)
    figures = {name: spread(values[1:]) for name, values in times.items()}
    publish(
        args,
        "Start time, milliseconds of wall time: median (minimum to maximum)",
        ["command", "ms"],
        [[name, figure.text(0)] for name, figure in figures.items()],
        figures,
    )


if __name__ == "__main__":
    main()
