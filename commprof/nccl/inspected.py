"""Operations as NCCL's Inspector plugin numbers them. Standard library only."""

from __future__ import annotations

from typing import NamedTuple


class Member(NamedTuple):
    """One rank of one communicator, in one process."""

    host: str
    pid: int
    comm: str
    comm_rank: int


class InspectedCollective(NamedTuple):
    """One collective of one rank. ``number`` counts those of the operation in the communicator from 0 on every rank.

    ``part_bytes``: the message of the plugin, one rank's chunk of an all_gather or reduce_scatter.
    """

    member: Member
    comm_size: int
    op: str
    number: int
    part_bytes: int
    payload_bytes: int
    algorithm: str | None
    protocol: str | None
    channels: int | None
