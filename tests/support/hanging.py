"""Recorded gloo ranks that hang. They are forked from the warm test process, examined while they hang, and killed."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from support.ranks import run_ranks  # noqa: F401 - imports what forked ranks need warm

# The number of successive checks, 0.1 s apart, that must find no change. One check does not suffice, because a
# rank on a busy machine may pause for 0.1 s.
_STILL: Final = 3


@contextlib.contextmanager
def hanging_ranks(
    run: Path, world: int, body: Callable[..., Any], *args: Any, env: dict[str, str] | None = None
) -> Iterator[dict[int, int]]:
    """Start ``body(rank, world, *args)`` on ``world`` recorded ranks, and yield their process ids by rank.

    All ranks are killed at the end of the block.
    """
    import torch
    import torch._dynamo

    torch.set_num_threads(1)
    store = tempfile.mktemp(prefix="commprof-store-")
    pids: dict[int, int] = {}
    try:
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                _main(run, rank, world, body, args, store, env or {})
            pids[rank] = pid
        yield pids
    finally:
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids.values():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        Path(store).unlink(missing_ok=True)


def all_reduces(count: int, numel: int = 256, group: Any = None) -> None:
    """Issue ``count`` equal all_reduces from one line of the program."""
    import torch
    import torch.distributed as dist

    for _ in range(count):
        dist.all_reduce(torch.ones(numel), group=group)


def load_batch() -> None:
    """Simulate a rank that loads data and never issues its next collective."""
    time.sleep(300)


def _main(run, rank, world, body, args, store, env):
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), **env)
        import torch.distributed as dist

        import commprof

        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
        commprof.attach(str(run), quiet=True)
        body(rank, world, *args)
        commprof.detach()
    finally:
        os._exit(0)


def await_stillness(run: Path, records: int, seconds: float = 60.0) -> None:
    """Wait until all ranks together have issued ``records`` collectives and nothing new for a moment.

    ``records`` is the number that the script issues before it hangs, so that a test does not examine the ranks too
    early.
    """
    from commprof.sampling.live import fingerprint, latest_files

    deadline = time.monotonic() + seconds
    before, alike = None, 0
    while time.monotonic() < deadline:
        time.sleep(0.1)
        found = {stem: fingerprint(stem) for _, stem in latest_files(run)} if run.exists() else {}
        alike = alike + 1 if found == before else 0
        if sum(total for total, _ in found.values()) >= records and alike >= _STILL:
            return
        before = found
    raise AssertionError(f"the ranks did not come to {records} records within {seconds} s: {before}")


def await_records(run: Path, records: int, seconds: float = 60.0) -> None:
    """Wait until all ranks together have issued at least ``records`` collectives."""
    from commprof.sampling.live import fingerprint, latest_files

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if run.exists() and sum(fingerprint(stem)[0] for _, stem in latest_files(run)) >= records:
            return
    raise AssertionError(f"the ranks did not come to {records} records within {seconds} s")
