"""Environment variables of the ranks: their number, rank, host and rendezvous address."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

DEFAULT_RANKS: Final = 2
# Interpreter flags of commprof that are not passed on, because the recorder cannot reach a script with these flags.
_DROPPED_FLAGS: Final = ("-I", "-E", "-P", "-s")


def visible_gpus(environment: Mapping[str, str]) -> int:
    """Return the number of GPUs that a program started with ``environment`` sees. Never imports torch."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        names = [name.strip() for name in listed.split(",")]
        return next((n for n, name in enumerate(names) if name in ("", "-1")), len(names))
    return _nvml_gpus() or len(list(Path("/dev").glob("nvidia[0-9]*")))


def _nvml_gpus() -> int:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # a missing package, driver or device all mean that there is no GPU
        return 0


def default_ranks(environment: Mapping[str, str]) -> int:
    """Return the default number of ranks: one per visible GPU, or two without GPUs."""
    return visible_gpus(environment) or DEFAULT_RANKS


def free_port() -> int:
    """Return a free TCP port of 127.0.0.1, below the range of ephemeral ports."""
    for _ in range(50):
        with socket.socket() as probe:
            try:
                port = random.randrange(16000, 32000)
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(
    environment: Mapping[str, str], rank: int, ranks: int, port: int, defaults: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of ``rank`` of ``ranks`` on this host, as torchrun would set it.

    Args:
        environment: The environment of this process.
        rank: The number of the rank.
        ranks: The number of ranks.
        port: The TCP port of the rendezvous.
        defaults: The variables to set if ``environment`` does not have them.
    """
    return {
        **defaults,
        **environment,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def thread_defaults(environment: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Return ``OMP_NUM_THREADS=1`` for several ranks, unless the user has set this variable.

    Without the variable, each rank would use all cores.
    """
    return {"OMP_NUM_THREADS": "1"} if ranks > 1 and "OMP_NUM_THREADS" not in environment else {}


def python_command() -> list[str]:
    """Return this interpreter and its flags that affect the program (``-O``, ``-W``, ``-X``, ``-u``, ...)."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # torchrun starts its ranks with -u, and sys.flags does not contain this flag.
    unbuffered = ["-u"] if getattr(sys.__stdout__, "write_through", False) else []
    return [sys.executable, *unbuffered, *(flag for flag in flags if flag not in _DROPPED_FLAGS)]
