"""The program that ``zero_runtime.launch`` runs as each rank: it binds the process to cores and runs the script."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from zero_runtime.deepspeed_names.script import run
from zero_runtime.errors import ConfigError

EXIT_CODE = 2


def cores(text: str) -> list[int]:
    """Return the cores in a list such as ``0-2,8``.

    >>> cores("0-2,8")
    [0, 1, 2, 8]

    Raises:
        ConfigError: The list is malformed.
    """
    numbers: list[int] = []
    for interval in text.split(","):
        first, dash, last = interval.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(
                f"--bind_core_list {text}: {interval!r} is no core; expected a list such as 0-15,32"
            )
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def share(available: Sequence[int], rank: int, ranks: int) -> list[int]:
    """Return the cores of one rank. All ranks get the same number of cores, in order.

    Raises:
        ConfigError: There are fewer cores than ranks.
    """
    per_rank = len(available) // ranks
    if per_rank == 0:
        raise ConfigError(
            f"{len(available)} cores cannot be bound to {ranks} ranks; name at least one for each"
        )
    return list(available[rank * per_rank : (rank + 1) * per_rank])


def _bind(text: str) -> None:
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    allowed = sorted(os.sched_getaffinity(0))
    listed = allowed if text == "all" else cores(text)
    missing = sorted(set(listed) - set(allowed))
    if missing:
        raise ConfigError(
            f"core {missing[0]} cannot be used; this process may use {allowed[0]} to {allowed[-1]}"
        )
    mine = share(listed, rank, ranks)
    os.sched_setaffinity(0, mine)
    os.environ["OMP_NUM_THREADS"] = str(len(mine))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run this rank's script."""
    parser = argparse.ArgumentParser(prog="python -m zero_runtime.launch_rank")
    parser.add_argument("--kind", choices=["script", "module", "program"], default="script")
    parser.add_argument("--no-local-rank", action="store_true")
    parser.add_argument("--cores", default=None)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    target, *rest = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not options.no_local_rank:
        rest = [f"--local_rank={os.environ.get('LOCAL_RANK', '0')}", *rest]
    try:
        if options.cores is not None:
            _bind(options.cores)
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"zero_runtime: error: {error}", file=sys.stderr)
        sys.exit(EXIT_CODE)
    if options.kind == "program":
        os.execvp(target, [target, *rest])
    run(target, rest, is_module=options.kind == "module")


if __name__ == "__main__":
    main()
