"""Test which lines the calls of torch leave in an NCCL log.

The table has one row per case (ProcessGroupNCCL.cpp, nccl.cpp).
"""

from __future__ import annotations

import pytest

from commprof.align.expected_lines import PLAIN_DIALECT, Call, Dialect, expected_lines

NEW = Dialect(frozenset({"all_to_all", "gather", "scatter"}), 1)


def call(op, method=None, sizes=None, payload=0, numel=None, peer=-1, ranks="0-3", rank=0, tensors=1, **more):
    return Call(
        op,
        method or op,
        tensors,
        sizes,
        payload // 4 if numel is None else numel,
        payload,
        peer,
        ranks,
        rank,
        **more,
    )


CASES = {
    "all_reduce": (call("all_reduce", payload=64), [("all_reduce", 64, None)]),
    "all_reduce coalesced: one line per tensor": (
        call("all_reduce", "allreduce_coalesced", "4;6;2->4;6;2", 48, tensors=3),
        [("all_reduce", 16, None), ("all_reduce", 24, None), ("all_reduce", 8, None)],
    ),
    "broadcast: the root counts within the group": (
        call("broadcast", payload=64, peer=6, ranks="2,6", rank=0),
        [("broadcast", 64, 1)],
    ),
    "reduce": (call("reduce", payload=64, peer=3), [("reduce", 64, 3)]),
    "all_gather into one tensor": (
        call("all_gather", "_allgather_base", "4->16", 64),
        [("all_gather", 64, None)],
    ),
    "all_gather into equal tensors": (
        call("all_gather", "allgather", "4->4;4;4;4", 64),
        [("all_gather", 64, None)],
    ),
    "all_gather into unequal tensors: a Broadcast per rank": (
        call("all_gather", "allgather", "4->4;6;1;5", 64),
        [("broadcast", 16, 0), ("broadcast", 24, 1), ("broadcast", 4, 2), ("broadcast", 20, 3)],
    ),
    "all_gather coalesced": (
        call("all_gather", "allgather_into_tensor_coalesced", "4;6->16;24", 160, tensors=2),
        [("all_gather", 64, None), ("all_gather", 96, None)],
    ),
    "reduce_scatter": (
        call("reduce_scatter", "_reduce_scatter_base", "16->4", 64),
        [("reduce_scatter", 64, None)],
    ),
    "reduce_scatter of unequal tensors: a Reduce per rank": (
        call("reduce_scatter", "reduce_scatter", "4;6;1;5->4", 64),
        [("reduce", 16, 0), ("reduce", 24, 1), ("reduce", 4, 2), ("reduce", 20, 3)],
    ),
    "reduce_scatter coalesced": (
        call("reduce_scatter", "reduce_scatter_tensor_coalesced", "16;24->4;6", 160, tensors=2),
        [("reduce_scatter", 64, None), ("reduce_scatter", 96, None)],
    ),
    "all_to_all_single": (
        call("all_to_all", "alltoall_base", "4->4", 16, ranks="0,1"),
        [("send", 8, 0), ("recv", 8, 0), ("send", 8, 1), ("recv", 8, 1)],
    ),
    "all_to_all of lists, unequal, with an empty part": (
        call("all_to_all", "alltoall", "3;0->1;5", 12, ranks="0,1"),
        [("send", 12, 0), ("recv", 4, 0), ("recv", 20, 1)],
    ),
    "all_to_all_single with splits": (
        call(
            "all_to_all",
            "alltoall_base",
            "4->5",
            16,
            ranks="0,1",
            output_bytes=20,
            input_splits="12,4",
            output_splits="0,20",
        ),
        [("send", 12, 0), ("send", 4, 1), ("recv", 20, 1)],
    ),
    "all_to_all_single that sends nothing and receives": (
        call("all_to_all", "alltoall_base", "0->3", 0, ranks="0,1", output_bytes=12, output_splits="4,8"),
        [("recv", 4, 0), ("recv", 8, 1)],
    ),
    "all_to_all of lists whose inputs are empty": (
        call("all_to_all", "alltoall", "0;0->1;2", 0, ranks="0,1", output_bytes=12),
        [("recv", 4, 0), ("recv", 8, 1)],
    ),
    "all_to_all_single with splits that nobody read": (
        call(
            "all_to_all",
            "alltoall_base",
            "4->4",
            16,
            ranks="0,1",
            output_bytes=16,
            input_splits="?",
            output_splits="?",
        ),
        None,
    ),
    "all_to_all_single with splits that no record holds": (
        call("all_to_all", "alltoall_base", "7->5", 28, ranks="0,1"),
        None,
    ),
    "gather at its root: from everybody else": (
        call("gather", payload=64, peer=1, rank=1),
        [("recv", 16, 0), ("recv", 16, 2), ("recv", 16, 3)],
    ),
    "gather elsewhere": (call("gather", payload=64, peer=1, rank=2), [("send", 16, 1)]),
    "scatter at its root": (
        call("scatter", payload=64, peer=0, rank=0),
        [("send", 16, 1), ("send", 16, 2), ("send", 16, 3)],
    ),
    "scatter elsewhere": (call("scatter", payload=64, peer=0, rank=3), [("recv", 16, 0)]),
    "send and receive name the peer within the group": (
        call("send", payload=64, peer=6, ranks="2,6"),
        [("send", 64, 1)],
    ),
    "barrier: one float": (call("barrier"), [("all_reduce", 4, None)]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_call_leaves_these_lines(name):
    asked, lines = CASES[name]
    found = expected_lines(asked, PLAIN_DIALECT)
    assert (None if found is None else [tuple(line) for line in found]) == lines


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (call("all_to_all", "alltoall_base", "4->4", 16), ("all_to_all", 16, None)),
        (call("gather", payload=64, peer=1), ("gather", 64, 1)),
        (call("scatter", payload=64, peer=1), ("scatter", 64, 1)),
        (call("barrier"), ("all_reduce", 1, None)),
    ],
)
def test_newer_versions_write_one_line(asked, line):
    assert [tuple(found) for found in expected_lines(asked, NEW)] == [line]


DIVIDED = NEW._replace(prints_empty=True, divided=frozenset({32}))


@pytest.mark.parametrize(
    ("asked", "lines"),
    [
        pytest.param(
            call(
                "all_to_all",
                "alltoall_base",
                "4->3",
                16,
                ranks="0,1",
                output_bytes=12,
                input_splits="16,0",
                output_splits="4,8",
            ),
            [("send", 16, 0), ("recv", 4, 0), ("send", 0, 1), ("recv", 8, 1)],
            id="splits",
        ),
        pytest.param(
            call("all_to_all", "alltoall", "2;2->2;2", 16, ranks="0,1", output_bytes=16),
            [("send", 8, 0), ("recv", 8, 0), ("send", 8, 1), ("recv", 8, 1)],
            id="lists",
        ),
        pytest.param(
            call("all_to_all", "alltoall_base", "8->8", 32, ranks="0,1", output_bytes=32),
            [("send", 16, 0), ("recv", 16, 0), ("send", 16, 1), ("recv", 16, 1)],
            id="equal splits",
        ),
        pytest.param(
            call("all_to_all", "alltoall_base", "4->4", 16, ranks="0,1"),
            [("all_to_all", 16, None)],
            id="none",
        ),
    ],
)
def test_with_splits_newer_versions_write_messages_empty_ones_too(asked, lines):
    assert [tuple(line) for line in expected_lines(asked, DIVIDED)] == lines
