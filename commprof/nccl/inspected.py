"""The data classes for collectives in logs of NCCL's Inspector plugin. Imports only the standard library."""

from __future__ import annotations

from typing import NamedTuple


class Member(NamedTuple):
    """One rank of one communicator, in one process."""

    host: str
    pid: int
    comm: str
    comm_rank: int


class InspectedCollective(NamedTuple):
    """One collective of one rank.

    Attributes:
        member: The rank, communicator and process that logged the collective.
        comm_size: The number of ranks of the communicator.
        op: The operation.
        number: The number of the collective among those of the same operation and communicator, from 0. It is equal on
            all ranks.
        part_bytes: The size that the plugin logs, in bytes. For an all_gather or a reduce_scatter, for example, it is
            the size of one rank's part.
        payload_bytes: The size of the whole collective in bytes.
        algorithm: The algorithm; None if the plugin did not log it.
        protocol: The protocol; None if the plugin did not log it.
        channels: The number of channels; None if the plugin did not log it.
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
