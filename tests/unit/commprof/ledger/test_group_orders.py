"""Test how ``verify`` and ``dump`` compare the order of collectives across groups between ranks.

The runs are synthetic.
"""

import random

import pytest

from commprof.align.ranks import group_orders
from commprof.ledger.verification import verify
from commprof.sampling.job_dump import take_dump
from support.runs import SyntheticRun

WORLD, PAIR, LOW = ("0", (0, 1, 2, 3)), ("1", (0, 1)), ("2", (0, 1, 2))


def issue(run, rank, *calls, **columns):
    """Add collectives that ``rank`` issues in this order, each given as operation and group."""
    for op, (pg, group) in calls:
        place = {"call_site": f"{op}.py:{pg} f", "module": f"layer.{pg}", "thread": "MainThread"}
        run.add_collective(
            op, payload_bytes=8 * len(group), pg=pg, group=group, ranks=(rank,), **{**place, **columns}
        )


def found_in(run, path):
    """Return the sentences that ``verify`` finds, and assert that ``dump`` finds the same sentences."""
    verdict = verify(run.open())
    found = [each.sentence for each in verdict.order_differences]
    dump = take_dump(run.write(path))
    assert [each.sentence for each in dump.situation.order_differences] == found
    assert set(found) <= set(dump.verdict.notes)
    assert {f"Note: {said}." for said in found} <= set(verdict.sentences)
    return found


def test_two_orders_are_named_with_ranks_steps_modules_and_call_sites(tmp_path):
    run = SyntheticRun(4)
    for step in range(3):
        for rank in range(4):
            calls = [("all_reduce", WORLD), ("all_gather", LOW)] if rank < 3 else [("all_reduce", WORLD)]
            if (step, rank) == (1, 1):
                calls.reverse()
            issue(run, rank, *calls, step=step)
    verdict = verify(run.open())
    (row,) = verdict.as_dict()["order_differences"]
    assert row["step"] == 1
    assert [(each["ranks"], each["first"]["op"], each["second"]["op"]) for each in row["orders"]] == [
        ([0, 2], "all_reduce", "all_gather"),
        ([1], "all_gather", "all_reduce"),
    ]
    assert (row["orders"][0]["first"]["pg"], row["orders"][0]["first"]["module"]) == ("0", "layer.0")
    assert found_in(run, tmp_path / "run") == [
        "ranks 0, 2 and rank 1 issued collectives of two groups in different orders in step 1, which can deadlock: ranks "
        "0, 2 issued all_reduce #1 (32 bytes, float32, SUM) for module layer.0 at all_reduce.py:0 f in group 0 (0-3), then "
        "all_gather #1 (24 bytes, float32) for module layer.2 at all_gather.py:2 f in group 2 (0-2); rank 1 issued "
        "all_gather #1 (24 bytes, float32) for module layer.2 at all_gather.py:2 f in group 2 (0-2), then all_reduce #1 "
        "(32 bytes, float32, SUM) for module layer.0 at all_reduce.py:0 f in group 0 (0-3)"
    ]


def test_another_order_leaves_the_ledger_as_it_is(tmp_path):
    """A program that finished has done its work, so the order is a risk and not a mismatch."""

    def ledger(is_swapped):
        run = SyntheticRun(2)
        for rank in range(2):
            run.add_collective("barrier", group=(0, 1), pg="1", ranks=(rank,), step=0)
            run.add_collective("barrier", group=(0, 1), pg="2", ranks=(rank,), step=0)
        for rank in range(2):
            calls = ["1", "2"][:: -1 if rank and is_swapped else 1]
            for pg in calls:
                run.add_collective("barrier", group=(0, 1), pg=pg, ranks=(rank,), step=1)
        return verify(run.open())

    assert [len(ledger(is_swapped).order_differences) for is_swapped in (False, True)] == [0, 1]
    assert ledger(False).state == ledger(True).state
    assert ledger(False).exit_code == ledger(True).exit_code


def test_across_the_boundary_of_a_step(tmp_path):
    run = SyntheticRun(2)
    for rank in range(2):
        issue(run, rank, ("all_reduce", ("0", (0, 1))), step=0)
        issue(run, rank, *[("all_reduce", ("0", (0, 1))), ("barrier", PAIR)][:: 1 - 2 * rank], step=1)
        issue(run, rank, ("all_reduce", ("0", (0, 1))), step=2)
    (said,) = found_in(run, tmp_path / "run")
    assert said.startswith(
        "rank 0 and rank 1 issued collectives of two groups in different orders in step 1, "
    )
    assert "rank 0 issued all_reduce #1 (16 bytes, float32, SUM) " in said


def test_a_thread_beside_the_main_one_raises_no_alarm(tmp_path):
    """DDP runs next to a thread that prefetches, so the order of their collectives is random."""
    run = SyntheticRun(2)
    rng = random.Random(3)
    for step in range(20):
        for rank in range(2):
            calls = [("all_reduce", "MainThread")] * 2 + [("all_gather", "prefetch")]
            for op, thread in rng.sample(calls, 3):
                group = ("0", (0, 1)) if op == "all_reduce" else PAIR
                issue(run, rank, (op, group), step=step, thread=thread)
    assert found_in(run, tmp_path / "run") == []


def test_threads_whose_names_differ_between_ranks(tmp_path):
    run = SyntheticRun(2)
    for step in range(4):
        for rank in range(2):
            calls = [("all_reduce", WORLD_2), ("barrier", PAIR)]
            issue(
                run,
                rank,
                *calls[:: -1 if (rank, step) == (1, 2) else 1],
                step=step,
                thread=f"Thread-{4 + rank}",
            )
    (said,) = found_in(run, tmp_path / "run")
    assert " in different orders in step 2, " in said


WORLD_2 = ("0", (0, 1))


def test_the_stages_of_a_pipeline_raise_no_alarm(tmp_path):
    """In 1F1B the first stage runs ahead, each stage reduces its own tensors, and messages cross each other."""
    run = SyntheticRun(4)
    stages = {0: ("5", (0, 1)), 1: ("6", (2, 3))}
    for rank in range(4):
        stage, other = rank // 2, (rank + 2) % 4
        passes = "FFBB" if stage == 0 else "FBFB"
        for step in range(3):
            for each in passes:
                is_send = (each == "F") == (stage == 0)
                issue(run, rank, ("all_reduce", stages[stage]), step=step)
                run.add_collective(
                    "send" if is_send else "recv", payload_bytes=8, peer=other, ranks=(rank,), pg="7",
                    group=(rank % 2, rank % 2 + 2), step=step, thread="MainThread",
                )  # fmt: skip
            issue(run, rank, ("all_reduce", ("8", (rank % 2, rank % 2 + 2))), ("barrier", WORLD), step=step)
    assert found_in(run, tmp_path / "run") == []


def test_captured_calls_and_calls_that_raised_have_no_order():
    run = SyntheticRun(2)
    for rank in range(2):
        for columns in ({"captured": True}, {"status": "raised"}):
            issue(run, rank, *[("all_reduce", WORLD_2), ("barrier", PAIR)][:: 1 - 2 * rank], **columns)
        issue(run, rank, ("all_reduce", WORLD_2), ("barrier", PAIR), step=1)
    assert verify(run.open()).order_differences == ()


def test_groups_whose_ranks_differ_anyway_are_left_out(tmp_path):
    """After a collective that one rank skipped, equal numbers belong to different collectives."""
    run = SyntheticRun(2)
    for step in range(3):
        for rank in range(2):
            calls = [("all_reduce", WORLD_2), ("barrier", PAIR)]
            issue(run, rank, *calls[(rank, step) == (1, 1) :], step=step)
    assert verify(run.open()).differences
    assert found_in(run, tmp_path / "run") == []


@pytest.mark.parametrize("state", ["killed", "running"])
def test_ranks_that_stand_in_two_groups_for_each_other(state, tmp_path):
    """Each rank waits in a collective that the other rank has not reached, so neither has issued both."""
    run = SyntheticRun(2, state=state)
    for step in range(2):
        for rank in range(2):
            calls = [("all_reduce", WORLD_2), ("barrier", PAIR)]
            if step == 1:
                calls = [calls[rank]]
            issue(run, rank, *calls, step=step)
    (said,) = found_in(run, tmp_path / "run")
    assert said == (
        "rank 0 and rank 1 issued collectives of two groups in different orders in step 1, which can deadlock: rank 0 "
        "issued all_reduce #1 (16 bytes, float32, SUM) for module layer.0 at all_reduce.py:0 f in group 0 (0-1), and not "
        "yet barrier #1 of group 1 (0-1); rank 1 issued barrier #1 for module layer.1 at barrier.py:1 f in group 1 (0-1), "
        "and not yet all_reduce #1 of group 0 (0-1)"
    )


def test_records_that_are_missing_show_no_order():
    run = SyntheticRun(2, state="killed", lost=3)
    issue(run, 0, ("all_reduce", WORLD_2))
    issue(run, 1, ("barrier", PAIR))
    assert verify(run.open()).order_differences == ()


def random_program(rng):
    """Return groups, the thread that issues in each group, and the collectives in program order."""
    world = rng.randint(2, 5)
    groups = []
    for number in range(rng.randint(2, 4)):
        ranks = tuple(sorted(rng.sample(range(world), rng.randint(1, world))))
        groups.append((str(number), ranks))
    threads = {pg: rng.choice(["MainThread", "MainThread", "prefetch"]) for pg, _ in groups}
    calls = [
        (rng.choice(["all_reduce", "barrier", "all_gather"]), rng.choice(groups), place // 5)
        for place in range(rng.randint(4, 40))
    ]
    return world, threads, calls


def course_of(rng, rank, threads, calls):
    """Return the calls of one rank.

    Each thread keeps the program order, and the threads are interleaved randomly.
    """
    waiting = {}
    for place, call in enumerate(calls):
        if rank in call[1][1]:
            waiting.setdefault(threads[call[1][0]], []).append(place)
    course = []
    while waiting:
        thread = rng.choice(sorted(waiting))
        course.append(waiting[thread].pop(0))
        if not waiting[thread]:
            del waiting[thread]
    return course


def write(run, threads, calls, courses):
    for rank, course in courses.items():
        for place in course:
            op, group, step = calls[place]
            issue(run, rank, (op, group), step=step, thread=threads[group[0]])


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("seed", range(40))
def test_right_programs_raise_no_alarm(seed, tmp_path):
    """There is no alarm however the threads are interleaved and wherever ranks are killed."""
    rng = random.Random(seed)
    world, threads, calls = random_program(rng)
    is_killed = seed % 2 == 1
    run = SyntheticRun(world, state="killed" if is_killed else "complete")
    courses = {rank: course_of(rng, rank, threads, calls) for rank in range(world)}
    if is_killed:
        courses = {rank: course[: rng.randint(0, len(course))] for rank, course in courses.items()}
    write(run, threads, calls, courses)
    assert verify(run.open()).differences == ()
    assert found_in(run, tmp_path / "run") == []


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("seed", range(60))
def test_a_planted_swap_is_found_exactly(seed, tmp_path):
    rng = random.Random(seed)
    while True:
        world, threads, calls = random_program(rng)
        courses = {rank: course_of(rng, rank, threads, calls) for rank in range(world)}
        rank = rng.randrange(world)
        mine = courses[rank]
        places = [
            at
            for at in range(len(mine) - 1)
            if calls[mine[at]][1] != calls[mine[at + 1]][1]
            and threads[calls[mine[at]][1][0]] == threads[calls[mine[at + 1]][1][0]]
            and mine[at] < mine[at + 1]
        ]
        if places:
            break
    at = rng.choice(places)
    first, second = mine[at : at + 2]
    mine[at : at + 2] = second, first
    run = SyntheticRun(world)
    write(run, threads, calls, courses)
    others = sorted((set(calls[first][1][1]) & set(calls[second][1][1])) - {rank})
    found = verify(run.open()).order_differences
    assert len(found) == bool(others)
    for difference in found:
        orders = {order.ranks: (order.first, order.second) for order in difference.orders}
        assert set(orders) == {(rank,), tuple(others)}
        of_rank = orders[(rank,)]
        assert [call.group[0] for call in of_rank] == [calls[second][1][0], calls[first][1][0]]
        numbers = [
            [place for place in courses[rank] if calls[place][1] == calls[each][1]].index(each)
            for each in (second, first)
        ]
        assert [call.call.number for call in of_rank] == numbers
        assert [call.call.step for call in of_rank] == [calls[second][2], calls[first][2]]
        assert orders[tuple(others)] == of_rank[::-1]
    assert len(found_in(run, tmp_path / "run")) == len(found)


def shared_by_pairs(members):
    """Return the groups that each pair of ranks shares, with the ranks that are in all of these groups.

    This is the rule itself, without optimization.
    """
    ranks = sorted(set().union(*members.values()))
    found = {}
    for one in ranks:
        for other in ranks:
            groups = frozenset(
                group for group, inside in members.items() if one in inside and other in inside
            )
            if one < other and len(groups) > 1:
                found[groups] = frozenset(
                    rank for rank in ranks if all(rank in members[group] for group in groups)
                )
    return found


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("most", [0, 2, 10])
def test_shared_groups_are_what_each_pair_of_ranks_shares(monkeypatch, seed, most):
    """Test both algorithms: listing the subsets of a rank's groups (up to ``most``), and comparing pairs of ranks."""
    monkeypatch.setattr(group_orders, "_MOST_LISTED", most)
    chance = random.Random(seed)
    ranks = range(chance.randint(1, 12))
    members = {
        (str(number), "ranks"): set(chance.sample(ranks, chance.randint(1, len(ranks))))
        for number in range(chance.randint(1, 7))
    }
    members |= {
        (f"again {pg}", text): inside for (pg, text), inside in members.items() if chance.random() < 0.2
    }
    assert group_orders.shared_groups(members) == shared_by_pairs(members)


def test_shared_groups_of_a_grid_of_ranks():
    tensor, pipeline, data = 2, 2, 4
    members = {("world", "0-15"): set(range(16))}
    for rank in range(16):
        t, p, d = rank % tensor, rank // tensor % pipeline, rank // (tensor * pipeline)
        for axis, place in (("tensor", (p, d)), ("pipeline", (t, d)), ("data", (t, p))):
            members.setdefault((axis, str(place)), set()).add(rank)
    assert len(members) == 1 + 8 + 8 + 4
    found = group_orders.shared_groups(members)
    assert found == shared_by_pairs(members)
    assert sorted(map(len, found.values())) == [2] * 16 + [data] * 4
