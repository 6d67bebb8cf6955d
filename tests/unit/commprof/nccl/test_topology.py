"""Test lines of topology, tuning and warnings.

The tests cover every form of the reference, and values counted by eye in real logs.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from commprof.nccl.grammar.topology import Link, RingNeighbours, RingOrder, TreeLine, read_topology
from commprof.nccl.grammar.tuning import TuningModelLine, read_tuning
from commprof.nccl.grammar.versions import candidates, describe, form_of
from commprof.nccl.grammar.warnings import read_trace, read_warning
from commprof.nccl.state.communicators import Communicator, Place, Process
from commprof.nccl.state.tuning_attribution import attribute_tuning
from commprof.nccl.tables.remark_tables import MessageRows, TuningRows
from commprof.nccl.tables.topology_tables import TopologyRows
from commprof.trace.tables import table_from_rows

ROOT = Path(__file__).resolve().parents[4]
LOGS = Path(os.environ.get("COMMPROF_NCCL_LOGS", ROOT.parent / "shared" / "data" / "nccl-logs"))
needs_logs = pytest.mark.skipif(not LOGS.is_dir(), reason=f"real NCCL logs are not at {LOGS}")


@pytest.mark.parametrize(
    ("body", "link"),
    [
        # 2.4
        (b"Ring 00 : 35 -> 34 [send] via NET/Socket/0", (0, None, 35, 34, None, None, "NET/Socket/0", "NET", "send")),
        (b"Ring 03 : 0[0] -> 1[1] via P2P/direct pointer", (3, None, 0, 1, "0", "1", "P2P/direct pointer", "P2P", None)),
        (
            b"Ring 01 : 0[0] -> 1[1] via direct shared memory",
            (1, None, 0, 1, "0", "1", "direct shared memory", "SHM", None),
        ),
        # 2.5 to 2.6
        (b"Ring 00 : 1[b000] -> 0[a000] via P2P/IPC", (0, None, 1, 0, "b000", "a000", "P2P/IPC", "P2P", None)),
        (b"Ring 00 : 1 -> 0 [receive] via NET/IB/0", (0, None, 1, 0, None, None, "NET/IB/0", "NET", "receive")),
        # 2.7 to 2.11
        (b"Channel 01 : 0[a000] -> 1[c000] via P2P/IPC/read", (1, None, 0, 1, "a000", "c000", "P2P/IPC/read", "P2P", None)),
        (
            b"Channel 01 : 0[1a000] -> 1[1a000] [send] via NET/IB/3/GDRDMA/Shared",
            (1, None, 0, 1, "1a000", "1a000", "NET/IB/3/GDRDMA/Shared", "NET", "send"),
        ),
        # 2.12 to 2.18.1
        (
            b"Channel 00/0 : 1[f5000] -> 0[35000] [receive] via NET/AWS Libfabric/0",
            (0, 0, 1, 0, "f5000", "35000", "NET/AWS Libfabric/0", "NET", "receive"),
        ),
        (
            b"Channel 15/1 : 7[8a000] -> 15[8a000] [send] via NET/IB/8(6)/GDRDMA/Shared",
            (15, 1, 7, 15, "8a000", "8a000", "NET/IB/8(6)/GDRDMA/Shared", "NET", "send"),
        ),
        (b"Channel 0/0 : 0[a] -> 1[b] via SHM/direct/direct", (0, 0, 0, 1, "a", "b", "SHM/direct/direct", "SHM", None)),
        (b"Channel 00/0 : 0[1a000] -> 1[1b000] via SHM/CE/CE", (0, 0, 0, 1, "1a000", "1b000", "SHM/CE/CE", "SHM", None)),
        # 2.18.3 and newer
        (b"Channel 02/0 : 7[7] -> 6[6] via P2P/CUMEM/read", (2, 0, 7, 6, "7", "6", "P2P/CUMEM/read", "P2P", None)),
        (b"Channel 02/0 : 7[3] -> 8[0] via P2P/MNNVL", (2, 0, 7, 8, "3", "0", "P2P/MNNVL", "P2P", None)),
        (
            b"Channel 07/0 : 7[7] -> 15[7] [send] via NET/IB/8/GDRDMA(PCI)",
            (7, 0, 7, 15, "7", "7", "NET/IB/8/GDRDMA(PCI)", "NET", "send"),
        ),
        # RCCL
        (
            b"Channel 07/0 : 0[c1000] -> 1[c6000] via P2P/IPC comm 0x55d0aa nRanks 08",
            (7, 0, 0, 1, "c1000", "c6000", "P2P/IPC", "P2P", None),
        ),
    ],
)  # fmt: skip
def test_a_link_of_every_version(body, link):
    assert read_topology(body) == Link(*link)
    # A line that is cut before its last word is not a link.
    assert all(not isinstance(read_topology(body[:end]), Link) for end in range(body.index(b" via") + 5))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"Channel 00 :    0   1", RingOrder(0, None, (0, 1))),
        (b"Channel 01/24 :    0   3   2   1", RingOrder(1, 24, (0, 3, 2, 1))),
        (b"Channel 00/32 : 0 1 2 3 ", RingOrder(0, 32, (0, 1, 2, 3))),
        (b"Ring 01 : 2 -> 0 -> 1", RingNeighbours(1, 2, 0, 1)),
        (b"Ring 00 : -1 -> 0 -> -1", RingNeighbours(0, None, 0, None)),
    ],
)
def test_a_ring_of_every_version(body, expected):
    assert read_topology(body) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"Tree 3 : -1 -> 1 -> 0/-1/-1", [TreeLine(3, 1, None, (0,))]),
        # Version 2.4 prints above -> rank -> below.
        (b"Trees [0] 22->23->-1/-1/-1", [TreeLine(0, 23, 22, ())]),
        (
            b"Trees [0] -1->0->1/8/-1 [1] 5->0->-1/-1/-1",
            [TreeLine(0, 0, None, (1, 8)), TreeLine(1, 0, 5, ())],
        ),
        # Versions 2.5 to 2.7 print the tree up and the tree down. There are two rows only if the two trees
        # differ.
        (b"Trees [0] -1/-1/-1->1->0|0->1->-1/-1/-1", [TreeLine(0, 1, 0, ())]),
        (b"Trees [4] 3/-1/-1->1->0|2->1->0/-1/-1", [TreeLine(4, 1, 0, (3,)), TreeLine(4, 1, 2, (0,))]),
        # Versions 2.8 and newer print below -> rank -> above.
        (b"Trees [0] 1/-1/-1->0->-1 [1] -1/-1/-1->0->1", [TreeLine(0, 0, None, (1,)), TreeLine(1, 0, 1, ())]),
        (b"Trees [3] 15/6/-1->14->-1", [TreeLine(3, 14, None, (15, 6))]),
    ],
)
def test_trees_of_every_version(body, expected):
    assert read_topology(body) == tuple(expected)


@pytest.mark.parametrize(
    "body",
    [
        b"Channel 12/0 : 7[7] -> 6[g183:161258:161696 [1] NCCL INFO Connected all rings",
        b"Channel 03/0 : 2[2] -> 1[1] via P2P/CUM",
        b"Channel 00/16 :    0   7   6   5",  # This line is cut, because a ring contains every rank once.
        b"Channel 00/02 :",
        b"Trees [0] 1/-1/-1->0->-1 [1] -1/-1/-1->0",
        b"Trees",
        b"Tree 0 : -1 -> 0 -> 1",
        b"Ring 00 : 1 -> 0",
        b"Connected all rings",
        b"24 coll channels, 24 collnet channels, 0 nvls channels, 32 p2p channels, 32 p2p channels per peer",
        b"NVLS Head  0:  0  8 16",
    ],
)
def test_what_is_not_whole_or_is_something_else_is_nothing(body):
    assert read_topology(body) is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # 2.20.3 to 2.22.3
        (b"262144 Bytes -> Algo 0 proto 1 time 54.707825", (None, 262144, "TREE", "LL128", None, None, 54.707825)),
        # 2.23.4
        (b"AllGather: 16 Bytes -> Algo 1 proto 0 time 11.601334", ("all_gather", 16, "RING", "LL", None, None, 11.601334)),
        (b"AllReduce: 16 Bytes -> Algo 6 proto 2 time 1.0", ("all_reduce", 16, "PAT", "SIMPLE", None, None, 1.0)),
        (b"AllReduce: 16 Bytes -> Algo 99 proto 2 time 1.0", ("all_reduce", 16, None, "SIMPLE", None, None, 1.0)),
        # 2.24.3 and newer
        (
            b"AllReduce: 33554432 Bytes -> Algo NVLS_TREE proto SIMPLE channel{Lo..Hi}={0..31}",
            ("all_reduce", 33554432, "NVLS_TREE", "SIMPLE", 0, 31, None),
        ),
        # 2.27.3, 2.28.3, 2.29.2, 2.30.7
        (
            b"AllReduce [Symmetric]: 4096 Bytes -> Kernel AllReduce_AGxLL_R nchannels 8 nthreads 512",
            ("all_reduce", 4096, "AllReduce_AGxLL_R", None, None, None, None),
        ),
        (
            b"ReduceScatter [Symmetric]: 4096 Bytes -> Kernel ReduceScatter_LD nchannels 8 nthreads 512 nWorks 2",
            ("reduce_scatter", 4096, "ReduceScatter_LD", None, None, None, None),
        ),
        (
            b"AllGather [Copy Engine]: 64 Bytes -> cudaMemcpy",
            ("all_gather", 64, "cudaMemcpy", None, None, None, None),
        ),
        (
            b"AllGather [Copy Engine]: 64 Bytes -> cudaMemcpy; CE synchronization with NVLS",
            ("all_gather", 64, "cudaMemcpy; CE synchronization with NVLS", None, None, None, None),
        ),
        (
            b"AlltoAll [Hierarchical CE]: 64 Bytes -> RMA proxy + CE",
            ("all_to_all", 64, "RMA proxy + CE", None, None, None, None),
        ),
    ],
)  # fmt: skip
def test_a_choice_of_every_version(body, expected):
    assert tuple(read_tuning(body)) == expected
    head = body.index(b" -> ") + 4
    assert all(read_tuning(body[:end]) is None for end in range(head + 1))


@pytest.mark.parametrize(
    ("body", "title"),
    [
        (b"     AllReduce |    16.8/   2.5 |    31.0/   0.0 |", "AllReduce"),
        (b"  Algorithm   |                            Tree                  |        Ring |", "Algorithm"),
        (b" Max NThreads |            512 |            640 |", "Max NThreads"),
        (b"Latency/AlgBw |    Tree/    LL |    Tree/ LL128 |", "Latency/AlgBw"),
        (b"threadThresholds 8/8/64 | 16/8/64 | 512 | 512", "threadThresholds"),
    ],
)
def test_rows_of_the_model_are_told_apart(body, title):
    line = read_tuning(body)
    assert isinstance(line, TuningModelLine)
    assert line.title == title
    assert len(line.cells) >= 2


def test_warnings_with_and_without_function_and_file():
    assert tuple(read_warning(b"transport/net_ib.cc:667", b"NET/IB : mismatch")) == (
        "warn", "transport/net_ib.cc:667", None, None, "NET/IB : mismatch",
    )  # fmt: skip
    assert tuple(read_warning(b"init.cc:12 (ncclInit)", b"no memory")) == (
        "warn", "init.cc:12", "ncclInit", None, "no memory",
    )  # fmt: skip
    assert read_warning(b"", b"from a plugin").source is None
    assert read_warning(b"init.cc", b"torn") is None
    assert read_warning(b"init.cc:3", b"over", level="abort").level == "abort"


@pytest.mark.parametrize(
    ("body", "result"),
    [
        (b"misc/socket.cc:47 -> 3", 3),
        (b"group.cc:69 -> 1 [Async thread]", 1),
        (b"proxy.cc:1520 -> 6 [Proxy Thread]", 6),
        (b"proxy.cc:900 -> 2 [Progress Thread]", 2),
    ],
)
def test_an_error_unwinds(body, result):
    message = read_trace(body)
    assert (message.level, message.result, message.text) == ("trace", result, body.decode())
    assert message.source == body.decode().partition(" ")[0]


@pytest.mark.parametrize(
    "body",
    [
        b"Connected to proxy localRank 0 -> connection 0x7",
        b"socket.cc:47 -> ",
        b"a b.cc:47 -> 3",
        b"init.cc:3 -> 3 [Thread]",
    ],
)
def test_other_arrows_are_no_traces(body):
    assert read_trace(body) is None


@pytest.mark.sampled
@pytest.mark.parametrize(
    "body",
    [
        b"Channel 00/02 :" + b" 1" * 5_000_000,
        b"Channel 00/02 :" + b" " * 10_000_000 + b"x",
        b"Trees" + b" [0] 1/-1/-1->0->-1" * 500_000 + b"x",
        b"Channel 00/0 : 0[0] -> 1[1] [send] via NET/" + b"A" * 10_000_000,
        b"1" * 10_000_000 + b" Bytes -> Algo",
        b"AllReduce |" + b" 1|" * 3_000_000 + b"x",
        b"threadThresholds " + b"8/8 | " * 2_000_000 + b"x",
        b"a.cc:1 -> " + b"3" * 10_000_000,
        b"a" * 10_000_000 + b":1 -> 3",
    ],
    ids=range(9),
)
def test_a_line_of_ten_megabytes_takes_linear_time(body):
    begin = time.perf_counter()
    assert read_topology(body) is None
    assert read_tuning(body) is None
    assert read_trace(body) is None
    assert time.perf_counter() - begin < 20


def bodies(fragment: str) -> list[tuple[int, str, bytes]]:
    """Return (line number, tid, text after NCCL INFO) of the last message of each line of a real log."""
    path = next(path for path in LOGS.iterdir() if fragment in path.name)
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        head = re.search(rb".*:\d+:(\d+) \[\d+\] NCCL INFO (.*)$", line)
        if head:
            found.append((number, head[1].decode(), head[2]))
    return found


# The columns are (ring orders, ring neighbors, lines of trees, links), counted in the files with grep.
COUNTED = {
    "issue-226": (0, 0, 3, 5),
    "bigscience_2.7.8_allreduce": (12, 0, 4, 100),
    "bigscience_2.7.8_megatron": (16, 0, 16, 51),
    "bigscience_2.10.3": (4, 0, 16, 184),
    "efa_2.12": (0, 0, 0, 4),
    "picotron": (0, 2, 3, 1),
    "two_gpu_2.23.4": (2, 2, 3, 2),
    "deepspeed-issue-7128": (1, 0, 0, 0),
    "issue-1453": (0, 0, 0, 0),  # The only ring is cut.
    "hyperpod": (1, 0, 0, 1),
    "ms-swift": (0, 0, 0, 11),  # Three more links are truncated.
    "nccl-docs": (0, 2, 2, 6),
    "ai-on-eks": (0, 0, 0, 0),
    "accelerate": (0, 0, 0, 0),
}


@needs_logs
@pytest.mark.parametrize("fragment", COUNTED)
def test_real_logs_hold_as_many_lines_of_topology_as_were_counted(fragment):
    read = Counter(type(read_topology(body)).__name__ for _, _, body in bodies(fragment))
    found = tuple(read[name] for name in ("RingOrder", "RingNeighbours", "tuple", "Link"))
    assert found == COUNTED[fragment]


@needs_logs
def test_real_trees_agree_with_one_another():
    # In the logs of a communicator with every rank, each rank that is named above another rank must name that
    # rank below it.
    trees = {
        (tree.tree, tree.rank): tree
        for _, _, body in bodies("bigscience_2.10.3")
        if isinstance(lines := read_topology(body), tuple) and isinstance(lines[0], TreeLine)
        for tree in lines
    }
    assert len(trees) == 4 * 16
    for (number, rank), tree in trees.items():
        if tree.parent is not None:
            assert rank in trees[number, tree.parent].children
        for child in tree.children:
            assert trees[number, child].parent == rank
    assert [trees[number, 0].parent for number in range(4)] == [None, 3, 4, 3]


@needs_logs
def test_real_links_are_the_edges_of_the_real_rings():
    read = [read_topology(body) for _, _, body in bodies("bigscience_2.10.3")]
    rings = {ring.channel: ring.ranks for ring in read if isinstance(ring, RingOrder)}
    edges = {(channel, ranks[i], ranks[(i + 1) % 16]) for channel, ranks in rings.items() for i in range(16)}
    links = {(link.channel, link.from_rank, link.to_rank) for link in read if isinstance(link, Link)}
    assert edges <= links


@needs_logs
def test_real_choices():
    choices = {
        number: read_tuning(body) for number, _, body in bodies("two_gpu_2.23.4") if b" Bytes -> " in body
    }
    assert {n: (c.op, c.num_bytes, c.algorithm, c.protocol) for n, c in choices.items()} == {
        47: ("all_gather", 16, "RING", "LL"),
        54: ("all_reduce", 9649344, "RING", "SIMPLE"),
        57: ("all_reduce", 10056384, "RING", "SIMPLE"),
        60: ("broadcast", 1478412, "RING", "SIMPLE"),
        63: ("all_reduce", 9649344, "RING", "SIMPLE"),
    }
    titles = [
        c.title
        for _, _, body in bodies("two_gpu_2.23.4")
        if isinstance(c := read_tuning(body), TuningModelLine)
    ]
    assert titles == ["Algorithm", "Protocol", "Max NThreads", "AllReduce", "threadThresholds"]
    named = [read_tuning(body) for _, _, body in bodies("nccl-docs") if b"Bytes ->" in body]
    assert [(c.algorithm, c.first_channel, c.last_channel) for c in named] == [("RING", 0, 31)] * 3


PROCESSES = [Process(0, "a", 10), Process(1, "a", 11)]


def communicator(index: int, **fields: object) -> Communicator:
    return Communicator(index, 0, f"0x{index + 1}", 0, 0, 1, **fields)


def test_a_link_that_is_printed_twice_is_one_row_with_its_lines_counted():
    rows, link = TopologyRows(), read_topology(b"Channel 02/0 : 7[7] -> 6[6] via P2P/CUMEM")
    rows.add(0, 0, link, 0, 8)
    rows.add(0, 0, link, 0, 5, lines=3)
    rows.add(0, 1, link, 0, 9)
    rows.add(1, None, link, 0, 10)
    table = rows.tables(PROCESSES, [communicator(0), communicator(1)], ["log"])["nccl_links"]
    assert [(r["pid"], r["comm"], r["lines"], r["line"]) for r in table.to_pylist()] == [
        (10, "0x1", 4, 5), (10, "0x2", 1, 9), (11, None, 1, 10),
    ]  # fmt: skip


def test_trees_said_twice_are_one_row_and_each_ring_line_is_its_own():
    rows = TopologyRows()
    rows.add(0, 0, read_topology(b"Tree 0 : -1 -> 0 -> 1/-1/-1"), 0, 3)
    rows.add(0, 0, read_topology(b"Trees [0] 1/-1/-1->0->-1 [1] -1/-1/-1->0->1"), 0, 4)
    ring = read_topology(b"Ring 00 : 1 -> 0 -> 1")
    rows.add(0, 0, ring, 0, 1)
    rows.add(0, 0, ring, 0, 2)
    tables = rows.tables(PROCESSES, [communicator(0)], ["log"])
    assert [(r["tree"], r["rank"], r["parent"], r["children"], r["line"]) for r in tables["nccl_trees"].to_pylist()] == [
        (0, 0, None, "1", 3), (1, 0, 1, "", 4),
    ]  # fmt: skip
    assert [(r["rank"], r["previous"], r["next"], r["line"]) for r in tables["nccl_rings"].to_pylist()] == [
        (0, 1, 1, 1), (0, 1, 1, 2),
    ]  # fmt: skip


def test_a_ring_that_was_cut_has_no_ranks():
    rows = TopologyRows()
    ring = read_topology(b"Channel 00/02 : 0 1 2 3")
    rows.add(0, 0, ring, 0, 1)
    rows.add(0, 1, ring, 0, 2)
    table = rows.tables(PROCESSES, [communicator(0, nranks=8), communicator(1, nranks=4)], ["log"])[
        "nccl_rings"
    ]
    assert table["ranks"].to_pylist() == [None, "0 1 2 3"]


def test_before_2_18_3_the_end_of_an_initialisation_claims_the_lines_of_its_thread():
    rows, ring = TopologyRows(), read_topology(b"Channel 00/02 :    0   1")
    ended = [
        communicator(0, stages={"complete"}, completed=Place(0, 10, 7)),
        communicator(1, stages={"complete"}, completed=Place(0, 20, 7)),
        communicator(2, stages={"start", "complete"}, completed=Place(0, 40, 7)),
    ]
    for line, tid in ((5, 7), (15, 7), (15, 8), (25, 7)):
        rows.add(0, None, ring, 0, line, tid=tid)
    table = rows.tables(PROCESSES, ended, ["log"])["nccl_rings"]
    assert sorted((r["line"], r["comm"] or "-") for r in table.to_pylist()) == [
        (5, "0x1"), (15, "-"), (15, "0x2"), (25, "-"),
    ]  # fmt: skip


def test_messages_keep_their_place():
    rows = MessageRows()
    rows.add(1, None, read_trace(b"misc/socket.cc:47 -> 3"), 0, 65, tid=12, device=3)
    assert rows.table(PROCESSES, [], ["log"]).to_pylist() == [
        {
            "host": "a", "pid": 11, "tid": 12, "device": 3, "level": "trace", "source": "misc/socket.cc:47",
            "function": None, "result": 3, "text": "misc/socket.cc:47 -> 3", "file": "log", "line": 65,
        }
    ]  # fmt: skip


def coll(
    line: int,
    op: str,
    size: int,
    total: int | None = None,
    comm: str = "0x1",
    rank: int | None = 0,
    tid: int = 10,
):
    return {
        "rank": rank, "comm": comm, "op": op, "kind": "coll", "bytes": size, "message_bytes": total or size,
        "host": "a", "pid": 10, "tid": tid, "file": "log", "line": line, "state": "whole",
    }  # fmt: skip


def attributed(
    calls: list[dict[str, object]], choices: list[tuple[int, bytes]], tid: int = 10
) -> list[tuple[object, ...]]:
    rows = TuningRows()
    for line, body in choices:
        rows.add(0, None, read_tuning(body), 0, line, tid=tid)
    table = attribute_tuning(rows.table(PROCESSES, [], ["log"]), table_from_rows("nccl_ops", calls))
    assert isinstance(table, pa.Table)
    return [(row["comm"], row["op_line"]) for row in table.to_pylist()]


def test_a_choice_follows_its_operation():
    calls = [coll(1, "all_gather", 8, 16), coll(4, "all_reduce", 16)]
    choices = [
        (3, b"AllGather: 16 Bytes -> Algo 1 proto 0 time 11.6"),
        (6, b"AllReduce: 16 Bytes -> Algo 1 proto 0 time 1.0"),
    ]
    assert attributed(calls, choices) == [("0x1", 1), ("0x1", 4)]


def test_bytes_are_those_of_one_rank_since_2_24():
    calls = [coll(1, "all_gather", 8, 16)]
    named = b"AllGather: %d Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}"
    assert attributed(calls, [(2, named % 8)]) == [("0x1", 1)]
    assert attributed(calls, [(2, named % 16)]) == [(None, None)]


def test_choices_of_a_group_are_told_apart_by_name_and_bytes():
    calls = [coll(1, "all_reduce", 800), coll(2, "all_reduce", 400), coll(3, "reduce_scatter", 200, 400)]
    choices = [
        (4, b"AllReduce: 400 Bytes -> Algo 1 proto 0 time 1.0"),
        (5, b"ReduceScatter: 400 Bytes -> Algo 1 proto 0 time 1.0"),
        (6, b"AllReduce: 800 Bytes -> Algo 1 proto 0 time 1.0"),
    ]
    assert attributed(calls, choices) == [("0x1", 2), ("0x1", 3), ("0x1", 1)]


def test_without_a_name_bytes_alone_decide_or_nothing_does():
    calls = [coll(1, "all_reduce", 400), coll(2, "broadcast", 400, comm="0x2"), coll(3, "all_reduce", 800)]
    choices = [(4, b"400 Bytes -> Algo 0 proto 1 time 5.0"), (5, b"800 Bytes -> Algo 0 proto 1 time 5.0")]
    assert attributed(calls, choices) == [(None, None), ("0x1", 3)]


def test_equal_operations_share_a_communicator_but_not_a_line():
    calls = [coll(1, "all_reduce", 400), coll(2, "all_reduce", 400)]
    choice = b"AllReduce: 400 Bytes -> Algo 1 proto 0 time 1.0"
    assert attributed(calls, [(3, choice), (4, choice)]) == [("0x1", None)] * 2


def test_only_rank_0_prints_a_choice_except_for_symmetric_kernels():
    calls = [coll(1, "all_reduce", 400, comm="0x2", rank=1), coll(2, "all_reduce", 400, comm="0x1")]
    plain = b"AllReduce: 400 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}"
    symmetric = b"AllReduce [Symmetric]: 400 Bytes -> Kernel AllReduce_AGxLL_R nchannels 1 nthreads 512"
    assert attributed(calls, [(3, plain)]) == [("0x1", 2)]
    assert attributed(calls[:1], [(3, plain)]) == [(None, None)]
    assert attributed(calls[:1], [(3, symmetric)]) == [("0x2", 1)]


def test_an_operation_that_was_lost_leaves_its_choice_alone():
    choice = b"AllReduce: 400 Bytes -> Algo 1 proto 0 time 1.0"
    later = [coll(5, "all_reduce", 400)]
    assert attributed(later, [(3, choice), (7, choice)]) == [(None, None), ("0x1", 5)]
    assert attributed([coll(1, "all_reduce", 400, tid=11)], [(3, choice)]) == [(None, None)]


# Versions are inferred only from the forms of topology, tuning and other INFO lines. The file names contain
# the version that wrote them.
INFERRED = {
    "issue-226": "2.4.2..2.4.8",
    "bigscience_2.7.8_allreduce": "2.7.3..2.7.8",
    "bigscience_2.10.3": "2.8.3..2.11.4",
    "efa_2.12": "2.12.7..2.12.12",
    "deepspeed-issue-7128": "2.20.3..2.22.3",
    "issue-1453": "2.20.3..2.22.3",
    "two_gpu_2.23.4": "2.23.4",
    "hyperpod": "2.23.4..2.30.7",
    "ms-swift": "2.18.1..2.30.7",
    "nccl-docs": "2.24.3..2.30.7",
}


@needs_logs
@pytest.mark.parametrize("fragment", INFERRED)
def test_the_version_follows_from_the_forms_of_lines(fragment):
    forms = {form for _, _, body in bodies(fragment) if (form := form_of(body))}
    assert describe(candidates(forms, False)) == f"{INFERRED[fragment]} (inferred)"


def test_forms_of_newer_versions_that_no_public_log_holds():
    newest = {
        b"NCCL git version master 1a2b3c4": "git_version",
        b"Connected all rings, use ring PXN 0 GDR 1": "connected_pxn",
        b"comm 0x55 rank 0 nRanks 2 cudaDev 0 busId 5000 - Abort START": "abort_start",
        b"AllReduce [Symmetric]: 4096 Bytes -> Kernel X nchannels 8 nthreads 512": "tuning_symmetric",
        b"Channel 07/0 : 7[7] -> 15[7] [send] via NET/IB/8/GDRDMA(PCI)": "net_gdr_mode",
        b"Channel 02/0 : 7[3] -> 8[0] via P2P/MNNVL": "p2p_mnnvl",
        b"16 coll channels, 16 nvls channels, 16 p2p channels, 2 p2p channels per peer": "channels_nvls",
        b"Init timings: rank 0 nranks 2 total 0.5 (kernels 0.1)": "timings",
        b"Using network IB": None,
    }
    assert {body: form_of(body) for body in newest} == newest
