"""Test that every line of a log is of exactly one kind and is counted.

Unrecognized lines are displayed safely.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from commprof.cli.application import invoke
from commprof.nccl.grammar.line_kinds import KNOWN, kind_of_message
from commprof.nccl.parser import parse_logs
from support.sample import examples

ARCHIVES = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")  # The first bytes of gzip and Zstandard files.
COLL = (
    b"n:1:1 [0] NCCL INFO AllReduce: opCount 0 sendbuff 0x1 recvbuff 0x2 count 4 datatype 7 op 0 root 0 comm 0x3 "
    b"[nranks=2] stream 0x4"
)
# Each line, and the kind that a person would assign to it.
LINES = {
    COLL: "read",
    b"n:1:1 [0] NCCL INFO comm 0x3 rank 0 nranks 2 cudaDev 0 busId 1000 commId 0x9 - Init START": "read",
    b"n:1:1 NCCL CALL ncclGroupStart()": "read",
    b"NCCL version 2.18.3+cuda12.2": "read",
    b"n:1:1 [0] init.cc:12 NCCL WARN no good": "read",
    b"": "blank",
    b"n:1:1 [0] NCCL INFO Launch mode Parallel": "operations",
    b"n:1:1 [0] NCCL INFO CollNet channels 2": "CollNet",
    b"n:1:1 [0] NCCL INFO NET/Plugin: No plugin found (libnccl-net.so)": "network and plugins",
    b"n:1:1 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.": "environment",
    b"n:1:1 [0] NCCL INFO Connected all rings": "connections",
    b"n:1:1 [0] NCCL INFO something that nobody ever printed": "INFO line of unknown form",
    b"n:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUM": "INFO line of unknown form",
    b"n:1:1 NCCL CALL ncclNothing(1,2)": "CALL line of unknown form",
    b"n:1:1 [0] what is this NCCL WARN no good": "WARN line of unknown form",
    b"n:1:1 [0] NCCL TRACE whatever": "TRACE line of unknown form",
    COLL[:70]: "torn operation",
    COLL[20:90]: "torn operation",
    COLL.replace(b"AllReduce", b"PutSignal"): "operation of unknown name",
    b"...:78:108 [0] NCCL INFO Connected all rings": "NCCL line with a damaged head",
    b"step 3 loss 1.25": "line of another program",
    b"caf\xc3\xa9": "line of another program",
    b"caf\xc3": "line of another program",
    b"\xff\xfe\x01": "binary or invalid UTF-8",
    b"a\x00b": "binary or invalid UTF-8",
    b"n:1:1 [0] NCCL INFO \xff\xfe": "binary or invalid UTF-8",
}


def kinds_of(path: Path, **how) -> dict[str, int]:
    return {kind.kind: kind.lines for kind in parse_logs(path, **how).kinds}


@pytest.mark.parametrize("line", LINES)
def test_a_line_by_itself_is_of_the_kind_that_a_person_would_say(tmp_path, line):
    path = tmp_path / "nccl.log"
    path.write_bytes(line + b"\n")
    assert kinds_of(path) == {LINES[line]: 1}
    assert kinds_of(path, careful=True) == {LINES[line]: 1}


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lines=st.lists(
        st.sampled_from(list(LINES)) | st.binary(max_size=40).map(lambda b: b.replace(b"\n", b""))
    ),
    end=st.sampled_from([b"\n", b"\r\n"]),
    last=st.booleans(),
)
def test_the_kinds_add_up_to_the_lines_of_the_file(tmp_path_factory, lines, end, last):
    path = tmp_path_factory.mktemp("logs") / "nccl.log"
    data = end.join(lines) + (end if last else b"")
    assume(not data.startswith(ARCHIVES))
    path.write_bytes(data)
    parsed = parse_logs(path)
    assert parsed.kinds == parse_logs(path, careful=True).kinds
    physical = data.split(b"\n")
    if not physical[-1]:
        physical.pop()  # Nothing follows the last newline.
    assert sum(kind.lines for kind in parsed.kinds) == len(physical)
    for kind in parsed.kinds:
        assert kind.lines > 0
        for example in kind.examples:
            assert example.text.isprintable() and len(example.text) <= 120
            assert 1 <= example.line <= len(physical)


def test_lines_of_one_kind_in_a_mixture_are_counted_as_by_hand(tmp_path):
    path = tmp_path / "nccl.log"
    path.write_bytes(
        b"\n".join([line for number, line in enumerate(LINES, 1) for _ in range(number)]) + b"\n"
    )
    expected: dict[str, int] = {}
    for number, kind in enumerate(LINES.values(), 1):
        expected[kind] = expected.get(kind, 0) + number
    assert kinds_of(path) == expected


def test_examples_are_the_first_lines_that_differ(tmp_path):
    path = tmp_path / "nccl.log"
    words = [b"one", b"one", b"two", b"one", b"three", b"four"]
    path.write_bytes(b"".join(b"n:1:%d [0] NCCL INFO %s\n" % (tid, word) for tid, word in enumerate(words)))
    (kind,) = parse_logs(path).kinds
    assert (kind.kind, kind.understood, kind.lines) == ("INFO line of unknown form", False, 6)
    assert [(e.line, e.text.split()[-1]) for e in kind.examples] == [(1, "one"), (3, "two"), (5, "three")]


def test_an_example_names_its_file(tmp_path):
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_bytes(COLL + b"\nhello from " + name.encode() + b"\n")
    kind = next(kind for kind in parse_logs(tmp_path).kinds if not kind.understood)
    assert [(e.file, e.line, e.text) for e in kind.examples] == [
        (str(tmp_path / name), 2, f"hello from {name}") for name in ("a.log", "b.log")
    ]


def test_a_line_that_is_too_long_is_of_a_kind_of_its_own(tmp_path):
    path = tmp_path / "nccl.log"
    path.write_bytes(COLL + b"\n" + b"x" * (17 << 20) + b"\n\n" + COLL + b"\n")
    assert kinds_of(path) == {"read": 2, "longer than 16 MiB": 1, "blank": 1}


def test_no_message_that_is_known_is_one_that_a_table_has():
    for body in (b"Channel 00/02 : 0 1", b"Ring 00 : 1 -> 0 -> 1", b"Trees [0] 1/-1/-1->0->-1", COLL[20:]):
        assert kind_of_message(b"INFO", body) not in KNOWN


def test_the_terminal_gets_counts_and_examples_and_no_control_characters(tmp_path, capsys):
    path = tmp_path / "nccl.log"
    path.write_bytes(COLL + b"\n\x1b]0;evil\x07\x1b[31mred \xe2\x80\xae\xff\n" + b"hello\n" * 5)
    assert invoke(["nccl", "parse", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "unrecognized lines: 6 of 7" in shown
    assert "5  line of another program" in shown
    assert "\\x1b]0;evil\\x07\\x1b[31mred" in shown
    assert all(letter.isprintable() or letter == "\n" for letter in shown)


def test_lines_of_unknown_size_are_not_summed_as_zero(tmp_path, capsys):
    path = tmp_path / "nccl.log"
    path.write_bytes(
        COLL
        + b"\n"
        + COLL.replace(b"datatype 7", b"datatype 12")
        + b"\nn:1:1 NCCL CALL ncclAllGather(1,2,4,7,0,0,0x9,0x4)\n"
    )
    assert invoke(["nccl", "parse", str(path)]) == 0
    shown = capsys.readouterr().out
    assert ["all_gather", "CALL", "1", "-"] in [line.split() for line in shown.splitlines()]
    assert "payload does not include 2 lines of unknown size" in " ".join(shown.split())


def test_json_has_every_kind_with_its_examples(tmp_path, capsys):
    path = tmp_path / "nccl.log"
    path.write_bytes(COLL + b"\nhello\n")
    assert invoke(["nccl", "parse", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["kinds"] == [
        {"kind": "read", "understood": True, "lines": 1, "examples": []},
        {
            "kind": "line of another program",
            "understood": False,
            "lines": 1,
            "examples": [{"file": str(path), "line": 2, "text": "hello"}],
        },
    ]


@pytest.mark.parametrize(
    ("lines", "version"),
    [
        ([b"n:1:1 [0] NCCL INFO Launch mode Parallel"], "2.4.2..2.12.12 (inferred)"),
        (
            [b"n:1:1 [0] NCCL INFO Launch mode Group/CGMD", b"n:1:1 [0] NCCL INFO Connected all rings"],
            "2.8.3..2.12.12",
        ),
        (
            [b"n:1:1 [0] NCCL INFO 2 coll channels, 0 nvls channels, 2 p2p channels"],
            "2.17.1..2.19.4 (inferred)",
        ),
        (
            [b"\x1b[1mn:1:1 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1"],
            "2.24.3..2.30.7 (inferred)",
        ),
        (
            [b"n:1:1 [0] NCCL INFO comm 0x3 rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0 MNNVL 0"],
            "2.20.3..2.30.7",
        ),
        (
            [b"n:1:1 [0] NCCL INFO comm 0x9 rank 0 nranks 2 cudaDev 0 busId 1000 - Destroy COMPLETE"],
            "2.12.7..2.30.7",
        ),
        ([b"n:1:1 [0] init.cc:12 (ncclCommInit) NCCL WARN no good"], "2.30.7 (inferred)"),
    ],
)
@pytest.mark.parametrize("careful", [False, True])
def test_the_version_is_inferred_from_lines_that_no_table_has(tmp_path, lines, version, careful):
    path = tmp_path / "nccl.log"
    path.write_bytes(b"\n".join([COLL, *lines]) + b"\n")
    (found,) = parse_logs(path, careful=careful).ops["version"].to_pylist()
    assert found.startswith(version)
