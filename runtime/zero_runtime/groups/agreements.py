"""Agreement of all ranks through the store of the process group.

Ranks write a few short texts, and no message is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

from zero_runtime import comm

_LONGEST_PAUSE_S: Final = 0.02
_numbers: Final = count()  # of agreements; equal on all ranks, because all ranks make the same agreements
lookouts: Final[list[Callable[[], None]]] = []  # called while a rank waits for another rank; may raise


def as_first_decides(topic: str, mine: str, decide: Callable[[Sequence[str]], str]) -> str:
    """Return the text that rank 0 decides from the texts of all ranks.

    All ranks must call this function, in the same order.

    Args:
        topic: The subject of the agreement, for a person who inspects the store.
        mine: The text of this rank.
        decide: A function that is called on rank 0 with the texts of all ranks.
    """
    world, rank = comm.get_world_size(), comm.get_rank()
    if world == 1:
        return decide([mine])
    store, key = comm.store(), f"zero_runtime/{topic}/{next(_numbers)}"
    if rank:
        store.set(f"{key}/{rank}", mine)
        return awaited(f"{key}/decided")
    texts = [mine, *(awaited(f"{key}/{each}") for each in range(1, world))]
    decided = decide(texts)
    store.set(f"{key}/decided", decided)
    return decided


def awaited(key: str) -> str:
    """Wait until a rank has written ``key`` into the store, and return the value."""
    store, pause = comm.store(), 0.0005
    until = time.monotonic() + comm.DEFAULT_TIMEOUT.total_seconds()
    # Without a lookout, get() waits, and raises when the time limit of the store has passed.
    while lookouts and time.monotonic() < until and not store.check([key]):
        for look in lookouts:
            look()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return str(store.get(key).decode())
