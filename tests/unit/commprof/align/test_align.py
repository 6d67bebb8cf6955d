"""Test alignment on planted logs.

Alignment finds exactly the lines that were dropped, added or truncated, and changes no other pair.
"""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commprof.align.matching import align
from commprof.nccl.parser import parse_logs
from support import planted_nccl
from support.runs import SyntheticRun
from support.sample import examples

GROUPS = {"0": (0, 1, 2, 3), "dp": (0, 1, 2, 3), "even": (0, 2), "odd": (1, 3), "pair": (0, 1)}
ROOTED = {"broadcast", "reduce", "gather", "scatter"}
OPS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", *sorted(ROOTED)]


def a_run(seed: int, calls: int, backend: str = "nccl", groups=GROUPS) -> SyntheticRun:
    """Return a run with calls of all kinds in several groups.

    Every call except a barrier has a unique size, so that the expected alignment is never ambiguous.
    """
    chance = random.Random(seed)
    run = SyntheticRun(world_size=4, backend=backend)
    for number in range(calls):
        pg, group = chance.choice(sorted(groups.items()))
        op = chance.choice(OPS)
        columns = {"peer": chance.choice(group)} if op in ROOTED else {}
        size = 0 if op == "barrier" else 64 * (number + 1)
        run.add_collective(op, payload_bytes=size, group=group, pg=pg, **columns)
    return run


def plant_and_align(directory: Path, run: SyntheticRun, **planting):
    records = run.table("collectives").to_pylist()
    planted = planted_nccl.plant(records, **planting)
    for name, lines in planted.files.items():
        (directory / name).write_text("\n".join(lines) + "\n")
    parsed = parse_logs(directory)
    return planted, align(run.open(), parsed.ops)


def run_without_lines_of_all_to_all(run: SyntheticRun) -> SyntheticRun:
    """Return the run in a form whose planted log has no lines of the all_to_alls."""

    class Unlogged(SyntheticRun):
        def table(self, name):
            return run.table(name).filter(pc.not_equal(run.table(name)["op"], "all_to_all"))

    shown = Unlogged(world_size=run.world_size, backend=run.backend)
    shown.open = run.open
    return shown


def communicators(report):
    return [SimpleNamespace(**row) for row in report.comm_matches.to_pylist()]


def identity(row):
    return (row["rank"], row["attempt"], row.get("record_pid", row.get("pid")), row["seq"])


@settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 10_000),
    calls=st.integers(1, 80),
    drop=st.integers(0, 8),
    extra=st.integers(0, 8),
    tear=st.integers(0, 4),
    version=st.sampled_from([(2, 4, 7), (2, 8, 3), (2, 18, 1), (2, 21, 5), (2, 27, 3), (2, 30, 7)]),
    call=st.booleans(),
)
def test_what_was_planted_is_found_exactly(tmp_path_factory, seed, calls, drop, extra, tear, version, call):
    directory = tmp_path_factory.mktemp("logs")
    run = a_run(seed, calls)
    planted, report = plant_and_align(
        directory,
        run,
        version=version,
        drop=drop,
        extra=extra,
        tear=tear,
        seed=seed,
        # If the only COLL line of a communicator is lost, its CALL lines are read in place of the COLL line.
        call=call and version > (2, 13, 0) and not drop + tear,
    )
    rows = report.matches.to_pylist()
    missing = {identity(row) for row in rows if row["state"] == "missing"}
    unsure = {identity(row) for row in rows if row["state"] == "ambiguous"}
    lost = {identity(row) for row in planted.dropped + planted.torn}
    # Consecutive barriers are equal, so alignment correctly leaves open which of them was lost.
    assert missing <= lost <= missing | unsure
    added = sorted((entry["file"], entry["text"]) for entry in planted.extra)
    assert report.extra == len(added)
    assert report.torn == len(planted.torn)
    found = sorted(
        (Path(row["file"]).name, planted.files[Path(row["file"]).name][row["line"] - 1])
        for row in rows
        if row["state"] == "extra"
    )
    assert found == added


def test_a_call_that_raised_leaves_no_line(tmp_path):
    run = SyntheticRun(world_size=2, backend="nccl")
    for number in range(6):
        if number == 3:
            run.add_collective("all_reduce", payload_bytes=64, ranks=(1,), status="raised")
        run.add_collective("all_reduce", payload_bytes=64)
    issued = [row for row in run.rows["collectives"] if row["status"] == "ok"]
    everything, run.rows["collectives"] = run.rows["collectives"], issued
    planted = planted_nccl.plant(run.table("collectives").to_pylist())
    run.rows["collectives"] = everything
    for name, lines in planted.files.items():
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    report = align(run.open(), parse_logs(tmp_path).ops)
    assert report.counts == {"matched": 12, "missing": 0, "extra": 0, "ambiguous": 0, "torn": 0}


def test_every_communicator_is_tied_to_its_group(tmp_path):
    run = a_run(1, 200)
    _, report = plant_and_align(tmp_path, run)
    tied = {(c.rank, c.pg, c.group_ranks) for c in communicators(report)}
    expected = {(row["rank"], row["pg"], row["group_ranks"]) for row in run.table("groups").to_pylist()}
    assert tied == expected
    assert (report.missing, report.extra) == (0, 0)


@pytest.mark.parametrize("init", [True, False])
def test_groups_with_equal_ranks_are_told_apart_by_what_they_did(tmp_path, init):
    run = SyntheticRun(world_size=2, backend="nccl")
    for number in range(30):
        run.add_collective("all_reduce", payload_bytes=4 * (1 + number % 3), pg="0")
        run.add_collective("all_gather", payload_bytes=8 * (1 + number % 5), pg="1")
    _, report = plant_and_align(tmp_path, run, init=init)
    assert (report.missing, report.extra) == (0, 0)
    assert sorted((c.rank, c.pg) for c in communicators(report)) == [(0, "0"), (0, "1"), (1, "0"), (1, "1")]


def test_lost_lines_in_a_pattern_that_repeats_cost_no_more_than_themselves(tmp_path):
    run = SyntheticRun(world_size=2, backend="nccl")
    for _ in range(100):
        for size in (64, 64, 128, 64, 256):
            run.add_collective("all_reduce", payload_bytes=size)
    planted, report = plant_and_align(tmp_path, run, drop=20, extra=10, seed=3)
    # If one line remains of two equal neighbors, alignment does not guess which one was lost.
    assert report.extra == 10
    assert report.missing < 20
    assert report.matched + report.missing + 3 * (20 - report.missing) >= planted.lines


def test_only_call_lines_are_enough(tmp_path):
    planted, report = plant_and_align(tmp_path, a_run(2, 60), coll=False, call=True, drop=3)
    assert (report.matched, report.missing, report.extra) == (planted.lines - 3, 3, 0)


def test_lists_of_unequal_sizes_become_one_broadcast_or_reduce_per_rank(tmp_path):
    run = SyntheticRun(world_size=2, backend="nccl")
    run.add_collective("all_gather", payload_bytes=40, backend_method="allgather", sizes="4->4;6")
    run.add_collective("reduce_scatter", payload_bytes=40, backend_method="reduce_scatter", sizes="4;6->4")
    run.add_collective(
        "all_gather", payload_bytes=80, backend_method="allgather_into_tensor_coalesced", sizes="4;6->8;12"
    )
    planted, report = plant_and_align(tmp_path, run)
    logged = [line for lines in planted.files.values() for line in lines if "opCount" in line]
    assert [sum(f"INFO {op}:" in line for line in logged) for op in ("Broadcast", "Reduce", "AllGather")] == [
        4,
        4,
        4,
    ]
    assert (report.matched, report.missing, report.extra) == (12, 0, 0)


def test_sends_and_receives_match_by_peer(tmp_path):
    run = SyntheticRun(world_size=4, backend="nccl")
    for size in (8, 16):
        run.add_collective("send", payload_bytes=size, ranks=(0,), peer=1)
        run.add_collective("send", payload_bytes=size, ranks=(0,), peer=2)
        run.add_collective("recv", payload_bytes=size, ranks=(1,), peer=0)
        run.add_collective("recv", payload_bytes=size, ranks=(2,), peer=0)
    _, report = plant_and_align(tmp_path, run)
    assert (report.matched, report.missing, report.extra) == (8, 0, 0)


def test_splits_that_no_record_holds_are_reported_and_not_guessed(tmp_path):
    run = SyntheticRun(world_size=2, backend="nccl")
    run.add_collective("all_reduce", payload_bytes=64)
    run.add_collective("all_to_all", payload_bytes=28, sizes="7->5")  # The format of schema 1.
    run.add_collective("all_to_all", payload_bytes=28, sizes="7->7", input_splits="?", output_splits="?")
    _, report = plant_and_align(tmp_path, run_without_lines_of_all_to_all(run))
    reasons = {row["reason"] for row in report.matches.to_pylist() if row["state"] == "missing"}
    assert report.unclear == 4
    assert (report.matched, report.missing, report.extra) == (2, 4, 0)
    assert all("the record does not have their sizes" in reason for reason in reasons)


def plant_exchanges(run, sent, method):
    """Add an all_to_all of float32 in which rank i sends ``sent[i][j]`` elements to rank j."""
    for rank, row in enumerate(sent):
        column = [other[rank] for other in sent]
        if method == "alltoall":
            sizes = ";".join(map(str, row)) + "->" + ";".join(map(str, column))
        else:
            sizes = f"{sum(row)}->{sum(column)}"
        run.add_collective(
            "all_to_all",
            ranks=(rank,),
            payload_bytes=4 * sum(row),
            input_bytes=4 * sum(row),
            output_bytes=4 * sum(column),
            numel=sum(row),
            backend_method=method,
            sizes=sizes,
            input_splits=",".join(str(4 * n) for n in row) if len(set(row)) > 1 else None,
            output_splits=",".join(str(4 * n) for n in column) if len(set(column)) > 1 else None,
        )


@pytest.mark.parametrize("method", ["alltoall_base", "alltoall"])
@pytest.mark.parametrize("version", [(2, 8, 3), (2, 12, 7), (2, 18, 1), (2, 27, 3), (2, 30, 7)])
def test_messages_of_unequal_splits_have_the_sizes_of_the_splits(tmp_path, version, method):
    chance = random.Random(7)
    run = SyntheticRun(world_size=3, backend="nccl")
    run.add_collective("all_to_all", payload_bytes=1200, sizes="300->300")
    for number in range(20):
        run.add_collective("all_reduce", payload_bytes=4 * (1 + number))
        plant_exchanges(
            run, [[chance.choice((0, 1, 5, 100, number)) for _ in range(3)] for _ in range(3)], method
        )
    # Rank 0 sends nothing but receives. Rank 2 receives different numbers of elements and sends equal parts.
    plant_exchanges(run, [[0, 0, 0], [3, 4, 5], [6, 6, 6]], method)
    planted, report = plant_and_align(tmp_path, run, version=version)
    assert planted.lines == report.matched - sum(
        row["parts"] == 0 for row in report.matches.to_pylist() if row["state"] == "matched"
    )
    assert (report.missing, report.extra, report.ambiguous, report.unclear) == (0, 0, 0, 0)


def test_a_message_of_another_size_than_its_split_is_no_pair(tmp_path):
    run = SyntheticRun(world_size=2, backend="nccl")
    plant_exchanges(run, [[100, 200], [300, 400]], "alltoall_base")
    records = run.table("collectives").to_pylist()
    for name, lines in planted_nccl.plant(records).files.items():
        text = "\n".join(lines)
        assert text.count("count 300 ") == 1
        (tmp_path / name).write_text(text.replace("count 300 ", "count 301 "))
    report = align(run.open(), parse_logs(tmp_path).ops)
    assert (report.matched, report.missing, report.extra) == (6, 2, 2)
    rows = report.matches.to_pylist()
    missing = {(row["rank"], row["part"]) for row in rows if row["state"] == "missing"}
    assert missing == {
        (0, 3),
        (1, 0),
        # On rank 0, the recv from rank 1 is the last of four lines. On rank 1, the send to rank 0 is the
        # first.
    }
    assert {row["line_bytes"] for row in rows if row["state"] == "extra"} == {1204}


def test_equal_splits_are_messages_beside_whole_all_to_alls(tmp_path):
    """An all_to_all with equal splits matches Send and Recv lines, and one without splits matches an AlltoAll line.

    With splits, torch never calls ncclAlltoAll. A record does not show whether equal splits were passed.
    """
    run = SyntheticRun(world_size=2, backend="nccl")
    writers = [planted_nccl.Writer("node-0", run.pid(rank), (2, 30, 7), device=rank) for rank in range(2)]
    for rank, writer in enumerate(writers):
        comm = planted_nccl.Communicator(0x55A000001000, rank, 2, 77)
        writer.init(comm)
        for size in (64, 128, 64):
            if size == 64:
                writer.operation(comm, planted_nccl.Operation("AlltoAll", size // 8, 7))
                continue
            for peer in range(2):
                for name in ("Send", "Recv"):
                    writer.operation(comm, planted_nccl.Operation(name, size // 8, 7, 0, peer))
        (tmp_path / f"{rank}.log").write_text("\n".join(writer.lines))
    for size in (64, 128, 64):
        run.add_collective("all_to_all", payload_bytes=size, sizes=f"{size // 4}->{size // 4}")
    report = align(run.open(), parse_logs(tmp_path).ops)
    assert (report.matched, report.missing, report.extra) == (12, 0, 0)


def test_a_communicator_made_anew_continues_its_group(tmp_path):
    writer = planted_nccl.Writer("host-a", 1000, (2, 27, 3))
    run = SyntheticRun(world_size=1, backend="nccl")
    for life in range(2):
        comm = planted_nccl.Communicator(0x55A000001000, 0, 1, 77 + life)
        writer.init(comm)
        for number in range(3):
            size = 4 * (1 + number + 3 * life)
            run.add_collective("all_reduce", payload_bytes=size)
            writer.operation(comm, planted_nccl.Operation("AllReduce", size // 4, 7))
        writer.end(comm)
    (tmp_path / "a.log").write_text("\n".join(writer.lines))
    report = align(run.open(), parse_logs(tmp_path).ops)
    assert (report.matched, report.missing, report.extra) == (6, 0, 0)
    assert [c.comm_epoch for c in communicators(report)] == [0, 1]


def test_a_rank_without_log_is_missing_with_its_reason(tmp_path):
    run = a_run(4, 20, groups={"0": (0, 1, 2, 3)})
    records = run.table("collectives").to_pylist()
    for name, lines in planted_nccl.plant([r for r in records if r["rank"] != 2]).files.items():
        (tmp_path / name).write_text("\n".join(lines))
    report = align(run.open(), parse_logs(tmp_path).ops)
    missing = [row for row in report.matches.to_pylist() if row["state"] == "missing"]
    assert {row["rank"] for row in missing} == {2}
    assert all("the log has no operation of rank 2" in row["reason"] for row in missing)
    assert report.extra == 0


def test_the_log_of_another_run_matches_nothing_and_says_so(tmp_path):
    writer = planted_nccl.Writer("elsewhere", 99, (2, 27, 3))
    comm = planted_nccl.Communicator(0x55A000001000, 0, 8, 5)
    writer.init(comm)
    writer.operation(comm, planted_nccl.Operation("AllReduce", 123, 7))
    (tmp_path / "a.log").write_text("\n".join(writer.lines))
    run = a_run(5, 10)
    report = align(run.open(), parse_logs(tmp_path).ops)
    assert (report.matched, report.extra) == (0, 1)
    assert any("another run" in note for note in report.notes)


def job(ranks: int, sizes=(4000, 8000, 1200), pid: int = 1000) -> SyntheticRun:
    """Return a run with four steps of equal all_reduces and a barrier."""
    run = SyntheticRun(world_size=ranks, backend="nccl")
    for step in range(4):
        for size in sizes:
            run.add_collective("all_reduce", payload_bytes=size, step=step)
        run.add_collective("barrier", step=step)
    for row in run.rows["collectives"]:
        row["pid"] += pid - 1000
    return run


@pytest.mark.parametrize(
    ("logged", "matched", "words"),
    [
        (job(4), 0, "The log has a communicator of 4 ranks and the run has 3: the log is of a larger job."),
        (job(2), 0, "Its largest communicator has 2 ranks; the run has 3."),
        # Barriers are equal in all runs. Calls with different byte counts never form a pair.
        (
            job(3, sizes=(4004, 8004, 1204)),
            3 * 4,
            "More lines are missing (36) than match (12), and 36 lines are extra",
        ),
        (job(3, pid=7000), 3 * 16, "No process of the log has the process id of a rank"),
        (job(3), 3 * 16, None),
    ],
    ids=["larger", "smaller", "other-bytes", "other-processes", "its-own"],
)
def test_a_log_that_may_be_of_another_run_is_told_as_one(tmp_path, logged, matched, words):
    planted = planted_nccl.plant(logged.table("collectives").to_pylist())
    for name, lines in planted.files.items():
        (tmp_path / name).write_text("\n".join(lines))
    report = align(job(3).open(), parse_logs(tmp_path).ops)
    assert report.matched == matched
    assert report.matched + report.missing == 3 * 16 and report.ambiguous == 0
    assert any(words in note for note in report.notes) if words else report.notes == ()


def test_a_log_without_operations_says_what_to_set(tmp_path):
    writer = planted_nccl.Writer("node-0", 1000, (2, 27, 3))
    writer.init(planted_nccl.Communicator(0x55A000001000, 0, 3, 5))
    (tmp_path / "a.log").write_text("\n".join(writer.lines))
    report = align(job(3).open(), parse_logs(tmp_path).ops)
    assert (report.matched, report.missing, report.extra) == (0, 3 * 16, 0)
    assert any("NCCL_DEBUG_SUBSYS=INIT,COLL" in note for note in report.notes)


def test_a_run_on_gloo_is_matched_with_a_word_of_warning(tmp_path):
    _, report = plant_and_align(tmp_path, a_run(6, 20, backend="gloo"))
    assert (report.missing, report.extra) == (0, 0)
    assert any("its collectives do not pass through NCCL" in note for note in report.notes)


def test_empty_sides_are_results(tmp_path):
    (tmp_path / "a.log").write_text("nothing\n")
    run = a_run(7, 3)
    report = align(run.open(), parse_logs(tmp_path).ops)
    assert (report.matched, report.missing, report.extra) == (0, report.matches.num_rows, 0)


def test_the_generator_runs_by_itself_and_marks_what_it_writes(tmp_path):
    run = a_run(8, 10)
    run.write(tmp_path / "run")
    generator = Path(planted_nccl.__file__)
    command = [sys.executable, generator, tmp_path / "run", "--out", tmp_path / "logs", "--drop", "2"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    parsed = parse_logs(tmp_path / "logs")
    assert parsed.generated
    assert all((tmp_path / "logs" / name).read_text().startswith("# GENERATED") for name in parsed.files)
    assert align(run.open(), parsed.ops).missing == 2


def test_the_generator_is_a_second_opinion():
    tree = ast.parse(Path(planted_nccl.__file__).read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert not any(module.startswith(("commprof.nccl", "commprof.align")) for module in imported)
