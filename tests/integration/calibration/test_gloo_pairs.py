"""The executed bytes between pairs of ranks, compared with the kernel's counters of the connections.

The ranks use gloo.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path

import pytest

from commprof.analysis import api
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

WORLD = 3
MIB = 2**20
WORDS = 300  # the most bytes that gloo adds to a message
TIMES = 4
CALLS = [  # operation, bytes, root
    ("all_reduce", 600_000, None),
    ("all_reduce", 7 * MIB, None),
    ("reduce", 600_000, 1),
    ("reduce", 11 * MIB, 0),
    ("reduce", 11 * MIB, 2),
    ("broadcast", 900_000, 1),
    ("all_gather", 900_000, None),
    ("reduce_scatter", 900_000, None),
    ("all_to_all", 900_000, None),
    ("unequal all_to_all", 900_000, None),
]
# The number of elements, in thousands, that each rank sends to each rank.
SPLITS = ((1, 60, 164), (120, 5, 100), (0, 200, 25))


def connections() -> dict[tuple[int, int], int]:
    """Return the acknowledged bytes of each TCP connection of this process, by its pair of ports."""
    found = {}
    for place in list(Path("/proc/self/fd").iterdir()):
        try:
            if not str(place.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(place.name))) as one:
                if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                    told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                    ports = one.getsockname()[1], one.getpeername()[1]
                    found[ports] = struct.unpack_from("Q", told, 120)[0]  # tcpi_bytes_acked
        except OSError:
            continue  # closed in the meantime, or not connected
    return found


def send(rank: int, world: int, out: str, op: str, size: int, root: int | None) -> tuple[dict, dict]:
    """Issue one operation several times while recording.

    Returns the counters of the connections before and after.
    """
    import torch
    import torch.distributed as dist

    from commprof import hooks

    numel = size // 4
    sent, got = ([1000 * each for each in row] for row in (SPLITS[rank], [row[rank] for row in SPLITS]))
    tensor, part = torch.ones(numel), torch.ones(numel // world)
    run = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "reduce": lambda: dist.reduce(tensor, root),
        "broadcast": lambda: dist.broadcast(tensor, root),
        "all_gather": lambda: dist.all_gather_into_tensor(torch.ones(numel), part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, tensor),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(tensor), tensor),
        "unequal all_to_all": lambda: dist.all_to_all_single(torch.empty(sum(got)), tensor, got, sent),
    }[op]
    run()  # The first call sets up the connections.
    dist.barrier()
    time.sleep(0.3)
    before = connections()
    dist.barrier()
    hooks.attach(out, quiet=True)
    for _ in range(TIMES):
        run()
    hooks.detach()
    time.sleep(0.3)
    after = connections()
    dist.barrier()
    return before, after


@pytest.mark.long
@pytest.mark.parametrize(("op", "size", "root"), CALLS)
def test_the_matrix_says_what_each_connection_carries(tmp_path, op, size, root):
    told = run_ranks(WORLD, send, str(tmp_path / "run"), op, size, root)
    owner = {ports: rank for rank, (_, after) in enumerate(told) for ports in after}
    counted = {
        (rank, owner[ports[::-1]]): acked - before.get(ports, 0)
        for rank, (before, after) in enumerate(told)
        for ports, acked in after.items()
        if ports[::-1] in owner and owner[ports[::-1]] != rank
    }
    assert sum(counted.values()) > size, "the kernel counts no bytes on these connections"
    frame = api.matrix(tmp_path / "run", op=op.split()[-1])
    modelled = {
        (row["sender"], row["receiver"]): row["executed_wire_bytes"] for row in frame.to_dict("records")
    }
    messages = TIMES * max(2, size // MIB + 2) * WORLD
    for pair in {*modelled, *counted}:
        assert abs(counted.get(pair, 0) - modelled.get(pair, 0.0)) <= WORDS * messages, pair
