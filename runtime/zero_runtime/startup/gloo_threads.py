"""The scheduling policy of gloo's event threads on Linux.

Each gloo group has a thread that waits for its sockets. While another thread has the lock of a connection (for
example because it sends), the event thread returns to epoll. epoll reports the same event immediately
(gloo/transport/tcp/pair.cc, ``Pair::handleEvents``), so the event thread spins until the lock is free. By
default the kernel lets a thread that wakes up for an event preempt another thread. Often the preempted thread
has the lock and then waits for a processor. A thread with the policy SCHED_BATCH preempts no other thread when
it wakes up (sched(7)). Its share of the processors stays the same.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

THREAD: Final = b"gloo_tcp_loop"  # gloo/transport/tcp/loop.cc; in torch 2.11 and 2.12 the thread has no name
_TASKS: Final = Path("/proc/self/task")


def use_batch_policy() -> None:
    """Set the policy SCHED_BATCH for the event threads of this process's gloo groups that have the default policy.

    This has no effect on other systems, if the policy may not be changed, or before torch 2.13, whose threads
    have no name.
    """
    tasks: list[Path] = []
    with contextlib.suppress(OSError):
        tasks = list(_TASKS.iterdir())
    for task in tasks:
        with contextlib.suppress(OSError):  # the thread has ended, or a sandbox forbids it
            # Compared as bytes, because the names of other threads may not be valid text.
            is_gloos = (task / "comm").read_bytes().rstrip() == THREAD
            if is_gloos and os.sched_getscheduler(int(task.name)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
