"""Real ranks for tests, forked from the warm test process, which imports torch once.

The ranks use gloo on the CPU. With COMMPROF_TESTS_DEVICE=cuda they use NCCL, all on the first GPU. NCCL refuses
two ranks of one host on one GPU, so each rank sets a different host (NCCL_HOSTID), and the ranks communicate
over loopback sockets. Their kernels take turns on the GPU. Operations, bytes, order and logs are therefore
those of NCCL, but the communication times differ from the times on several GPUs.
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
    """Return the device of the tensors of the ranks: ``cpu`` (gloo) or ``cuda`` (NCCL)."""
    return os.environ.get(DEVICE, "cpu")


def one_gpu(rank: int) -> dict[str, str]:
    """Return the environment of ``rank`` if all ranks use NCCL on the same GPU."""
    return {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "TORCH_FR_BUFFER_SIZE": "20000",  # enables the Flight Recorder of torch, which tests read
    }


class RankError(AssertionError):
    """At least one rank raised, died or did not finish in time."""


def prepare() -> None:
    """Do once what every rank would otherwise do after its fork.

    This imports torch and the recorder, and excludes the functions of commprof from torch's compiler.
    """
    import torch
    import torch._dynamo  # otherwise the first optimizer step imports it, which takes seconds

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
        process_group: Whether to initialize torch.distributed (gloo or NCCL, a FileStore) before the call, and to
            destroy the process group after it.
        env: Variables to set in every rank. RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are always set.

    Raises:
        RankError: a rank failed. The message contains the traceback of every failing rank.
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
    """A pipe on which a rank waits until all other ranks have returned.

    Each rank keeps the write end of the pipe open until it returns or dies. A rank must not exit too early,
    because its connections close when it exits. One rank may finish the creation of a group before another rank
    does. If the first rank exits in between, gloo fails on the other rank with "Connection closed by peer".
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()

    def close(self) -> None:
        """Close both ends of the pipe in the parent process, which is not a rank."""
        os.close(self._read_end)
        os.close(self._write_end)

    def wait_for_others(self, seconds: float) -> None:
        """Wait in a rank that has returned until all other ranks have returned, but at most ``seconds``.

        The limit is necessary because another rank may wait for this rank to exit.
        """
        os.close(self._write_end)
        select.select([self._read_end], [], [], seconds)


def rank_main(rank, world, function, args, write_end, store, process_group, env, working):
    gc.freeze()  # otherwise the first collection copies every page of the test process
    try:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
        )
        if device() == "cuda":
            os.environ.update(one_gpu(rank))
        os.environ.update(env)
        import torch
        import torch.distributed as dist

        # After a fork, torch creates its thread pool again at the first call of this function. If this thread
        # and a thread of gloo made the first call at the same time, they would race, and one of them would fail
        # with "Invalid thread pool".
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
