"""Test the bytes that gloo sends between pairs of ranks, in the matrix, the bytes per rank and the buckets.

The expected values come from gloo's algorithms, written out by hand here.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest

from commprof.analysis import api
from support.runs import SyntheticRun

MIB = 2**20


def cells(frame, column="executed_wire_bytes"):
    return {(row["sender"], row["receiver"]): row[column] for row in frame.to_dict("records") if row[column]}


def of_one(op, size, ranks, root=-1, **columns):
    run = SyntheticRun(world_size=ranks)
    run.add_collective(op, payload_bytes=size, peer=root, **columns)
    return api.matrix(run.open())


def walked(op: str, size: int, members: list[int], root: int | None) -> Counter:
    """Return the bytes by sender and receiver from gloo's algorithms, message by message.

    The payloads must be divisible by gloo's segments.
    """
    n = len(members)
    sent: Counter = Counter()
    if op in ("all_reduce", "reduce_scatter", "reduce"):
        # In the reduce_scatter of a ring, each rank sends one chunk to the previous rank in each of n - 1
        # rounds.
        for _ in range(n - 1):
            for place in range(n):
                sent[members[place], members[place - 1]] += size // n
    if op in ("all_reduce", "reduce_scatter"):
        for _ in range(n - 1):
            for place in range(n):
                sent[members[place], members[place - 1]] += size // n
    if op == "reduce":
        for member in members:
            if member != root:
                sent[member, root] += size // n
    if op == "broadcast":
        have = [members.index(root)]
        while len(have) < n:  # In each round, every rank that has the data sends it to one more rank.
            for place in [(place + len(have)) % n for place in have][: n - len(have)]:
                sent[members[(place - len(have)) % n], members[place]] += size
            have = [(have[0] + more) % n for more in range(min(n, 2 * len(have)))]
    if op == "all_gather":
        for _ in range(n - 1):
            for place in range(n):
                sent[members[place], members[(place + 1) % n]] += size // n
    if op == "all_to_all":
        for a in members:
            for b in members:
                if a != b:
                    sent[a, b] += size // n
    return sent


def test_a_ring_goes_against_the_order_of_the_group():
    assert cells(of_one("all_reduce", 1200, 3)) == dict.fromkeys([(0, 2), (1, 0), (2, 1)], 1600.0)
    assert cells(of_one("reduce_scatter", 1200, 3)) == dict.fromkeys([(0, 2), (1, 0), (2, 1)], 1600.0)


def test_a_reduce_sends_around_the_ring_and_then_to_its_root():
    # Each rank sends 800 of 1200 bytes to the previous rank. Then ranks 0 and 2 send 400 bytes to rank 1, so
    # rank 2 sends both amounts to rank 1.
    assert cells(of_one("reduce", 1200, 3, root=1)) == {(0, 2): 800, (1, 0): 800, (2, 1): 1200, (0, 1): 400}
    assert cells(of_one("reduce", 1200, 3, root=1), "wire_bytes") == {(0, 1): 1200.0, (2, 1): 1200.0}


def test_a_large_reduce_keeps_two_segments_of_a_mebibyte():
    """A reduce of 9 MiB on 2 ranks has room for 5 segments per rank, and the last segment of rank 1 is empty.

    Each rank keeps its last two segments.
    """
    assert cells(of_one("reduce", 9 * MIB, 2, root=0)) == {(0, 1): 7 * MIB, (1, 0): (8 + 4) * MIB}
    assert cells(of_one("reduce", 9 * MIB, 2, root=1)) == {(0, 1): (7 + 5) * MIB, (1, 0): 8 * MIB}


def test_calls_of_unlike_sizes_are_not_taken_for_their_mean():
    run = SyntheticRun(world_size=2)
    for size in (8, 8, 8, 9 * MIB):
        run.add_collective("reduce", payload_bytes=size, peer=0)
    assert cells(api.matrix(run.open())) == {(0, 1): 7 * MIB + 12, (1, 0): 12 * MIB + 24}


def test_a_broadcast_goes_along_a_tree():
    assert cells(of_one("broadcast", 10, 5, root=3)) == {(3, 4): 10, (3, 0): 10, (4, 1): 10, (3, 2): 10}


def a_mixture(seed):
    chance = random.Random(seed)
    world = chance.choice((2, 3, 4, 6))
    run = SyntheticRun(world_size=world)
    wanted: dict[str, Counter] = defaultdict(Counter)
    for number in range(40):
        members = chance.sample(range(world), chance.randint(2, world))
        op = chance.choice(
            ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all")
        )
        size, root = 120 * chance.randint(1, 5000), chance.choice(members)
        purpose = chance.choice(("gradient_reduce", "parameter_gather"))
        rooted = op in ("reduce", "broadcast")
        run.add_collective(
            op, payload_bytes=size, group=tuple(members), pg=f"{number}", peer=root if rooted else -1,
            step=chance.randint(0, 2), purpose=purpose,
        )  # fmt: skip
        wanted[purpose] += walked(op, size, members, root if rooted else None)
    return run, wanted


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(8))
def test_the_matrix_holds_what_every_message_of_gloo_carries(seed):
    run, wanted = a_mixture(seed)
    opened = run.open()
    assert cells(api.matrix(opened)) == pytest.approx(dict(sum(wanted.values(), Counter())), rel=1e-12)
    for purpose, sent in wanted.items():
        assert cells(api.matrix(opened, purpose=purpose)) == pytest.approx(dict(sent), rel=1e-12)
    by = api.matrix(opened, by=("purpose",))
    for purpose, sent in wanted.items():
        assert cells(by[by["purpose"] == purpose]) == pytest.approx(dict(sent), rel=1e-12)


def test_what_is_not_of_gloo_is_not_known_and_is_said():
    run = SyntheticRun(world_size=2)
    run.add_collective("all_reduce", payload_bytes=100, backend="nccl", step=0)
    run.add_collective("all_gather", payload_bytes=100, step=1)
    run.add_collective("send", payload_bytes=40, ranks=(0,), peer=1, backend="nccl", step=1)
    run.add_collective("recv", payload_bytes=40, ranks=(1,), peer=0, backend="nccl", step=1)
    frame = api.matrix(run.open())
    assert frame["executed_wire_bytes"].isna().all() and len(frame) == 2
    assert (
        frame.attrs["executed_reason"] == "it is not known which ranks send the bytes of all_reduce on nccl"
    )
    by = api.matrix(run.open(), by=("step",))
    assert by["executed_wire_bytes"].isna().tolist() == [True, True, False, False]
    rest = api.matrix(run.open(), steps=(1, 1))
    assert cells(rest) == {(0, 1): 90, (1, 0): 50} and rest.attrs["executed_reason"] is None


def test_bytes_without_a_root_are_said_of_both_models():
    run = SyntheticRun(world_size=4)
    run.add_collective("reduce", payload_bytes=800, peer=-1)
    frame = api.matrix(run.open())
    assert frame.empty
    # As issued, the total is 3 x 800. With gloo, each of 4 ranks sends 600, and three of the ranks send 200
    # to the root.
    assert (frame.attrs["unplaced_bytes"], frame.attrs["executed_unplaced_bytes"]) == (2400.0, 3000.0)


STEPS = 7
WORLD = 3


def varying(seed):
    """Return a run with reduces to changing roots and an all_reduce in each step.

    Every second step also has a broadcast, and one step has a gather.
    """
    chance = random.Random(seed)
    run = SyntheticRun(world_size=WORLD)
    sent: dict[int, Counter] = defaultdict(Counter)
    for step in range(STEPS):
        run.add_step(step, duration_ns=1_000_000)
        for root in range(WORLD) if step else range(2 * WORLD):  # The first step sends twice as much.
            size = 12 * (root % WORLD + 1)
            run.add_collective(
                "reduce", payload_bytes=size, peer=(root + step) % WORLD, step=step, purpose="gradient_reduce"
            )
            sent[step] += walked("reduce", size, [0, 1, 2], (root + step) % WORLD)
        size = 12 * chance.randint(1, 100)
        run.add_collective("all_reduce", payload_bytes=size, step=step, purpose="gradient_norm")
        sent[step] += walked("all_reduce", size, [0, 1, 2], None)
        if step % 2:
            run.add_collective("broadcast", payload_bytes=30, peer=1, step=step, purpose="metric")
            sent[step] += walked("broadcast", 30, [0, 1, 2], 1)
        if step == 5:
            run.add_collective("all_gather", payload_bytes=90_000, step=step, purpose="checkpoint")
    return run, sent


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(3))
def test_each_rank_has_the_values_of_a_step_that_settings_have(seed):
    """Sum the warm steps 1 to 6 record by record.

    The broadcast is in 3 of them, and the gather is in no mean.
    """
    run, sent = varying(seed)
    opened = run.open()
    frame = api.rank_bytes([opened]).set_index("rank")
    mean = Counter()
    for step in range(1, STEPS):
        mean += Counter({pair: size / (STEPS - 1) for pair, size in sent[step].items()})
    for rank in range(WORLD):
        out = sum(size for (sender, _), size in mean.items() if sender == rank)
        into = sum(size for (_, receiver), size in mean.items() if receiver == rank)
        assert frame.loc[rank, "executed_sent_bytes_per_step"] == pytest.approx(out, rel=1e-12)
        assert frame.loc[rank, "executed_received_bytes_per_step"] == pytest.approx(into, rel=1e-12)
    compared = api.compare([opened]).iloc[0]
    assert frame["sent_bytes_per_step"].mean() == pytest.approx(compared["wire_bytes_per_step"], rel=1e-12)
    executed = compared["executed_wire_bytes_per_step"]
    assert frame["executed_sent_bytes_per_step"].mean() == pytest.approx(executed, rel=1e-12)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(2))
def test_the_levels_have_the_values_of_a_step_that_settings_have(seed):
    opened = varying(seed)[0].open()
    levels = api.reduction_levels([opened]).set_index("level")
    reducing = api.traffic_by_setting([opened]).set_index("purpose").loc["gradient_reduce"]
    assert levels.loc["issued", "wire_bytes_per_step"] == reducing["wire_bytes_per_step"] == 72 * 2 / 3
    assert (
        levels.loc["executed", "wire_bytes_per_step"]
        == reducing["executed_wire_bytes_per_step"]
        == 72 * 8 / 9
    )
    assert levels.loc["issued", "payload_bytes_per_step"] == 12 + 24 + 36


@pytest.mark.long
def test_repeats_count_by_their_steps():
    runs = []
    for steps, size in ((3, 120), (5, 240)):
        run = SyntheticRun(world_size=2)
        for step in range(steps):
            run.add_step(step, duration_ns=1_000_000)
            run.add_collective("all_reduce", payload_bytes=size, step=step, purpose="gradient_reduce")
        runs.append(run.open())
    frame = api.rank_bytes(runs)
    assert frame["sent_bytes_per_step"].tolist() == [(3 * 120 + 5 * 240) / 8] * 2
    assert frame["executed_sent_bytes_per_step"].tolist() == [(3 * 120 + 5 * 240) / 8] * 2


def bucket_run():
    """Return a run with one bucket of 240 bytes per step, reduced to rank 0.

    The first step sends the bucket twice.
    """
    run = SyntheticRun(world_size=2)
    for step in range(5):
        run.add_step(step, duration_ns=1_000_000)
        for rank in range(2):
            run.add(
                "buckets", rank=rank, attempt=0, pid=run.pid(rank), step=step, micro_step=0, bucket=0, numel=60, bytes=240,
                capacity=60, dtype="float32", owners="0", parameters="a", flush_reason="full", time_ns=step,
            )  # fmt: skip
        for _ in range(1 if step else 2):
            run.add_collective(
                "reduce", payload_bytes=240, bucket=0, peer=0, step=step, purpose="gradient_reduce"
            )
    return run


def test_a_bucket_has_what_gloo_sends_for_it_and_the_value_of_a_step():
    opened = bucket_run().open()
    flushes = api.bucket_flushes(opened)
    assert flushes["wire_bytes"].tolist() == [240.0, 120.0, 120.0, 120.0, 120.0]
    # gloo sends 3/4 of 240 bytes.
    assert flushes["executed_wire_bytes"].tolist() == [360.0, 180.0, 180.0, 180.0, 180.0]
    mean = api.bucket_means(opened).iloc[0]
    assert (mean["collectives"], mean["wire_bytes"], mean["executed_wire_bytes"], mean["steps"]) == (
        1,
        120,
        180,
        5,
    )
    (per_step,) = api.buckets_per_step(opened).to_dict("records")
    assert (per_step["buckets"], per_step["bytes"], per_step["executed_wire_bytes"]) == (1, 240, 180)
    assert per_step["executed_wire_bytes"] == api.compare([opened])["executed_wire_bytes_per_step"][0]


def test_a_bucket_on_a_backend_that_nobody_knows_has_none():
    run = bucket_run()
    for row in run.rows["collectives"]:
        if row["step"] == 2:
            row["backend"] = "mpi"
    opened = run.open()
    assert api.bucket_flushes(opened)["executed_wire_bytes"].isna().tolist() == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert api.bucket_means(opened)["executed_wire_bytes"].isna().all()
    assert api.bucket_steps(opened)["executed_wire_bytes"].isna().sum() == 1
