"""Test the compiled scanner.

Skipped lines contain no information, and every cut of a block gives the same result as the line reader.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.nccl_log import generate
from commprof.compiled import COMPILED_VARIABLE
from commprof.nccl import scan, sources
from commprof.nccl.grammar.line_kinds import form_of_message, kind_of_headless, kind_of_message
from commprof.nccl.grammar.line_prefix import KnownHosts, Origin
from commprof.nccl.grammar.lines import read_line, read_message
from commprof.nccl.parser import parse_logs
from commprof.nccl.state.log_state import Assembly
from support.sample import examples

compiled_only = pytest.mark.skipif(scan.MODULE is None, reason="the scanner was not compiled here")
HEAD = b"n0:1:1 [0] NCCL INFO "
NUMBERS = st.text("0123456789abcdefgx:/ -", max_size=20) | st.integers(0, 10**19).map(str)
POINTERS = st.text("0x123abfg)(nil ", max_size=20) | st.integers(0, 2**68).map(hex) | st.just("(nil)")
BODIES = st.lists(
    st.sampled_from(
        [
            b"AllReduce", b": o", b"pCount ", b"opCount 3", b"comm 0xa", b" rank 0 nranks 2 cudaDev 0", b" - Init START",
            b"Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", b"Ring 00 : 1 -> 0 -> 1", b"Trees [0] -1/-1/-1->0->1", b"Tree ",
            b"init.cc:12 -> 3", b"12 Bytes -> Algo 0 proto 1 time 3.0", b"NCCL version 2.20.5", b"Broadcast |", b" 1.0 |",
            b"ncclGroupStart()", b"Destroyed comm 0xa rank 0", b" ", b"Connected to proxy 1 -> connection", b"[nranks=2]",
            b"0x7f0a", b"comm 0x7fab rank 1 nRanks 2 nNodes ", b"Connected all rings", b" - Abort START", b"NET/IB: ",
            b"NCCL_X set to 0xabc", b"\xc3", b"\xa9", b"\xed\xa0\x80", b"\xf4\x8f\xbf\xbf", b"\xe0\x80", b"x" * 297,
            b"12 coll channels, 0 nvls channels", b" created ncclComm_ ", b"abcdef",
        ]
    ),
    max_size=5,
).map(b"".join)  # fmt: skip
LOG = (
    HEAD + b"AllReduce: opCount 3f sendbuff 0x1 recvbuff (nil) count 4 datatype 7 op 0 root 0 comm 0xa [nranks=2] "
    b"stream 0x4\r\n"
    b"n0:1:1 NCCL CALL ncclAllReduce(1,0,4,7,0,0,0xa,0x4)\n\n"
    b"12:00:01 n1:2:2 [1] NCCL INFO comm 0xa rank 1 nranks 2 cudaDev 1 busId 2000 commId 0x7 - Init COMPLETE\n"
    + HEAD + b"Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"
    + HEAD + b"Using network Socket\nd\xc3\xa9j\xc3\xa0 vu \xf0\x9f\x8e\x89\n\x1b[1m\tbold\x1b[0m\r"
    b"tag:n0:1:1 [0] NCCL INFO Connected to proxy localRank 0 -> connection 0x7dab00\nNCCL version 2.21.5"
)  # fmt: skip


def scanned(text: bytes) -> tuple[int, int, list[bytes]]:
    """Return the numbers of the head and the text of one line, and the texts."""
    assert scan.MODULE is not None
    lines, _, texts = scan.MODULE.Scanner().scan(text)
    words = memoryview(lines).cast("i")
    assert len(words) == 5
    return words[3], words[4], texts


def assembled(scanner: scan.Scanner, *blocks: bytes) -> object:
    """Return all rows and texts from blocks of one file."""
    assembly = Assembly()
    assembly.begin_file()
    for block in blocks:
        assembly.add(scanner.read(block, scanner.look(block)))
    rows = [{name: column.tolist() for name, column in batch.items()} for batch in assembly.rows.batches()]
    return (
        rows, assembly.counts, assembly.unknown_ops, assembly.banners, assembly.streams, assembly.registry.processes,
        assembly.registry.communicators, assembly.census.kinds(["f"], assembly.lines), assembly.census.forms,
    )  # fmt: skip


def everything(parsed):
    tables = {name: table.to_pylist() for name, table in parsed.tables.items()}
    return parsed.ops.to_pylist(), tables, parsed.counts, parsed.kinds, parsed.notes, parsed.communicators


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(
    fields=st.lists(
        st.tuples(
            NUMBERS, POINTERS, POINTERS, st.sampled_from(["", " acc 0x5", " acc x" + 20 * "y"]), NUMBERS
        ),
        max_size=12,
    )
)
def test_numbers_and_pointers_are_those_of_the_reader_of_lines(fields):
    coll = "n:1:1 [0] NCCL INFO Send: opCount {} sendbuff {} recvbuff {}{} count {}"
    coll += " datatype 7 op 0 root 0 comm 0xa [nranks=2] stream 0x4\n"
    call = "n:1:1 NCCL CALL ncclSend({0},{1},{4},7,0,0,0xa,0x4)\n"
    text = "".join(coll.format(*each) + call.format(*each) for each in fields).encode()
    assert assembled(scan.new_scanner(), text) == assembled(scan.LineScanner(), text)


@compiled_only
@settings(max_examples=examples(400))
@given(BODIES)
def test_a_message_that_is_passed_over_says_nothing_and_is_of_the_kind_of_its_shape(body):
    _, number, texts = scanned(HEAD + body + b"\n")
    tags = {text[:1]: text[1:] for text in texts}
    if b"S" in tags:
        assert read_message(Origin(b"n", 1, 1, 0, True), body, b"INFO") is None
        shape = tags[b"S"]
        assert kind_of_message(b"INFO", shape) == kind_of_message(b"INFO", body)
        assert form_of_message(shape) == form_of_message(body)
    assert number == 3 or texts


@compiled_only
@settings(max_examples=examples(400))
@given(BODIES | st.binary(max_size=60).map(lambda text: text.replace(b"\n", b"")))
def test_a_line_without_a_head_that_is_passed_over_says_nothing_and_is_of_its_kind(text):
    kind = scanned(text + b"\n")[1]
    if kind < 3:
        assert read_line(text, KnownHosts()) == []
        assert kind_of_headless(text) == ("blank", "line of another program", "binary or invalid UTF-8")[kind]


@compiled_only
def test_regular_lines_are_not_left_to_the_reader_of_lines(tmp_path):
    path = tmp_path / "nccl.log"
    generate(path, 400_000, ranks=8, seed=3)
    lines, operations, _ = scan.MODULE.Scanner().scan(path.read_bytes())
    texts = memoryview(lines).cast("i")[4::5].tolist()
    assert len(operations) // 40 > 500
    assert texts.count(3) < len(texts) / 100


@pytest.mark.long
@pytest.mark.parametrize("text", [LOG, LOG + b"\n"], ids=["without", "with"])
def test_a_block_that_ends_or_begins_at_any_byte(text):
    for place in range(len(text) + 1):
        for block in (text[:place], text[place:]):
            assert assembled(scan.new_scanner(), block) == assembled(scan.LineScanner(), block), place


def test_texts_that_were_forgotten_are_read_again(tmp_path, monkeypatch):
    path = tmp_path / "nccl.log"
    generate(path, 200_000, ranks=8, seed=5)
    careful = everything(parse_logs(path, careful=True))
    monkeypatch.setattr(scan, "_MOST_REMEMBERED", 0)
    monkeypatch.setattr(sources, "SPAN_BYTES", 10_000)
    assert everything(parse_logs(path)) == careful


def test_without_the_compiled_scanner_the_tables_are_the_same(tmp_path):
    path = tmp_path / "nccl.log"
    generate(path, 300_000, ranks=8, seed=9)
    shown = []
    for switch in ("0", ""):
        out = tmp_path / f"out{switch}"
        done = subprocess.run(
            [sys.executable, "-m", "commprof", "nccl", "parse", "--json", str(path), "--out", str(out)],
            env=os.environ | {COMPILED_VARIABLE: switch}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        shown.append((json.loads(done.stdout), {file.name: file.read_bytes() for file in out.iterdir()}))
        shown[-1][0].pop("out", None)
    assert shown[0][1].keys() == shown[1][1].keys() and len(shown[0][1]) == 7
    assert shown[0][1] == shown[1][1]


@compiled_only
def test_blocks_and_lines_of_wrong_sizes_are_refused():
    scanner, tally = scan.MODULE.Scanner(), scan.MODULE.tally
    lines, _, _ = scanner.scan(LOG)
    number = len(lines) // 20
    with pytest.raises(TypeError):
        scanner.scan("text")
    with pytest.raises(ValueError, match="expected one for each"):
        tally(LOG, lines, bytes(number + 1))
    with pytest.raises(ValueError, match="is not in the block of 3 bytes"):
        tally(LOG[:3], lines, bytes(number))
    assert tally(LOG, lines, b"\xff" * number) == []
    assert [entry[:2] for entry in tally(memoryview(LOG), bytearray(lines), bytes(number))] == [(0, number)]
