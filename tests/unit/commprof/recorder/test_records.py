"""Test the binary record.

The fields that the hot path packs are the fields that the schema declares, and no two threads share a slot.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from pathlib import Path

import pytest

from commprof.schema import (
    COLLECTIVES,
    COMMIT,
    LAYERS,
    PHASES,
    RECORD,
    RECORD_FIELDS,
    STATUSES,
    Source,
    record_offset,
)
from commprof.trace.rank_files.layout import ISSUE, Header, RankFile, parse_header, parse_stem
from commprof.trace.rank_files.records import RECORD_DTYPE
from commprof.trace.rank_files.segments import (
    RETURN_WORD,
    WAIT_BEGIN_WORD,
    WAIT_END_WORD,
    mark_raised,
    pack_tail,
)
from commprof.trace.rank_files.writer import LARGEST_SEGMENT_BYTES, SEGMENT_UNIT, EventFile, RecordFile

IDENTITY = RankFile(3, 1, 4711, 1)


def unpack(data: bytes) -> dict[str, int]:
    return dict(zip([field.name for field in RECORD_FIELDS], RECORD.unpack(data), strict=True))


def records_of(file: RecordFile) -> list[dict[str, int]]:
    data = file.path.read_bytes()
    header = parse_header(data, file.path)
    body = data[header.header_bytes :]
    return [unpack(body[i : i + RECORD.size]) for i in range(0, len(body) - RECORD.size + 1, RECORD.size)]


def test_every_column_from_the_record_is_a_field_of_it():
    """One declaration is sufficient: the layout, its struct, its dtype and its decoding follow from the column."""
    columns = {column.name for column in COLLECTIVES.columns if column.source is Source.RECORD}
    assert {field.name for field in RECORD_FIELDS} == columns | {"signature", "tag", "commit"}
    assert RECORD_DTYPE.itemsize == RECORD.size
    assert [RECORD_DTYPE.fields[field.name][1] for field in RECORD_FIELDS] == [
        record_offset(field.name) for field in RECORD_FIELDS
    ]


def test_the_record_of_schema_version_2_has_this_layout():
    """The layout is repeated here, because files that were written earlier must stay readable."""
    assert RECORD.format == "<qqqqqqqqIIIIiiiiBBBBI" and ISSUE.format == "<q8x8x8x8x8x8xqIIII24s"
    assert [record_offset(name) for name in ("issue_ns", "pg_seq", "signature", "tag")] == [0, 56, 64, 68]
    assert [record_offset(name) for name in ("call_site", "thread", "step", "commit")] == [72, 76, 80, 100]


def test_what_is_packed_at_issue_reads_back_through_the_declared_record():
    tail = pack_tail(-1, 7, 77, PHASES.index("optimizer"), LAYERS.index("backend"), captured=True)
    fields = (11, 22, 33, 44, 55, 66, tail)
    assert ISSUE.size == RECORD.size
    assert unpack(ISSUE.pack(*fields)) == {
        "issue_ns": 11,
        "return_ns": 0,
        "wait_begin_ns": 0,
        "wait_end_ns": 0,
        "device_begin_ns": 0,
        "device_end_ns": 0,
        "exposed_ns": 0,
        "pg_seq": 22,
        "signature": 33,
        "tag": 44,
        "call_site": 55,
        "thread": 66,
        "step": -1,
        "micro_step": 7,
        "coalesce_id": 77,
        "replays": 0,
        "phase": PHASES.index("optimizer"),
        "layer": LAYERS.index("backend"),
        "status": STATUSES.index("incomplete"),
        "captured": 1,
        "commit": COMMIT,
    }


def test_a_record_is_completed_in_place(tmp_path):
    file = RecordFile(tmp_path / "r", IDENTITY)
    words, base = file.append(1, 2, 3, 4, 5, 6, pack_tail(8, 0, 0, 0, 0))
    words[base + RETURN_WORD] = 100
    words[base + WAIT_BEGIN_WORD] = 200
    words[base + WAIT_END_WORD] = 300
    mark_raised((words, base, True))
    file.close()
    (record,) = records_of(file)
    assert (record["return_ns"], record["wait_begin_ns"], record["wait_end_ns"]) == (100, 200, 300)
    assert STATUSES[record["status"]] == "raised" and record["commit"] == COMMIT and record["step"] == 8


@pytest.mark.parametrize("refused", [None, errno.EOPNOTSUPP])
def test_many_threads_fill_many_segments_and_every_record_stands_once(tmp_path, monkeypatch, refused):
    if refused:

        def reserve(*args):
            raise OSError(refused, os.strerror(refused))

        monkeypatch.setattr(os, "posix_fallocate", reserve)
    file = RecordFile(tmp_path / "r", IDENTITY)
    per_thread = 3000

    def write(thread):
        for n in range(per_thread):
            words, base = file.append(
                thread * per_thread + n + 1, 0, 1, 0, 0, thread, pack_tail(0, 0, 0, 0, 0)
            )
            words[base + RETURN_WORD] = thread * per_thread + n + 1

    threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.kept == 4 * per_thread and file.lost == 0
    file.close()
    records = records_of(file)
    assert sorted(record["issue_ns"] for record in records) == list(range(1, 4 * per_thread + 1))
    assert all(record["return_ns"] == record["issue_ns"] for record in records)


def mapped_bytes(path) -> int:
    """Return the number of bytes of the file that this process has mapped, from the kernel's own list."""
    sizes = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            begin, _, end = line.split()[0].partition("-")
            sizes.append(int(end, 16) - int(begin, 16))
    return sum(sizes)


def test_full_segments_are_unmapped_and_their_records_still_completed(tmp_path):
    file = RecordFile(tmp_path / "r", IDENTITY)
    tail = pack_tail(0, 0, 0, 0, 0)
    tokens = {}
    for n in range(60_000):
        segment, base = file.append(n + 1, 0, 1, 0, 0, 0, tail)
        if n % 7919 == 0:
            tokens[n] = segment, base, True
    assert mapped_bytes(file.path) <= LARGEST_SEGMENT_BYTES + SEGMENT_UNIT
    for n, (words, base, _) in tokens.items():
        words[base + WAIT_END_WORD] = 10 * n + 1
        assert words[base + WAIT_END_WORD] == 10 * n + 1
    mark_raised(tokens[0])
    assert file.kept == 60_000 and file.lost == 0
    file.close()
    for words, base, _ in tokens.values():
        words[base + RETURN_WORD] = 5  # This stamp is too late and has no effect.
    records = records_of(file)
    assert [record["issue_ns"] for record in records] == list(range(1, 60_001))
    assert {n for n, record in enumerate(records) if record["wait_end_ns"]} == set(tokens)
    assert all(records[n]["wait_end_ns"] == 10 * n + 1 and not records[n]["return_ns"] for n in tokens)
    assert STATUSES[records[0]["status"]] == "raised"


def test_space_is_reserved_before_it_is_mapped(tmp_path):
    file = RecordFile(tmp_path / "r", IDENTITY)
    status = file.path.stat()
    assert status.st_blocks * 512 >= status.st_size > 256 << 10  # The file has no holes.
    file.close()


def test_files_are_never_overwritten(tmp_path):
    RecordFile(tmp_path / "r", IDENTITY).close()
    with pytest.raises(FileExistsError):
        RecordFile(tmp_path / "r", IDENTITY)


def test_events_stop_at_the_first_write_that_fails(tmp_path, monkeypatch):
    events = EventFile(tmp_path / "r")
    assert events.write("note", {"text": "one"})
    monkeypatch.setattr(os, "write", lambda descriptor, data: len(data) - 1)
    assert not events.write("note", {"text": "two"})
    monkeypatch.undo()
    assert not events.write("note", {"text": "three"})
    assert events.lost == 2 and "the disk is probably full" in (events.stopped_reason or "")
    assert events.path.read_text() == '{"kind":"note","text":"one"}\n'


def test_names_and_headers_read_back():
    for identity in (RankFile(0, 0, 1, 1), RankFile(123456, 7, 99999, 3)):
        assert parse_stem(identity.stem) == identity
    assert parse_stem("rank-1-2") is None and parse_stem("notes") is None
    header = Header(1, 4096, RECORD.size, 3, 1, 4711, 17)
    assert parse_header(header.pack(), Path("x")) == header
    assert struct.calcsize("<8s") == 8
