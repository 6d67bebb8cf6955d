"""Test the certain pairs of two sequences.

These are exactly the pairs that every longest common subsequence contains.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commprof.align.sequences.edits import ALONE, AMBIGUOUS
from commprof.align.sequences.pairs import UNSEARCHED, find_partners, one_gap
from support.sample import examples


def every_alignment(first, second):
    """Return all longest common subsequences, each as {position: partner}, by exhaustive search."""

    @functools.cache
    def longest(i, j):
        if i == len(first) or j == len(second):
            return 0
        best = max(longest(i + 1, j), longest(i, j + 1))
        return max(best, 1 + longest(i + 1, j + 1)) if first[i] == second[j] else best

    @functools.cache
    def paths(i, j):
        if not longest(i, j):
            return frozenset([()])
        found = set()
        if longest(i + 1, j) == longest(i, j):
            found |= paths(i + 1, j)
        if longest(i, j + 1) == longest(i, j):
            found |= paths(i, j + 1)
        if first[i] == second[j] and 1 + longest(i + 1, j + 1) == longest(i, j):
            found |= {((i, j), *path) for path in paths(i + 1, j + 1)}
        return frozenset(found)

    return [dict(path) for path in paths(0, 0)]


def verdicts(alignments, length):
    each = [{alignment.get(place, ALONE) for alignment in alignments} for place in range(length)]
    return [found.pop() if len(found) == 1 else AMBIGUOUS for found in each]


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(st.integers(0, 3), max_size=9), st.lists(st.integers(0, 3), max_size=9))
def test_a_pair_is_certain_when_no_alignment_does_without_it(first, second):
    found = find_partners(np.array(first, np.int64), np.array(second, np.int64))
    alignments = every_alignment(tuple(first), tuple(second))
    mirrored = [{j: i for i, j in alignment.items()} for alignment in alignments]
    anchors = {v for v in first if first.count(v) == 1 and second.count(v) == 1}
    for place, verdict in enumerate(verdicts(alignments, len(first))):
        # An element that occurs once on each side is matched, even if a swap would have nearly the same cost.
        assert found.first[place] == verdict or first[place] in anchors or anchors
    if not anchors:
        assert found.second.tolist() == verdicts(mirrored, len(second))


def test_equal_neighbours_of_which_one_is_lost_are_all_ambiguous():
    found = find_partners(np.array([1, 5, 5, 5, 2]), np.array([1, 5, 5, 2]))
    assert found.first.tolist() == [0, AMBIGUOUS, AMBIGUOUS, AMBIGUOUS, 3]
    assert found.second.tolist() == [0, AMBIGUOUS, AMBIGUOUS, 4]


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.data())
def test_a_block_that_is_missing_may_slide_as_far_as_it_repeats(values, length, data):
    first = data.draw(st.lists(st.integers(0, values), min_size=length, max_size=length))
    begin = data.draw(st.integers(0, length - 1))
    end = data.draw(st.integers(begin + 1, length))
    second = first[:begin] + first[end:]
    found = one_gap(np.array(first, np.int64), np.array(second, np.int64))
    places = [at for at in range(len(second) + 1) if first[:at] + first[at + end - begin :] == second]
    alignments = [
        {i: i if i < at else i - (end - begin) for i in range(length) if not at <= i < at + end - begin}
        for at in places
    ]
    assert found.first.tolist() == verdicts(alignments, length)


@pytest.mark.sampled
@pytest.mark.parametrize("lost", [0, 40, 1000, 5000])
def test_scattered_losses_in_a_long_repeating_sequence_are_found(lost):
    chance = np.random.default_rng(lost)
    first = np.tile(np.arange(50), 4000)
    gone = np.sort(chance.choice(len(first), lost, replace=False))
    kept = np.setdiff1d(np.arange(len(first)), gone)
    found = find_partners(first, first[kept])
    paired = np.flatnonzero(found.first >= 0)
    assert (kept[found.first[paired]] == paired).all()
    assert len(paired) >= 0.99 * len(kept)


def test_more_differences_than_one_search_allows_still_align():
    first = np.array(list(range(5000)) * 2)
    second = np.array([number for place, number in enumerate(first.tolist()) if place % 5])
    assert (find_partners(first, second).first >= 0).sum() == len(second)


def test_sequences_without_order_in_common_are_left_open_within_bounds():
    chance = np.random.default_rng(1)
    found = find_partners(chance.integers(0, 50, 100_000), chance.integers(0, 50, 100_000))
    assert (found.first == UNSEARCHED).mean() > 0.9


def test_nothing_in_common_is_nobody_s_partner():
    found = find_partners(np.arange(10), np.arange(10, 30))
    assert set(found.first.tolist()) == {ALONE}
    assert set(found.second.tolist()) == {ALONE}


def test_partners_point_at_each_other():
    chance = np.random.default_rng(3)
    for _ in range(50):
        first = chance.integers(0, 6, 60)
        second = np.delete(first, chance.choice(60, 7, replace=False))
        found = find_partners(first, second)
        for place, partner in enumerate(found.first.tolist()):
            assert partner < 0 or found.second[partner] == place
        pairs = [(x, y) for x, y in enumerate(found.first.tolist()) if y >= 0]
        assert all(a[1] < b[1] for a, b in itertools.pairwise(pairs))
