"""The result of an importer: the collectives of each rank as far as the other tool knew them, and what it did not know."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from commprof.schema import COLLECTIVES, Op

# The step of what was issued before the first one, or of a tool that knows no steps.
NO_STEP: Final = -1


@dataclass(slots=True)
class Collective:
    """One operation. Attributes with the name of a column of ``collectives`` are that column.

    What the tool does not say is None; ``group_ranks`` is empty where the group's members are not known. Times are
    nanoseconds of one clock for the whole recording. Bytes are those of the rank's own buffers. ``identity`` is what all
    ranks of one collective share and no other collective of the group has, where the tool says such a thing; its number in
    the group is then the same on all ranks, whatever else of the group a rank's file lacks.
    """

    op: Op
    backend_method: str  # as the tool calls it
    pg: str
    pg_seq: int | None  # with an identity: only the order of the collectives of the group
    group_size: int  # 0 where it is not known
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


# The columns of ``collectives`` that importers state; the others are null or follow from these (:mod:`.run_writer`).
STATED_COLUMNS: Final = tuple(item.name for item in fields(Collective) if item.name in COLLECTIVES.names)


@dataclass(slots=True)
class ImportedRank:
    """The operations of one rank."""

    rank: int
    host: str = ""
    pid: int = 0
    collectives: list[Collective] = field(default_factory=list)
    steps: list[tuple[int, int, int | None]] = field(default_factory=list)  # step, begin, end
    # Rows of the table ``flight``, without the columns that name the process.
    flight: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0  # operations that the tool itself counted and could not keep


@dataclass(slots=True)
class Imported:
    """The content of the files of one tool.

    ``notes`` are sentences on what the tool does not record, or was refused; ``realtime`` whether times are CLOCK_REALTIME.
    """

    tool: str
    ranks: list[ImportedRank]
    world_size: int | None = None
    realtime: bool = True
    notes: list[str] = field(default_factory=list)
