"""Real gloo ranks that issue different collectives, and programs whose ranks legitimately differ.

The tests check what verify and dump report about both.
"""

import contextlib
import faulthandler
import inspect
import json
import os
import tempfile
import threading
import time
from functools import cache
from pathlib import Path

import pytest

from commprof.ledger.verification import verify
from commprof.sampling.job_dump import take_dump
from commprof.trace.reader import open_run
from support.hanging import await_stillness, hanging_ranks
from support.recording import record

pytestmark = pytest.mark.ranks


def line_of(text, function):
    """Return ``file.py:N``, where N is the line of ``function`` that contains ``text``."""
    lines, first = inspect.getsourcelines(function)
    number = next(n for n, line in enumerate(lines, first) if text in line)
    return f"{Path(inspect.getsourcefile(function)).name}:{number}"


def equal_reduces(group=None, count=3):
    import torch
    import torch.distributed as dist

    for _ in range(count):
        dist.all_reduce(torch.ones(64), group=group)


def other_reduction(rank, group):
    import torch
    import torch.distributed as dist

    equal_reduces(group)
    dist.all_reduce(torch.ones(64), dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM, group=group)
    equal_reduces(group)


def other_dtype(rank, group):
    import torch
    import torch.distributed as dist

    equal_reduces(group)
    dist.all_reduce(torch.ones(64, dtype=torch.int32 if rank == 1 else torch.float32), group=group)
    equal_reduces(group)


def larger_buffer(rank, group):
    """Broadcast into a larger buffer. gloo accepts a message that is shorter than the buffer."""
    import torch
    import torch.distributed as dist

    equal_reduces(group)
    dist.broadcast(torch.ones(100 if rank == 0 else 200), 0, group=group)
    equal_reduces(group)


def smaller_part(rank, group):
    import torch
    import torch.distributed as dist

    equal_reduces(group)
    parts = [torch.zeros(10), torch.zeros(10)] if rank == 0 else None
    dist.gather(torch.ones(10 if rank == 0 else 5), parts, 0, group=group)
    equal_reduces(group)


def larger_split(rank, group):
    """Receive into a larger split. In an all_to_all gloo also accepts a part that is shorter than the buffer."""
    import torch
    import torch.distributed as dist

    given, expected = (([1, 2], [1, 3]), ([3, 4], [5, 4]))[rank]
    for _ in range(2):
        dist.all_to_all_single(torch.zeros(4), torch.ones(4), [1, 3] if rank == 0 else [3, 1],
                               [1, 3] if rank == 0 else [3, 1], group=group)  # fmt: skip
    dist.all_to_all_single(torch.zeros(sum(expected)), torch.ones(sum(given)), expected, given, group=group)


def skipped(rank, group):
    """Skip the second of three broadcasts of step 1 on rank 1.

    Rank 0 never waits for any of the broadcasts.
    """
    import torch
    import torch.distributed as dist

    import commprof

    for step in range(3):
        commprof.step(step)
        for layer in range(3):
            if (rank, step, layer) == (1, 1, 1):
                continue
            with commprof.tag("other", module=f"layers.{layer}"):
                WORK.append(dist.broadcast(torch.ones(64), 0, group=group, async_op=True))


def branches(rank, group):
    import torch
    import torch.distributed as dist

    if rank == 0:
        WORK.append(dist.broadcast(torch.ones(8), 0, group=group, async_op=True))
    else:
        WORK.append(dist.gather(torch.ones(8), None, 0, group=group, async_op=True))


def lone_send(rank, group):
    import torch
    import torch.distributed as dist

    if rank == 0:
        WORK.extend(dist.isend(torch.ones(size), 1, group=group) for size in (8, 16, 8))
    else:
        WORK.extend(dist.irecv(torch.ones(size), 0, group=group) for size in (8, 16))


WORK: list[object] = []  # handles that are never waited for
PLANTED = (
    other_reduction, other_dtype, larger_buffer, smaller_part, larger_split, branches, lone_send, skipped
)  # fmt: skip


def all_planted(rank, world, names):
    """Run each program in a group of its own, and write the names of the groups on rank 0."""
    import torch.distributed as dist

    groups = [dist.new_group([0, 1]) for _ in PLANTED]
    if rank == 0:
        Path(names).write_text(json.dumps([group.group_name for group in groups]))
    for body, group in zip(PLANTED, groups, strict=True):
        body(rank, group)
    time.sleep(0.5)


@cache
def planted():
    """Return the verdict on all programs, the reported difference of each program, and a dump."""
    with tempfile.TemporaryDirectory() as folder:
        run, names = Path(folder) / "run", Path(folder) / "names"
        # The processes exit without destroying their groups.
        with hanging_ranks(run, 2, all_planted, str(names)) as pids:
            for pid in pids.values():
                os.waitpid(pid, 0)
        verdict = verify(open_run(run))
        dump = take_dump(run)
        by_name = dict(zip(json.loads(names.read_text()), PLANTED, strict=True))
    found = {by_name[each.pg].__name__: each for each in verdict.differences}
    assert len(found) == len(verdict.differences)
    return verdict, found, dump


SAID = {
    "other_reduction": ("all_reduce #3 (256 bytes, float32, SUM)", "all_reduce #3 (256 bytes, float32, MAX)"),
    "other_dtype": ("all_reduce #3 (256 bytes, float32, SUM)", "all_reduce #3 (256 bytes, int32, SUM)"),
    "larger_buffer": (
        "broadcast #3 (400 bytes, float32, root 0)",
        "broadcast #3 (800 bytes, float32, root 0)",
    ),
    "smaller_part": ("gather #3 (80 bytes, float32, root 0)", "gather #3 (40 bytes, float32, root 0)"),
    "branches": ("broadcast #0 (32 bytes, float32, root 0)", "gather #0 (64 bytes, float32, root 0)"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", list(SAID))
def test_what_gloo_lets_pass_is_named(name):
    verdict, found, dump = planted()
    mine, theirs = SAID[name]
    difference = found[name]
    body = next(body for body in PLANTED if body.__name__ == name)
    assert (str(verdict.state), verdict.exit_code) == ("mismatch", 1)
    assert " (0-1) did not issue the same before the first step: rank 0 issued " + mine in difference.sentence
    assert "; rank 1 issued " + theirs in difference.sentence
    assert line_of("dist.", body) in difference.sentence
    assert difference.sentence in dump.verdict.notes


def test_a_rank_that_skips_one_of_equal_collectives_is_named_with_module_and_step():
    _, found, dump = planted()
    difference = found["skipped"]
    done, left_out = difference.conducts
    assert (done.ranks, done.skipped, left_out.ranks, left_out.skipped) == ((0,), False, (1,), True)
    assert (done.call.step, done.call.module, done.call.op) == (1, "layers.1", "broadcast")
    assert line_of("dist.broadcast(", skipped) in done.call.call_site
    said = difference.sentence
    assert "in step 1: rank 0 issued broadcast #4 (256 bytes, float32, root 0) for module layers.1" in said
    assert (
        "; rank 1 did not, and issued broadcast #4 (256 bytes, float32, root 0) for module layers.2" in said
    )
    assert said in dump.verdict.notes


def test_splits_that_two_ranks_give_differently_are_named():
    verdict, found, dump = planted()
    difference = found["larger_split"]
    said = f"in all_to_all #2 of group {difference.pg} (0-1) before the first step, rank 0 sends 8 bytes to rank 1, which "
    assert difference.sentence.startswith(
        f"{said}expects 20: rank 0 issued all_to_all #2 (12 bytes, float32) at "
    )
    assert "; rank 1 issued all_to_all #2 (28 bytes, float32) at " in difference.sentence
    assert difference.sentence.count(line_of("expected, given, group=group", larger_split)) == 2
    assert any(difference.sentence in sentence for sentence in verdict.sentences)
    assert difference.sentence in dump.verdict.notes


def smaller_split(rank, world):
    """Receive less than the peer sends. gloo then ends the process of the receiving rank."""
    import torch
    import torch.distributed as dist

    # Without this, faulthandler would print the stack of rank 1.
    faulthandler.disable()
    equal_reduces()
    given, expected = (([1, 2], [1, 3]), ([3, 4], [1, 4]))[rank]
    with contextlib.suppress(RuntimeError):  # rank 0 raises because its peer is gone
        dist.all_to_all_single(torch.zeros(sum(expected)), torch.ones(sum(given)), expected, given)


@pytest.mark.long
def test_a_program_that_died_of_unequal_splits(tmp_path):
    run = tmp_path / "run"
    with hanging_ranks(run, 2, smaller_split) as pids:
        for pid in pids.values():
            os.waitpid(pid, 0)
        dump = take_dump(run)
    said = "in all_to_all #3 of group 0 (0-1) before the first step, rank 0 sends 8 bytes to rank 1, which expects 4: "
    assert dump.verdict.kind == "different"
    assert dump.verdict.sentence.startswith(said)
    assert "; rank 1 waited in all_to_all #3 of group default_pg (28 B float32, " in dump.verdict.sentence
    (found,) = verify(open_run(run)).differences
    assert found.sentence.startswith(said)


def test_a_send_without_its_recv_is_named():
    _, found, _ = planted()
    said = found["lone_send"].sentence
    assert said.startswith("rank 0 sent rank 1 3 messages (128 bytes) in group ")
    assert (
        ", and 2 (96 bytes) were received (before the first step): rank 0 issued send #2 to rank 1 (32 bytes, float32) at"
        in said
    )
    assert line_of("dist.isend(", lone_send) in said
    assert said.endswith("; rank 1 did not, and issued nothing more in the group")


def test_the_differences_as_json():
    verdict, found, dump = planted()
    rows = {row["pg"]: row for row in verdict.as_dict()["differences"]}
    assert len(rows) == len(PLANTED) == len(found)
    row = rows[found["skipped"].pg]
    assert (row["step"], row["pg_seq"], row["sentence"]) == (1, 4, found["skipped"].sentence)
    assert [(each["ranks"], each["skipped"], each["call"]["module"]) for each in row["ranks"]] == [
        ([0], False, "layers.1"),
        ([1], True, "layers.2"),
    ]
    collectives = {pg: row for pg, row in rows.items() if pg != found["lone_send"].pg}
    assert {each["pg"] for each in dump.as_dict()["differences"]} == set(collectives)


def uneven_parts(rank, world):
    """Exchange parts of unequal sizes, and objects.

    In the last broadcast the tensor of the source has a different shape than the tensors of the other ranks.
    """
    import torch
    import torch.distributed as dist

    parts = [1 + rank + other for other in range(world)]
    dist.all_to_all_single(torch.zeros(sum(parts)), torch.ones(sum(parts)), parts, parts)
    dist.all_gather_object([None] * world, {"rank": "x" * rank})
    dist.broadcast_object_list([rank] if rank == 0 else [None], 0)
    dist.broadcast(torch.ones(4, 8).contiguous() if rank == 0 else torch.ones(8, 4), 0)


def from_elsewhere(rank, world):
    """Call a broadcast from different places on the source and on other ranks.

    One rank also evaluates in a group of its own.
    """
    import torch
    import torch.distributed as dist

    alone = dist.new_group([0])
    for _ in range(3):
        if rank == 0:
            dist.broadcast(torch.arange(8.0), 0)
            dist.all_reduce(torch.ones(4), group=alone)
        else:
            dist.broadcast(torch.zeros(8), 0)
        dist.scatter(torch.zeros(4), [torch.ones(4)] * world if rank == 1 else None, 1)
        dist.gather(torch.zeros(4), [torch.ones(4) for _ in range(world)] if rank == 0 else None, 0)


def refused_call(rank, world):
    """Issue a call that torch refuses.

    The call reaches no rank, even if a sequence number was assigned to it.
    """
    import torch
    import torch.distributed as dist

    equal_reduces()
    if rank == 1:
        with pytest.raises((RuntimeError, ValueError)):
            dist.all_reduce(torch.ones(4, 4).to_sparse(), dist.ReduceOp.MAX)
    dist.all_gather([torch.zeros(4) for _ in range(world)], torch.ones(4))
    equal_reduces()


def groups_anew(rank, world):
    """Destroy a group and create another one."""
    import torch
    import torch.distributed as dist

    for size in (4, 8):
        group = dist.new_group([0, 1])
        for _ in range(size):
            dist.all_reduce(torch.ones(size), group=group)
        dist.destroy_process_group(group)


def messages_by_tag(rank, world):
    """Receive messages in a different order than they were sent."""
    import torch
    import torch.distributed as dist

    if rank == 0:
        handles = [dist.isend(torch.ones(4 * (1 + tag)), 1, tag=tag) for tag in (0, 1)]
    else:
        handles = [dist.irecv(torch.ones(4 * (1 + tag)), 0, tag=tag) for tag in (1, 0)]
    for handle in handles:
        handle.wait()


def threads_by_chance(rank, world):
    """Run a thread with a group of its own beside the main thread.

    The order of their collectives is left to chance.
    """
    import torch
    import torch.distributed as dist

    group = dist.new_group([0, 1])

    def fetch():
        for _ in range(20):
            dist.all_gather([torch.zeros(4) for _ in range(world)], torch.ones(4), group=group)

    thread = threading.Thread(target=fetch, name="prefetch")
    thread.start()
    for _ in range(20):
        dist.all_reduce(torch.ones(8))
        time.sleep(0.001 * rank)
    thread.join()


def groups_by_turns(rank, world):
    """Use several groups with the same ranks, always in the same order, and a group of rank 0 only."""
    import torch
    import torch.distributed as dist

    groups = [dist.new_group([0, 1]) for _ in range(3)]
    alone = dist.new_group([0])
    for _ in range(4):
        handles = [dist.all_reduce(torch.ones(8), group=group, async_op=True) for group in groups]
        if rank == 0:
            dist.barrier(group=alone)
        for handle in handles[:: 1 - 2 * rank]:  # the order of waits is not an order of issue
            handle.wait()


RIGHT = (
    uneven_parts, from_elsewhere, refused_call, groups_anew, messages_by_tag, threads_by_chance, groups_by_turns
)  # fmt: skip


def all_right(rank, world):
    for body in RIGHT:
        body(rank, world)


def test_right_programs_raise_no_alarm(tmp_path):
    run, _ = record(tmp_path / "run", 2, all_right)
    assert run.health.raised == 1  # the call that torch refused
    verdict = verify(run)
    assert (verdict.differences, verdict.disagreements) == ((), ()), verdict.disagreements
    assert verdict.order_differences == ()
    situation = take_dump(tmp_path / "run").situation
    assert (situation.differences, situation.order_differences) == ([], [])


def two_groups(rank, world, is_async):
    """Issue collectives of two groups, both of which contain ranks 0 and 1.

    In step 1, rank 1 issues them in the opposite order.
    """
    import torch
    import torch.distributed as dist

    import commprof

    low, pair = dist.new_group([0, 1, 2]), dist.new_group([0, 1])
    for step in range(3):
        commprof.step(step)
        groups = [low, pair] if rank < 2 else [low] if rank == 2 else []
        if (rank, step) == (1, 1):
            groups.reverse()
        for group in groups:
            with commprof.tag("other", module="low" if group is low else "pair"):
                work = dist.all_reduce(torch.ones(8), group=group, async_op=is_async)
            WORK.append(work)
        if is_async:
            for work in WORK:
                work.wait()


@pytest.mark.sampled
@pytest.mark.parametrize("is_async", [True, False], ids=["ends", "hangs"])
def test_collectives_of_two_groups_in_different_orders_are_named(is_async, tmp_path):
    """A different order of the collectives of two groups is reported.

    gloo runs collectives of several groups concurrently. Asynchronous collectives do not hang there, but
    synchronous ones do.
    """
    run = tmp_path / "run"
    with hanging_ranks(run, 4, two_groups, is_async) as pids:
        if is_async:
            for pid in pids.values():
                os.waitpid(pid, 0)
        else:
            await_stillness(run, 5 + 3)
        dump = take_dump(run, watch_seconds=0.2)
    verdict = verify(open_run(run))
    (found,) = verdict.order_differences
    (mine, theirs), said = found.orders, found.sentence
    assert said.startswith(
        "rank 0 and rank 1 issued collectives of two groups in different orders in step 1, which can deadlock: rank 0 "
        "issued all_reduce #1 (32 bytes, float32, SUM) for module low at "
    )
    assert (mine.ranks, theirs.ranks) == ((0,), (1,))
    assert (mine.first.call.module, mine.second.group, mine.is_second_issued) == (
        "low",
        theirs.first.group,
        is_async,
    )
    assert (theirs.first.call.module, theirs.second.group) == ("pair", mine.first.group)
    assert line_of("work = dist.all_reduce", two_groups) in said
    assert said in dump.verdict.notes
    assert dump.verdict.kind == ("ended" if is_async else "ring")
    # The code is 3 because the run has no config. It would also be 3 without the different order.
    assert (verdict.differences, verdict.exit_code) == ((), 3)


def stops(rank, world):
    equal_reduces()
    if rank == 1:
        time.sleep(300)
    equal_reduces()


@pytest.mark.long
def test_a_rank_that_stopped_earlier_is_no_difference(tmp_path):
    with hanging_ranks(tmp_path / "run", 2, stops):
        await_stillness(tmp_path / "run", 7)
        assert take_dump(tmp_path / "run", watch_seconds=0.2).situation.differences == []
    run = open_run(tmp_path / "run")
    assert run.health.state == "killed"
    assert verify(run).differences == ()
