"""``python -m zero_runtime.bench [NAME ...]``: run one benchmark; without a name ``comm`` among the ranks of a launcher.

Otherwise what there is is listed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from zero_runtime.bench import io, messages
from zero_runtime.errors import ZeroRuntimeError

Benchmark = Callable[[Sequence[str]], int]
# What each does, in one line, and how it is run.
BENCHMARKS: Final[Mapping[str, tuple[str, Benchmark]]] = {
    "comm": ("how fast collectives are among the ranks of a launcher, by operation and size", messages.main),
    "io": ("how fast files of offloaded tensors are read and written", io.main),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0, or 2 where it could not be done."""
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
