"""Test which communicators are grouped, and which rank of the job each process has.

The result follows from a rule, or it is unknown and a reason is given.
"""

from __future__ import annotations

import pytest

from commprof.nccl.grammar.line_prefix import Origin
from commprof.nccl.grammar.lines import EndLine, InitLine
from commprof.nccl.grammar.topology import read_topology
from commprof.nccl.state.communicators import Communicator, Registry, communicators_table
from commprof.nccl.state.membership import find_families, find_global_ranks
from commprof.nccl.tables.missing_evidence import Findings, remarks


class Log:
    """Feeds a registry with the lines of a log, one after the other."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.line = 0

    def process(self, pid: int, file: int = 0, host: str = "a", tid: int | None = None):
        origin = Origin(host.encode(), pid, tid or pid, 0, True)
        return origin, self.registry.process(origin, file)

    def init(
        self, pid: int, comm: int, rank: int, nranks: int, comm_id: str | None = None, **more
    ) -> Communicator:
        file, host, tid = more.pop("file", 0), more.pop("host", "a"), more.pop("tid", None)
        device, bus = more.pop("device", rank), more.pop("bus", None)
        stages = more.pop("stages", ("start", "complete"))
        origin, process = self.process(pid, file, host, tid)
        communicator = None
        for stage in stages:
            self.line += 1
            line = InitLine(
                origin=origin, stage=stage, api=more.get("api"), comm=b"0x%x" % comm, rank=rank, nranks=nranks,
                cuda_device=device, bus_id=(bus or b"%x000" % (device + 1)),
                comm_id=None if comm_id is None else comm_id.encode(), parent=more.get("parent"),
                split=more.get("split"), color=more.get("color"), form="init_api",
            )  # fmt: skip
            communicator = self.registry.init(process, line, file, self.line)
        return communicator

    def op(
        self, pid: int, comm: int, nranks: int | None = None, file: int = 0, host: str = "a"
    ) -> Communicator:
        _, process = self.process(pid, file, host)
        self.line += 1
        return self.registry.operation(process, b"0x%x" % comm, nranks, file, self.line)

    def end(self, pid: int, comm: int, file: int = 0) -> None:
        origin, process = self.process(pid, file)
        self.registry.end(process, EndLine(origin, "abort", b"0x%x" % comm))

    def result(self) -> list[dict[str, object]]:
        communicators = self.registry.communicators
        membership = find_families(communicators)
        find_global_ranks(communicators, membership)
        return communicators_table(communicators, self.registry.processes, ["log"] * 9).to_pylist()


def test_containers_with_equal_host_and_pid_in_two_files_are_two_processes():
    log = Log()
    for rank in (0, 1):
        log.init(21, 0x10 + rank, rank, 2, "0xa", file=rank, device=0)
        log.op(21, 0x10 + rank, 2, file=rank)
    rows = log.result()
    assert [(r["pid"], r["rank"], r["global_rank"], r["operations"]) for r in rows] == [
        (21, 0, 0, 1),
        (21, 1, 1, 1),
    ]
    assert len(log.registry.processes) == 2


def test_containers_whose_addresses_are_equal_too_stay_apart():
    log = Log()
    for rank in (0, 1):
        log.init(21, 0x10, rank, 2, "0xa", file=rank, device=0)
        log.op(21, 0x10, 2, file=rank)
    rows = log.result()
    assert [(r["rank"], r["global_rank"], r["operations"]) for r in rows] == [(0, 0, 1), (1, 1, 1)]
    # Host, pid, address and epoch still identify one row.
    assert len({(r["host"], r["pid"], r["comm"], r["comm_epoch"]) for r in rows}) == 2


def test_a_log_that_goes_on_in_a_second_file_is_one_process():
    log = Log()
    for rank in (0, 1):
        log.init(20 + rank, 0x10 + rank, rank, 2, "0xa", file=0)
    for rank in (0, 1):
        assert log.op(20 + rank, 0x10 + rank, 2, file=1).rank == rank
        log.init(20 + rank, 0x20 + rank, rank, 2, "0xb", file=1)
    rows = log.result()
    assert [(r["family"], r["rank"], r["global_rank"]) for r in rows] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 1, 1),
    ]


def test_a_second_file_that_begins_with_a_new_communicator_is_joined_when_no_family_holds_both():
    log = Log()
    for rank in (0, 1):
        log.init(20 + rank, 0x10 + rank, rank, 2, "0xa", file=0)
    for rank in (0, 1):
        log.init(20 + rank, 0x20 + rank, rank, 2, "0xb", file=1)
        assert log.op(20 + rank, 0x10 + rank, 2, file=1).rank == rank
    assert [r["global_rank"] for r in log.result()] == [0, 1, 0, 1]


def test_two_containers_in_one_stream_are_told_apart_by_their_cards():
    log = Log()
    for rank in (0, 1):
        log.init(21, 0x10 + rank, rank, 2, "0xa", device=0, bus=b"%x000" % (rank + 1))
    assert [(r["rank"], r["global_rank"]) for r in log.result()] == [(0, 0), (1, 1)]


def test_ranks_that_nothing_tells_apart_have_no_global_rank_and_say_so():
    log = Log()
    for rank in (0, 1):
        log.init(21, 0x10 + rank, rank, 2, "0xa", device=0, bus=b"1000")
    log.op(21, 0x30, 2)
    rows = log.result()
    assert {r["global_rank"] for r in rows} == {None}
    assert "share a process and a device" in rows[0]["reason"]


@pytest.mark.parametrize("comm_ids", [("0xa", "0xb"), (None, None)])
def test_a_restart_is_a_second_world(comm_ids):
    log = Log()
    for attempt, comm_id in enumerate(comm_ids):
        # An elastic restart may give a process on the same device a different rank.
        for rank in (0, 1):
            log.init(100 * (attempt + 1) + rank, 0x10 + rank, (rank + attempt) % 2, 2, comm_id, device=rank)
    rows = log.result()
    assert [r["family"] for r in rows] == [0, 0, 1, 1]
    assert [(r["rank"], r["global_rank"]) for r in rows] == [(0, 0), (1, 1), (1, 1), (0, 0)]


def test_a_restart_within_the_same_pids_that_renumbers_leaves_global_ranks_open():
    log = Log()
    for attempt, comm_id in enumerate(("0xa", "0xb")):
        for rank in (0, 1):
            log.init(10 + rank, 0x10 + rank, (rank + attempt) % 2, 2, comm_id, device=rank)
    rows = log.result()
    assert {r["global_rank"] for r in rows} == {None}
    assert all("number them differently" in r["reason"] for r in rows)


def test_an_address_that_is_used_again_is_another_communicator():
    log = Log()
    log.init(10, 0x10, 0, 2, "0xa")
    log.end(10, 0x10)
    log.op(10, 0x10, 2)
    log.init(10, 0x10, 1, 4, "0xb")
    log.init(10, 0x10, 1, 4, "0xc")
    rows = log.result()
    assert [(r["comm_epoch"], r["comm_id"], r["rank"], r["ended"]) for r in rows] == [
        (0, "0xa", 0, "abort"), (1, None, None, None), (2, "0xb", 1, None), (3, "0xc", 1, None),
    ]  # fmt: skip


def test_several_ranks_in_one_process_are_told_apart_by_device():
    log = Log()
    for rank in range(4):
        log.init(10, 0x10 + rank, rank, 4, "0xa", tid=100 + rank)
    assert [r["global_rank"] for r in log.result()] == [0, 1, 2, 3]


def split(log: Log, comm: int, color: int, **more) -> None:
    for rank in (0, 1):
        log.init(
            10 + rank, comm + rank, rank, 2, more.get("comm_id"), device=rank, parent=b"0x%x" % (0x10 + rank),
            color=color, split=more.get("split"), api=b"ncclCommSplit",
        )  # fmt: skip


def test_a_split_with_the_colour_of_an_earlier_one_repeats_its_id_and_is_another_family():
    log = Log()
    for rank in (0, 1):
        log.init(10 + rank, 0x10 + rank, rank, 2, "0xa")
    split(log, 0x20, 5, comm_id="0xf")
    split(log, 0x30, 5, comm_id="0xf")
    assert [r["family"] for r in log.result()] == [0, 0, 1, 1, 2, 2]


def test_splits_without_id_are_joined_by_parent_count_and_colour():
    log = Log()
    for rank in (0, 1):
        log.init(10 + rank, 0x10 + rank, rank, 2, "0xa")
    split(log, 0x20, 5, split=b"splitCount 1")
    split(log, 0x30, 5, split=b"splitCount 2")
    split(log, 0x40, 6, split=b"childCount 2")
    rows = log.result()
    assert [r["family"] for r in rows] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [r["parent"] for r in rows[2:4]] == ["0x10", "0x11"]
    assert [r["reason"] for r in rows] == [None] * 8


def test_a_split_whose_parent_the_log_does_not_show_has_no_family_and_says_so():
    log = Log()
    split(log, 0x20, 5, split=b"splitCount 1")
    rows = log.result()
    assert {r["family"] for r in rows} == {None}
    assert all("it was split from has no init line" in r["reason"] for r in rows)


def test_equal_looking_groups_without_id_stay_ambiguous():
    log = Log()
    for group in (0, 1):
        for rank in (0, 1):
            log.init(
                10 + 2 * group + rank, 0x10 + rank, rank, 2, stages=("complete",), device=2 * group + rank
            )
    rows = log.result()
    assert {r["family"] for r in rows} == {None}
    assert all("no commId distinguishes them" in r["reason"] for r in rows)


def test_part_of_a_smaller_group_without_id_is_no_family():
    log = Log()
    for rank in (0, 1, 2, 3):
        log.init(10 + rank, 0x10 + rank, rank, 4, stages=("complete",))
    # These are ranks 0 and 2 of two groups of three. The other members of each group cannot be determined.
    log.init(10, 0x20, 0, 3, stages=("complete",))
    log.init(13, 0x23, 2, 3, stages=("complete",), device=3)
    rows = log.result()
    assert [r["family"] for r in rows] == [0, 0, 0, 0, None, None]
    assert "not every rank" in rows[4]["reason"]
    assert [r["global_rank"] for r in rows] == [0, 1, 2, 3, 0, 3]


def test_the_world_may_be_incomplete_where_every_process_is_in_it():
    log = Log()
    log.init(10, 0x10, 15, 64, host="a", device=0, stages=("complete",))
    log.init(10, 0x10, 19, 64, host="b", device=0, stages=("complete",))
    assert [r["global_rank"] for r in log.result()] == [15, 19]


def test_a_communicator_that_grows_or_shrinks():
    log = Log()
    for rank in (0, 1):
        log.init(10 + rank, 0x10 + rank, rank, 2, "0xa")
    for rank in (0, 1):
        log.init(10 + rank, 0x20 + rank, rank, 3, parent=b"0x%x" % (0x10 + rank), split=b"childCount 1", color=0,
                 api=b"ncclCommGrow")  # fmt: skip
    log.init(12, 0x22, 2, 3, "0xb", api=b"ncclCommGrow")
    for rank in (0, 1):
        log.init(10 + 2 * rank, 0x30 + rank, rank, 2, parent=b"0x%x" % (0x20 + 2 * rank), split=b"childCount 1",
                 color=0, device=2 * rank, api=b"ncclCommShrink")  # fmt: skip
    rows = log.result()
    assert [r["family"] for r in rows] == [0, 0, 1, 1, 1, 2, 2]
    assert [r["global_rank"] for r in rows] == [0, 1, 0, 1, 2, 0, 2]


def test_without_an_init_line_the_reason_is_given():
    log = Log()
    log.op(10, 0x10, 2)
    assert "no init line" in log.result()[0]["reason"]


def test_lines_of_topology_belong_to_the_initialisation_of_their_thread():
    log = Log()
    first = log.init(10, 0x10, 0, 2, "0xa", stages=("start",), tid=7)
    second = log.init(10, 0x20, 0, 2, "0xb", stages=("start",), tid=8)
    _, process = log.process(10)
    current = log.registry.current_initialization
    assert current(process, 7) is first
    assert current(process, 8) is second
    assert current(process, 9) is None
    log.init(10, 0x20, 0, 2, "0xb", stages=("complete",), tid=8)
    assert current(process, 8) is first
    log.init(10, 0x10, 0, 2, "0xa", stages=("complete",), tid=7)
    assert current(process, 9) is None  # A late connection may belong to either communicator.
    log.end(10, 0x20)
    assert current(process, 9) is first


def test_the_ranks_of_a_split_are_not_those_of_the_job_where_the_log_does_not_show_what_was_split():
    log = Log()
    for rank in (0, 1):
        log.init(10 + rank, 0x20 + rank, rank, 2, "0xb", parent=b"0x%x" % (0x10 + rank), color=0)
    rows = log.result()
    assert [row["rank"] for row in rows] == [0, 1]
    assert [row["global_rank"] for row in rows] == [None, None]
    assert [row["parent"] for row in rows] == ["0x10", "0x11"]  # The parent is given as printed.
    assert all("split from one that the logs do not show" in row["reason"] for row in rows)


def test_a_late_connection_belongs_to_the_only_communicator_in_which_the_process_has_that_rank():
    log = Log()
    world = log.init(10, 0x10, 3, 8, "0xa", stages=("start", "complete"), tid=7)
    pair = log.init(10, 0x20, 1, 2, "0xb", stages=("start", "complete"), tid=7)
    _, process = log.process(10)

    def owner(text: bytes):
        return log.registry.current_initialization(process, 9, read_topology(text))

    assert owner(b"Channel 00/0 : 3[3] -> 4[4] via P2P/CUMEM") is world
    assert owner(b"Channel 00/0 : 1[3] -> 0[2] via P2P/CUMEM") is pair
    assert owner(b"Channel 00/0 : 2[0] -> 3[1] [receive] via NET/IB/0") is world
    # No communicator has this connection.
    assert owner(b"Channel 00/0 : 3[0] -> 1[1] [receive] via NET/IB/0") is None
    # A communicator of two ranks has no rank 3.
    assert owner(b"Channel 00/0 : 1[0] -> 3[1] via P2P/IPC") is world
    log.init(10, 0x30, 3, 4, "0xc", stages=("start", "complete"), tid=7)
    assert owner(b"Channel 00/0 : 3[3] -> 4[4] via P2P/CUMEM") is world
    # The connection may belong to either communicator.
    assert owner(b"Channel 00/0 : 3[3] -> 2[2] via P2P/CUMEM") is None
    log.op(10, 0x40, 2)
    # The connection may belong to an unknown communicator.
    assert owner(b"Channel 00/0 : 3[3] -> 4[4] via P2P/CUMEM") is None


def test_before_starts_were_printed_no_line_of_topology_is_given_away_early():
    log = Log()
    log.init(10, 0x10, 0, 2, stages=("complete",), tid=7)
    _, process = log.process(10)
    assert log.registry.current_initialization(process, 7) is None


def notes(log: Log) -> str:
    log.result()
    nothing_else = Findings(1, 0, 0, False, False, 0, 0, 0, (), False, {}, ())
    return "\n".join(remarks(nothing_else, log.registry.communicators))


def test_remarks_say_what_is_not_known_why_and_what_to_set():
    log = Log()
    for group in (0, 1):
        for rank in (0, 1):
            log.init(
                10 + 2 * group + rank, 0x10 + rank, rank, 2, stages=("complete",), device=2 * group + rank
            )
    assert "Which ranks share 4 communicators is not known: other communicators" in notes(log)
    assert "commId since 2.16" in notes(log)


def test_remarks_name_a_log_that_is_there_twice():
    log = Log()
    for pid in (10, 20):
        log.init(pid, 0x10, 0, 2, "0xa")
    assert "2 communicators is not known: two processes have the same rank and commId" in notes(log)
    assert "Name each log once" in notes(log)


def test_remarks_name_a_restart_that_numbers_processes_anew():
    log = Log()
    for attempt, comm_id in enumerate(("0xa", "0xb")):
        for rank in (0, 1):
            log.init(10 + rank, 0x10 + rank, (rank + attempt) % 2, 2, comm_id, device=rank)
    assert "The rank in the job is not known for 4 communicators" in notes(log)
    assert "NCCL_DEBUG_FILE" in notes(log)


def test_remarks_are_silent_where_all_is_known():
    log = Log()
    for rank in (0, 1):
        log.init(10 + rank, 0x10 + rank, rank, 2, "0xa")
    assert notes(log) == ""
