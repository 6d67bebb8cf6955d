"""Finds the process whose clock is the reference, through a few keys of commprof in the job's store.

torch's store serves one operation per handle at a time, and a waiting operation blocks the others. So this
module uses a separate handle if torch can create one. It uses only operations that never wait for a peer:
check, add, set, and get of an existing key.
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

EXCHANGES: Final = 10  # exchanges through the store if no connection can be made
# Stores within one process. They belong to threads that act as ranks, or to torch's 'fake' backend. For the latter,
# torch reports only the base class.
_PRIVATE_STORES: Final = frozenset({"HashStore", "FakeStore", "Store"})
_ANSWER_SECONDS: Final = 2.0
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.5


class Store(Protocol):
    """The methods of torch's Store that this module uses."""

    def set(self, key: str, value: str) -> None:
        """Set ``key`` to ``value``."""

    def get(self, key: str) -> bytes:
        """Return the value of ``key``. Waits until the key exists."""

    def add(self, key: str, value: int) -> int:
        """Add ``value`` to the number at ``key`` (initially 0), and return the sum."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all of ``keys`` exist."""


class Reference(NamedTuple):
    """The process whose clock is the reference, and its addresses."""

    clock: str  # commprof.recorder.clocks.process_clocks.clock_identity
    addresses: list[str]
    port: int
    token: str  # hexadecimal


class Meeting:
    """Communicates through the keys below ``prefix`` in ``store``.

    Every method may raise the exceptions of torch's store.

    Args:
        store: The store of the job.
        prefix: The prefix of all keys.
        host: The host that serves the store, if it is known. This is usually the host of rank 0.
    """

    def __init__(self, store: Store, prefix: str, host: str | None = None) -> None:
        self._store = store
        self._prefix = prefix
        self._answered = 0
        self.host = host

    def publish(self, reference: Reference) -> None:
        """Write ``reference`` into the store."""
        self._store.set(f"{self._prefix}/reference", json.dumps(reference._asdict()))

    def find(self, seconds: float, parting: Event) -> Reference | None:
        """Return the reference; None if it is not published within ``seconds`` or before ``parting`` is set."""
        key = f"{self._prefix}/reference"
        for pause in _pauses(seconds):
            if parting.is_set():
                return None
            if self._store.check([key]):
                return Reference(**json.loads(self._store.get(key)))
            parting.wait(pause)
        return None

    def claim(self, clock: str) -> bool:
        """Return whether this process is the first of all processes with ``clock`` that calls this.

        This process then measures the offset for all of them.
        """
        return self._store.add(f"{self._prefix}/askers/{clock}", 1) == 1

    def ask(self, clock: Callable[[], int], parting: Event) -> list[Exchange]:
        """Run :data:`EXCHANGES` exchanges through the store.

        Returns:
            The exchanges; fewer, or none, if an answer is missing.
        """
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
        """Answer the processes that have begun to ask through the store since the last call."""
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
        """Return whether ``key`` is set before a timeout.

        Polls without pauses, because each pause would loosen the error bound of the offset.
        """
        until = time.monotonic() + _ANSWER_SECONDS
        while not parting.is_set() and time.monotonic() < until:
            if self._store.check([key]):
                return True
        return False


def job_meeting(prefix: str) -> Meeting | None:
    """Return the meeting in the store of this job; None if other hosts cannot use this store.

    Raises:
        ValueError: torch.distributed is not initialized.
    """
    store: Any = distributed_c10d._get_default_store()
    inner: Any = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    host = getattr(inner, "host", None)
    if type(inner).__name__ in _PRIVATE_STORES or (host is not None and _is_loopback(host)):
        return None
    # A FileStore must not be cloned. It would count a second handle as another worker, and this count decides when
    # the file is removed.
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
