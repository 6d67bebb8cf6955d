"""Compare the shards of stage 3 with hand-computed tables and with shards that torch computes."""

from __future__ import annotations

import pytest
import torch

from zero_runtime.sharding.shard_layout import shard_layout, sub_groups


def test_slices_by_hand():
    layout = shard_layout([5, 2, 0, 3], 3)
    assert (layout.offsets, layout.shard_numel) == ((0, 2, 3, 3), 4)
    # The columns are (owner, first element, elements, position in the owner's shard). Padding has no owner.
    assert layout.shards(0) == ((0, 0, 2, 0), (1, 2, 2, 0), (2, 4, 1, 0))
    assert layout.shards(1) == ((0, 0, 1, 2), (1, 1, 1, 2))
    assert layout.shards(2) == ()
    assert layout.shards(3) == ((0, 0, 1, 3), (1, 1, 1, 3), (2, 2, 1, 3))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_slices_are_what_cutting_the_padded_parameter_gives(world):
    numels = [1, 5, 12, 13, 100]
    layout = shard_layout(numels, world)
    for index, numel in enumerate(numels):
        values = torch.arange(numel)
        width = -(-numel // world)
        padded = torch.full((world * width,), -1)
        padded[:numel] = values
        for owner, row in enumerate(padded.view(world, width)):
            real = row[row >= 0]
            found = [piece for piece in layout.shards(index) if piece.owner == owner]
            assert [values[p.start : p.start + p.numel].tolist() for p in found] == (
                [real.tolist()] if len(real) else []
            )
            assert all(piece.offset == layout.offsets[index] for piece in found)
    assert layout.shard_numel == sum(-(-numel // world) for numel in numels)


@pytest.mark.parametrize(
    ("limit", "groups"),
    [
        (1, [[0], [1], [2], [3]]),
        (4, [[0], [1, 2], [3]]),
        (5, [[0, 1], [2, 3]]),
        (9, [[0, 1, 2, 3]]),
        (10**9, [[0, 1, 2, 3]]),
    ],
)
def test_a_sub_group_ends_once_it_is_full(limit, groups):
    # The shards have 4, 2, 2 and 1 elements on 2 ranks.
    assert [list(span) for span in sub_groups([8, 4, 3, 2], 2, limit)] == groups


def test_no_parameters_are_no_sub_group():
    assert sub_groups([], 2, 10) == []
