"""Test the rules of ZeroRedundancyOptimizer that no run on this machine can show."""

from __future__ import annotations

import pytest

from commprof.requested.errors import RequestedError
from commprof.requested.wrappers.arguments import Tensor, Wrapper
from commprof.requested.wrappers.zero_redundancy import ZeroRedundancy
from commprof.schema import Purpose


def rules(*sizes, ranks=2, dtype="float32", **arguments):
    parameters = tuple(Tensor(str(place), (size,), dtype, True) for place, size in enumerate(sizes))
    given = {"groups": [len(sizes)], "devices": ["cpu"], **arguments}
    return ZeroRedundancy(
        Wrapper("zero_redundancy_optimizer", "", tuple(range(ranks)), parameters, arguments=given)
    )


def payloads(rules, passes):
    sent, state = rules.passes(passes, None)
    assert state is None
    return [each for row in sent for (each,) in row.payloads]


def test_the_rank_with_the_fewest_elements_gets_the_next_largest():
    """40 goes to rank 0, 30 to rank 1, 20 to rank 1, which has 30, and 15 to rank 0, which has 40."""
    assert payloads(rules(15, 40, 20, 30), "S1;") == [160, 60, 120, 80]
    buckets = rules(15, 40, 20, 30, parameters_as_bucket_view=True)
    assert payloads(buckets, "S1;") == [55 * 4, 50 * 4]


def test_a_bucket_has_what_is_trained_and_is_never_empty():
    buckets = rules(15, 40, dtype="bfloat16", parameters_as_bucket_view=True)
    assert payloads(buckets, "S1-1;") == [4, 30]  # The 4 bytes are a placeholder of one fp32 value.
    assert payloads(buckets, "S1;S1;") == [80, 30, 80, 30]


@pytest.mark.parametrize("passes", ["?", "S2;", "S1", "S;"])
def test_steps_that_are_not_known_are_refused(passes):
    with pytest.raises(RequestedError):
        rules(3, 4).passes(passes, None)


def test_what_is_sent_from_a_hook_is_not_predicted():
    overlapped = rules(3, 4, overlap_with_ddp=True)
    assert set(overlapped.unpredicted) == {Purpose.PARAMETER_BROADCAST, Purpose.GRADIENT_REDUCE}
    assert payloads(overlapped, "S1;") == []
    assert rules(3, 4, parameters_as_bucket_view=True, devices=["cuda:0", "cuda:1"]).unpredicted
