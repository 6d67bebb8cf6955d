"""Test which gradients share a bucket at stage 0.

The runtime and the rules of ``requested``, which share no code, must agree.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commprof.requested import Parameter
from commprof.requested.configuration import read_configuration
from commprof.requested.zero.gradients import whole_gradients_in_buckets
from support.sample import examples
from zero_runtime.gradient_reduction.whole_buckets import partition

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@settings(max_examples=examples(200), deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 40), st.sampled_from(sorted(DTYPES))), max_size=12),
    limit=st.integers(1, 60),
)
def test_the_runtime_fills_the_buckets_that_the_rules_expect(sizes, limit):
    tensors = [torch.nn.Parameter(torch.zeros(numel, dtype=DTYPES[kind])) for numel, kind in sizes]
    buckets = partition(tensors, dict.fromkeys(tensors, torch.float32), limit)
    zero = {"gradient_reduction": "all_reduce", "overlap_comm": True, "reduce_bucket_size": limit}
    rules = whole_gradients_in_buckets(
        read_configuration({"zero_optimization": zero}),
        [Parameter(f"p{index}", numel, kind, 0, True, index) for index, (numel, kind) in enumerate(sizes)],
        None,
    )
    assert [sum(tensors[index].numel() for index in each) for each in buckets] == [
        each.numel for each in rules.messages
    ]
    assert sorted(index for each in buckets for index in each) == [
        index for index, (numel, _) in enumerate(sizes) if numel
    ]


def test_a_bucket_waits_for_its_last_gradient_and_for_the_buckets_before_it():
    parameters = [Parameter(name, 10, "float32", 0, True, index) for index, name in enumerate("abcd")]
    zero = {"gradient_reduction": "all_reduce", "overlap_comm": True, "reduce_bucket_size": 20}
    configuration = read_configuration({"zero_optimization": zero})
    assert whole_gradients_in_buckets(configuration, parameters, None).arrived == (2, 4)
    assert whole_gradients_in_buckets(configuration, parameters, ["a", "b", "d", "c"]).arrived == (4, 4)
    # b never arrives, so its bucket is sent after the backward pass.
    assert whole_gradients_in_buckets(configuration, parameters, ["d", "c", "a"]).arrived == (2, 4)
