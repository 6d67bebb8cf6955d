"""Compare flat buffers, owners and buckets with a count element by element."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from commprof.requested.parameters import Parameter
from commprof.requested.zero.bucket_rules import buckets_within, owned_slices, runs_past
from commprof.requested.zero.partition import OwnedShard, lay_out
from commprof.requested.zero.reductions import (
    Terms,
    multi_rank_all_reduce,
    reduce_to_owner,
)
from support.sample import examples

QUICK = settings(max_examples=examples(60), deadline=None)
SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=12)
WORLDS = st.integers(1, 5)


def named(sizes):
    return [Parameter(f"p{index}", size) for index, size in enumerate(sizes)]


# The network is 37 -> 131 -> 257 -> 67 -> 11. With these odd sizes, the boundaries of 3 shards are inside
# parameters.
MLP = named([37 * 131, 131, 131 * 257, 257, 257 * 67, 67, 67 * 11, 11])


def owners_by_element(sizes, world_size, *, dealt_out, unit):
    """Return the owner of every element of every parameter, from an explicitly constructed buffer."""
    order = sorted(range(len(sizes)), key=lambda i: (i % world_size, i)) if dealt_out else range(len(sizes))
    buffer = []
    for index in order:
        buffer += [index] * sizes[index]
        while len(buffer) % unit:
            buffer.append(None)
    while len(buffer) % (2 * world_size):
        buffer.append(None)
    piece = len(buffer) // world_size
    owners = {index: [] for index in range(len(sizes))}
    for position, index in enumerate(buffer):
        if index is not None:
            owners[index].append(position // piece)
    return owners, len(buffer)


@QUICK
@given(SIZES, WORLDS, st.booleans(), st.booleans())
def test_every_element_has_the_owner_of_its_place_in_the_flat_buffer(sizes, world_size, dealt_out, aligned):
    layout = lay_out([named(sizes)], world_size, round_robin=dealt_out, align_parameters=aligned)
    owners, length = owners_by_element(sizes, world_size, dealt_out=dealt_out, unit=4 if aligned else 1)
    assert layout.groups[0].numel == length
    for index, parameter in enumerate(named(sizes)):
        spelled_out = [piece.owner for piece in layout.shards(parameter) for _ in range(piece.numel)]
        assert spelled_out == owners[index]


@QUICK
@given(st.lists(SIZES, min_size=1, max_size=3), WORLDS)
def test_the_pieces_of_each_group_are_equal_and_hold_all_of_it(groups, world_size):
    listed = [
        [Parameter(f"g{number}.{index}", size) for index, size in enumerate(sizes)]
        for number, sizes in enumerate(groups)
    ]
    layout = lay_out(listed, world_size)
    for flat, sizes in zip(layout.groups, groups, strict=True):
        assert flat.numel == flat.shard_numel * world_size
        assert flat.numel % (2 * world_size) == 0
        assert 0 <= flat.numel - sum(sizes) < 2 * world_size


def test_a_parameter_may_have_every_rank_as_owner():
    layout = lay_out([MLP], 3)
    assert layout.groups[0].numel == 56_940
    assert layout.shards(MLP[2]) == [
        OwnedShard(0, 14_002, 4_978),
        OwnedShard(1, 18_980),
        OwnedShard(2, 685),
    ]


def test_16_bit_parameters_are_aligned_to_8_elements():
    layout = lay_out([named([3, 9])], 2, "bfloat16", align_parameters=True)
    assert layout.places == {"p0": (0, 0), "p1": (0, 8)}
    assert layout.groups[0].numel == 24


@QUICK
@given(SIZES, st.integers(1, 60))
def test_buckets_keep_the_order_and_the_limit(sizes, capacity):
    buckets = buckets_within(named(sizes), capacity)
    assert [p for bucket in buckets for p in bucket] == [p for p in named(sizes) if p.numel]
    for bucket in buckets:
        assert len(bucket) == 1 or sum(p.numel for p in bucket) <= capacity
    for bucket, following in pairwise(buckets):
        assert sum(p.numel for p in bucket) + following[0].numel > capacity


def test_a_sum_is_closed_once_it_is_past_the_limit():
    assert runs_past([4, 4, 1, 9, 2], 8) == [9, 9, 2]
    assert runs_past([8], 8) == [8]
    assert runs_past([], 8) == []


def test_an_oversized_parameter_travels_alone_and_in_parts():
    layout = lay_out([MLP], 3)
    slices = [owned_slices(bucket, layout) for bucket in buckets_within(MLP[::-1], 20_000)]
    assert [sum(piece.numel for piece in bucket) for bucket in slices] == [18_291, 33_667, 4_978]
    assert [m.numel for m in multi_rank_all_reduce(slices[1], Terms(20_000, 2, False))] == [32_982, 685]
    assert [m.numel for bucket in slices for m in reduce_to_owner(bucket, Terms(20_000, 2, False))] == [
        18_291,
        14_002,
        18_980,
        685,
        4_978,
    ]


def test_slices_of_one_owner_travel_together_in_the_order_of_the_first():
    slices = [OwnedShard(1, 5), OwnedShard(0, 7), OwnedShard(1, 2)]
    assert [message.numel for message in reduce_to_owner(slices, Terms(100, 2, False))] == [7, 7]
    assert [message.numel for message in reduce_to_owner(slices, Terms(4, 2, False))] == [5, 2, 7]


@QUICK
@given(SIZES.filter(any), WORLDS, st.integers(1, 60), st.booleans())
def test_every_rank_owns_a_row_of_every_chunk(sizes, world_size, capacity, aligned):
    layout = lay_out([named(sizes)], world_size, align_parameters=aligned, bucket_size=capacity)
    flat = layout.groups[0]
    assert flat.numel == flat.chunks * world_size * flat.row_numel
    assert flat.chunk_numel <= max(capacity, 2 * world_size)
    taken = set()
    for parameter in named(sizes):
        start = layout.places[parameter.name][1]
        for owner, numel, offset, _ in layout.shards(parameter):
            for each in range(numel):
                chunk, within = divmod(start, flat.chunk_numel)
                assert (owner, offset + each) == (
                    within // flat.row_numel,
                    chunk * flat.row_numel + within % flat.row_numel,
                )
                taken.add((owner, offset + each))
                start += 1
    assert len(taken) == sum(sizes)


def test_a_buffer_has_16_chunks_unless_they_would_be_too_small_or_too_large():
    def chunks(numel, bucket_size=500_000_000):
        return lay_out([[Parameter("p", numel)]], 4, bucket_size=bucket_size).groups[0].chunks

    assert [chunks(numel) for numel in (1, 2**18, 2**18 + 8, 2**20, 2**23, 2**26, 2**28, 2**29)] == [
        1, 1, 2, 4, 16, 16, 32, 64,
    ]  # fmt: skip
    assert chunks(2**20, bucket_size=2**16) == 16
