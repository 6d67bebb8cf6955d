"""Splits a line into messages at their heads, ``host:pid:tid [device] NCCL INFO``.

``src/debug.cc`` of NVIDIA/nccl writes the heads. Their form is equal in all versions. Text before a head is not from
NCCL.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

HEAD: Final = re.compile(
    rb"(?<![\w.-])(?=\w)(?P<host>[\w.-]{1,64}+):(?P<pid>\d{1,9}):(?P<tid>\d{1,9}) "
    rb"(?:\[(?P<device>-?\d{1,5})\](?P<source>(?: [^\s\[\]]{1,80}){0,3})"
    rb" NCCL (?P<level>INFO|WARN|TRACE|ABORT)|NCCL (?P<call>CALL))(?: |$)"
)


class Origin(NamedTuple):
    """The ``host:pid:tid [device]`` before a message. ``clean``: whether it is certain where the host name begins."""

    host: bytes
    pid: int
    tid: int
    device: int | None
    clean: bool


class Piece(NamedTuple):
    """One message of a physical line.

    Attributes:
        start: The position of the head in the line.
        origin: The head.
        level: The level: INFO, WARN, TRACE, ABORT or CALL.
        source: The text between the device and the level. For warnings it is the position in NCCL's source.
        body: The text of the message.
    """

    start: int
    origin: Origin
    level: bytes
    source: bytes
    body: bytes


class KnownHosts:
    """The hosts whose names were read with certainty, and their processes."""

    def __init__(self) -> None:
        self._hosts: set[bytes] = set()
        self._by_pid: dict[int, set[bytes]] = {}

    def add(self, host: bytes, pid: int) -> None:
        """Remember a host and one of its processes."""
        self._hosts.add(host)
        self._by_pid.setdefault(pid, set()).add(host)

    def end_of(self, token: bytes, pid: int, any_process: bool) -> bytes | None:
        """Return the longest known host at the end of ``token``; None if there is none.

        Args:
            token: A text that ends with the name of a host.
            pid: The process id. Hosts with this process have priority.
            any_process: Whether hosts without this process are allowed too.
        """
        for hosts in (self._by_pid.get(pid, ()), self._hosts if any_process else ()):
            matching = [host for host in hosts if token.endswith(host)]
            if matching:
                return max(matching, key=len)
        return None


def split_messages(line: bytes, hosts: KnownHosts) -> list[Piece]:
    """Return the messages of one physical line, split before each head.

    If two messages are interleaved, the end of the first may look like a part of the host name of the second. In this
    case the host name is a host that is known from other lines.
    """
    if line.count(b" NCCL ") == 1:
        head_match = HEAD.search(line)
        heads = [] if head_match is None else [head_match]
    else:
        heads = list(HEAD.finditer(line))
    if not heads:
        return []
    starts: list[tuple[int, Origin]] = []
    for head in heads:
        starts.append(_origin(line, head, hosts, glued=bool(starts)))
    ends = [start for start, _ in starts[1:]] + [len(line)]
    return [
        Piece(start, origin, head["level"] or head["call"], head["source"] or b"", line[head.end() : end])
        for (start, origin), head, end in zip(starts, heads, ends, strict=True)
    ]


def _origin(line: bytes, head: re.Match[bytes], hosts: KnownHosts, *, glued: bool) -> tuple[int, Origin]:
    """Return the position at which the host of a head begins, and the head as a record.

    Args:
        line: The line.
        head: The match of the head.
        hosts: The known hosts, which are updated with the host of this head.
        glued: Whether another message precedes the head in the line.
    """
    host, pid, tid, device = head["host"], head["pid"], head["tid"], head["device"]
    start, number = head.start(), int(pid)
    clean = not glued and (start == 0 or line[start - 1 : start].isspace())
    if not clean:
        known = hosts.end_of(host, number, glued)
        if known is not None:
            start += len(host) - len(known)
            host, clean = known, True
    if clean:
        hosts.add(host, number)
    return start, Origin(host, number, int(tid), None if device is None else int(device), clean)
