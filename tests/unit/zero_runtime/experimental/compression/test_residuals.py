"""Test residuals that some ranks save and a different number of ranks load.

Every residual is used exactly once. The elements of each rank are written by hand here: the rank in position
p of each host sums the p-th part of a bucket, and exchanges the sum with the same position of the other
hosts.
"""

from types import SimpleNamespace

import pytest
import torch

from zero_runtime.experimental.compression.residuals import OF_SHARE, Layout, Residuals, layout_of
from zero_runtime.experimental.compression.signs import MeanOfSigns
from zero_runtime.gradient_reduction.gradient_buckets import Entry

SIZES = {"a": 7, "b": 1, "c": 12}
NUMEL = sum(SIZES.values())
# Each entry has the ranks and the ranks per host. With 1 rank per host there is no grouping by hosts.
GRIDS = [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (6, 2), (6, 3), (8, 2), (8, 4)]


def bucket():
    return [Entry(name, torch.zeros(numel), ()) for name, numel in SIZES.items()]


def part_of(rank, local):
    """Return the elements of the bucket that ``rank`` uses."""
    width = -(-NUMEL // local)
    start = min(NUMEL, rank % local * width)
    return slice(start, min(NUMEL, start + width))


def saved(ranks, local, seed):
    """Return the saved values of each rank, and the sum of all values over the bucket."""
    generator = torch.Generator().manual_seed(seed)
    total, files = torch.zeros(NUMEL), []
    for rank in range(ranks):
        values, used = torch.randint(-9, 10, (NUMEL,), generator=generator).float(), part_of(rank, local)
        own = torch.zeros(NUMEL)
        own[used] = values[used]
        total += own
        files.append(dict(zip(SIZES, own.split(list(SIZES.values())), strict=True)))
    return files, total


def load(files, ranks, local, layout, **options):
    found = []
    for rank in range(ranks):
        residuals = Residuals(Layout(local), **options)
        residuals.load(lambda each: files[each], rank, ranks, len(files), layout, torch.device("cpu"))
        found.append(residuals)
    return found


def used_by(every, local):
    """Return the sum that all ranks add to a bucket of zeros."""
    total = torch.zeros(NUMEL)
    for rank, residuals in enumerate(every):
        part = part_of(rank, local)
        values = torch.zeros(part.stop - part.start)
        residuals.add_to(values, bucket(), part.start, 1.0)
        total[part] += values
    return total


@pytest.mark.parametrize(("ranks", "local"), GRIDS)
@pytest.mark.parametrize(("saved_ranks", "saved_local"), GRIDS)
def test_other_ranks_use_the_sum_of_what_was_saved(saved_ranks, saved_local, ranks, local):
    files, total = saved(saved_ranks, saved_local, seed=saved_ranks)
    every = load(files, ranks, local, Layout(saved_local))
    torch.testing.assert_close(used_by(every, local), total)
    # The residuals are saved again before and after the first use and loaded by a third number of ranks.
    # Nothing is lost or used twice.
    early = [residuals.stored() for residuals in load(files, ranks, local, Layout(saved_local))]
    for again in (early, [residuals.stored() for residuals in every]):
        torch.testing.assert_close(used_by(load(again, 5, 1, Layout(local)), 1), total)
        torch.testing.assert_close(used_by(load(again, ranks, local, Layout(local)), local), total)


def test_a_sum_of_two_is_used_as_two_on_two_ranks_a_host():
    files = [{"a": torch.full((7,), 0.5)}, {"a": torch.full((7,), 1.5)}]
    used = used_by(load(files, 4, 2, Layout()), 2)
    assert used[:7].tolist() == [2.0] * 7


def test_what_one_rank_has_on_behalf_of_all_is_not_forgotten_where_no_rank_does_so():
    files = [{"a": torch.ones(7)}, {"a": torch.ones(7), f"{OF_SHARE}a": torch.full((7,), 3.0)}, {}, {}]
    assert used_by(load(files, 2, 1, Layout(two_phases=True)), 1)[:7].tolist() == [5.0] * 7


def test_the_same_ranks_go_on_with_what_was_their_own():
    files, _ = saved(4, 2, seed=0)
    for layout in (Layout(2), None):
        for residuals, own in zip(load(files, 4, 2, layout), files, strict=True):
            assert all(torch.equal(residuals.tensors[name], own[name]) for name in SIZES)


def test_of_values_that_are_divided_after_the_sum_the_mean_is_kept():
    files, total = saved(4, 1, seed=3)
    for ranks in (1, 2, 3, 4, 7):
        # With this layout, the loading ranks differ from the saving ranks, whatever their number.
        layout = Layout(two_phases=True)
        used = used_by(load(files, ranks, 1, layout, of_mean=True), 1)
        torch.testing.assert_close(used / ranks, total / 4)


def test_a_single_rank_adds_what_signs_left_over_to_its_own_value_once():
    (residuals,) = load([{"a": torch.ones(7)}, {"a": torch.full((7,), 2.0)}], 1, 1, Layout(), of_mean=True)
    mean = MeanOfSigns(SimpleNamespace(world_size=1), residuals)
    for expected in (11.5, 10.0):
        value = torch.full((7,), 10.0)
        mean(["a"], [value])
        assert value.tolist() == [expected] * 7
    assert residuals.stored() == {}


def test_gradients_that_overflowed_leave_it_as_it_is():
    (residuals,) = load([{"a": torch.ones(7)}, {"a": torch.ones(7)}], 1, 1, Layout())
    values = torch.full((NUMEL,), float("inf"))
    residuals.hand_over(values, bucket(), 1.0)
    assert torch.isinf(values).all()
    values = torch.zeros(NUMEL)
    residuals.hand_over(values, bucket(), 4.0)
    assert values[:7].tolist() == [8.0] * 7


def test_a_residual_that_decays_is_added_in_part_and_replaced_whole():
    residuals = Residuals(decay=0.5)
    for expected in (0.0, 2.0):
        values = torch.zeros(NUMEL)
        residuals.add_to(values, bucket(), 0, 2.0)
        assert values.tolist() == [expected] * NUMEL
        residuals.keep(torch.full((NUMEL,), 4.0), bucket(), 0, 2.0)
    assert residuals.norm() == pytest.approx((4.0 * NUMEL) ** 0.5)


def test_other_ranks_use_the_sum_of_the_momentum_if_they_have_any():
    files = [{"a": torch.ones(7), "corrected momentum of a": torch.full((7,), each)} for each in (1.0, 5.0)]
    entries = [Entry("corrected momentum of a", torch.zeros(7), ())]
    for ranks in (1, 2, 3):
        found = [
            part[1].tolist()
            for each in load(files, ranks, 1, None, momentum=True)
            for part in each.ranges(torch.zeros(7), entries)
        ]
        assert [sum(values) for values in zip(*found, strict=True)] == pytest.approx([6.0] * 7)
        assert all(set(each.stored()) <= {"a", "pending a"} for each in load(files, ranks, 1, None))


def test_what_a_checkpoint_says_of_the_layout_is_checked():
    assert layout_of(None) is None
    assert layout_of({"places": 2, "two_phases": True}) == Layout(2, True)
    for told in ({"places": "2", "two_phases": True}, {"places": 2, "two_phases": 1}):
        with pytest.raises(ValueError, match="laid out"):
            layout_of(told)
