"""Splits a line into messages at the heads ``host:pid:tid [device] NCCL INFO`` of messages.

Writer: ``src/debug.cc`` of NVIDIA/nccl. The form is the same in all versions; text before it is not NCCL's.
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
    """The ``host:pid:tid [device]`` before a message; ``clean`` when the beginning of the host is certain."""

    host: bytes
    pid: int
    tid: int
    device: int | None
    clean: bool


class Piece(NamedTuple):
    """One message of a physical line: where its head starts, the head, its level, and the text.

    ``source`` is the text between the device and the level: the position in NCCL's source, for warnings.
    """

    start: int
    origin: Origin
    level: bytes
    source: bytes
    body: bytes


class KnownHosts:
    """Hosts that were seen at a certain beginning, and their processes."""

    def __init__(self) -> None:
        self._hosts: set[bytes] = set()
        self._by_pid: dict[int, set[bytes]] = {}

    def add(self, host: bytes, pid: int) -> None:
        """Remember a host and one of its processes."""
        self._hosts.add(host)
        self._by_pid.setdefault(pid, set()).add(host)

    def end_of(self, token: bytes, pid: int, any_process: bool) -> bytes | None:
        """The longest known host at the end of ``token``: one that has process ``pid``, else any if allowed."""
        for hosts in (self._by_pid.get(pid, ()), self._hosts if any_process else ()):
            matching = [host for host in hosts if token.endswith(host)]
            if matching:
                return max(matching, key=len)
        return None


def split_messages(line: bytes, hosts: KnownHosts) -> list[Piece]:
    """The messages of one physical line, split before each head.

    Where two messages are interleaved, the end of the first may look like the beginning of the host: then a host that
    is known from other lines decides.
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
    """Where the head's host begins, and the head as a record; ``glued``: another message precedes it."""
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
