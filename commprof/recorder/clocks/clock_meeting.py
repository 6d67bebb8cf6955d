"""Finds the process whose clock is the reference, through a few keys of commprof in the job's store.

torch's store serves one operation per handle at a time, and a waiting operation blocks the others. So this uses a handle of
its own if torch can make one, and only operations that never wait for a peer: check, add, set, and get of an existing
key.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any, Final, NamedTuple, Protocol

from torch.distributed import distributed_c10d

from commprof.recorder.clocks.process_clocks import Exchange

EXCHANGES: Final = 10  # questions that are asked through the store, where no connection can be made
# Stores within one process: of threads that play ranks, and of torch's 'fake' backend, whose class torch forgets.
_PRIVATE_STORES: Final = frozenset({"HashStore", "FakeStore", "Store"})
_ANSWER_SECONDS: Final = 2.0
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.5


class Store(Protocol):
    """The methods of torch's Store that are used."""

    def set(self, key: str, value: str) -> None:
        """Let ``key`` have ``value``."""

    def get(self, key: str) -> bytes:
        """The value of ``key``; waits until there is one."""

    def add(self, key: str, value: int) -> int:
        """Add to the number that ``key`` holds (0 at first), and return the sum."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of ``keys`` have values."""


class Reference(NamedTuple):
    """The process whose clock is the reference, and its addresses."""

    clock: str  # commprof.recorder.clocks.process_clocks.clock_identity
    addresses: list[str]
    port: int
    token: str  # hexadecimal


class Meeting:
    """The keys below ``prefix`` in ``store``. Every method may raise what torch's store raises.

    Args:
        host: where the store itself is served, when that is known: most often beside rank 0.
    """

    def __init__(self, store: Store, prefix: str, host: str | None = None) -> None:
        self._store = store
        self._prefix = prefix
        self._answered = 0
        self.host = host

    def publish(self, reference: Reference) -> None:
        """Publish the reference."""
        self._store.set(f"{self._prefix}/reference", json.dumps(reference._asdict()))

    def find(self, seconds: float, parting: Event) -> Reference | None:
        """Return the reference; None if it is not published within ``seconds``, or when ``parting`` is set."""
        key = f"{self._prefix}/reference"
        for pause in _pauses(seconds):
            if parting.is_set():
                return None
            if self._store.check([key]):
                return Reference(**json.loads(self._store.get(key)))
            parting.wait(pause)
        return None

    def claim(self, clock: str) -> bool:
        """Whether this process is the first of those with ``clock``, so that it is the one that asks for all of them."""
        return self._store.add(f"{self._prefix}/askers/{clock}", 1) == 1

    def ask(self, clock: Callable[[], int], parting: Event) -> list[Exchange]:
        """Exchanges through the store; fewer than :data:`EXCHANGES`, or none, when the answers stay away."""
        number = self._store.add(f"{self._prefix}/questions", 1)
        exchanges: list[Exchange] = []
        for turn in range(EXCHANGES):
            key = f"{self._prefix}/{number}/{turn}"
            sent = clock()
            self._store.set(f"{key}/question", "")
            if not self._appears(f"{key}/answer", parting):
                break
            received, answered = map(int, self._store.get(f"{key}/answer").split())
            exchanges.append(Exchange(sent, received, answered, clock()))
        return exchanges

    def answer(self, clock: Callable[[], int], parting: Event) -> None:
        """Answer those who have begun to ask through the store since the last time."""
        asking = self._store.add(f"{self._prefix}/questions", 0)
        while self._answered < asking:
            self._answered += 1
            for turn in range(EXCHANGES):
                key = f"{self._prefix}/{self._answered}/{turn}"
                if not self._appears(f"{key}/question", parting):
                    break
                received = clock()
                self._store.set(f"{key}/answer", f"{received} {clock()}")

    def _appears(self, key: str, parting: Event) -> bool:
        """Whether ``key`` is set soon. Asked without a pause, since each would widen the bound of the answer."""
        until = time.monotonic() + _ANSWER_SECONDS
        while not parting.is_set() and time.monotonic() < until:
            if self._store.check([key]):
                return True
        return False


def job_meeting(prefix: str) -> Meeting | None:
    """The meeting in the store of this job; None where that store does not reach beyond this host.

    Raises:
        ValueError: torch.distributed is not initialised.
    """
    store: Any = distributed_c10d._get_default_store()
    inner: Any = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    host = getattr(inner, "host", None)
    if type(inner).__name__ in _PRIVATE_STORES or (host is not None and _is_loopback(host)):
        return None
    # A second handle of a FileStore would count as a worker of its own, by which the file is removed in the end.
    if host is not None and hasattr(store, "clone"):
        with contextlib.suppress(RuntimeError):
            store = store.clone()
    return Meeting(store, prefix, host)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _pauses(seconds: float) -> Iterator[float]:
    until = time.monotonic() + seconds
    pause = _FIRST_PAUSE
    while time.monotonic() < until:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)
