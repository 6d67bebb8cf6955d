"""Reads blocked signals from a signalfd, which a process can wait for together with other descriptors.

Python's ``signal.sigtimedwait`` may return uninitialized memory, for example SIGHUP (CPython 3.11 and 3.12, measured).
This happens if the call is interrupted and its timeout has expired by then: after Ctrl-Z and ``fg``, after a
container's pause, or in a debugger. A read of the kernel's descriptor does not wait, so it cannot be interrupted.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from commprof.errors import LaunchError

# linux/signalfd.h: number, errno, code, and fields that are not used.
_SIGINFO: Final = struct.Struct("=Iii116x")
_LARGEST_SET: Final = 128  # the size of sigset_t in bytes, in glibc and musl
_AT_ONCE: Final = 64


class Signal(NamedTuple):
    """A received signal. ``code`` identifies the kind of sender (``si_code`` of sigaction(2))."""

    number: signal.Signals
    code: int


class SignalQueue:
    """The pending signals among ``watched``. Every thread must block these signals.

    Raises:
        LaunchError: the system cannot create the descriptor.
    """

    def __init__(self, watched: Sequence[signal.Signals]) -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            mask = ctypes.create_string_buffer(_LARGEST_SET)
            libc.sigemptyset(mask)
            for number in watched:
                libc.sigaddset(mask, int(number))
            self.descriptor: int = libc.signalfd(-1, mask, os.O_CLOEXEC | os.O_NONBLOCK)
        except AttributeError as error:
            raise LaunchError(
                f"this system cannot wait for signals: {error}; commprof run needs Linux"
            ) from error
        if self.descriptor < 0:
            raise LaunchError(f"no descriptor to wait for signals: {os.strerror(ctypes.get_errno())}")

    def take(self) -> Iterator[Signal]:
        """Yield all pending signals. Never waits."""
        while True:
            try:
                answer = os.read(self.descriptor, _AT_ONCE * _SIGINFO.size)
            except BlockingIOError:
                return
            for number, _, code in _SIGINFO.iter_unpack(answer):
                yield Signal(signal.Signals(number), code)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)
