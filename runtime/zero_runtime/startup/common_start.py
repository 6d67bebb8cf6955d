"""The start of an engine on all ranks with a traffic contract.

No rank waits for a rank that fails or starts differently.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final

from zero_runtime import comm
from zero_runtime.errors import TrafficContractError, ZeroRuntimeError
from zero_runtime.groups.agreements import awaited, lookouts
from zero_runtime.groups.contract_messages import failed_start, lost_start
from zero_runtime.groups.host_processes import HostProcesses
from zero_runtime.groups.traffic_contract import OFF, Verdict

_LOOK_S: Final = 0.2  # interval at which a waiting rank looks for failed ranks
_READ_S: Final = 3.0  # time for the other ranks to write or read an error


class CommonStart:
    """A context in which an error of one rank is raised on all other ranks, which otherwise would wait for this rank.

    Ranks whose ``traffic_contract`` is off report their errors, but do not wait for other ranks.

    Args:
        mode: The value of ``traffic_contract`` in the configuration.

    Attributes:
        verdict: The verdict of the engine's contracts.
    """

    def __init__(self, mode: object) -> None:
        self.verdict = Verdict()
        self._keeps = mode != OFF
        self._is_alone = comm.get_world_size() == 1 or comm.DataParallelGroup().backend == "fake"
        self._looked = time.monotonic()
        self._error = f"{self.verdict.key}/error"
        self._has_read = False

    def __enter__(self) -> CommonStart:
        if self._keeps and not self._is_alone:
            self.verdict.processes = HostProcesses(
                comm.store(), f"{self.verdict.key}/processes", comm.get_rank()
            )
            lookouts.append(self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._look in lookouts:
            lookouts.remove(self._look)
        if self._is_alone or not isinstance(error, Exception):
            return
        try:
            reason = self._told(error)
        except (RuntimeError, OSError):
            return  # the store has ended with rank 0
        if reason is not None:
            raise TrafficContractError(reason) from error

    def decided(self, mine: str, decide: Callable[[Mapping[int, str]], str]) -> str:
        """Return the text that rank 0 decides from the texts of all ranks, which are given by rank.

        A rank without a contract does not wait for other ranks. On such a rank the result is empty.

        Args:
            mine: The text of this rank; empty on ranks without a contract.
            decide: A function that returns the decision for the texts of some ranks.
        """
        rank, world = comm.get_rank(), comm.get_world_size()
        if self._is_alone:
            return decide({rank: mine})
        store, key = comm.store(), f"{self.verdict.key}/start"
        store.set(f"{key}/{rank}", json.dumps(mine))
        if not self._keeps:
            return ""
        first = mine if rank == 0 else json.loads(awaited(f"{key}/0"))
        if rank and not first:
            return decide({0: first, rank: mine})
        if rank:
            return awaited(f"{key}/decided")
        texts = {each: json.loads(awaited(f"{key}/{each}")) for each in range(1, world)}
        decision = decide({0: mine, **texts})
        store.set(f"{key}/decided", decision)
        return decision

    def _told(self, error: Exception) -> str | None:
        """Report ``error`` to the other ranks.

        The result is the error that another rank reported, if it is why this rank has failed. Otherwise it is
        None.
        """
        store, reason = comm.store(), None
        if not isinstance(error, ZeroRuntimeError) and self._keeps:
            # A collective fails if another rank has ended. That rank has reported its error before.
            until = time.monotonic() + (_READ_S if isinstance(error, RuntimeError | OSError) else 0.0)
            while not store.check([self._error]) and time.monotonic() < until:
                time.sleep(0.02)
            if store.check([self._error]):
                reason = store.get(self._error).decode()
        if reason is None and not isinstance(error, TrafficContractError):
            store.compare_set(self._error, "", failed_start(comm.get_rank(), error))
        self._read()
        return reason

    def _read(self) -> None:
        """Count this rank among the ranks that have read an error.

        Rank 0 may run the store, and therefore waits for the others.
        """
        store, key = comm.store(), f"{self.verdict.key}/read"
        if not self._has_read:
            self._has_read = True
            store.add(key, 1)
        until = time.monotonic() + _READ_S
        while self._keeps and comm.get_rank() == 0 and time.monotonic() < until:
            if store.add(key, 0) >= comm.get_world_size():
                break
            time.sleep(0.02)

    def _look(self) -> None:
        """Raise the error that another rank reported, or an error if the process of another rank has ended."""
        if time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        store, processes = comm.store(), self.verdict.processes
        ended = {} if processes is None else processes.ended()
        if ended:
            store.compare_set(self._error, "", lost_start(ended))
        if store.check([self._error]):
            raise TrafficContractError(store.get(self._error).decode())
