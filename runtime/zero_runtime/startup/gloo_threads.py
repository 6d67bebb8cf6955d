"""The scheduling policy of gloo's event threads on Linux.

Each gloo group has a thread that waits for its sockets. While another thread holds the lock of a connection (it sends, for
example), the event thread returns to epoll, which reports the same event at once (gloo/transport/tcp/pair.cc,
``Pair::handleEvents``): it spins until the lock is free. By default the kernel lets a thread that an event wakes up preempt
another one. Often that is the thread with the lock, which then waits for a processor. A thread with the policy SCHED_BATCH
preempts nothing when it wakes up (sched(7)); its share of the processors stays the same.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

THREAD: Final = b"gloo_tcp_loop"  # gloo/transport/tcp/loop.cc; torch 2.11 and 2.12 have it without a name
_TASKS: Final = Path("/proc/self/task")


def use_batch_policy() -> None:
    """Give the event threads of this process's gloo groups the policy SCHED_BATCH, where they have the default policy.

    Without effect on other systems, where the policy may not be changed, and before torch 2.13, whose threads have no name.
    """
    tasks: list[Path] = []
    with contextlib.suppress(OSError):
        tasks = list(_TASKS.iterdir())
    for task in tasks:
        with contextlib.suppress(OSError):  # the thread has ended, or a sandbox forbids it
            # In bytes: what names other threads have is not known.
            is_gloos = (task / "comm").read_bytes().rstrip() == THREAD
            if is_gloos and os.sched_getscheduler(int(task.name)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
