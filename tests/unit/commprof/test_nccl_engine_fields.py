"""Fields read for many lines at once, against Python's own reading of each; and what may be passed over unread."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from commprof.nccl.fields import Text
from commprof.nccl.heads import KnownHosts, Origin
from commprof.nccl.line_kinds import shape
from commprof.nccl.lines import may_speak, may_speak_headless, read_line, read_message
from commprof.nccl.parser import parse_logs

NUMBERS = st.text("0123456789abcdefgx:/ -", max_size=18) | st.integers(0, 10**17).map(str)
POINTERS = st.text("0x123abfg)(nil ", max_size=18) | st.integers(0, 2**64).map(hex) | st.just("(nil)")
BODIES = st.lists(
    st.sampled_from(
        [
            b"AllReduce", b": o", b"pCount ", b"opCount 3", b"comm 0xa", b" rank 0 nranks 2 cudaDev 0", b" - Init START",
            b"Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", b"Ring 00 : 1 -> 0 -> 1", b"Trees [0] -1/-1/-1->0->1", b"Tree ",
            b"init.cc:12 -> 3", b"12 Bytes -> Algo 0 proto 1 time 3.0", b"NCCL version 2.20.5", b"Broadcast |", b" 1.0 |",
            b"ncclGroupStart()", b"Destroyed comm 0xa rank 0", b" ", b"Connected to proxy 1 -> connection", b"[nranks=2]",
        ]
    ),
    max_size=5,
).map(b"".join)  # fmt: skip


def laid_out(texts, stop=b" "):
    """The texts one behind the other, each ended by ``stop``, as a text of which fields are read; and their places."""
    data, begins = b"", []
    for text in texts:
        begins.append(len(data))
        data += text.encode() + stop
    return Text(data + b"\n" * 64), np.array(begins, np.int64)


def is_number(text, digits):
    return 1 <= len(text) <= 15 and set(text) <= set(digits)


@given(st.lists(NUMBERS, min_size=1, max_size=20))
def test_decimals_are_those_of_python(texts):
    text, begins = laid_out(texts, b",")
    field = text.decimal(begins, b",")
    for number, source in enumerate(texts):
        assert field.right[number] == is_number(source, "0123456789")
        if field.right[number]:
            assert field.values[number] == int(source)
            assert field.ends[number] == begins[number] + len(source)


@given(st.lists(NUMBERS, min_size=1, max_size=20))
def test_hexadecimals_are_those_of_python(texts):
    text, begins = laid_out(texts, b",")
    field = text.hexadecimal(begins, b",")
    for number, source in enumerate(texts):
        assert field.right[number] == is_number(source, "0123456789abcdef")
        if field.right[number]:
            assert field.values[number] == int(source, 16)
            assert field.ends[number] == begins[number] + len(source)


@given(st.lists(POINTERS.map(lambda text: text.replace(" ", "_")), min_size=1, max_size=20))
def test_pointers_are_those_of_python_and_nil_is_nothing(texts):
    text, begins = laid_out(texts)
    field = text.pointer(begins, b" ")
    for number, source in enumerate(texts):
        digits = source[2:] if source.startswith("0x") else ""
        whole = is_number(digits, "0123456789abcdef") and int(digits, 16) != 0
        assert field.right[number] == (whole or source == "(nil)")
        if field.right[number]:
            assert field.values[number] == (int(digits, 16) if whole else 0)
            assert field.ends[number] == begins[number] + len(source)


@given(BODIES)
def test_no_message_that_is_passed_over_unread_says_anything(body):
    nobody = Origin(b"n", 1, 1, 0, True)
    if not may_speak(shape(body)):
        assert read_message(nobody, body, b"INFO") is None
        assert read_message(nobody, body, b"CALL") is None
    if not may_speak_headless(body):
        assert read_line(body, KnownHosts()) == []


def test_a_message_that_names_nccl_again_is_one_message(tmp_path):
    line = b"n0:1:1 [0] NCCL INFO NET/IB: NCCL Dev 1 Port 1 qpn 7 mtu 5\n"
    (tmp_path / "a.log").write_bytes(line * 3 + b"n0:1:1 [0] NCCL WARN NET/IB : NCCL said no\n")
    parsed = parse_logs(tmp_path / "a.log")
    assert (parsed.counts.lines, parsed.counts.ignored, parsed.counts.message) == (4, 3, 1)
    assert parsed.counts == parse_logs(tmp_path / "a.log", careful=True).counts
