"""Ranks that the tests of a file share.

Starting ranks, initializing their process group and ending them takes longer than most trainings of a test.
Functions are pickled by name, with their arguments. Changes of a function to its process (environment,
constants, signal handlers, the names of DeepSpeed) remain for the later tests of the file. Therefore a test
that makes such a change, kills a rank, captures its output or expects an error must use
:func:`support.ranks.run_ranks`.
"""

from __future__ import annotations

import gc
import multiprocessing.connection
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support import ranks
from support.ranks import RankError
from support.recording import recorded

_sets: dict[int, _Set] = {}  # key: the number of ranks


def run_standing(world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run ``function(rank, world, *args)`` on ``world`` shared ranks and return the result of each rank.

    Raises:
        RankError: a rank failed. The message contains the traceback of every failing rank. The next call starts new
            ranks.
    """
    if world not in _sets:
        _sets[world] = _Set(world)
    try:
        return _sets[world].run(function, args, timeout)
    except BaseException:
        _sets.pop(world).end()
        raise


def record_standing(
    run: Path, world: int, body: Any, *args: Any, **options: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """Record a run as :func:`support.recording.record` does, but on ranks that tests share."""
    from commprof.trace.finaliser import finalise
    from commprof.trace.reader import open_run

    outcomes = run_standing(world, recorded, str(run), body, args, options)
    finalise(run)
    return open_run(run), outcomes


def end() -> None:
    """Kill all shared ranks."""
    while _sets:
        _sets.popitem()[1].end()


class _Set:
    """A set of forked ranks, with a connection to each rank."""

    def __init__(self, world: int) -> None:
        ranks.prepare()
        self._store = tempfile.mktemp(prefix="commprof-store-")
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        working = ranks.Working()
        for rank in range(world):
            ours, theirs = multiprocessing.Pipe()
            pid = os.fork()
            if pid == 0:
                ours.close()
                nowhere = os.open(os.devnull, os.O_WRONLY)
                # This call does not return.
                ranks.rank_main(rank, world, _serve, (theirs,), nowhere, self._store, True, {}, working)
            theirs.close()
            self._connections.append(ours)
            self._pids.append(pid)
        working.close()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        """Run ``function`` on every rank and return the result of each rank."""
        job = pickle.dumps((function, args))
        for connection in self._connections:
            connection.send_bytes(job)
        outcomes: dict[int, tuple[bool, Any]] = {}
        until = time.monotonic() + timeout
        while missing := [each for rank, each in enumerate(self._connections) if rank not in outcomes]:
            for ready in multiprocessing.connection.wait(missing, max(0.0, until - time.monotonic())):
                rank = self._connections.index(ready)
                try:
                    outcomes[rank] = pickle.loads(ready.recv_bytes())
                except (EOFError, OSError):
                    outcomes[rank] = (False, "died with no result")
                if not outcomes[rank][0]:
                    until = min(until, time.monotonic() + 10)
            if time.monotonic() > until:
                break
        late = (False, "did not finish in time, or another rank failed")
        found = [outcomes.get(rank, late) for rank in range(len(self._pids))]
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(found) if not ok]
        if failures:
            raise RankError("\n".join(failures))
        return [result for _, result in found]

    def end(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        for pid, connection in zip(self._pids, self._connections, strict=True):
            os.waitpid(pid, 0)
            connection.close()
        Path(self._store).unlink(missing_ok=True)


def _serve(rank: int, world: int, connection: Connection) -> None:
    """Execute the jobs of the test process until it kills this rank or exits."""
    import torch

    parent = os.getppid()
    while True:
        while not connection.poll(5.0):
            if os.getppid() != parent:
                return
        try:
            job = connection.recv_bytes()
        except (EOFError, OSError):
            return
        random.seed(0)
        torch.manual_seed(0)  # all ranks draw the same numbers, as newly started ranks do
        try:
            function, args = pickle.loads(job)
            reply = pickle.dumps((True, function(rank, world, *args)))
        except BaseException:
            reply = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(reply)
        gc.collect()  # frees the engines of this job, which contain reference cycles
