"""Test the verdict on lateness against simulated jobs with a planted culprit: ranks, hosts, paths, or none."""

from __future__ import annotations

import random
import re
import sys
from types import SimpleNamespace

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from commprof.analysis import api
from commprof.analysis.storage import index
from commprof.analysis.stragglers import late_verdict, slow_paths
from commprof.analysis.stragglers.arrivals import arrivals
from commprof.analysis.stragglers.late_verdict import LATE_RANK, NOBODY, SLOW_TRANSFER, TRANSFERS, UNTOLD
from commprof.analysis.stragglers.slow_paths import SlowPath
from commprof.analysis.stragglers.straggling import straggling
from commprof.analysis.time import partitions
from commprof.trace import reader
from support.simulated_jobs import MS, Call, Compute, Job, Step, Wait, of_ddp, saved

STEPS = 20
MIB = 1 << 20
HOSTS = ["h0", "h1", "h2"]


def verdict(job: Job) -> tuple[str, str]:
    """Return the named culprit and the sentence."""
    run = job.run()
    found = arrivals(
        run.table("collectives"), run.table("clocks"), run.table("clock_offsets"), one_host=False
    )
    said = straggling([found], lambda part: part, 1, dict(enumerate(job.hosts))).ranks.attrs
    return said["culprit"], said["statement"] or ""


def steps(
    job: Job, delays=lambda step, rank: 0, size=MIB, calls=3, op="all_reduce", seed=1, noise=0.02
) -> Job:
    """Add steps with 5 ms of work before each of some collectives.

    ``delays`` adds time before the first collective of a step.
    """
    chance = random.Random(seed)
    for step in range(STEPS):
        for rank in range(job.world):
            job.do(rank, Step(step))
            for call in range(calls):
                work = 5 * MS * (1 + noise * chance.random())
                job.do(rank, Compute(int(work) + (delays(step, rank) if call == 0 else 0)), Call(op, size))
    return job


@pytest.mark.sampled
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_nobody_is_named_where_nobody_is_slow(world):
    for seed in range(5):
        assert verdict(steps(Job(world), seed=seed)) == (NOBODY, "")
    hosts = [f"h{rank}" for rank in range(world)]
    # If a network is slow everywhere, no rank and no host is the cause.
    assert verdict(steps(Job(world, hosts=hosts))) == (NOBODY, "")
    culprit, said = verdict(steps(Job(world, hosts=hosts, rates=dict.fromkeys(hosts, (50, 50)))))
    assert culprit == TRANSFERS and said.startswith(
        "Transfers take most of the time, and no rank stands out"
    ), said
    assert "It is not known" in said and "straggler" not in said and "host h" not in said, said


def test_a_late_rank_is_late_by_itself_and_its_delay_is_what_the_others_waited():
    culprit, said = verdict(steps(Job(3), lambda step, rank: 20 * MS * (rank == 1)))
    assert culprit == LATE_RANK
    assert said.startswith("Rank 1 is a straggler: it arrived last in ")
    assert "the others waited 20." in said and "per step for its own delay" in said
    assert "Rank 0" not in said and "Rank 2" not in said and "Slow transfers" not in said


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_slow_link_of_a_host_names_the_host_and_no_rank(slow):
    job = Job(3, hosts=HOSTS, rates={f"h{slow}": (20, 20)}, shifts={"h1": 10**12, "h2": -(10**9)})
    culprit, said = verdict(steps(job))
    assert culprit == SLOW_TRANSFER and "by itself" not in said
    assert f"host h{slow} (rank {slow})" in said
    assert "The delay is inherited: the previous collectives ended late on th" in said


def test_a_slow_link_and_a_late_rank_are_both_named():
    job = Job(3, hosts=HOSTS, rates={"h1": (40, 40)})
    culprit, said = verdict(steps(job, lambda step, rank: 300 * MS * (rank == 2)))
    assert culprit == LATE_RANK and "Rank 2 is a straggler" in said and "Rank 0 is a straggler" not in said
    assert "host h1 (rank 1)" in said


def test_a_path_of_which_the_slow_end_cannot_be_told_is_named_with_both_ends():
    # A ring of all_reduces cannot distinguish the two cases.
    for rates in ({"h1": (20, 8000)}, {"h0": (8000, 20)}):
        culprit, said = verdict(steps(Job(3, hosts=HOSTS, rates=rates)))
        assert culprit == SLOW_TRANSFER
        assert (
            "the path from host h1 (rank 1) to host h0 (rank 0) is slow" in said and "it is not known" in said
        )


def messages(job: Job, size=MIB) -> Job:
    """Add steps in which every rank sends to every other rank, one after the other."""
    for step in range(STEPS):
        job.all(Step(step), Compute(2 * MS))
        for sender in range(job.world):
            for receiver in range(job.world):
                if sender != receiver:
                    job.do(sender, Call("send", size, peer=receiver))
                    job.do(receiver, Call("recv", size, peer=sender))
    return job


@pytest.mark.parametrize(
    ("rates", "said"),
    [((20, 8000), "host h1 (rank 1) sends slowly"), ((8000, 20), "host h1 (rank 1) receives slowly"),
     ((20, 20), "the link of host h1 (rank 1) is slow")],
)  # fmt: skip
def test_messages_tell_who_sends_and_who_receives_slowly(rates, said):
    culprit, statement = verdict(messages(Job(3, hosts=HOSTS, rates={"h1": rates})))
    assert culprit == SLOW_TRANSFER and said in statement
    assert verdict(messages(Job(3, hosts=HOSTS))) == (NOBODY, "")


def test_on_one_host_ranks_stand_for_the_ends():
    culprit, said = verdict(messages(Job(3, rates={"rank 2": (20, 8000)})))
    assert culprit == SLOW_TRANSFER and "rank 2 sends slowly" in said


def rooted(op: str, late: int, delay: int = 20 * MS, world: int = 4, calls: int = 1) -> Job:
    """Return a job in which rank 1 is the root of ``calls`` operations per step.

    One rank works longer before the first operation.
    """
    chance, job = random.Random(late), Job(world)
    for step in range(STEPS):
        for rank in range(world):
            work = int(30 * MS * (1 + 0.1 * chance.random())) + delay * (rank == late)
            job.do(rank, Step(step), Compute(work), Call(op, MIB, peer=1))
            for _ in range(calls - 1):
                job.do(rank, Compute(int(MS * chance.random())), Call(op, MIB, peer=1))
    return job


@pytest.mark.parametrize("op", ["broadcast", "scatter"])
def test_receivers_wait_for_the_root_and_for_nobody_else(op):
    culprit, said = verdict(rooted(op, late=1))
    assert culprit == LATE_RANK and said.startswith("Rank 1 is a straggler as the root in ")
    waited = float(re.search(r"the others waited ([0-9.]+) ms per step for its own delay", said)[1])
    assert 15 < waited < 25, said
    for late in (
        0,
        3,
        -1,
        # A receiver that works longer delays no other rank. If all ranks work equally long, no rank is
        # delayed either.
    ):
        assert verdict(rooted(op, late)) == (NOBODY, "")


@pytest.mark.parametrize("op", ["reduce", "gather"])
def test_the_root_waits_for_its_last_sender_and_nobody_for_the_root(op):
    culprit, said = verdict(rooted(op, late=2))
    assert culprit == LATE_RANK and said.startswith(f"Rank 2 is a straggler in 19 of 19 {op} collectives")
    waited = float(re.search(r"their root waited ([0-9.]+) ms per step for its own delay", said)[1])
    assert 13 < waited < 25, said
    for late in (1, -1):
        assert verdict(rooted(op, late)) == (NOBODY, "")


@pytest.mark.sampled
@pytest.mark.parametrize("op", ["broadcast", "scatter", "reduce", "gather"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_is_late_before_the_first_of_several_rooted_collectives_is_named(op, world):
    late = 1 if op in ("broadcast", "scatter") else 0
    culprit, said = verdict(rooted(op, late, world=world, calls=3))
    assert culprit == LATE_RANK and said.startswith(f"Rank {late} is a straggler"), said
    for other in {0, 1, -1} - {late}:
        assert verdict(rooted(op, other, world=world, calls=3)) == (NOBODY, "")


@pytest.mark.sampled
@pytest.mark.parametrize("op", ["broadcast", "scatter", "reduce", "gather"])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("world", [2, 3])
def test_jitter_around_rooted_collectives_blames_nobody(op, seed, world):
    chance, job = random.Random(seed), Job(world)
    for step in range(STEPS):
        for rank in range(world):
            work = int(MS * chance.expovariate(1 / 20))
            job.do(rank, Step(step), Compute(work), Call(op, MIB, peer=1), Call("barrier", 0))
    assert verdict(job)[0] == NOBODY


@pytest.mark.parametrize("op", ["broadcast", "reduce"])
@pytest.mark.parametrize("late", [0, 1])
def test_of_two_ranks_the_late_one_is_named_around_rooted_collectives(op, late):
    chance, job = random.Random(late), Job(2)
    for step in range(STEPS):
        for rank in range(2):
            work = int(MS * chance.expovariate(1 / 20)) + 100 * MS * (rank == late)
            job.do(rank, Step(step), Compute(work), Call(op, MIB, peer=1), Call("barrier", 0))
    culprit, said = verdict(job)
    assert culprit == LATE_RANK and f"Rank {late} is a straggler" in said, said
    assert f"Rank {1 - late} is late" not in said, said


def from_one_root(job: Job, op: str, root: int = 1) -> Job:
    """Add steps of rooted operations, which do not synchronize the ranks.

    A rank that receives fast has its result before other ranks arrive.
    """
    for step in range(STEPS):
        job.all(Step(step), Compute(2 * MS))
        for _ in range(3):
            job.all(Call(op, MIB, peer=root))
    return job


@pytest.mark.parametrize("op", ["broadcast", "scatter"])
@pytest.mark.parametrize("slow", [0, 2])
def test_the_receiver_behind_a_slow_link_is_named_where_others_return_before_it_comes(op, slow):
    culprit, said = verdict(from_one_root(Job(3, hosts=HOSTS, rates={f"h{slow}": (20, 20)}), op))
    assert culprit == SLOW_TRANSFER and f"host h{slow} (rank {slow}) receives slowly" in said, said


@pytest.mark.parametrize("op", ["broadcast", "scatter", "gather", "reduce"])
def test_where_all_transfers_share_the_slow_end_it_is_said_that_no_rank_is_late(op):
    culprit, said = verdict(from_one_root(Job(3, hosts=HOSTS, rates={"h1": (20, 20)}), op))
    assert culprit == TRANSFERS and f"no rank stands out by its own delay: {op} of 1.00 MiB takes " in said
    assert "It is not known whether " in said and "host h" not in said and "straggler" not in said


@pytest.mark.sampled
@pytest.mark.parametrize("root", range(4))
@pytest.mark.parametrize("slow", range(4))
def test_the_tree_of_a_broadcast_blames_no_host_before_the_slow_one(root, slow):
    hosts = ["h0", "h1", "h2", "h3"]
    _, said = verdict(from_one_root(Job(4, hosts=hosts, rates={f"h{slow}": (20, 20)}), "broadcast", root))
    assert set(re.findall(r"host (h\d) \(rank", said)) <= {f"h{slow}"}, said


def from_each_root(job: Job, op: str = "broadcast") -> Job:
    for step in range(STEPS):
        job.all(Step(step), Compute(2 * MS))
        for root in range(job.world):
            job.all(Call(op, MIB, peer=root), Compute(MS), Call("barrier", 0))
    return job


@pytest.mark.parametrize("op", ["broadcast", "scatter"])
def test_a_root_that_sends_slowly_is_named(op):
    culprit, said = verdict(from_each_root(Job(3, hosts=HOSTS, rates={"h2": (20, 8000)}), op))
    assert culprit == SLOW_TRANSFER and "host h2 (rank 2) sends slowly" in said
    culprit, said = verdict(from_each_root(Job(3, hosts=HOSTS, rates={"h2": (8000, 20)}), op))
    assert culprit == SLOW_TRANSFER and "host h2 (rank 2) receives slowly" in said


@pytest.mark.sampled
@pytest.mark.parametrize("op", ["reduce", "gather"])
@pytest.mark.parametrize("rates", [(20, 8000), (8000, 20), (20, 20)])
def test_a_slow_link_below_collectives_to_a_root_blames_no_rank_and_no_other_host(op, rates):
    for slow in range(3):
        culprit, said = verdict(from_each_root(Job(3, hosts=HOSTS, rates={f"h{slow}": rates}), op))
        assert culprit != LATE_RANK and "by itself" not in said, said
        named = set(re.findall(r"host (h\d) \(rank", said))
        assert named <= {f"h{slow}"}, said


def test_groups_of_different_members_tell_the_host():
    job = Job(4, hosts=["h0", "h1", "h2", "h3"], rates={"h2": (20, 20)})
    for step in range(STEPS):
        job.all(Step(step), Compute(2 * MS))
        for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))):
            for pair in pairs:
                for rank in pair:
                    job.do(rank, Call("all_reduce", MIB, group=pair, pg=f"pg{pair}"), Compute(MS))
    culprit, said = verdict(job)
    assert (
        culprit == SLOW_TRANSFER
        and "the link of host h2 (rank 2) is slow" in said
        and "by itself" not in said
    )


def test_groups_within_a_host_are_not_compared_with_groups_across_hosts():
    hosts = ["h0", "h0", "h1", "h1"]
    job = Job(4, hosts=hosts, rates=dict.fromkeys(hosts, (200, 200)))
    for step in range(STEPS):
        job.all(Step(step), Compute(2 * MS))
        for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3))):
            for pair in pairs:
                for rank in pair:
                    job.do(rank, Call("all_reduce", MIB, group=pair, pg=f"pg{pair}"), Compute(MS))
    culprit, said = verdict(job)
    assert culprit == TRANSFERS and "no path or group of these transfers is much slower" in said, said
    assert "low transfers" not in said and "host h" not in said, said


def test_a_rank_hidden_by_a_later_one_is_said_too():
    culprit, said = verdict(steps(Job(3), lambda step, rank: (0, 20 * MS, 50 * MS)[rank]))
    assert culprit == LATE_RANK
    first, _, hidden = said.partition("Without it, ")
    assert "Rank 2 is a straggler" in first and "the others waited 30." in first
    assert hidden.startswith("rank 1 would be a straggler: the others would wait 20.")


def test_two_ranks_that_are_late_together_are_both_named():
    culprit, said = verdict(steps(Job(4), lambda step, rank: 20 * MS * (rank in (1, 2))))
    assert culprit == LATE_RANK and "Rank 1 is a straggler" in said and "Rank 2 is a straggler" in said
    assert "Rank 0" not in said and "Rank 3" not in said


def test_lateness_that_a_shared_rank_passes_on_is_not_its_own():
    job = Job(4)
    for step in range(STEPS):
        job.all(Step(step))
        for rank in range(4):
            job.do(rank, Compute(5 * MS + 30 * MS * (rank == 3)))
        for rank in (2, 3):  # Rank 3 is late only in this group.
            job.do(rank, Call("all_reduce", MIB, group=(2, 3), pg="late"))
        for rank in (0, 1, 2):  # Rank 2 comes from this group.
            job.do(rank, Call("all_reduce", MIB, group=(0, 1, 2), pg="shared"))
    culprit, said = verdict(job)
    assert culprit == LATE_RANK and "Rank 3 is a straggler" in said and "Rank 2 is a straggler" not in said
    # Rank 3 begins its next step while rank 2 is in the other group. Rank 2 therefore arrives that much less
    # than 30 ms late.
    assert re.search(
        r"The others waited (29|30)[.0-9]* ms per step for rank 2, but not for its own delay", said
    ), said


def test_ranks_that_are_late_in_turn_are_not_blamed_one_by_one():
    culprit, said = verdict(steps(Job(3), lambda step, rank: 20 * MS * (step % 3 == rank)))
    assert culprit == NOBODY and "late in turn" in said and "straggler" not in said


def test_warm_up_in_the_first_step_is_not_counted():
    assert verdict(steps(Job(3), lambda step, rank: 900 * MS * (rank == 1 and step == 0))) == (NOBODY, "")


def test_a_rank_that_is_late_in_a_few_steps_is_named_with_them():
    culprit, said = verdict(steps(Job(4), lambda step, rank: 100 * MS * (rank == 2 and step % 4 == 3)))
    assert culprit == LATE_RANK
    assert said.startswith("Rank 2 is a straggler in 5 of 19 steps: the others waited about 100 ms")


@pytest.mark.parametrize("first", [5, 13])
def test_a_rank_that_becomes_slow_is_named_with_the_step_from_which_on_it_is_late(first):
    culprit, said = verdict(steps(Job(4), lambda step, rank: 100 * MS * (rank == 2 and step >= first)))
    assert culprit == LATE_RANK
    assert f"from step {first} on" in said and said.startswith("Rank 2 is a straggler")


def test_a_rank_that_is_slow_from_the_start_or_only_for_a_while_has_no_such_step():
    for slow in (range(STEPS), range(6, 12)):
        culprit, said = verdict(
            steps(Job(4), lambda step, rank, slow=slow: 100 * MS * (rank == 2 and step in slow))
        )
        assert culprit == LATE_RANK and "from step" not in said


@pytest.mark.parametrize(
    ("slow", "since"),
    [
        ({20, *range(30, 60)}, "from step 30 on"),  # One step before step 30 is late too.
        (set(range(30, 60)) - {41}, "from step 30 on"),
        (set(range(10, 55)), None),  # The rank recovers.
    ],
)
def test_single_steps_do_not_move_the_step_and_a_rank_that_recovered_has_none(slow, since, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "STEPS", 60)
    culprit, said = verdict(steps(Job(4), lambda step, rank: 100 * MS * (rank == 2 and step in slow)))
    assert culprit == LATE_RANK
    assert since in said if since else "from step" not in said


def asynchronous(job: Job, delays, recorded=True) -> Job:
    """Add buckets that are reduced while the program computes, with a wait at the end of the step."""
    for step in range(STEPS):
        for rank in range(job.world):
            job.do(rank, Step(step), Compute(5 * MS + delays(step, rank)))
            for _ in range(4):
                job.do(rank, Call("all_reduce", MIB, is_async=True), Compute(2 * MS))
            job.do(rank, Wait(recorded), Compute(MS))
    return job


def test_a_delay_before_asynchronous_collectives_is_the_ranks_own():
    culprit, said = verdict(asynchronous(Job(3), lambda step, rank: 20 * MS * (rank == 2)))
    assert culprit == LATE_RANK and "Rank 2 is a straggler" in said


def test_a_rank_that_leaves_late_from_asynchronous_collectives_inherits_that():
    job = Job(3, hosts=HOSTS, rates={"h1": (20, 20)})
    culprit, said = verdict(asynchronous(job, lambda step, rank: 0))
    assert culprit == SLOW_TRANSFER and "by itself" not in said and "host h1 (rank 1)" in said


def test_waits_that_were_not_recorded_leave_the_cause_untold():
    job = asynchronous(Job(3), lambda step, rank: 20 * MS * (rank == 2), recorded=False)
    culprit, said = verdict(job)
    assert culprit == UNTOLD and said.startswith("Rank 2 arrived last in ") and "It is not known" in said


@pytest.mark.sampled
@pytest.mark.parametrize(("world", "metric"), [(2, False), (2, True), (4, True)])
def test_in_ddp_a_late_rank_is_late_by_its_own_delay_and_since_a_step(world, metric, tmp_path):
    """The waits of DDP are in C++, and the cause used to be unknown.

    A rank that became late halfway through the run was not found.
    """
    found = api.straggling(saved(of_ddp(world, since=15, metric=metric), tmp_path / "run"))
    said = found.ranks.attrs
    assert (said["culprit"], said["late"], said["since"]) == (LATE_RANK, [1], [[1, 15]])
    assert said["statement"].startswith("Rank 1 is a straggler, from step 15 on: it arrived last in ")
    # By hand: 25 of 39 steps are late by 20 ms each. The others wait once per step and not once per bucket.
    own_ns = found.steps.groupby("rank")["others_waited_own_ns"].sum()[1]
    assert own_ns == pytest.approx(25 * 20 * MS, rel=0.03)
    assert api.straggling(saved(of_ddp(world, late_ns=0), tmp_path / "even")).ranks.attrs["culprit"] == NOBODY


def test_in_ddp_files_and_the_index_have_the_answer_of_all_records(tmp_path, monkeypatch):
    expected = api.straggling(saved(of_ddp(since=15), tmp_path / "run"))
    assert expected.ranks.attrs["since"] == [[1, 15]]
    indexed = saved(of_ddp(since=15), tmp_path / "indexed")
    monkeypatch.setattr(index, "_FEWEST_IN_FILE", 0)
    assert api.index(indexed)["in_file"]
    for name in ("ranks", "steps"):
        pd.testing.assert_frame_equal(getattr(api.straggling(indexed), name), getattr(expected, name))
    monkeypatch.setattr(reader, "_MOST_ROWS", 10)
    # The run is read in several parts, which also split steps.
    monkeypatch.setattr(partitions, "_MOST_SCANNED", 60)
    divided = api.straggling(saved(of_ddp(since=15), tmp_path / "divided"), first_step=False)
    assert divided.ranks.attrs["since"] == [[1, 15]]
    own_ns = divided.steps["others_waited_own_ns"].sum()
    assert own_ns == pytest.approx(expected.steps["others_waited_own_ns"].sum(), rel=0.15)


def test_in_ddp_bounds_that_are_far_apart_leave_the_cause_unknown(tmp_path):
    found = api.straggling(saved(of_ddp(apart_ns=15 * MS), tmp_path / "run")).ranks.attrs
    assert found["culprit"] == UNTOLD and "It is not known" in found["statement"]
    # The others wait 20 ms once per step, and not for each of its three buckets.
    assert re.search(r"(20\.\d|19\.\d) ms per step", found["statement"]), found["statement"]
    late = api.straggling(saved(of_ddp(apart_ns=15 * MS, since=25), tmp_path / "late")).ranks.attrs
    assert late["culprit"] == UNTOLD
    assert re.search(r"collectives, and in nearly all from step 2[56] on; ", late["statement"])


@pytest.mark.parametrize("kind", ["ring", "messages", "roots"])
def test_the_verdict_does_not_depend_on_how_the_records_are_divided(kind, monkeypatch):
    job = Job(3, hosts=HOSTS, rates={"h1": (20, 20)})
    job = {"ring": steps, "messages": messages, "roots": from_each_root}[kind](job)
    run, hosts = job.run(), dict(enumerate(job.hosts))
    found = arrivals(
        run.table("collectives"), run.table("clocks"), run.table("clock_offsets"), one_host=False
    )
    for most_values in (2_000_000, 40):  # All values, and a sample.
        monkeypatch.setattr(slow_paths, "_MOST_VALUES", most_values)
        said = straggling([found], lambda part: part, 1, hosts).ranks.attrs
        assert said["culprit"] == SLOW_TRANSFER or most_values == 40
        for seed in range(3):
            chance = random.Random(seed)
            parts = [chance.randrange(7) for _ in range(found["collective"].to_numpy().max() + 1)]
            part = pa.array([parts[each] for each in found["collective"].to_pylist()])
            divided = [found.filter(pc.equal(part, number)) for number in chance.sample(range(7), 7)]
            divided = [each for each in divided if len(each)]
            assert straggling(divided, lambda part: part, 1, hosts).ranks.attrs == said


@pytest.mark.parametrize("seed", range(6))
def test_jitter_without_a_culprit_blames_nobody(seed):
    """Every rank works for a random time, which is sometimes long, and transfers take a random time."""
    chance = random.Random(seed)
    job = Job(4, hosts=["h0", "h1", "h2", "h3"])
    for step in range(12):
        for rank in range(4):
            job.do(rank, Step(step))
            for _ in range(3):
                job.do(rank, Compute(int(MS * chance.expovariate(1 / 5))), Call("all_reduce", MIB))
    culprit, said = verdict(job)
    assert culprit == NOBODY and "by itself" not in said and "low transfers" not in said, said


def test_paths_that_a_busy_machine_delays_do_not_hide_a_far_slower_link():
    """The paces are of messages between three hosts (measured ns per byte).

    Host h1 sends at 20 Mbit/s. The messages of h0 took 4 times as long as those of h2.
    """
    measured = {
        ("h0", "h1"): (7, 15, 30), ("h0", "h2"): (8, 18, 43), ("h1", "h0"): (167, 313, 341),
        ("h1", "h2"): (497, 742, 749), ("h2", "h0"): (1, 4, 19), ("h2", "h1"): (2, 4, 5),
    }  # fmt: skip
    paces = {ends: slow_paths.Pace(*pace, size=11 * MIB, number=11) for ends, pace in measured.items()}
    found = slow_paths._of_pairs(paces)
    assert (found.kind, found.ends) == (slow_paths.SENDS, ("h1",))
    del paces["h1", "h0"], paces["h1", "h2"]
    assert slow_paths._of_pairs(paces) is None


def test_the_widest_gap_parts_slow_paths_from_those_that_wake_up_late():
    """The paces are of messages between three hosts (measured ns per byte).

    The link of h1 has 20 Mbit/s. Host h0 woke up late for the messages of h2. The link buffers less than a
    message, so half of the messages pass it faster.
    """
    measured = {
        ("h0", "h1"): (402, 402, 402), ("h0", "h2"): (0.6, 0.7, 0.8), ("h1", "h0"): (19, 19, 20),
        ("h1", "h2"): (437, 437, 437), ("h2", "h0"): (2.6, 2.9, 3.4), ("h2", "h1"): (18, 19, 19),
    }  # fmt: skip
    paces = {ends: slow_paths.Pace(*pace, size=11 * MIB / 4, number=11) for ends, pace in measured.items()}
    found = slow_paths._of_pairs(paces)
    assert (found.kind, found.ends) == (slow_paths.LINK, ("h1",))
    assert found.ratio == pytest.approx((402 + 437) / (2.9 + 19))


def test_operations_that_disagree_leave_it_open_which_link_is_slow():
    one = slow_paths.SlowPath(slow_paths.SENDS, ("host a",), 4.0, 1000)
    other = slow_paths.SlowPath(slow_paths.RECEIVES, ("host b",), 4.0, 999)
    for found in ([one, other], [other, one]):
        slow = slow_paths.agreed(found)
        assert slow.kind == slow_paths.EITHER and slow.ends == ("host a", "host b")
    assert slow_paths.agreed([one, other._replace(extra_ns=100)]) == one  # The other path costs far less.
    path = slow_paths.SlowPath(slow_paths.PATH, ("host a", "host c"), 4.0, 1200)
    assert slow_paths.agreed([path, one]).ends == ("host a",)  # Both agree only on this end of the path.


def test_a_rank_that_some_others_waited_for_and_that_never_came_last_is_not_said_to_have_come_last():
    path = SimpleNamespace(slow=lambda worth_ns: SlowPath(slow_paths.GROUP, ("ranks 0, 1, 2",), 0.0, 0))
    by_rank = {rank: pd.Series({"last": last, "collectives": 9}) for rank, last in enumerate((0, 0, 6))}
    findings = SimpleNamespace(inherited={0: 5 * MS, 1: 0, 2: 10 * MS}, share=1.0, steps=0)
    (said,) = late_verdict._transfers(findings, path, by_rank, 10 * MS)
    assert (
        "Rank 2 arrived last in 67 % of 9 collectives, and the others waited 10.0 ms in total for it" in said
    )
    assert "rank 0)" not in said and "Ranks" not in said


def test_own_delay_and_inherited_add_up_to_the_lateness(tmp_path):
    job = steps(
        Job(3, hosts=HOSTS, rates={"h1": (20, 20)}), lambda step, rank: 10 * MS * (rank == 2), noise=0
    )
    run = job.run()
    found = api.arrivals(run.write(tmp_path / "run"))
    known = found[found["own_delay_ns"].notna()]
    assert len(known) == len(found) - 3  # The arrivals of the first collective are not known.
    assert (known["own_delay_ns"] + known["inherited_ns"] == known["lateness_ns"]).all()
    own = known[(known["step"] > 0) & (known["rank"] == 2)].groupby("step")["own_delay_ns"].max()
    assert ((own >= 0) & (own <= 10 * MS)).all()
    innocent = known[known["rank"] == 0]
    assert innocent["own_delay_ns"].max() == 0 and innocent["inherited_ns"].max() > 10 * MS


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(24))
def test_the_planted_culprit_is_the_one_that_is_blamed(seed):
    """The worlds, work, sizes and noise are random. A rank, a host or nothing is slow."""
    chance = random.Random(seed)
    world = chance.randint(3, 6)
    hosts = [f"h{rank}" for rank in range(world)]
    planted = chance.choice(["nobody", "rank", "host"])
    who = chance.randrange(world)
    delay = chance.randint(5, 40) * MS if planted == "rank" else 0
    rates = {f"h{who}": (chance.randint(10, 60),) * 2} if planted == "host" else {}
    job = steps(
        Job(world, hosts=hosts, rates=rates, shifts={f"h{world - 1}": chance.randint(-(10**12), 10**12)}),
        lambda step, rank: int(delay * chance.uniform(0.7, 1.3)) if rank == who else 0,
        size=chance.choice([MIB // 4, MIB]), calls=chance.randint(1, 4), seed=seed, noise=chance.uniform(0, 0.1),
    )  # fmt: skip
    culprit, said = verdict(job)
    if planted == "nobody":
        assert culprit == NOBODY and "by itself" not in said, said
    elif planted == "rank":
        assert culprit == LATE_RANK and f"Rank {who} is a straggler" in said, said
        assert said.count("a straggler") == 1, said
    else:
        assert culprit == SLOW_TRANSFER and "by itself" not in said, said
        assert f"host h{who} (rank {who})" in said, said


def test_records_that_are_read_file_by_file_have_the_same_attribution(tmp_path, monkeypatch):
    job = steps(Job(3, hosts=HOSTS, rates={"h1": (20, 20)}), lambda step, rank: 10 * MS * (rank == 2))
    path = job.run().write(tmp_path / "run")
    found, said = api.arrivals(path), api.stragglers(path).attrs
    monkeypatch.setattr(reader, "_MOST_ROWS", 10)
    monkeypatch.setattr(partitions, "_MOST_SCANNED", 30)  # The run is read in several parts.
    again = api.arrivals(path).sort_values(["pg_seq", "rank"], ignore_index=True)
    names = ["rank", "seq", "own_delay_ns", "inherited_ns", "others_waited_own_ns"]
    assert again[names].equals(found.sort_values(["pg_seq", "rank"], ignore_index=True)[names])
    assert api.stragglers(path).attrs == said and said["culprit"] == SLOW_TRANSFER
