"""Test the reader on real logs from public sources.

The expected counts are computed here independently, with regular expressions only.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from commprof.nccl.parser import parse_logs

ROOT = Path(__file__).resolve().parents[4]
LOGS = Path(os.environ.get("COMMPROF_NCCL_LOGS", ROOT.parent / "shared" / "data" / "nccl-logs"))
pytestmark = pytest.mark.skipif(
    not LOGS.is_dir(), reason=f"real NCCL logs are not at {LOGS}; set COMMPROF_NCCL_LOGS to their directory"
)
FILES = (
    sorted(path.name for path in LOGS.glob("*") if path.suffix in (".log", ".txt")) if LOGS.is_dir() else []
)

# A complete line ends with a complete stream pointer and has host:pid:tid directly before its level.
WHOLE_COLL = re.compile(
    r"\w:\d+:\d+ \[\d+\] NCCL INFO \w+: opCount [0-9a-f]+ .*?count \d+ datatype \d+ op \d+ root \d+ "
    r"comm 0x[0-9a-f]+ \[nranks=\d+\] stream 0x[0-9a-f]+"
)
WHOLE_CALL = re.compile(
    r"NCCL CALL nccl(?!Comm)\w+\([0-9a-f]+,[0-9a-f]+,\d+,\d+,\d+,\d+,0x[0-9a-f]+,0x[0-9a-f]+\)"
)
BEGINS = re.compile(r"\w+: opCount |NCCL CALL nccl(?:Send|Recv|All|Reduce|Broadcast)\w*\(")


def log(fragment: str) -> Path:
    return next(LOGS / name for name in FILES if fragment in name)


@pytest.mark.parametrize("name", FILES)
def test_every_operation_line_is_counted_once_and_by_its_kind(name):
    text = (LOGS / name).read_text(errors="replace")
    parsed = parse_logs(LOGS / name)
    coll, call = len(WHOLE_COLL.findall(text)), len(WHOLE_CALL.findall(text))
    begun = len(BEGINS.findall(text))
    counts = parsed.counts
    assert (counts.coll, counts.call) == (coll, call)
    assert counts.torn == begun - coll - call
    assert counts.lines == len(text.removesuffix("\n").split("\n"))
    assert parsed.ops.num_rows == begun
    init = r"\w:\d+:\d+ \[\d+\] .*comm 0x[0-9a-f]{4,} .*- ?Init (?:START|COMPLETE)|CALL ncclCommInitRank"
    assert counts.init == len(re.findall(init, text))


def test_rank_size_and_identity_come_from_the_init_lines():
    rows = parse_logs(log("two_gpu_2.23.4")).ops.to_pylist()
    coll = [row for row in rows if row["kind"] == "coll"]
    assert [(r["op"], r["opcount"], r["bytes"], r["message_bytes"]) for r in coll] == [
        ("all_gather", 0, 8, 16),
        ("all_reduce", 0x3F, 10_056_384, 10_056_384),
        ("broadcast", 0x40, 1_478_412, 1_478_412),
        ("all_reduce", 0x41, 9_649_344, 9_649_344),
    ]
    assert {(r["rank"], r["nranks"], r["comm_id"], r["version"]) for r in rows} == {
        (0, 2, "0xfe34f77ffe21ca43", "2.23.4")
    }
    assert [r["dtype"] for r in coll] == ["int64", "float32", "float32", "float32"]


def test_message_sizes_agree_with_what_nccl_prints_when_it_tunes():
    # Versions 2.20 to 2.23 print the bytes of the complete collective on the TUNING line of rank 0.
    text = log("two_gpu_2.23.4").read_text()
    tuned = {int(n) for n in re.findall(r"(?:AllGather|Broadcast): (\d+) Bytes", text)}
    printed = {
        r["message_bytes"]
        for r in parse_logs(log("two_gpu_2.23.4")).ops.to_pylist()
        if r["op"] != "all_reduce"
    }
    assert printed == tuned


def test_send_and_recv_have_a_peer_and_no_root():
    rows = parse_logs(log("picotron-pp")).ops.to_pylist()
    assert {(r["op"], r["peer"], r["root"]) for r in rows} == {
        ("send", 0, None), ("recv", 0, None), ("send", 2, None), ("recv", 2, None),
    }  # fmt: skip
    assert {r["bytes"] for r in rows} == {8_388_608 * 2}


def test_a_type_that_old_versions_hide_is_unknown_and_its_bytes_are_right():
    rows = parse_logs(log("allgather-int8")).ops.to_pylist()
    assert {(r["dtype"], r["bytes"], r["message_bytes"]) for r in rows} == {(None, 512, 512 * 16)}


def test_two_messages_in_one_line_are_two_and_headless_ones_are_torn():
    parsed = parse_logs(log("issue-147"))
    states = [(r["line"], r["state"], r["pid"]) for r in parsed.ops.to_pylist()]
    assert states == [
        (1, "whole", 32629), (2, "whole", 32625), (3, "whole", 32615), (5, "whole", 32617),
        (6, "torn", None), (7, "whole", 32617), (8, "torn", 32627),
    ]  # fmt: skip


def test_without_init_lines_ranks_are_null_and_the_reason_is_given():
    parsed = parse_logs(log("torchtitan"))
    rows = parsed.ops.to_pylist()
    assert {(r["rank"], r["global_rank"]) for r in rows} == {(None, None)}
    assert all("NCCL_DEBUG_SUBSYS had COLL without INIT" in r["rank_reason"] for r in rows)
    assert any("NCCL_DEBUG_SUBSYS=INIT,COLL" in note for note in parsed.notes)


@pytest.mark.parametrize(
    ("fragment", "members"),
    [
        ("bigscience_2.10.3", 16),
        ("bigscience_2.7.8_allreduce", 4),
        ("accelerate-issue-2246", 5),
        ("efa_2.12", 2),
    ],
)
def test_members_of_one_communicator_form_one_family_with_global_ranks(fragment, members):
    communicators = parse_logs(log(fragment)).communicators
    assert len(communicators) == members
    assert {c.family for c in communicators} == {0}
    assert sorted(c.global_rank for c in communicators) == sorted(c.rank for c in communicators)


def test_the_lines_of_torch_are_understood():
    assert parse_logs(log("torch-pgnccl")).counts.torch == 8


# Each entry has the rows of (rings, trees, lines of links, tuning, messages), and the number of rows of the
# first three without a communicator. They were counted in the files with grep. The number of trees is ranks x
# trees, as 2.8 and newer print each tree twice.
TABLES = {
    "issue-226": ((0, 3, 5, 0, 0), 8),  # The excerpt has lines of only one process.
    "bigscience_2.7.8_allreduce": ((12, 48, 100, 0, 0), 0),
    "bigscience_2.10.3": ((4, 64, 184, 0, 0), 0),
    "efa_2.12": ((0, 0, 4, 0, 0), 0),
    "picotron": ((2, 6, 1, 0, 0), 0),
    "two_gpu_2.23.4": ((4, 2, 2, 5, 1), 0),
    "deepspeed-issue-7128": ((1, 0, 0, 0, 0), 0),
    "issue-1453": ((0, 0, 0, 3, 0), 0),
    "ms-swift": ((0, 0, 11, 0, 0), 11),  # The log has no init line.
    "allgather-int8": ((0, 0, 0, 0, 1), 0),
    "ai-on-eks": ((0, 0, 0, 1, 0), 0),
}


@pytest.mark.parametrize("fragment", TABLES)
def test_tables_of_topology_tuning_and_messages_hold_what_was_counted(fragment):
    tables = parse_logs(log(fragment)).tables
    links = tables["nccl_links"]["lines"].to_pylist()
    rows = [tables[f"nccl_{name}"].num_rows for name in ("rings", "trees", "tuning", "messages")]
    nameless = sum(tables[name]["comm"].null_count for name in ("nccl_rings", "nccl_trees", "nccl_links"))
    assert ((rows[0], rows[1], sum(links), rows[2], rows[3]), nameless) == TABLES[fragment]


def test_choices_name_their_operation_where_the_log_holds_it():
    tuning = parse_logs(log("two_gpu_2.23.4")).tables["nccl_tuning"].to_pylist()
    # The operation of line 54 is missing from the excerpt, which contains only its CALL line.
    assert [(r["line"], r["op_line"]) for r in tuning] == [(47, 44), (54, None), (57, 55), (60, 58), (63, 61)]
    assert {r["comm"] for r in tuning} == {"0x6171c5824800", None}


def test_rings_of_a_real_log_hold_every_rank_of_their_communicator():
    rings = parse_logs(log("bigscience_2.7.8_allreduce")).tables["nccl_rings"].to_pylist()
    assert {tuple(sorted(map(int, r["ranks"].split()))) for r in rings} == {(0, 1, 2, 3)}
    assert [r["channel"] for r in rings] == list(range(12))
    assert {r["comm"] for r in rings} == {
        r["comm"] for r in parse_logs(log("bigscience_2.7.8_allreduce")).tables["nccl_communicators"].to_pylist()
        if r["rank"] == 0
    }  # fmt: skip


def test_the_warning_and_the_trace_of_real_logs():
    warning = parse_logs(log("allgather-int8")).tables["nccl_messages"].to_pylist()[0]
    assert (warning["level"], warning["source"], warning["pid"], warning["device"], warning["line"]) == (
        "warn", "transport/net_ib.cc:667", 201805, 0, 1,
    )  # fmt: skip
    assert warning["text"].startswith("NET/IB : collective mismatch error local size 32768")
    trace = parse_logs(log("two_gpu_2.23.4")).tables["nccl_messages"].to_pylist()[0]
    assert (trace["level"], trace["source"], trace["result"], trace["tid"]) == (
        "trace",
        "misc/socket.cc:47",
        3,
        6362,
    )


def test_groups_that_look_alike_have_no_family_and_say_so():
    rows = parse_logs(log("megatron")).tables["nccl_communicators"].to_pylist()
    assert len(rows) == 16
    assert {(r["family"], r["nranks"]) for r in rows} == {(None, 2)}
    assert all("no commId distinguishes them" in r["reason"] for r in rows)


@pytest.mark.parametrize(
    ("fragment", "families"),
    [("deepspeed-issue-7128", [2, 2]), ("bigscience_2.10.3", [16]), ("accelerate", [5])],
)
def test_families_of_real_logs(fragment, families):
    rows = parse_logs(log(fragment)).tables["nccl_communicators"].to_pylist()
    found = [r["family"] for r in rows]
    assert [found.count(number) for number in range(max(found) + 1)] == families


def test_the_version_follows_from_a_line_of_tuning_where_there_is_no_banner():
    assert set(parse_logs(log("ai-on-eks")).ops["version"].to_pylist()) == {"2.23.4 (inferred)"}


def test_lines_that_neither_begin_nor_end_a_communicator(tmp_path):
    # The formats are from 2.28.7 and 2.18.1, because no public log contains them.
    prefix = "host:10:10 [0] NCCL INFO "
    lines = [
        "ncclCommInitRank comm 0x10 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 5000 commId 0xa - Init START",
        "ncclCommInitRank comm 0x10 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 5000 commId 0xa - Init COMPLETE",
        "Rank 0 has color with NCCL_SPLIT_NOCOLOR, not creating a new communicator",
        "comm 0x10 rank 0 nRanks 2 cudaDev 0 busId 5000 - Revoke START",
        "comm 0x10 rank 0 nRanks 2 cudaDev 0 busId 5000 - Revoke COMPLETE, result 0",
        "comm 0x10 rank 0 nRanks 2 cudaDev 0 busId 5000 - Abort START",
        "comm 0x10 rank 0 nranks 2 cudaDev 0 busId 5000 - Abort COMPLETE",
    ]
    for count, ended in ((6, None), (7, "abort")):
        path = tmp_path / f"{count}.log"
        path.write_text("".join(f"{prefix}{line}\n" for line in lines[:count]))
        rows = parse_logs(path).tables["nccl_communicators"].to_pylist()
        assert [(r["comm"], r["comm_epoch"], r["ended"]) for r in rows] == [("0x10", 0, ended)]
