"""Agreement of the ranks on the order of their modules (stage 3).

If the orders differ, the ranks raise an error instead of hanging.

Ranks that gather different parameters than their peers hang, or mix up values of equal size. Therefore a rank
compares before it gathers:

* While a rank follows the recorded order, a comparison with this order is sufficient, and nothing is exchanged.
* When a rank departs from the recorded order, it waits until all ranks have departed to the same module. A rank that
  continues to follow the order waits for a message that is never sent. Meanwhile it reads what the others have written.
* While the order is recorded, the first rank writes the name of each module that gathers. The others compare their
  names before they gather.

The ranks write to the store of the process group, so no message is sent. The first difference is also written
to the store, so that every rank raises the same error.
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
_SHOWN: Final = 6  # number of names of an order in an error
_LONGEST_PAUSE_S: Final = 0.05
# Time for the other ranks to read the error before the store may exit with this process.
_FAREWELL_S: Final = 10.0
_numbers: Final = count()  # of the agreements of this process; equal on all ranks


class OrderAgreement:
    """The comparison of the order of modules between the ranks of a group.

    An *event* is the use of a module or block that may gather, or the end of a backward pass. The events of a
    pass are counted.

    Args:
        group: The data-parallel ranks.
    """

    def __init__(self, group: DataParallelGroup) -> None:
        self._group = group
        # torch's fake process group, in which one process represents all ranks, has no other ranks either.
        self._is_alone = group.world_size == 1 or group.backend == "fake"
        self._key = f"zero_runtime/order/{group.global_ranks[0]}/{next(_numbers)}"
        self._pass = 0
        self._names: list[str] = []  # names of the events of this pass
        self._recording = True  # whether no rank follows a recorded order
        self._written: list[list[str]] = [
            [],
            [],
        ]  # keys that the first rank wrote in this pass and in the one before
        if not self._is_alone and group.device.type == "cpu":
            # On CUDA, waiting for a message does not block the process.
            comm.watch_waits(self._look)

    def begin(self, is_recording: bool) -> None:
        """Begin a pass. ``is_recording`` is True if no order has been recorded."""
        self._pass += 1
        self._names.clear()
        self._recording = is_recording
        if not self._is_alone and self._group.rank == 0:
            for key in self._written.pop(0):
                comm.store().delete_key(key)
            self._written.append([])

    def follow(self, name: str) -> None:
        """Count an event that follows the recorded order."""
        self._names.append(name)

    def depart(self, name: str, keeps_order: bool = False) -> None:
        """Count an event that is not in the recorded order, or that is after its end.

        Args:
            name: The name of the event.
            keeps_order: Whether the ranks follow the recorded order after the event.

        Raises:
            UsageError: Another rank has a different event at this point.
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
        """Raise the error that in the previous pass this rank ran ``own``, but the first rank ran ``first``."""
        self._fail(0, first[-1], first, own)

    def _compare(self, name: str) -> None:
        """Compare the event with that of the first rank, which does not wait."""
        key = self._at("first")
        if self._group.rank == 0:
            self._write(key, name)
            return
        first = self._wait_for(key)
        if first != name:
            self._fail(0, first)

    def _compare_all(self, name: str) -> None:
        """Compare the event with that of the first rank, and wait for all ranks."""
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
        """Wait until a rank has written ``key``, and return the value. Meanwhile look for errors of other ranks."""
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
        """Raise the error that another rank has found, or an error if another rank has departed from the order."""
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
        """Write the error that this rank and ``rank`` differ, so that all ranks can read it, and raise it."""
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
        # Several ranks may find an error at the same time. All ranks raise the first one.
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
