"""Exchanges timestamps with the reference clock of another host, over the recorder's own connection.

The process whose clock is the reference listens, and one process of each other host connects to it. The client
gets a token through the job's store and sends this token first. The server returns the token. So neither side
exchanges timestamps with a foreign process.

    token (16 bytes)        ->
                            <-  token
    number                  ->                       8 bytes
                            <-  number, when it was received, when it was answered    24 bytes
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from commprof.recorder.clocks.process_clocks import Exchange

TOKEN_BYTES: Final = 16
_QUESTION: Final = struct.Struct("<q")
_ANSWER: Final = struct.Struct("<qqq")
_SIOCGIFADDR: Final = 0x8915  # netdevice(7)
_MOST_BUFFERED: Final = 1 << 12
_STRANGERS: Final = 64  # maximum number of open connections that have not sent the token yet


class ClockServer:
    """Serves the time of this process's clock.

    Args:
        clock: A function that returns the time of the clock in nanoseconds.

    Raises:
        OSError: The server cannot listen on any port.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.token = os.urandom(TOKEN_BYTES)
        self._clock = clock
        self._listener = _listen()
        self.port: int = self._listener.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._buffers: dict[socket.socket, bytes] = {}
        self._admitted: set[socket.socket] = set()
        self._ending = threading.Event()
        self._interrupted = threading.Event()

    @property
    def asked(self) -> int:
        """The number of open connections that have sent the token."""
        return len(self._admitted)

    def serve(self, seconds: float | None = None) -> bool:
        """Answer questions for ``seconds``, or until :meth:`interrupt` is called.

        Returns:
            False if :meth:`end` was called and no client is connected; otherwise True.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while not (self._ending.is_set() and not self._admitted):
            left = None if until is None else until - time.monotonic()
            if self._interrupted.is_set() or (left is not None and left <= 0):
                self._interrupted.clear()
                return True
            for key, _ in self._selector.select(left):
                self._attend(key.fileobj)
        return False

    def interrupt(self) -> None:
        """Make :meth:`serve` return soon. Any thread may call this."""
        self._interrupted.set()
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def end(self) -> None:
        """Make :meth:`serve` return as soon as all clients have disconnected. Any thread may call this."""
        self._ending.set()
        self.interrupt()

    def close(self) -> None:
        """Close every socket. A forked child that inherited the server can call this without effect on the peers."""
        for connection in [*self._buffers, self._listener, self._wake, self._woken]:
            connection.close()
        self._buffers.clear()
        self._admitted.clear()
        self._selector.close()

    def _attend(self, connection: object) -> None:
        assert isinstance(connection, socket.socket)
        if connection is self._woken:
            connection.recv(64)
        elif connection is self._listener:
            self._accept()
        else:
            try:
                self._answer(connection)
            except OSError:
                self._dismiss(connection)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._buffers) - len(self._admitted) >= _STRANGERS:
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffers[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _answer(self, connection: socket.socket) -> None:
        try:
            received = connection.recv(_MOST_BUFFERED)
        except BlockingIOError:
            return
        now = self._clock()
        buffer = self._buffers[connection] + received
        if not received or len(buffer) > _MOST_BUFFERED:
            self._dismiss(connection)
            return
        if connection not in self._admitted:
            if len(buffer) < TOKEN_BYTES:
                self._buffers[connection] = buffer
                return
            if not hmac.compare_digest(buffer[:TOKEN_BYTES], self.token):
                self._dismiss(connection)
                return
            self._admitted.add(connection)
            connection.sendall(self.token)
            buffer = buffer[TOKEN_BYTES:]
        while len(buffer) >= _QUESTION.size:
            (number,) = _QUESTION.unpack_from(buffer)
            buffer = buffer[_QUESTION.size :]
            connection.sendall(_ANSWER.pack(number, now, self._clock()))
        self._buffers[connection] = buffer

    def _dismiss(self, connection: socket.socket) -> None:
        self._admitted.discard(connection)
        self._buffers.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()


class ClockConnection:
    """A connection to a :class:`ClockServer`.

    Args:
        addresses: The possible addresses of the server. The first one that answers with the token is used.
        port: The port of the server.
        token: The token that the client sends, and that the server must return.
        timeout: The timeout of each socket operation, in seconds.
        clock: A function that returns the time of this process's clock in nanoseconds.

    Raises:
        OSError: The server cannot be reached at any of the addresses.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        port: int,
        token: bytes,
        timeout: float = 1.0,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._clock = clock
        self._number = 0
        self._socket = _connect(addresses, port, token, timeout)

    def ask(self, count: int) -> list[Exchange]:
        """Run ``count`` exchanges, one after the other, and return them.

        Raises:
            OSError: The connection was closed, or an answer took too long.
        """
        return [self._exchange() for _ in range(count)]

    def _exchange(self) -> Exchange:
        self._number += 1
        question = _QUESTION.pack(self._number)
        sent = self._clock()
        self._socket.sendall(question)
        answer = _receive(self._socket, _ANSWER.size)
        arrived = self._clock()
        number, received, answered = _ANSWER.unpack(answer)
        if number != self._number:
            raise OSError(f"question {self._number} was given the answer to question {number}")
        return Exchange(sent, received, answered, arrived)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def _connect(addresses: Sequence[str], port: int, token: bytes, timeout: float) -> socket.socket:
    problems = []
    for address in dict.fromkeys(addresses):
        connection = None
        try:
            connection = socket.create_connection((address, port), timeout)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(token)
            if not hmac.compare_digest(_receive(connection, TOKEN_BYTES), token):
                raise OSError("somebody else answers")
            return connection
        except OSError as error:
            problems.append(f"{address}: {error}")
            if connection is not None:
                connection.close()
    raise OSError(f"the reference clock cannot be reached at port {port} of {'; '.join(problems)}")


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise OSError("the connection was closed")
        data += part
    return data


def _listen() -> socket.socket:
    """Return a listening socket on a free port, for IPv6 and IPv4 if the host supports both."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", 0))


def own_addresses() -> list[str]:
    """Return the addresses at which other hosts may reach this host.

    These are the IPv4 addresses of its interfaces, except loopback addresses, and its host name.
    """
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                addresses.append(socket.inet_ntoa(answer[20:24]))
    return [*(each for each in addresses if not each.startswith("127.")), socket.gethostname()]
