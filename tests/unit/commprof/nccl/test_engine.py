"""Compare the compiled scanner with the line reader: both return the same tables for any mixture of lines."""

from __future__ import annotations

import gzip

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commprof.nccl import sources
from commprof.nccl.parser import parse_logs
from support.sample import examples

HEADS = [
    b"n0:1:1 [0]",
    b"n0:1:2 [0]",
    b"n1:2:2 [1]",
    b"tag:n0:1:1 [0]",
    b"x n1:2:2 [1]",
    b"[1,0]<stdout>:n2:3:3 [0]",
]
COLL = b"%s: opCount %s sendbuff 0x7f%d recvbuff %s%s count %d datatype %d op %d root %d comm 0x%s [nranks=%d] stream %s%s"
CALL = b"nccl%s(7f%d,%s,%d,%d,%d,%d,0x%s,%s)"
NAMES = st.sampled_from(
    [b"AllReduce", b"AllGather", b"Send", b"Recv", b"Broadcast", b"PutSignal", b"[0] Reduce"]
)
COMMS = st.sampled_from([b"a", b"b", b"00a"])
POINTERS = st.sampled_from([b"0x4", b"(nil)", b"0x0", b"0xffffffffffffffff"])


@st.composite
def operation(draw):
    """Return a COLL line and its CALL line with separate heads, or one of the two lines."""
    name, comm, number = draw(NAMES), draw(COMMS), draw(st.integers(0, 3))
    count = draw(st.integers(0, 10**18 - 1) | st.integers(0, 9))
    datatype, reduction, root = draw(st.integers(0, 12)), draw(st.integers(0, 6)), draw(st.integers(-1, 3))
    stream = draw(POINTERS)
    acc = draw(st.sampled_from([b"", b"", b" acc (nil)"]))
    tail = draw(st.sampled_from([b"", b"", b" task 0 globalrank 3", b" more", b" "]))
    coll = COLL % (
        name, draw(st.sampled_from([b"0", b"3f", b"3F"])), number, draw(POINTERS), acc, count, datatype, reduction, root,
        comm, draw(st.sampled_from([2, 2, 4])), stream, tail,
    )  # fmt: skip
    call = CALL % (name, number, b"4", count, datatype, reduction, root, comm, stream)
    return draw(st.sampled_from([[(b"INFO", coll)], [(b"CALL", call)], [(b"INFO", coll), (b"CALL", call)]]))


OTHERS = st.sampled_from(
    [
        (b"CALL", b"ncclGroupStart()"),
        (b"CALL", b"ncclGroupEnd()"),
        (b"INFO", b"comm 0xa rank 0 nranks 2 cudaDev 0 busId 1000 commId 0x7 - Init START"),
        (b"INFO", b"comm 0xa rank 0 nranks 2 cudaDev 0 busId 1000 commId 0x7 - Init COMPLETE"),
        (b"INFO", b"comm 0xa rank 0 nranks 2 cudaDev 0 busId 1000 - Destroy COMPLETE"),
        (b"INFO", b"comm 0xb rank 0 nranks 4 cudaDev 0 busId 1000 - Init START"),
        (b"INFO", b"NCCL version 2.21.5+cuda12"),
        (b"INFO", b"Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read"),
        (b"INFO", b"AllReduce: 128 Bytes -> Algo 1 proto 2 time 3.5"),
        (b"INFO", b"Using network Socket"),
    ]
).map(lambda line: [line])
PLAIN = st.sampled_from(
    [
        b"",
        b"step 1 loss 2.5",
        b"NCCL version 2.18.1",
        b"AllReduce: opCount 3",
        b" comm 0xa [nranks=2] stream 0x4",
        b"\x1b[1m\r",
    ]
)


@st.composite
def logs(draw):
    """Return logs with complete, truncated, interleaved and decorated lines.

    The lines end with a newline, a carriage return, or nothing.
    """
    text = b""
    for messages in draw(st.lists(operation() | OTHERS, max_size=25)):
        head = draw(st.sampled_from(HEADS))
        for level, body in messages:
            line = (head.split(b" [")[0] if level == b"CALL" else head) + b" NCCL " + level + b" " + body
            if draw(st.integers(0, 7)) == 0:
                line = line[: draw(st.integers(0, len(line)))]
            if draw(st.integers(0, 9)) == 0:
                place = draw(st.integers(0, len(line)))
                line = line[:place] + draw(st.binary(max_size=3)) + line[place:]
            text += line + draw(st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b""]))
        if draw(st.integers(0, 4)) == 0:
            text += draw(PLAIN) + b"\n"
    return text


def everything(parsed):
    tables = {name: table.to_pylist() for name, table in parsed.tables.items()}
    return (
        parsed.ops.to_pylist(), tables, parsed.counts, parsed.kinds, parsed.unknown_ops, parsed.notes, parsed.communicators,
        parsed.processes,
    )  # fmt: skip


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(text=logs())
def test_any_mixture_of_lines_reads_as_if_read_one_by_one(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("logs") / "a.log"
    path.write_bytes(text)
    assert everything(parse_logs(path)) == everything(parse_logs(path, careful=True))


@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(text=logs(), size=st.integers(1, 400))
def test_where_blocks_are_cut_makes_no_difference(tmp_path_factory, text, size):
    path = tmp_path_factory.mktemp("logs") / "a.log"
    path.write_bytes(text)
    whole = everything(parse_logs(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "SPAN_BYTES", size)
        assert everything(parse_logs(path)) == whole


def test_plain_and_compressed_files_are_read_as_by_the_reader_of_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SPAN_BYTES", 2000)
    line = b"n0:1:1 [0] NCCL INFO " + COLL % (
        b"AllReduce",
        b"1",
        1,
        b"0x4",
        b"",
        5,
        7,
        0,
        0,
        b"a",
        2,
        b"0x9",
        b"",
    )
    text = b"\n".join([line, b"junk", line.replace(b"comm 0xa", b"comm 0xb")] * 60)
    (tmp_path / "a.log").write_bytes(text)
    (tmp_path / "b.log.gz").write_bytes(gzip.compress(text))
    assert everything(parse_logs(tmp_path)) == everything(parse_logs(tmp_path, careful=True))


WHOLE = (
    b"n:1:2 [0] NCCL INFO AllReduce: opCount 0 sendbuff 0x1 recvbuff 0x2 count 4 datatype 7 op 0 root 0 comm 0x3 "
    b"[nranks=2] stream 0x4",
    b"n:1:2 NCCL CALL ncclAllReduce(1,2,4,7,0,0,0x3,0x4)",
    b"n:1:2 [0] NCCL INFO [1] AllGather: opCount a sendbuff (nil) recvbuff 0x2 acc 0x5 count 4 datatype 7 op 0 root 0 "
    b"comm 0x3 [nranks=2] stream 0x4 task 1 globalrank 1",
)


@pytest.mark.parametrize("line", WHOLE, ids=["COLL", "CALL", "RCCL"])
def test_a_line_that_goes_on_behind_its_newline_is_torn(tmp_path, line):
    rest = b"\n" + 4 * (line + b"\n")
    text = b"".join(line[:place] + b"\n" + line[place:] + rest for place in range(1, len(line)))
    path = tmp_path / "nccl.log"
    path.write_bytes(text)
    assert everything(parse_logs(path)) == everything(parse_logs(path, careful=True))
    assert parse_logs(path).ops.num_rows >= 4 * (len(line) - 1)
