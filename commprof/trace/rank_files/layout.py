"""Names and layout of a rank's files, shared by the writer and the decoder. Standard library only.

A rank writes two files. ``.records`` has a header of one page, followed by ``schema.RECORD`` structs without gaps. It
grows by whole segments, so its tail is zeros. ``.events`` has one JSON object per line, whose ``kind`` is one of
``EVENT_KINDS``. An interned value is written there before the first record that refers to it.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.errors import SchemaError, TraceError
from commprof.schema import RECORD, RECORD_FIELDS, SCHEMA_VERSION, record_offset

MAGIC: Final = b"COMMPROF"
# magic, schema version, header bytes, bytes of one record, rank, attempt, pid, seq of the first record
HEADER: Final = struct.Struct("<8sIIIiiqq")
# The rest of the first page is reserved for the totals, which can then be written even if the disk is full. The totals
# are their length, followed by JSON.
TOTALS_OFFSET: Final = 64
_TOTALS_LENGTH: Final = struct.Struct("<I")

# The fields that are known when a call is issued, in the order of the arguments on the hot path. The tail is the end of
# the record, which is equal in many records. The compiled slots rely on this order (a test checks it): the issue time
# is first, the number in the group and the four interned values are directly before the tail, the commit word is last.
ISSUED: Final = ("issue_ns", "pg_seq", "signature", "tag", "call_site", "thread")
TAIL_ISSUED: Final = ("step", "micro_step", "coalesce_id", "phase", "layer", "status", "captured", "commit")
TAIL_OFFSET: Final = record_offset(TAIL_ISSUED[0])


def _packer(names: Collection[str], begin: int, end: int) -> struct.Struct:
    """Return a struct that packs the fields ``names`` among the record's bytes ``begin`` to ``end``.

    Other fields in this range become zeros.
    """
    fields = [field for field in RECORD_FIELDS if begin <= record_offset(field.name) < end]
    return struct.Struct(
        "<" + "".join(field.code if field.name in names else f"{field.size}x" for field in fields)
    )


TAIL: Final = _packer(TAIL_ISSUED, TAIL_OFFSET, RECORD.size)
ISSUE: Final = struct.Struct(f"{_packer(ISSUED, 0, TAIL_OFFSET).format}{TAIL.size}s")
# The macros that hatch_build.py defines when it compiles the slots, so that both versions use the same layout.
C_MACROS: Final = {"RECORD_SIZE": RECORD.size, "RECORD_SEQUENCE": record_offset("pg_seq")}

RECORDS_SUFFIX: Final = ".records"
EVENTS_SUFFIX: Final = ".events"

# The possible values of ``kind`` of a line in the events file.
EVENT_KINDS: Final[tuple[str, ...]] = (
    "begin",  # the process that writes: rank, attempt, pid, host, world size, versions
    "signature",  # interned: id and the columns whose source is SIGNATURE, or the fields of splits.py
    "tag",  # interned: id and the columns whose source is TAG
    "site",  # interned: id, call_site, api
    "thread",  # interned: id, name, ident
    "group",  # a process group that this rank is a member of
    "step",  # a step or micro-batch begins, or a step ended; with the resources in use at this time
    "outside_step",  # an evaluation or a checkpoint begins; repeated with its end when training resumes
    "metrics",
    "parameters",
    "expert_layers",
    "expert_load",  # a forward pass of a layer of experts: how many tokens chose each of them
    "wrappers",
    "wrapper_passes",
    "buckets",
    "bucket",  # interned: id and what describes a gradient bucket
    "flush",  # the bucket with this id was flushed: step, micro-batch, time
    "stalls",  # an interval in which C++ waited
    "config",
    "clock",  # monotonic and real-time clock read together
    "clock_offset",  # the offset between the clock of this host and the clock of rank 0
    "flight",  # an entry of torch's Flight Recorder
    "stacks",  # the signal on which the process writes its stacks, and the file, relative to the run
    "raised",  # a call raised: its signature and the pg_seq in its record
    "unseen",  # a self-check found collectives without records
    "outside",  # collectives issued outside the steps to record, so far
    "aggregate",  # sums over collectives of one step that have no records: rows of SUM_FIELDS
    "note",  # a sentence for the person who reads the trace
    "end",  # recording ended in an orderly way; totals
)

# The fields of a row of sums: columns of the table ``aggregates``.
SUM_FIELDS: Final = (
    "phase",
    "op",
    "intended_op",
    "purpose",
    "pg",
    "is_p2p",
    "calls",
    "payload_bytes",
    "input_bytes",
    "output_bytes",
    "host_ns",
    "exposed_ns",
)


class RankFile(NamedTuple):
    """The identity of the files of a rank, as encoded in their name."""

    rank: int
    attempt: int
    pid: int
    part: int  # 1 for the first recording of the process, 2 after detach and attach, ...

    @property
    def stem(self) -> str:
        """The file name without suffix."""
        tail = "" if self.part == 1 else f"-{self.part}"
        return f"rank-{self.rank:05d}-{self.attempt}-{self.pid}{tail}"


_STEM = re.compile(r"rank-(\d{5,10})-(\d{1,10})-(\d{1,10})(?:-(\d{1,10}))?", re.ASCII)
_LARGEST_NUMBER: Final = 1 << 31


def parse_stem(stem: str) -> RankFile | None:
    """Return the identity in a :attr:`RankFile.stem`. Return ``None`` if ``stem`` is not the name of a rank file.

    >>> parse_stem("rank-00003-0-4711-2")
    RankFile(rank=3, attempt=0, pid=4711, part=2)
    """
    match = _STEM.fullmatch(stem)
    if match is None:
        return None
    rank, attempt, pid, part = match.groups()
    numbers = RankFile(int(rank), int(attempt), int(pid), int(part or 1))
    return numbers if max(numbers) < _LARGEST_NUMBER else None


class Header(NamedTuple):
    """The first bytes of a ``.records`` file."""

    schema_version: int
    header_bytes: int
    record_bytes: int
    rank: int
    attempt: int
    pid: int
    first_seq: int

    def pack(self) -> bytes:
        """Return the bytes of the header, without the padding to a whole page."""
        return HEADER.pack(MAGIC, *self)


def new_header(identity: RankFile, header_bytes: int, first_seq: int) -> Header:
    """Return the header of a file that this version writes."""
    return Header(
        SCHEMA_VERSION,
        header_bytes,
        RECORD.size,
        identity.rank,
        identity.attempt,
        identity.pid,
        first_seq,
    )


def parse_header(data: bytes, path: Path) -> Header:
    """Parse the header at the beginning of ``data``, the content of ``path``.

    Raises:
        SchemaError: A version with a different record layout wrote the file.
        TraceError: The file is not a valid records file, or is cut off within the header.
    """
    if len(data) < HEADER.size:
        raise TraceError(
            f"{path} holds {len(data)} bytes, less than the {HEADER.size} of a header: it was cut off before the "
            "first record. Nothing in it can be read; remove it, or copy it again from where it was recorded"
        )
    magic, *fields = HEADER.unpack_from(data)
    header = Header(*fields)
    if magic != MAGIC:
        raise TraceError(
            f"{path} begins with {magic!r} where a records file begins with {MAGIC!r}: it is damaged, or was not "
            "written by commprof"
        )
    if not 1 <= header.schema_version <= SCHEMA_VERSION or header.record_bytes != RECORD.size:
        raise SchemaError(
            f"{path} has schema version {header.schema_version} ({header.record_bytes} bytes a record); this commprof "
            f"reads versions 1 to {SCHEMA_VERSION} ({RECORD.size} bytes). Open it with the version of commprof that wrote it"
        )
    # The writer's header is a whole number of pages.
    if not HEADER.size <= header.header_bytes <= 1 << 20 or header.header_bytes % 4096:
        raise TraceError(
            f"{path} says that its header is {header.header_bytes} bytes long: the file is damaged"
        )
    return header


def pack_totals(totals: Mapping[str, Any], room: int) -> bytes:
    """Return the bytes of the totals for the first page. Empty if the totals need more than ``room`` bytes."""
    text = json.dumps(totals, separators=(",", ":"), default=str).encode()
    return _TOTALS_LENGTH.pack(len(text)) + text if len(text) + _TOTALS_LENGTH.size <= room else b""


def parse_totals(data: bytes, header_bytes: int) -> dict[str, Any] | None:
    """Return the totals in the first page of ``data``. None if the process ended without writing totals."""
    if len(data) < TOTALS_OFFSET + _TOTALS_LENGTH.size:
        return None
    (length,) = _TOTALS_LENGTH.unpack_from(data, TOTALS_OFFSET)
    begin = TOTALS_OFFSET + _TOTALS_LENGTH.size
    if not 0 < length <= header_bytes - begin:
        return None
    try:
        totals = json.loads(data[begin : begin + length])
    except ValueError:
        return None
    return totals if isinstance(totals, dict) else None


def rank_files(directory: Path) -> list[tuple[RankFile, Path]]:
    """Return the identity and the path without suffix of each rank file in ``directory``, in order of identity."""
    paths: dict[RankFile, Path] = {}
    for path in directory.iterdir():
        if path.suffix in (RECORDS_SUFFIX, EVENTS_SUFFIX):
            identity = parse_stem(path.stem)
            if identity is not None:
                paths[identity] = path.with_suffix("")
    return sorted(paths.items())
