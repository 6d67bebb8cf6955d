"""Test files that are not logs, and damaged logs.

The parser does not crash, invents no row, and counts unrecognized lines.
"""

from __future__ import annotations

import gzip
import os
import random

import pyarrow as pa
import pytest

from commprof.align.matching import align
from commprof.errors import CommprofError, LogError
from commprof.nccl.parser import parse_logs
from support.planted_nccl import Communicator, Operation, Writer
from support.runs import SyntheticRun

COLL = (
    b"n:1:1 [0] NCCL INFO AllReduce: opCount 0 sendbuff 0x1 recvbuff 0x2 count 4 datatype 7 op 0 root 0 "
    b"comm 0x3 [nranks=2] stream 0x4"
)
CALL = b"n:1:1 NCCL CALL ncclAllReduce(1,2,4,7,0,0,0x3,0x4)"
INIT = b"n:1:1 [0] NCCL INFO comm 0x3 rank 0 nranks 2 cudaDev 0 busId 1000 commId 0x9 - Init COMPLETE"
TUNING = b"n:1:1 [0] NCCL INFO AllReduce: 16 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..1}"
SMALL = b"\n".join([INIT, COLL, CALL, TUNING]) + b"\n"
GARBAGE = random.Random(3).randbytes(200_000)


def parse(tmp_path, data: bytes):
    path = tmp_path / "nccl.log"
    path.write_bytes(data)
    return parse_logs(path)


def states(parsed) -> tuple[int, int, int]:
    """Return the numbers of complete COLL lines, complete CALL lines and truncated lines.

    The table and the counts must agree.
    """
    rows = parsed.ops.select(["kind", "state"]).to_pylist()
    whole = [row["kind"] for row in rows if row["state"] == "whole"]
    found = whole.count("coll"), whole.count("call"), len(rows) - len(whole)
    assert found == (parsed.counts.coll, parsed.counts.call, parsed.counts.torn)
    return found


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", 0),
        (b"\n", 1),
        (b"\n" * 1000, 1000),
        (b"\r\n" * 10, 10),
        (b"\x00" * 5000, 1),
        (b"\xff\xfe\n\x80\n", 2),
        (b"\x7fELF\x02\x01\x01" + GARBAGE, None),
        (b"PAR1" + GARBAGE + b"PAR1", None),
        (b"opCount " * 1000 + b"\n", 1),
        (b": opCount " * 1000 + b"\n", 1),
        (b"NCCL CALL nccl" * 1000 + b"\n", 1),
        (b"comm 0x" * 1000 + b"\n", 1),
    ],
)
def test_what_is_no_log_gives_no_row(tmp_path, data, lines):
    parsed = parse(tmp_path, data)
    assert states(parsed) == (0, 0, 0)
    assert parsed.counts.bytes == len(data)
    assert parsed.counts.lines == (data.count(b"\n") + (not data.endswith(b"\n")) if lines is None else lines)
    assert any("No complete operation line was found" in note for note in parsed.notes)


def test_rows_survive_among_bytes_that_mean_nothing(tmp_path):
    clean = GARBAGE.replace(b"\n", b"")
    parsed = parse(tmp_path, b"\n".join([clean, COLL, b"\xff\xfe\x00", CALL, clean[:70_000], COLL]))
    assert states(parsed) == (2, 1, 0)
    assert [row["line"] for row in parsed.ops.to_pylist()] == [2, 4, 6]


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize(
    "word", [b"x", b"opCount ", b": opCount ", b"[nranks=", b"NCCL CALL nccl", b"n:1:1 [0] NCCL "]
)
@pytest.mark.timeout(60)
def test_a_line_of_ten_megabytes_takes_no_quadratic_time(tmp_path, word):
    long = word * (10_000_000 // len(word))
    parsed = parse(tmp_path, COLL + b"\n" + long + b"\n" + CALL + b"\n")
    coll, call, _ = states(parsed)
    assert (coll, call) == (1, 1)
    assert parsed.counts.lines == 3
    assert {row["line"] for row in parsed.ops.to_pylist() if row["state"] == "whole"} == {1, 3}


def test_a_line_of_many_glued_messages_gives_each_its_row(tmp_path):
    parsed = parse(tmp_path, COLL + b" " + b" ".join([COLL, CALL] * 2000) + b"\n")
    assert states(parsed) == (2001, 2000, 0)


def test_crlf_nul_and_invalid_utf8_beside_a_message_do_not_hide_it(tmp_path):
    parsed = parse(
        tmp_path,
        b"\r\n".join([COLL, b"\xff\xc3\x28 " + COLL, COLL + b" \x00\x00", b"50%\r60%\r" + COLL, CALL, b""]),
    )
    assert states(parsed) == (4, 1, 0)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_is_read_or_said_not_to_be_understood_but_never_half(tmp_path, encoding):
    parsed = parse(tmp_path, SMALL.decode().encode(encoding))
    assert states(parsed) in {(0, 0, 0), (1, 1, 0)}


@pytest.mark.long
def test_cut_at_every_byte_only_ever_loses_the_last_line(tmp_path):
    for cut in range(len(SMALL) + 1):
        data = SMALL[:cut]
        coll, call, torn = states(parse(tmp_path, data))
        # A message that lacks the end of its last number cannot be distinguished from a complete message.
        stop = len(INIT) + 1 + len(COLL)
        assert coll == (cut >= stop), cut
        assert call == (cut >= stop + 1 + len(CALL)), cut
        assert torn <= 1 and (not torn or not data.endswith(b"\n")), cut


@pytest.mark.parametrize("packed", [gzip.compress, lambda data: pa.compress(data, "zstd", asbytes=True)])
def test_a_damaged_archive_gives_what_it_still_holds_and_says_so(tmp_path, packed):
    text = b"".join(COLL.replace(b"opCount 0", b"opCount %x" % n) + b"\n" for n in range(50_000))
    data = packed(text)
    for damaged in (data[: len(data) // 2], data[:20], data[: len(data) // 2] + GARBAGE[:5000]):
        parsed = parse(tmp_path, damaged)
        coll, call, torn = states(parsed)
        assert coll < 50_000
        assert call == 0 and torn <= 1
        assert any("could not be read to its end" in note for note in parsed.notes), parsed.notes
    assert parse(tmp_path, data).counts.coll == 50_000


def test_bytes_behind_a_gzip_archive_do_not_hide_it(tmp_path):
    parsed = parse(tmp_path, gzip.compress(SMALL) + b"trailing garbage")
    assert states(parsed) == (1, 1, 0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"count 4 ", b"count 99999999999999999999999 "),
        (b"count 4 ", b"count 9223372036854775808 "),
        (b"count 4 ", b"count -4 "),
        (b"opCount 0 ", b"opCount ffffffffffffffffffff "),
        (b"opCount 0 ", b"opCount -1 "),
        (b"datatype 7", b"datatype 99999999999"),
        (b"datatype 7", b"datatype -7"),
        (b"root 0", b"root 99999999999"),
        (b"[nranks=2]", b"[nranks=99999999999999]"),
        (b"[nranks=2]", b"[nranks=-2]"),
        (b"comm 0x3", b"comm 0x11112222333344445555"),
        (b"comm 0x3", b"comm -0x3"),
        (b"stream 0x4", b"stream 0x11112222333344445555"),
    ],
)
def test_a_number_that_no_column_holds_makes_a_torn_line(tmp_path, old, new):
    parsed = parse(tmp_path, INIT + b"\n" + COLL.replace(old, new, 1) + b"\n")
    assert states(parsed) == (0, 0, 1)


@pytest.mark.parametrize(
    "line",
    [
        COLL.replace(b"n:1:1", b"n:99999999999999:1"),
        COLL.replace(b"n:1:1", b"n:-1:1"),
        COLL.replace(b"[0]", b"[99999999999999]"),
        INIT.replace(b"nranks 2", b"nranks 99999999999999"),
        INIT.replace(b"rank 0", b"rank -1"),
        INIT.replace(b"commId 0x9", b"commId 0x99999999999999999999999"),
        TUNING.replace(b"16 Bytes", b"99999999999999999999999999 Bytes"),
        TUNING.replace(b"{0..1}", b"{0..99999999999999999}"),
        b"n:1:1 [0] NCCL INFO Channel 99999999999999999999/02 : 0 1",
        b"n:1:1 [0] NCCL INFO Channel 00/0 : 99999999999999999999[0] -> 1[1] via P2P/CUMEM",
        b"n:1:1 [0] NCCL INFO Tree 99999999999999999999 : -1 -> 0 -> 1/-1/-1",
        b"n:1:1 [0] NCCL INFO Trees [0] 99999999999999999999/-1/-1->0->-1",
        b"n:1:1 [0] NCCL INFO Ring 00 : 99999999999999999999 -> 1 -> 2",
        b"n:1:1 [0] NCCL INFO transport.cc:99999999999999999999 -> 99999999999999999",
        b"n:1:1 [0] init.cc:99999999999999999999 NCCL WARN \xff\xfe oh",
    ],
)
def test_other_numbers_beyond_their_columns_do_no_harm(tmp_path, line):
    parsed = parse(tmp_path, COLL + b"\n" + line + b"\n" + CALL + b"\n")
    assert parsed.counts.call == 1
    assert parsed.counts.coll in (1, 2)
    states(parsed)


def test_a_communicator_of_more_ranks_than_exist_takes_no_memory(tmp_path):
    huge = INIT.replace(b"nranks 2", b"nranks 999999999")
    parsed = parse(tmp_path, huge + b"\n" + COLL.replace(b"nranks=2", b"nranks=999999999") + b"\n")
    assert states(parsed) == (1, 0, 0)
    assert parsed.ops["nranks"].to_pylist() == [999_999_999]


def test_the_same_file_named_twice_is_read_once_and_a_copy_counts_again(tmp_path):
    log, copy = tmp_path / "a.log", tmp_path / "b.log"
    log.write_bytes(SMALL)
    assert parse_logs([log, log, str(tmp_path / "*.log")]).counts.coll == 1
    copy.write_bytes(SMALL)
    assert parse_logs(tmp_path).counts.coll == 2


def test_links_in_a_circle_end(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "again").symlink_to(folder)
    (folder / "nowhere").symlink_to(folder / "gone")
    (folder / "self").symlink_to(folder / "self")
    (folder / "nccl.log").write_bytes(SMALL)
    assert states(parse_logs(folder)) == (1, 1, 0)
    with pytest.raises(LogError):
        parse_logs(folder / "self")


def test_what_cannot_be_opened_is_named_with_a_remedy(tmp_path):
    for path in (tmp_path / "missing.log", tmp_path / "*.none", tmp_path):
        with pytest.raises(LogError, match="NCCL"):
            parse_logs(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_the_right_to_read_it_is_named(tmp_path):
    path = tmp_path / "secret.log"
    path.write_bytes(SMALL)
    path.chmod(0)
    with pytest.raises(LogError, match=r"secret\.log"):
        parse_logs(path)


def log_of(tmp_path, nranks: int, operations: int) -> pa.Table:
    writer = Writer("host", 77, (2, 27, 3))
    comm = Communicator(0x5500, 0, nranks, 0xABC)
    writer.init(comm)
    for number in range(operations):
        writer.operation(comm, Operation("AllReduce", 101 + number, 7))
    return parse(tmp_path, "\n".join(writer.lines).encode()).ops


@pytest.mark.parametrize("nranks", [2, 64])
def test_the_log_of_another_run_matches_nothing_and_every_side_is_told(tmp_path, nranks):
    synthetic = SyntheticRun(world_size=2, backend="nccl")
    for step in range(3):
        synthetic.add_collective("all_reduce", step=step, payload_bytes=4 * 997)
    run = synthetic.open()
    ops = log_of(tmp_path, nranks, 5)
    assert ops.num_rows == 5
    try:
        report = align(run, ops)
    except CommprofError as error:
        assert len(str(error)) > 40  # The error is a sentence that names a remedy.
        return
    assert report.matched == 0
    found = report.matches["state"].to_pylist()
    assert found.count("missing") == run.table("collectives").num_rows
    assert found.count("extra") + found.count("ambiguous") == 5


@pytest.mark.parametrize("color", [2**31 - 1, -1, 2**31, 2**32, -(10**10) + 1])
def test_a_color_that_no_column_holds_is_null(tmp_path, color):
    split = "n:1:2 NCCL CALL ncclCommSplit(0x3, %d, 0, 0x7, 0, 2)\n"
    started = (
        "n:1:2 [0] NCCL INFO ncclCommSplit comm 0x7 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1000 parent 0x3 "
        "splitCount 1 color %d key 0 - Init START\n"
    )
    for line in (split, started):
        parsed = parse(tmp_path, (line % color).encode())
        (row,) = parsed.tables["nccl_communicators"].to_pylist()
        assert row["color"] == (color if abs(color) < 2**31 else None)
