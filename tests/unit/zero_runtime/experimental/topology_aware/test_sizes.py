"""Test the axes of the rank grid for a world size and its hosts."""

from __future__ import annotations

from math import prod

import pytest

from zero_runtime.experimental.topology_aware.sizes import axis_groups, grid, ranks_per_host, sharing


def hosts(*ranks):
    """Return the host of each rank: ``hosts(2, 3)`` puts two ranks on the first host and three on the second."""
    return [number for number, count in enumerate(ranks) for _ in range(count)]


@pytest.mark.parametrize(
    ("topology", "on", "sizes"),
    [
        (1, hosts(2, 2), (4,)),
        (2, hosts(2, 2), (2, 2)),
        (2, hosts(4, 4), (2, 4)),
        (2, hosts(2, 2, 2), (3, 2)),
        (2, hosts(6), (2, 3)),
        (2, hosts(1, 1, 1, 1), (2, 2)),
        (3, hosts(8), (2, 2, 2)),
        (3, hosts(2, 2, 2, 2), (2, 2, 2)),
        (3, hosts(4, 4), (2, 2, 2)),
        (3, hosts(24), (2, 3, 4)),
        ("auto", hosts(3, 3), (2, 3)),
        ((2, 1, 3), hosts(6), (2, 3)),
        ((1, 4), hosts(4), (4,)),
        ((1,), hosts(1), (1,)),
        (3, hosts(1), (1,)),
    ],
)
def test_axes_lie_along_the_hosts_where_they_can(topology, on, sizes):
    assert grid(topology, on) == (sizes, "")


@pytest.mark.parametrize(
    ("topology", "on", "sizes", "said"),
    [
        (2, hosts(5), (5,), "collectives are plain"),
        (3, hosts(6), (2, 3), "along axes of 2 x 3"),
        (3, hosts(2, 2), (2, 2), "along axes of 2 x 2"),
        (3, hosts(7), (7,), "7 ranks do not make a grid of 3 axes"),
        ("auto", hosts(4), (4,), "all 4 ranks are on one host"),
        ("auto", hosts(1, 1, 1), (3,), "has one rank"),
        ("auto", hosts(1, 3), (4,), "do not have equal numbers"),
    ],
)
def test_what_cannot_be_has_fewer_axes_and_says_so(topology, on, sizes, said):
    found = grid(topology, on)
    assert found.sizes == sizes and said in found.notice


@pytest.mark.parametrize("world", range(1, 33))
@pytest.mark.parametrize("topology", [1, 2, 3])
def test_every_world_has_a_grid(world, topology):
    sizes = grid(topology, [0] * world).sizes
    assert prod(sizes) == world and len(sizes) <= topology
    assert world == 1 or all(size > 1 for size in sizes)


def test_hosts_that_take_turns_are_no_axis():
    assert ranks_per_host([0, 1, 0, 1]) is None
    assert ranks_per_host([7, 7, 3, 3]) == 2


@pytest.mark.parametrize("sizes", [(4,), (2, 3), (3, 2), (2, 3, 4)])
def test_groups_of_an_axis_share_the_ranks_out(sizes):
    world = range(prod(sizes))
    for axis, size in enumerate(sizes):
        groups = axis_groups(sizes, axis)
        assert sorted(rank for group in groups for rank in group) == list(world)
        assert {len(group) for group in groups} == {size}
        assert all(list(group) == sorted(group) for group in groups)
    # Groups of different axes have exactly one common rank, so no two ranks share groups of two axes.
    for rank in world:
        met = [
            set(group) for axis in range(len(sizes)) for group in axis_groups(sizes, axis) if rank in group
        ]
        assert all(a & b == {rank} for a in met for b in met if a is not b)


def test_innermost_ranks_follow_one_another():
    assert axis_groups((2, 2), 1) == [(0, 1), (2, 3)]
    assert axis_groups((2, 2), 0) == [(0, 2), (1, 3)]


def test_groups_that_leave_a_host_share_its_link():
    assert sharing((2, 2), hosts(2, 2)) == (2, 1)
    assert sharing((2, 3), hosts(3, 3)) == (3, 1)
    assert sharing((2, 2), hosts(1, 1, 1, 1)) == (1, 1)
    assert sharing((2, 2, 2), hosts(4, 4)) == (4, 2, 2)
