"""Agreement of the ranks on the order of their modules (stage 3): an error instead of a hang where the orders differ.

Ranks that gather other parameters than their peers hang, or mix up values of equal size. So a rank compares before it
gathers:

* While it follows the recorded order, a comparison with that order is enough, and nothing is exchanged.
* Where it departs from that order, it waits until all ranks have departed to the same module. A rank that follows the order
  instead waits for a message that does not come, and looks at what the others have written meanwhile.
* While the order is recorded, the first rank writes each module that gathers, and the others compare before they gather.

The ranks write to the store of the process group, so no message is sent. The first difference is written there, too: every
rank raises the same error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import count
from typing import Any, Final, NoReturn

from zero_runtime import comm
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import UsageError

END: Final = "the end of the backward pass"
_SHOWN: Final = 6  # names of an order in an error
_LONGEST_PAUSE_S: Final = 0.05
# Time for the other ranks to see the error before the store may vanish with this process.
_FAREWELL_S: Final = 10.0
_numbers: Final = count()  # of the agreements of this process; equal on all ranks, which make the same ones


class OrderAgreement:
    """What the ranks of a group know of the order of one another's modules.

    An *event* is the use of a module or block that may gather, or the end of a backward pass. Events of a pass are counted.

    Args:
        group: the data-parallel ranks.
    """

    def __init__(self, group: DataParallelGroup) -> None:
        self._group = group
        # torch's fake process group, on which one process stands for a world, has no other ranks either.
        self._is_alone = group.world_size == 1 or group.backend == "fake"
        self._key = f"zero_runtime/order/{group.global_ranks[0]}/{next(_numbers)}"
        self._pass = 0
        self._names: list[str] = []  # of the events of this pass
        self._recording = True  # all ranks know that no recorded order is followed
        self._written: list[list[str]] = [
            [],
            [],
        ]  # keys that the first rank wrote in this pass and in the one before
        if not self._is_alone and group.device.type == "cpu":
            # On CUDA, waiting for a message does not block the process.
            comm.watch_waits(self._look)

    def begin(self, is_recording: bool) -> None:
        """Begin a pass; ``is_recording`` if no order has been recorded."""
        self._pass += 1
        self._names.clear()
        self._recording = is_recording
        if not self._is_alone and self._group.rank == 0:
            for key in self._written.pop(0):
                comm.store().delete_key(key)
            self._written.append([])

    def follow(self, name: str) -> None:
        """An event of the recorded order."""
        self._names.append(name)

    def depart(self, name: str, keeps_order: bool = False) -> None:
        """An event that is not in the recorded order, or comes after it.

        Args:
            name: of the event.
            keeps_order: whether the ranks follow the recorded order after it.

        Raises:
            UsageError: another rank has another event here.
        """
        self._names.append(name)
        if self._is_alone:
            return
        if self._recording:
            self._compare(name)
        else:
            self._compare_all(name)
            self._recording = not keeps_order

    def differ(self, own: Sequence[str], first: Sequence[str]) -> NoReturn:
        """Raise the error that this rank ran ``own``, and the first rank ``first``, in the pass before."""
        self._fail(0, first[-1], first, own)

    def _compare(self, name: str) -> None:
        """Compare with the first rank, which does not wait."""
        key = self._at("first")
        if self._group.rank == 0:
            self._write(key, name)
            return
        first = self._wait_for(key)
        if first != name:
            self._fail(0, first)

    def _compare_all(self, name: str) -> None:
        """Compare with the first rank, and wait for all ranks."""
        store, members = comm.store(), self._at("members")
        notice = [self._group.rank, self._pass, len(self._names), self._names[-_SHOWN:]]
        store.set(f"{self._key}/departed", json.dumps(notice))
        self._compare(name)
        if store.add(members, 1) == self._group.world_size:
            store.set(f"{members}/all", "yes")
        self._wait_for(f"{members}/all")
        if self._group.rank == 0:
            self._written[-1] += [members, f"{members}/all"]

    def _at(self, what: str) -> str:
        return f"{self._key}/{self._pass}/{len(self._names)}/{what}"

    def _write(self, key: str, value: str) -> None:
        comm.store().set(key, value)
        self._written[-1].append(key)

    def _wait_for(self, key: str) -> str:
        """The value of ``key``, once a rank has written it; looks for errors of other ranks meanwhile."""
        store, pause, waited = comm.store(), 0.0, 0.0
        while not store.check([key]):
            time.sleep(pause)
            waited += pause
            pause = min(_LONGEST_PAUSE_S, pause * 2 + 0.0002)
            if pause == _LONGEST_PAUSE_S:
                self._look()
                comm.look()
            if waited > comm.DEFAULT_TIMEOUT.total_seconds():
                self._fail(None, "nothing")
        return str(store.get(key).decode())

    def _look(self) -> None:
        """Raise the error that another rank has found, or one about a rank that has departed from the order."""
        store, error, departed = comm.store(), f"{self._key}/error", f"{self._key}/departed"
        if store.check([error]):
            self._raise(store.get(error).decode())
        if self._recording or not store.check([departed]):
            return
        rank, number, event, names = json.loads(store.get(departed))
        if number == self._pass and event <= len(self._names) and rank != self._group.rank:
            mine = self._names[:event]
            if mine[-1] != names[-1]:
                self._fail(rank, names[-1], names, mine)

    def _fail(
        self,
        rank: int | None,
        theirs: str,
        other: Sequence[str] | None = None,
        own: Sequence[str] | None = None,
    ) -> NoReturn:
        """Write the error that this rank and ``rank`` differ, for all ranks, and raise it."""
        own = self._names if own is None else own
        other = [*own[:-1], theirs] if other is None else other
        here = f"rank {self._group.global_ranks[self._group.rank]}"
        there = "the others" if rank is None else f"rank {self._group.global_ranks[rank]}"
        text = (
            f"ranks run their modules in different orders at stage 3: in pass {self._pass}, {here} came to {own[-1]}, and "
            f"{there} to {other[-1]}. Order of {here}: {_shown(own)}; order of {there}: {_shown(other)}. All ranks must run "
            "the same modules in the same order, since each gathers from all; let every rank take the same branch, or "
            "gather modules that run in varying order as one with set_z3_leaf_modules"
        )
        store, key = comm.store(), f"{self._key}/error"
        # Several ranks may find an error at once: the first one is that of all.
        if store.add(f"{key}/found", 1) == 1:
            store.set(key, text)
        else:
            store.wait([key])
            text = store.get(key).decode()
        self._raise(text)

    def _raise(self, text: str) -> NoReturn:
        store, seen = comm.store(), f"{self._key}/error/seen"
        until = time.monotonic() + _FAREWELL_S
        all_seen = store.add(seen, 1) >= self._group.world_size
        while not all_seen and time.monotonic() < until:
            time.sleep(_LONGEST_PAUSE_S)
            all_seen = store.add(seen, 0) >= self._group.world_size
        raise UsageError(f"{text}. Found by rank {comm.get_rank()}")


def _shown(names: Sequence[Any]) -> str:
    shown = ", ".join(names[-_SHOWN:])
    return f"..., {shown}" if len(names) > _SHOWN else shown
