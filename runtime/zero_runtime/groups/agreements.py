"""Agreement of all ranks through the store of the process group: a few short texts, and no message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

from zero_runtime import comm

_numbers: Final = count()  # of agreements; equal on all ranks, which make the same ones


def as_first_decides(topic: str, mine: str, decide: Callable[[Sequence[str]], str]) -> str:
    """What rank 0 decides by the texts of all ranks.

    All ranks must call it, in the same order.

    Args:
        topic: what it is about, for whoever looks at the store.
        mine: this rank's text.
        decide: called on rank 0 with the texts of all ranks.
    """
    world, rank = comm.get_world_size(), comm.get_rank()
    if world == 1:
        return decide([mine])
    store, key = comm.store(), f"zero_runtime/{topic}/{next(_numbers)}"
    if rank:
        store.set(f"{key}/{rank}", mine)
        return store.get(f"{key}/decided").decode()
    texts = [mine, *(store.get(f"{key}/{each}").decode() for each in range(1, world))]
    decided = decide(texts)
    store.set(f"{key}/decided", decided)
    return decided
