"""The data classes for the result of an importer: the collectives of each rank, and notes on missing data."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from commprof.schema import COLLECTIVES, Op

# The step of collectives that were issued before the first step, or that a tool without steps recorded.
NO_STEP: Final = -1


@dataclass(slots=True)
class Collective:
    """One operation. An attribute with the name of a column of ``collectives`` becomes the value of that column.

    A value that the tool does not record is None. ``group_ranks`` is empty if the members of the group are unknown.
    Times are nanoseconds of one clock for the whole recording. ``payload_bytes`` is the size of the whole operation.
    ``input_bytes`` and ``output_bytes`` are the sizes of the buffers of the rank itself.

    ``identity`` is a value that all ranks of a collective share and that no other collective of the group has, if the
    tool records such a value. With an identity, the number of the collective in the group is equal on all ranks, even
    if the file of a rank lacks other collectives of the group.
    """

    op: Op
    backend_method: str  # the name that the tool uses
    pg: str
    pg_seq: int | None  # if there is an identity, only used to order the collectives of the group
    group_size: int  # 0 if unknown
    group_ranks: Sequence[int] = ()
    group_desc: str | None = None
    group_rank: int = -1
    issue_ns: int = 0
    return_ns: int | None = None
    device_begin_ns: int | None = None
    device_end_ns: int | None = None
    payload_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    numel: int = 0
    num_tensors: int = 1
    sizes: str | None = None
    dtype: str | None = None
    device: str | None = None
    backend: str | None = None
    peer: int = -1
    is_p2p: bool = False
    is_async: bool = True
    call_site: str | None = None
    thread: str | None = None
    step: int = NO_STEP
    finished: bool = True
    identity: Hashable | None = None
    algorithm: str | None = None
    protocol: str | None = None
    channels: int | None = None


# The columns of ``collectives`` that importers set. :mod:`.run_writer` derives the other columns or leaves them null.
STATED_COLUMNS: Final = tuple(item.name for item in fields(Collective) if item.name in COLLECTIVES.names)


@dataclass(slots=True)
class ImportedRank:
    """The operations and steps of one rank."""

    rank: int
    host: str = ""
    pid: int = 0
    collectives: list[Collective] = field(default_factory=list)
    steps: list[tuple[int, int, int | None]] = field(default_factory=list)  # step, begin, end
    # Rows of the table ``flight``, without the columns that name the process.
    flight: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0  # the number of operations that the tool reports as dropped


@dataclass(slots=True)
class Imported:
    """The content of the files of one tool.

    Attributes:
        tool: The name of the tool.
        ranks: The operations of each rank.
        world_size: The world size; None if unknown.
        realtime: Whether times are CLOCK_REALTIME.
        notes: Sentences on data that the tool does not record, or that the importer left out.
    """

    tool: str
    ranks: list[ImportedRank]
    world_size: int | None = None
    realtime: bool = True
    notes: list[str] = field(default_factory=list)
