"""Test the division of shards into chunks (``Stretch``).

No element is missing or repeated, and the division does not change the instruction that processes an element.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_runtime.offload.stretches import GRAIN, Stretch, cut, stretch_numel

numels = st.integers(0, 10_000)
limits = st.integers(1, 30).map(lambda grains: grains * GRAIN)
shares = st.floats(0.0, 1.0)


@settings(deadline=None)
@given(numels, limits, shares)
def test_stretches_cover_a_piece_in_order(numel, limit, ratio):
    found = list(cut(3, numel, limit, ratio))
    position = 0
    for stretch in found:
        assert stretch.piece == 3 and stretch.part.start == position and stretch.numel > 0
        assert stretch.part.start % GRAIN == 0
        assert stretch.numel <= limit or not stretch.offloaded
        position = stretch.part.stop
    assert position == numel
    offloaded = sum(stretch.numel for stretch in found if stretch.offloaded)
    assert abs(offloaded - ratio * numel) <= GRAIN
    assert [stretch.offloaded for stretch in found] == sorted((s.offloaded for s in found), reverse=True)


@settings(deadline=None)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=20), limits, shares)
def test_stretches_begin_where_they_may(sizes, limit, ratio):
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    found = list(cut(0, sum(sizes), limit, ratio, starts))
    assert [stretch.part.start for stretch in found][:1] in ([], [0])
    assert {stretch.part.start for stretch in found} <= set(starts)
    assert [stretch.part.stop for stretch in found[:-1]] == [stretch.part.start for stretch in found[1:]]
    assert found[-1].part.stop == sum(sizes)
    for stretch in found:
        inside = [start for start in starts if stretch.part.start < start < stretch.part.stop]
        assert not stretch.offloaded or stretch.numel <= limit or not inside


def test_an_empty_piece_has_no_stretch():
    assert list(cut(0, 0, 64)) == []


@pytest.mark.parametrize(
    ("total", "largest", "expected"),
    [
        (10**9, 10**9, 2**22),
        (64 * 10**6 + 640, 10**9, 1_000_000),
        (1000, 10**9, 2**18),
        (10**9, 5000, 4992),
        (10**9, 10, 64),
    ],
)
def test_stretches_are_neither_too_small_for_a_disk_nor_too_large_for_memory(total, largest, expected):
    assert stretch_numel(total, largest) == expected


def test_a_share_is_the_beginning_of_a_piece():
    assert list(cut(1, 1000, 256, 0.5)) == [
        Stretch(1, slice(0, 256), True),
        Stretch(1, slice(256, 512), True),
        Stretch(1, slice(512, 1000), False),
    ]
