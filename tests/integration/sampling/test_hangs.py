"""Real ranks that hang in different ways.

The tests check the exact text of a dump, and that a dump does not disturb the ranks.
"""

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commprof.sampling.dump_text import dump_text
from commprof.sampling.job_dump import take_dump
from commprof.sampling.live import fingerprint, latest_files
from commprof.sampling.processes import RankProcess, State, state_of
from commprof.sampling.stacks import explain_refusal, py_spy_program
from support.hanging import all_reduces, await_records, await_stillness, hanging_ranks, load_batch

pytestmark = [pytest.mark.ranks, pytest.mark.alone]


def look(run, records, **options):
    await_stillness(run, records)
    return take_dump(run, watch_seconds=0.2, **options)


def line_of(text, function):
    """Return ``file.py:N``, where N is the line of ``function`` that contains ``text``."""
    lines, first = inspect.getsourcelines(function)
    number = next(n for n, line in enumerate(lines, first) if text in line)
    return f"{Path(inspect.getsourcefile(function)).name}:{number}"


def one_rank_sleeps(rank, world):
    all_reduces(5)
    if rank == 1:
        load_batch()
    all_reduces(1, 1 << 20)


def test_a_rank_that_sleeps_in_python_is_named_with_its_place(tmp_path):
    run = tmp_path / "run"
    with hanging_ranks(run, 4, one_rank_sleeps) as pids:
        dump = look(run, 4 * 5 + 3)
        assert [state_of(RankProcess(rank, pid)) for rank, pid in pids.items()] == [State.RUNS] * 4
    waiting, _, missing = dump.verdict.sentence.partition("; ")
    assert waiting.startswith(
        "ranks 0, 2, 3 wait in all_reduce #5 of group default_pg (4.00 MiB float32, issued at "
    )
    assert line_of("dist.all_reduce(", all_reduces) + " all_reduces, " in waiting
    assert missing == (f"rank 1 has not issued it: it is in load_batch ({line_of('time.sleep', load_batch)})")
    assert dump.verdict.kind == "missing" and dump.verdict.hangs
    text = dump_text(dump)
    assert text.startswith(dump.verdict.sentence + "\n")
    assert "ranks 0, 2, 3 have issued all_reduce #5 (4.00 MiB float32) last" in text
    assert "rank 1 has issued all_reduce #4 (1.00 KiB float32) last" in text
    assert "rank 1, main thread, by py-spy, innermost call first:\n    load_batch (" in text
    assert "ranks 0, 2, 3, main thread, by py-spy" in text  # the same stack is printed once


@pytest.mark.long
def test_the_dump_as_json_says_the_same(tmp_path):
    run = tmp_path / "run"
    with hanging_ranks(run, 2, one_rank_sleeps) as pids:
        found = json.loads(json.dumps(look(run, 2 * 5 + 1).as_dict()))
    assert found["hangs"] and found["kind"] == "missing"
    ranks = {row["rank"]: row for row in found["ranks"]}
    assert {rank: row["pid"] for rank, row in ranks.items()} == pids
    assert [ranks[0]["state"], ranks[1]["state"]] == ["runs", "runs"]
    assert [(call["op"], call["pg_seq"], call["payload_bytes"]) for call in ranks[0]["inside"]] == [
        ("all_reduce", 5, 4 << 20)
    ]
    assert ranks[1]["inside"] == [] and ranks[1]["last_completed"]["pg_seq"] == 4
    (wait,) = found["waits"]
    assert (wait["waiting"], wait["missing"]) == ([0], [1])
    frames = next(stack["frames"] for stack in ranks[1]["stacks"] if stack["main"])
    assert frames[0]["function"] == "load_batch" and Path(frames[0]["file"]).name == "hanging.py"


def one_rank_broadcasts(rank, world):
    import torch
    import torch.distributed as dist

    all_reduces(2)
    if rank == 1:
        dist.broadcast(torch.ones(1024), 1)
    else:
        dist.all_reduce(torch.ones(1024))
    all_reduces(1)


def test_ranks_that_issue_different_collectives_are_named_side_by_side(tmp_path):
    run = tmp_path / "run"
    with hanging_ranks(run, 3, one_rank_broadcasts):
        dump = look(run, 3 * 3)
    sentence = dump.verdict.sentence
    assert dump.verdict.kind == "different"
    assert sentence.startswith(
        "at #2 of group default_pg the ranks diverge: ranks 0, 2 issued all_reduce (4.00 KiB float32,"
    )
    assert ", but rank 1 issued broadcast (4.00 KiB float32, issued at" in sentence
    assert "with root 1" in sentence
    assert line_of("dist.broadcast(", one_rank_broadcasts) in sentence


def nobody_sleeps(rank, world):
    import torch
    import torch.distributed as dist

    while True:
        dist.all_reduce(torch.ones(8))
        time.sleep(0.02)


@pytest.mark.long
def test_a_stopped_process_is_named_and_stays_stopped(tmp_path):
    run = tmp_path / "run"
    with hanging_ranks(run, 3, nobody_sleeps) as pids:
        await_records(run, 30)
        os.kill(pids[2], signal.SIGSTOP)
        time.sleep(0.3)
        dump = look(run, 30)
        assert state_of(RankProcess(2, pids[2])) is State.STOPPED
        sentence = dump.verdict.sentence
        assert dump.verdict.hangs
        assert f"its process (pid {pids[2]}) is stopped by a signal" in sentence
        assert sentence.startswith("ranks 0, 1 wait in all_reduce #") or "rank 2" in sentence
        os.kill(pids[2], signal.SIGCONT)
        # The dump did not disturb the ranks.
        assert take_dump(run, stacks=False, watch_seconds=2.0).verdict.kind == "moving"


def send_without_recv(rank, world):
    import torch
    import torch.distributed as dist

    all_reduces(1)
    if rank == 0:
        dist.send(torch.ones(1 << 20), 1)
    else:
        load_batch()


@pytest.mark.long
def test_a_send_that_nobody_receives(tmp_path):
    run = tmp_path / "run"
    with hanging_ranks(run, 2, send_without_recv):
        dump = look(run, 3)
    assert dump.verdict.sentence.startswith(
        "rank 0 waits in send #0 to rank 1 of group default_pg (4.00 MiB float32,"
    )
    assert "; rank 1 has not issued the matching recv: it is in load_batch (" in dump.verdict.sentence


def receive_from_each_other(rank, world):
    import torch
    import torch.distributed as dist

    all_reduces(1)
    dist.recv(torch.ones(8), 1 - rank)


def test_ranks_that_wait_for_each_other_are_a_ring(tmp_path):
    run = tmp_path / "run"
    with hanging_ranks(run, 2, receive_from_each_other):
        dump = look(run, 4)
    sentence = dump.verdict.sentence
    assert dump.verdict.kind == "ring"
    assert sentence.startswith("a ring: rank 0 waits in recv #0 from rank 1 of group default_pg")
    assert "for rank 1, and rank 1 waits in recv #0 from rank 0 of group default_pg" in sentence
    assert sentence.endswith("for rank 0; none of them can continue")


def subgroup_hangs(rank, world):
    import torch.distributed as dist

    pair = dist.new_group([0, 1], group_desc="pair")
    all_reduces(2)
    if rank == 1:
        load_batch()
    if rank == 0:
        all_reduces(1, group=pair)
    all_reduces(1)


@pytest.mark.long
def test_in_a_chain_of_waits_the_first_cause_is_named(tmp_path):
    """In a chain of waits, the dump names the first cause.

    Ranks 2 and 3 wait for rank 0, which itself waits in a group of two for rank 1.
    """
    run = tmp_path / "run"
    with hanging_ranks(run, 4, subgroup_hangs):
        dump = look(run, 4 * 2 + 1 + 2)
    found = dump.as_dict()
    assert sorted((w["call"]["pg_seq"], w["waiting"], w["missing"]) for w in found["waits"]) == [
        (0, [0], [1]),
        (2, [2, 3], [0, 1]),
    ]
    sentence = dump.verdict.sentence
    assert "rank 1: it is in load_batch (" in sentence
    assert "rank 0: it stands in all_reduce #0 of group pair" in sentence


def waits_for_a_handle(rank, world):
    import torch
    import torch.distributed as dist

    all_reduces(1)
    if rank == 1:
        load_batch()
    handles = [dist.all_reduce(torch.ones(64), async_op=True) for _ in range(3)]
    handles[0].wait()


@pytest.mark.long
def test_an_asynchronous_collective_counts_from_its_wait_on(tmp_path):
    run = tmp_path / "run"
    with hanging_ranks(run, 2, waits_for_a_handle):
        dump = look(run, 2 + 3)
    assert dump.verdict.sentence.startswith(
        "rank 0 waits in all_reduce #1 of group default_pg (256 B float32,"
    )
    assert [call["pg_seq"] for call in dump.as_dict()["ranks"][0]["inside"]] == [1]


def everybody_calculates(rank, world):
    all_reduces(3)
    load_batch()


def test_a_long_calculation_is_no_hang(tmp_path):
    run = tmp_path / "run"
    with hanging_ranks(run, 2, everybody_calculates):
        dump = look(run, 6)
    assert dump.verdict.kind == "idle" and not dump.verdict.hangs
    assert dump.verdict.sentence.startswith(
        "no rank waits: none is inside a collective; the last one, all_reduce #2 of group default_pg, ended "
    )


@pytest.mark.long
def test_a_job_that_goes_on_is_said_to_move(tmp_path):
    run = tmp_path / "run"
    with hanging_ranks(run, 2, nobody_sleeps):
        await_records(run, 20)
        dump = take_dump(run, stacks=False, watch_seconds=2.0)
    assert dump.verdict.kind == "moving" and not dump.verdict.hangs
    assert dump.verdict.sentence.startswith(
        "the job makes progress: ranks 0, 1 issued or completed collectives within the "
    )


@pytest.mark.long
def test_stacks_by_faulthandler_where_nothing_may_look_in(tmp_path, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.setenv("COMMPROF_STACKS", "faulthandler")
    with hanging_ranks(run, 3, one_rank_sleeps) as pids:
        dump = look(run, 3 * 5 + 2)
        assert [state_of(RankProcess(rank, pid)) for rank, pid in pids.items()] == [State.RUNS] * 3
        again = take_dump(run)  # the signal may be sent repeatedly
    for found in (dump, again):
        assert "rank 1 has not issued it: it is in load_batch (" in found.verdict.sentence
        assert [report.stacks.source for report in found.situation.reports.values()] == ["faulthandler"] * 3
    text = dump_text(dump)
    assert "rank 1, main thread, by faulthandler, innermost call first:\n    load_batch (" in text
    frames = next(s for s in dump.as_dict()["ranks"][0]["stacks"] if s["main"])["frames"]
    assert "all_reduces" in [frame["function"] for frame in frames]  # although it blocks in C++


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_where_ptrace_is_refused_faulthandler_answers_by_itself(tmp_path):
    """Faulthandler provides the stacks if ptrace is refused.

    The dump is made by a process without SYS_PTRACE, and the ranks have this capability.
    """
    run = tmp_path / "run"
    with hanging_ranks(run, 2, one_rank_sleeps):
        await_stillness(run, 2 * 5 + 1)
        done = run_without_ptrace(sys.executable, "-m", "commprof", "dump", str(run), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "rank 1 has not issued it: it is in load_batch (" in found["sentence"]
    assert [row["stacks_by"] for row in found["ranks"]] == ["faulthandler"] * 2
    refused = run_without_ptrace(py_spy_program(), "dump", "--pid", str(os.getpid()))
    assert explain_refusal(refused.stderr).startswith("py-spy was refused"), refused.stderr


def run_without_ptrace(*command):
    dropping = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]
    return subprocess.run([*dropping, *command], capture_output=True, text=True, timeout=60)


@pytest.mark.long
def test_the_end_of_a_killed_run_is_told_without_stacks(tmp_path):
    run = tmp_path / "run"
    with hanging_ranks(run, 3, one_rank_sleeps):
        await_stillness(run, 3 * 5 + 2)
    before = take_dump(run)
    assert before.verdict.sentence.startswith(
        "ranks 0, 2 waited in all_reduce #5 of group default_pg (4.00 MiB float32,"
    )
    assert (
        "; rank 1 had not issued it: its last collective was all_reduce #4 of group"
        in before.verdict.sentence
    )
    assert "Stacks" not in dump_text(before)
    from commprof.trace.finaliser import finalise

    finalise(run)
    assert not list(run.glob("*.records"))
    after = take_dump(run)  # reads the tables, because the run is finalised
    assert after.verdict.sentence == before.verdict.sentence
    assert not (run / "stacks").exists()  # neither dump requested stacks


def backward_in_one_rank_only(rank, world, sign):
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    for _ in range(2):
        model(torch.ones(4, 64)).sum().backward()
    if rank == 1:
        Path(sign).touch()
        load_batch()
    model(torch.ones(4, 64)).sum().backward()


def test_a_wait_in_cpp_does_not_show_and_the_rank_that_is_behind_does(tmp_path):
    """The dump names the rank that is behind, although the wait in C++ is not recorded.

    DDP's reducer waits for its buckets in C++.
    """
    run, sign = tmp_path / "run", tmp_path / "rank-1-goes-no-further"
    with hanging_ranks(run, 2, backward_in_one_rank_only, str(sign)):
        await_lead(run, sign)
        dump = take_dump(run, watch_seconds=0.2)
    assert dump.verdict.kind == "missing"
    assert dump.verdict.sentence.startswith("rank 0 has issued all_reduce #")
    assert "; rank 1 has not issued it: it is in load_batch (" in dump.verdict.sentence
    assert "and whether it has completed is not known" in dump_text(dump)


def await_lead(run, sign):
    """Wait until rank 0 has issued more than rank 1, which issues nothing after its sign.

    The collectives of DDP itself are not counted.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if sign.exists():
            first, second = (fingerprint(stem)[0] for _, stem in latest_files(run))
            if first > second:
                return
    raise AssertionError("rank 0 did not come to its last collective within 60 s")


def sends_from_a_thread(rank, world):
    """Prepare batches in the main thread, and reduce in another thread of the program.

    On rank 1 this thread does not reach its last collective.
    """
    import threading

    def reduce():
        all_reduces(3)
        if rank == 1:
            load_batch()
        all_reduces(1)

    sender = threading.Thread(target=reduce, name="sender")
    sender.start()
    sender.join()


@pytest.mark.sampled("py-spy")
@pytest.mark.parametrize("by", ["py-spy", "faulthandler"])
def test_the_thread_that_issues_is_the_one_that_is_looked_at(tmp_path, monkeypatch, by):
    monkeypatch.setenv("COMMPROF_STACKS", by)
    if by == "py-spy" and py_spy_program() is None:
        pytest.skip("py-spy is not installed")
    run = tmp_path / "run"
    with hanging_ranks(run, 2, sends_from_a_thread):
        dump = look(run, 2 * 3 + 1)
    waiting, _, missing = dump.verdict.sentence.partition("; ")
    assert " all_reduces in thread sender, " in waiting
    place = line_of("time.sleep", load_batch)
    assert missing == f"rank 1 has not issued it: its thread sender is in load_batch ({place})"
    text = dump_text(dump)
    assert f"rank 0, thread sender in all_reduce #3, by {by}" in text
    assert f"rank 1, thread sender, by {by}, innermost call first:\n    load_batch (" in text
    assert f"ranks 0, 1, main thread, by {by}" in text
    assert ", thread sender, " in text.partition("Groups")[0]
