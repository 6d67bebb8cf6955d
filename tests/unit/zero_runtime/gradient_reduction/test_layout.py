"""Compare the partition layout with its definition and with the sizes that DeepSpeed recorded."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_runtime.gradient_reduction.flat_layout import (
    Run,
    chunk_limit,
    flushed_runs,
    group_layout,
    owner_runs,
    round_robin_order,
)

NUMELS = st.lists(st.integers(0, 50), min_size=1, max_size=12)
WORLDS = st.integers(1, 5)
MLP = [131 * 37, 131, 257 * 131, 257, 67 * 257, 67, 11 * 67, 11]


def owned_elements(layout, index):
    """Return (owner, position in the owner's shard) of each element of a parameter, by definition."""
    start = layout.offsets[index]
    return [divmod(start + each, layout.shard_numel) for each in range(layout.numels[index])]


@given(NUMELS, WORLDS, st.booleans(), st.sampled_from([1, 4, 8]))
def test_slices_follow_the_definition(numels, world, round_robin, alignment):
    layout = group_layout(numels, world, round_robin=round_robin, alignment=alignment)
    for index, numel in enumerate(numels):
        assert layout.offsets[index] % alignment == 0
        elements = [
            (part.owner, part.offset + each) for part in layout.shards(index) for each in range(part.numel)
        ]
        assert elements == owned_elements(layout, index) and len(elements) == numel


@given(NUMELS, WORLDS, st.booleans())
def test_pieces_are_equal_and_parameters_do_not_overlap(numels, world, round_robin):
    layout = group_layout(numels, world, round_robin=round_robin)
    assert layout.numel % (2 * world) == 0 and layout.numel - sum(numels) < 2 * world
    taken = sorted((layout.offsets[index], numels[index]) for index in range(len(numels)))
    assert all(first + numel <= second for (first, numel), (second, _) in itertools.pairwise(taken))


@pytest.mark.parametrize(("world", "piece"), [(2, 28_468), (3, 18_980), (4, 14_234)])
def test_pieces_of_the_recorded_model(world, piece):
    assert group_layout(MLP, world).shard_numel == piece


def test_a_large_parameter_straddles_all_pieces():
    weight = group_layout(MLP, 3).shards(2)
    assert [(part.owner, part.numel) for part in weight] == [(0, 14_002), (1, 18_980), (2, 685)]


def test_round_robin_deals_parameters_to_the_ranks_in_turn():
    assert round_robin_order(7, 3) == (0, 3, 6, 1, 4, 2, 5)
    assert group_layout([4] * 4, 2, round_robin=True).offsets == (0, 8, 4, 12)


def test_alignment_pads_each_parameter():
    layout = group_layout([3, 4, 5], 2, alignment=4)
    assert (layout.offsets, layout.numel) == ((0, 4, 8), 16)


@given(NUMELS, WORLDS, st.integers(1, 60), st.booleans())
def test_every_rank_owns_a_row_of_every_chunk(numels, world, limit, round_robin):
    layout = group_layout(numels, world, round_robin=round_robin, chunk_limit=limit)
    assert layout.numel == layout.chunks * layout.chunk_numel == layout.chunks * world * layout.row_numel
    assert layout.chunk_numel <= max(limit, 2 * world) and layout.row_numel % 2 == 0
    assert layout.numel - sum(numels) < 2 * world * layout.chunks
    for index, numel in enumerate(numels):
        expected = []
        for position in range(layout.offsets[index], layout.offsets[index] + numel):
            chunk, within = divmod(position, layout.chunk_numel)
            owner, column = divmod(within, layout.row_numel)
            expected.append((owner, chunk * layout.row_numel + column))
        assert [
            (part.owner, part.offset + each) for part in layout.shards(index) for each in range(part.numel)
        ] == expected


def test_a_chunk_is_a_16th_of_the_buffer_within_bounds():
    assert [chunk_limit(numel, 500_000_000) for numel in (1000, 2**20, 2**25, 2**40)] == [
        2**18, 2**18, 2**21, 2**23,
    ]  # fmt: skip
    assert chunk_limit(2**26, 1000) == 1000


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=12))
def test_runs_merge_neighbours_of_one_owner(slices):
    runs = owner_runs(slices)
    assert [owner for owner, numel in slices for _ in range(numel)] == [
        run.owner for run in runs for _ in range(run.numel)
    ]
    assert all(first.owner != second.owner for first, second in itertools.pairwise(runs))
    assert all(first.start + first.numel == second.start for first, second in itertools.pairwise(runs))


def test_runs_are_sent_as_soon_as_they_exceed_the_limit():
    # Recorded: with 3 ranks and a limit of 20,000, the 33,667 elements of the mlp's weight are sent as 32,982
    # and 685.
    runs = owner_runs([(0, 14_002), (1, 18_980), (2, 685)])
    batches = flushed_runs(runs, 20_000)
    assert [sum(run.numel for run in batch) for batch in batches] == [32_982, 685]
    assert flushed_runs([Run(0, 0, 20_000), Run(1, 20_000, 1)], 20_000) == (
        (Run(0, 0, 20_000), Run(1, 20_000, 1)),
    )
