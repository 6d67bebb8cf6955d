"""The reader of NCCL logs on damaged logs.

It must not crash, must return no row that a line does not contain, and must count every mention of an
operation.
"""

from __future__ import annotations

import os
import random
import re
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from benchmarks.nccl_log import generate
from commprof.nccl.parser import ParsedLogs, parse_logs
from support.log_mutations import MUTATIONS, mutate
from support.sample import examples
from support.strict_nccl import BEGINS, MENTIONED, WholeLine, printable, read_strictly, whole_messages

ROOT = Path(__file__).resolve().parents[3]
LOGS = Path(os.environ.get("COMMPROF_NCCL_LOGS", ROOT.parent / "shared" / "data" / "nccl-logs"))


def corpus() -> list[bytes]:
    """Return the lines of real logs, if there are any on this machine."""
    files = sorted(path for path in LOGS.glob("*") if path.suffix in (".log", ".txt"))
    return [line for path in files for line in path.read_bytes().split(b"\n")]


@pytest.fixture(scope="module")
def generated(tmp_path_factory) -> list[bytes]:
    path = tmp_path_factory.mktemp("generated") / "nccl.log"
    generate(path, 1_500_000, ranks=8, seed=7)
    lines = path.read_bytes().split(b"\n")[1:]
    # operations and the lines between them, in equal parts
    operations = [line for line in lines if b"opCount" in line or b"NCCL CALL" in line]
    others = [line for line in lines if b"opCount" not in line and b"NCCL CALL" not in line]
    return operations[:2000] + others[:2000]


def identity(row: dict[str, object]) -> WholeLine:
    return WholeLine(row["op"], row["kind"], row["opcount"], row["count"], row["comm"])  # type: ignore[arg-type]


def check(text: bytes, parsed: ParsedLogs) -> Counter[str]:
    """Check all properties that must be true for any bytes.

    Returns the number of lines for each outcome.
    """
    counts = parsed.counts
    rows: dict[int, list[dict[str, object]]] = defaultdict(list)
    columns = ["line", "op", "kind", "opcount", "count", "comm", "stream", "host", "pid", "tid", "state"]
    for row in parsed.ops.select(columns).to_pylist():
        rows[row["line"]].append(row)
    states = Counter((row["kind"], row["state"]) for found in rows.values() for row in found)
    assert (states["coll", "whole"], states["call", "whole"]) == (counts.coll, counts.call)
    assert states["coll", "torn"] + states["call", "torn"] == counts.torn
    lines = text.split(b"\n")
    assert counts.lines == len(lines) - (lines[-1] == b"")
    assert sum(kind.lines for kind in parsed.kinds) == counts.lines
    assert all(kind.lines > 0 and all(e.text.isprintable() for e in kind.examples) for kind in parsed.kinds)
    assert max(rows, default=0) <= counts.lines
    outcome: Counter[str] = Counter()
    lost = []
    for number, raw in enumerate(lines, 1):
        # most lines contain no operation and have no row
        if number not in rows and b": o" not in raw and b"nccl" not in raw:
            continue
        state = check_line(printable(raw), rows.get(number, []))
        outcome[state] += 1
        if state == "elsewhere":
            lost.append(raw)
    # A damaged name of an operation may count as unknown. An operation without its head may count as a
    # fragment.
    assert len(lost) <= counts.unknown_op + counts.fragment, lost[:3]
    return outcome


def check_line(text: str, rows: list[dict[str, object]]) -> str:
    """Check one line and its rows, and return the outcome."""
    whole = [row for row in rows if row["state"] == "whole"]
    printed = Counter(whole_messages(text))
    for row in whole:
        assert printed[identity(row)] > 0, f"invented: {row} in {text!r}"
        printed[identity(row)] -= 1
        # A second message may directly follow the address of the stream. The row then shows where the address
        # ends.
        assert re.search(rf"(?:stream |,){re.escape(str(row['stream']))}", text), (row, text)
        assert re.search(rf"{re.escape(str(row['host']))}:0*{row['pid']}:0*{row['tid']} ", text), (row, text)
    assert len(rows) <= len(BEGINS.findall(text)), f"more rows than operations begin: {rows} in {text!r}"
    strictly = read_strictly(text)
    if strictly is not None:
        assert [identity(row) for row in rows] == [strictly], f"{rows} for the whole line {text!r}"
        return "whole"
    if rows:
        return "torn"
    return "elsewhere" if MENTIONED.search(text) else "ignored"


def parse(text: bytes) -> ParsedLogs:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nccl.log"
        path.write_bytes(text)
        return parse_logs(path)


def test_undamaged_generated_lines_are_all_whole(generated):
    text = b"\n".join(generated) + b"\n"
    outcome = check(text, parse(text))
    # ncclGroupStart and similar functions print CALL lines, but are not operations.
    assert outcome["whole"] == sum(bool(read_strictly(printable(line))) for line in generated) > 1500
    assert outcome["torn"] == outcome["elsewhere"] == 0


@pytest.mark.skipif(not LOGS.is_dir(), reason=f"real NCCL logs are not at {LOGS}; set COMMPROF_NCCL_LOGS")
def test_real_lines_are_whole_where_a_strict_reader_finds_them_whole():
    lines = corpus()
    text = b"\n".join(lines) + b"\n"
    outcome = check(text, parse(text))
    assert outcome["whole"] == sum(bool(read_strictly(printable(line))) for line in lines) > 30


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("seed", range(4))
def test_damaged_lines(generated, seed):
    text = mutate([*corpus(), *generated], 5_000, seed)
    outcome = check(text, parse(text))
    assert outcome["whole"] > 200
    assert outcome["torn"] > 100


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 120))
def test_a_million_damaged_lines(generated, seed):
    text = mutate([*corpus(), *generated], 50_000, seed)
    check(text, parse(text))


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_each_kind_of_damage_by_itself(generated, mutation):
    rng = random.Random(mutation.__name__)
    text = b"\n".join(mutation(rng, rng.choice(generated), rng.choice(generated)) for _ in range(500))
    check(text, parse(text))


PIECES = [
    b"n:1:2 [0] NCCL INFO ", b"n:1:2 NCCL CALL ", b"AllReduce: opCount ", b"sendbuff 0x1 recvbuff 0x2 ", b"count 4 ",
    b"datatype 7 op 0 root 0 ", b"comm 0x3 [nranks=2] stream 0x4", b"ncclAllReduce(1,2,4,7,0,0,0x3,0x4)", b"\n", b" ",
    b"opCount 1f ", b"Send: opCount 0 ", b"[nranks=", b"\r", b"\x1b[1m", b"\x00", b"\xff", b"0", b"NCCL version 2.27.3",
    b"comm 0x3 rank 0 nranks 2 cudaDev 0 busId 1 - Init COMPLETE", b"n:1:2 [0] x.cc:1 NCCL WARN ",
]  # fmt: skip


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=8)), max_size=30).map(b"".join))
@example(b"n:1:2 [0] NCCL INFO NCCL version 2.27.3AllReduce: opCount Send: opCount 0 ")
@example(
    b"n:1:2 [0] NCCL INFO comm 0x3 rank 0 nranks 2 cudaDev 0 busId 1 - Init COMPLETEAllReduce: opCount 0 "
)
@example(b"n:1:2 [0] NCCL INFO Destroyed comm 0x3 rank 0 Send: opCount 0 ")
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_pieces_of_lines_in_any_order(pieces):
    text = b"log\n" + pieces
    check(text, parse(text))
