"""The command ``python -m zero_runtime.bench [NAME ...]``, which runs one benchmark.

Without a name, the command runs ``comm`` if a launcher started the process, and lists the benchmarks otherwise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from zero_runtime.bench import io, message_times
from zero_runtime.errors import ZeroRuntimeError

Benchmark = Callable[[Sequence[str]], int]
# The description (one line) and the main function of each benchmark, by name.
BENCHMARKS: Final[Mapping[str, tuple[str, Benchmark]]] = {
    "comm": (
        "how fast collectives are among the ranks of a launcher, by operation and size",
        message_times.main,
    ),
    "io": ("how fast files of offloaded tensors are read and written", io.main),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code: 0, or 2 after an error."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    if "RANK" in os.environ and (not command or command[0].startswith("-")):
        command = ["comm", *command]
    if not command or command[0] in ("-h", "--help"):
        print("usage: python -m zero_runtime.bench NAME [options]\n\nbenchmarks:")
        for name, (meaning, _) in BENCHMARKS.items():
            print(f"  {name:<8} {meaning}")
        print("\npython -m zero_runtime.bench NAME --help says which options there are.")
        return 0
    if command[0] not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        print(f"zero_runtime: error: no benchmark {command[0]!r}; expected one of: {known}", file=sys.stderr)
        return 2
    try:
        return BENCHMARKS[command[0]][1](command[1:])
    except ZeroRuntimeError as error:
        print(f"zero_runtime: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
