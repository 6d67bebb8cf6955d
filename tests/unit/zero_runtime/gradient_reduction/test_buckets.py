"""Test in which bucket each gradient is sent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commprof import hooks
from zero_runtime.gradient_reduction.flat_layout import ShardRange, group_layout
from zero_runtime.gradient_reduction.gradient_buckets import Bucketer, Entry, Scaling

FP32, BF16 = torch.float32, torch.bfloat16


def fill(numels, limit, contiguous=True, dtypes=None):
    """Return the buckets for gradients of the given sizes: (sizes, reason, dtype, content)."""
    sent = []

    def send(bucket):
        sent.append(
            (
                [entry.gradient.numel() for entry in bucket.entries],
                bucket.flush_reason,
                bucket.dtype,
                bucket.tensor.tolist(),
            )
        )

    bucketer = Bucketer(limit, sum(numels), contiguous, Scaling(), send)
    layout = group_layout(numels, 2)
    for index, numel in enumerate(numels):
        gradient = torch.full((numel,), float(index))
        entry = Entry(f"p{index}", gradient, layout.shards(index))
        bucketer.add(entry, dtypes[index] if dtypes else FP32)
    bucketer.flush()
    return sent


def test_a_bucket_is_sent_before_the_gradient_that_would_not_fit():
    assert [(sizes, reason) for sizes, reason, *_ in fill([6, 4, 1, 9, 2], 10)] == [
        ([6, 4], "full"),
        ([1, 9], "full"),
        ([2], "end_of_backward"),
    ]


def test_a_gradient_over_the_limit_is_a_bucket_of_its_own():
    assert [(sizes, reason) for sizes, reason, *_ in fill([3, 25, 3], 10)] == [
        ([3], "full"),
        ([25], "oversized"),
        ([3], "end_of_backward"),
    ]


def test_nothing_is_sent_for_an_empty_bucket_or_gradient():
    assert [sizes for sizes, *_ in fill([25, 0, 30], 10)] == [[25], [30]]


def test_each_communication_dtype_has_its_bucket_and_the_last_go_in_the_order_of_their_names():
    sent = fill([4, 4, 4, 4, 4], 8, dtypes=[FP32, BF16, FP32, BF16, FP32])
    assert [(sizes, dtype) for sizes, _, dtype, _ in sent] == [
        ([4, 4], FP32),
        ([4, 4], BF16),
        ([4], FP32),
    ]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 40), st.booleans())
def test_every_gradient_arrives_whole_and_in_order(numels, limit, contiguous):
    sent = fill(numels, limit, contiguous)
    assert [value for *_, content in sent for value in content] == [
        float(index) for index, numel in enumerate(numels) for _ in range(numel)
    ]
    assert all(sum(sizes) <= limit or len(sizes) == 1 for sizes, *_ in sent)


@pytest.mark.parametrize("contiguous", [True, False])
def test_only_contiguous_buckets_copy(contiguous):
    pointers = []
    bucketer = Bucketer(
        10, 30, contiguous, Scaling(), lambda bucket: pointers.append(bucket.tensor.data_ptr())
    )
    small, large = torch.ones(4), torch.ones(20)
    for gradient in (small, large):
        bucketer.add(Entry("p", gradient, ()), FP32)
    bucketer.flush()
    assert (pointers[0] == small.data_ptr()) is not contiguous
    assert pointers[1] == large.data_ptr()


def test_owners_are_published_as_global_ranks(monkeypatch):
    """The shards of a bucket are identified by their owner's position in the group.

    A trace contains the ranks of the job instead.
    """
    published = []
    monkeypatch.setattr(hooks, "recording", lambda: True)
    monkeypatch.setattr(hooks.bucket, "flushed", lambda content: published.append(content.row["owners"]))
    for members in ((), (2, 3)):
        bucketer = Bucketer(10, 10, False, Scaling(), lambda bucket: None, members=members)
        bucketer.add(Entry("p", torch.ones(4), (ShardRange(0, 0, 0, 3), ShardRange(1, 3, 0, 1))), FP32)
        bucketer.flush()
    assert published == ["0,1", "2,3"]
