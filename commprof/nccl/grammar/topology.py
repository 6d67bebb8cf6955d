"""Parses the lines about the connections of the ranks of a communicator: rings, trees, and links between pairs.

Formats of NCCL 2.4 to 2.30, from ``src/init.cc``, ``src/graph/connect.cc`` and ``src/transport/*.cc`` of NVIDIA/nccl.
RCCL appends the communicator's address to some of the lines. A message must match a form completely. Truncated messages
are dropped. :mod:`commprof.nccl.tables.topology_tables` collects the results.

The functions are pure: they take bytes and return tuples. ``-1`` in a tree or a ring means that there is no such rank,
and becomes None.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class RingOrder(NamedTuple):
    """All ranks in the order of a ring, which rank 0 prints: ``Channel 00/02 : 0 1``."""

    channel: int
    channels: int | None
    ranks: tuple[int, ...]


class RingNeighbours(NamedTuple):
    """One rank of a ring, with the ranks that it receives from and sends to: ``Ring 00 : 1 -> 0 -> 1``."""

    channel: int
    previous: int | None
    rank: int
    next: int | None


class TreeLine(NamedTuple):
    """One rank of one tree. ``parent`` is the rank above, or None at the root. ``children`` are the ranks below."""

    tree: int
    rank: int
    parent: int | None
    children: tuple[int, ...]


class Link(NamedTuple):
    """The connection from one rank to another in a channel: ``Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/0``."""

    channel: int
    connection: int | None
    from_rank: int
    to_rank: int
    from_device: str | None
    to_device: str | None
    transport: str
    kind: str
    direction: str | None


Topology = RingOrder | RingNeighbours | tuple[TreeLine, ...] | Link

# Repeats are bounded or possessive, so that a line of several megabytes is read in linear time.
_RCCL_TAIL = rb"(?: comm 0x[0-9a-f]{1,16} nRanks \d{1,9}(?: busId [0-9a-f]{1,16})?)?"
_RING_ORDER = re.compile(rb"Channel (\d{1,4})(?:/(\d{1,4}))? :((?: ++\d{1,9}+)++)")
_NEIGHBOURS = re.compile(rb"Ring (\d{1,4}) : (-?\d{1,9}) -> (\d{1,9}) -> (-?\d{1,9})" + _RCCL_TAIL)
_BELOW = rb"-?\d{1,9}(?:/-?\d{1,9}){1,3}"
_TREE = re.compile(rb"Tree (\d{1,4}) : (-?\d{1,9}) -> (\d{1,9}) -> (" + _BELOW + rb")" + _RCCL_TAIL)
# 2.8 and newer print below->rank->above, and 2.4 prints above->rank->below. 2.5 to 2.7 print the tree up and the tree
# down.
_TREES_ENTRY = re.compile(
    rb" \[(\d{1,4})\] (?:"
    rb"(?P<below>" + _BELOW + rb")->(?P<rank>\d{1,9})->(?P<above>-?\d{1,9})"
    rb"(?:\|(?P<down_above>-?\d{1,9})->(?P<down_rank>\d{1,9})->(?P<down_below>" + _BELOW + rb"))?"
    rb"|(?P<old_above>-?\d{1,9})->(?P<old_rank>\d{1,9})->(?P<old_below>" + _BELOW + rb"))(?= |$)"
)
_TAIL = re.compile(_RCCL_TAIL)
# All transports are listed, so that a truncated name does not match another transport.
_TRANSPORT = (
    rb"P2P/(?:direct pointer|direct|IPC|CUMEM|MNNVL|indirect/\d{1,9}\[[0-9a-f]{1,16}\])(?:/read)?(?:/CE)?"
    rb"|SHM(?:/(?:direct|CE)){0,2}|direct shared memory"
    rb"|(?:COLL)?NET/[^/\[\]]{1,60}/\d{1,6}(?:\(-?\d{1,9}\))?(?:/(?:GDRDMA(?:\([A-Z0-9]{1,12}\))?|Shared|Direct)){0,3}"
)
_LINK = re.compile(
    rb"(?:Channel|Ring) (\d{1,4})(?:/(\d{1,4}))? : (\d{1,9})(?:\[([0-9a-f]{1,16})\])? -> "
    rb"(\d{1,9})(?:\[([0-9a-f]{1,16})\])?(?: \[(send|receive)\])? via (" + _TRANSPORT + rb")" + _RCCL_TAIL
)


def read_topology(body: bytes) -> Topology | None:
    """Return the ring, trees or link in one message; None for other messages and truncated ones.

    Args:
        body: The text after ``NCCL INFO ``.

    >>> read_topology(b"Ring 00 : 1 -> 0 -> 1")
    RingNeighbours(channel=0, previous=1, rank=0, next=1)
    """
    if body.startswith((b"Channel ", b"Ring ")):
        body = body.rstrip()
        return _link(body) or _ring_order(body) or _neighbours(body)
    if body.startswith(b"Trees "):
        return _trees(body.rstrip())
    if body.startswith(b"Tree "):
        return _tree(body.rstrip())
    return None


def _link(body: bytes) -> Link | None:
    match = _LINK.fullmatch(body)
    if match is None:
        return None
    channel, connection, sender, sender_device, receiver, receiver_device, direction, transport = (
        None if group is None else group.decode("utf-8", "replace") for group in match.groups()
    )
    assert channel is not None and sender is not None and receiver is not None and transport is not None
    return Link(
        int(channel),
        None if connection is None else int(connection),
        int(sender),
        int(receiver),
        sender_device,
        receiver_device,
        transport,
        "SHM" if transport == "direct shared memory" else transport.partition("/")[0],
        direction,
    )


def _ring_order(body: bytes) -> RingOrder | None:
    match = _RING_ORDER.fullmatch(body)
    if match is None:
        return None
    ranks = tuple(map(int, match[3].split()))
    # A complete ring has every rank exactly once. Otherwise the line is truncated.
    if sorted(ranks) != list(range(len(ranks))):
        return None
    return RingOrder(int(match[1]), None if match[2] is None else int(match[2]), ranks)


def _neighbours(body: bytes) -> RingNeighbours | None:
    match = _NEIGHBOURS.fullmatch(body)
    if match is None:
        return None
    return RingNeighbours(int(match[1]), _rank(match[2]), int(match[3]), _rank(match[4]))


def _tree(body: bytes) -> tuple[TreeLine, ...] | None:
    match = _TREE.fullmatch(body)
    if match is None:
        return None
    return (_tree_line(match[1], match[2], match[3], match[4]),)


def _trees(body: bytes) -> tuple[TreeLine, ...] | None:
    lines: list[TreeLine] = []
    position = len(b"Trees")
    while entry := _TREES_ENTRY.match(body, position):
        position = entry.end()
        number = entry[1]
        if entry["old_rank"] is not None:
            lines.append(_tree_line(number, entry["old_above"], entry["old_rank"], entry["old_below"]))
            continue
        up = _tree_line(number, entry["above"], entry["rank"], entry["below"])
        lines.append(up)
        if entry["down_rank"] is not None:
            down = _tree_line(number, entry["down_above"], entry["down_rank"], entry["down_below"])
            if down != up:
                lines.append(down)
    if not lines or _TAIL.fullmatch(body, position) is None:
        return None
    return tuple(lines)


def _tree_line(number: bytes, above: bytes, rank: bytes, below: bytes) -> TreeLine:
    children = tuple(child for child in map(int, below.split(b"/")) if child >= 0)
    return TreeLine(int(number), int(rank), _rank(above), children)


def _rank(text: bytes) -> int | None:
    number = int(text)
    return None if number < 0 else number
