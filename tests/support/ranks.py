"""Real ranks for tests, forked from the warm test process (torch is imported once).

They use gloo on the CPU. With COMMPROF_TESTS_DEVICE=cuda they use NCCL, all on the first GPU: NCCL refuses two ranks of one
host on one GPU, so each rank names another host (NCCL_HOSTID), and they talk over loopback sockets. Their kernels take turns
on the GPU: operations, bytes, order and logs are NCCL's own, the times of communication are not those of several GPUs.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEVICE = "COMMPROF_TESTS_DEVICE"


def device() -> str:
    """Where the ranks' tensors are: ``cpu`` (gloo) or ``cuda`` (NCCL)."""
    return os.environ.get(DEVICE, "cpu")


def one_gpu(rank: int) -> dict[str, str]:
    """The environment of ``rank`` where all ranks share one GPU over NCCL."""
    return {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "TORCH_FR_BUFFER_SIZE": "20000",  # or torch keeps no Flight Recorder that a test could read
    }


class RankError(AssertionError):
    """At least one rank raised, died or did not finish in time."""


def prepare() -> None:
    """What every rank would do for itself: import torch and the recorder, and keep our functions from torch's compiler."""
    import torch
    import torch._dynamo  # in its optimizer's first step: seconds

    import commprof.recorder.session  # noqa: F401 - where it is recorded: 90 modules
    from commprof.recorder.dispatcher.compiler import keep_from_compiler

    torch.set_num_threads(1)
    keep_from_compiler(torch._dynamo.eval_frame)


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    process_group: bool = True,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Run ``function(rank, world, *args)`` on ``world`` forked ranks and return what each returned.

    Args:
        process_group: initialise torch.distributed (gloo or NCCL, a FileStore) before, and destroy it after.
        env: variables to set in every rank; RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE are set anyway.

    Raises:
        RankError: with every failing rank's traceback.
    """
    prepare()
    store = tempfile.mktemp(prefix="commprof-store-")
    pipes: dict[int, int] = {}
    pids: dict[int, int] = {}
    working = Working()
    for rank in range(world):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            rank_main(rank, world, function, args, write_end, store, process_group, env or {}, working)
        os.close(write_end)
        pipes[rank], pids[rank] = read_end, pid
    working.close()
    outcomes = _collect(pipes, pids, timeout)
    Path(store).unlink(missing_ok=True)
    failures = [f"rank {rank}: {text}" for rank, (ok, text) in sorted(outcomes.items()) if not ok]
    if failures:
        raise RankError("\n".join(failures))
    return [outcomes[rank][1] for rank in range(world)]


class Working:
    """The ranks that have not returned yet: each holds one end of a pipe until it returns or dies.

    Who leaves takes its connections along, and a group is made on one rank before it is on another: gloo fails there with
    "Connection closed by peer" if the first is gone by then.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()

    def close(self) -> None:
        """For the process that forks the ranks and is none."""
        os.close(self._read_end)
        os.close(self._write_end)

    def wait_for_others(self, seconds: float) -> None:
        """For a rank that has returned: until all others have, or time is up (a rank may wait for this one to leave)."""
        os.close(self._write_end)
        select.select([self._read_end], [], [], seconds)


def rank_main(rank, world, function, args, write_end, store, process_group, env, working):
    gc.freeze()  # or the first collection copies every page of the test process
    try:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
        )
        if device() == "cuda":
            os.environ.update(one_gpu(rank))
        os.environ.update(env)
        import torch
        import torch.distributed as dist

        # After a fork torch makes its pool of threads anew, at the first call of this. Two threads that come at once (this
        # one and gloo's) would race for it, and one fail with "Invalid thread pool".
        torch.set_num_threads(1)
        backend = "gloo"
        if device() == "cuda":
            backend = "nccl"
            torch.cuda.set_device(0)
            torch.set_default_device("cuda")
        if process_group:
            dist.init_process_group(backend, store=dist.FileStore(store, world), rank=rank, world_size=world)
        result = function(rank, world, *args)
        if process_group and dist.is_initialized():
            working.wait_for_others(5.0)
            dist.destroy_process_group()
        message = (True, result)
    except BaseException:
        message = (False, traceback.format_exc())
    try:
        payload = pickle.dumps(message)
    except Exception:
        payload = pickle.dumps((False, traceback.format_exc()))
    with os.fdopen(write_end, "wb") as pipe:
        pipe.write(payload)
    os._exit(0)


def _collect(pipes, pids, timeout):
    deadline = time.monotonic() + timeout
    buffers: dict[int, bytes] = dict.fromkeys(pipes, b"")
    open_pipes = {fd: rank for rank, fd in pipes.items()}
    failed_at = None
    outcomes: dict[int, tuple[bool, Any]] = {}
    while open_pipes:
        limit = deadline if failed_at is None else min(deadline, failed_at + 10)
        ready, _, _ = select.select(list(open_pipes), [], [], max(0.0, min(1.0, limit - time.monotonic())))
        for fd in ready:
            chunk = os.read(fd, 1 << 20)
            rank = open_pipes[fd]
            if chunk:
                buffers[rank] += chunk
                continue
            os.close(fd)
            del open_pipes[fd]
            _, status = os.waitpid(pids[rank], 0)
            if buffers[rank]:
                outcomes[rank] = pickle.loads(buffers[rank])
            else:
                outcomes[rank] = (
                    False,
                    f"died with status {os.waitstatus_to_exitcode(status)} and no result",
                )
            if not outcomes[rank][0] and failed_at is None:
                failed_at = time.monotonic()
        if open_pipes and time.monotonic() > limit:
            for fd, rank in list(open_pipes.items()):
                os.kill(pids[rank], signal.SIGKILL)
                os.waitpid(pids[rank], 0)
                os.close(fd)
                del open_pipes[fd]
                outcomes[rank] = (False, "killed: did not finish in time, or another rank failed")
    return outcomes
