"""Test stage 3 by blocks against hand-computed values.

The model has an embedding of 12 elements, two layers of 9 and 3, and a head of 12, on 2 ranks. Padded, the
sizes are 12, twice 10 + 4, and 12 elements.
"""

from __future__ import annotations

import pytest

from commprof.requested import Parameter, RequestedError, expected_in_step
from commprof.requested.memory.states import holdings
from commprof.requested.zero.parameter_blocks import blocks_of

SIZES = {
    "words.weight": 12,
    "h.0.weight": 9,
    "h.0.bias": 3,
    "h.1.weight": 9,
    "h.1.bias": 3,
    "head.weight": 12,
}
MODEL = [Parameter(name, numel, forward_index=index) for index, (name, numel) in enumerate(SIZES.items())]
PADDED = (12, 14, 14, 12)
NUM_BYTES = sum(PADDED) * 4


def stage_3(**keys):
    own = {"stage3_gather_unit": "block", "reduce_scatter_impl": "native"}
    return {"zero_optimization": {"stage": 3, **own, **keys}}


def rows(config, step, runtime="zero_runtime"):
    return {
        each.purpose: each
        for each in expected_in_step(config, MODEL, 2, step, runtime=runtime, backend="gloo")
    }


def test_blocks_are_numbered_modules_and_what_is_between_them():
    assert [[each.name for each in block] for block in blocks_of(MODEL)] == [
        ["words.weight"],
        ["h.0.weight", "h.0.bias"],
        ["h.1.weight", "h.1.bias"],
        ["head.weight"],
    ]
    flat = [Parameter(name, 4) for name in ("encoder.a.w", "encoder.b.w", "head.w")]
    assert [len(block) for block in blocks_of(flat)] == [2, 1]


def test_a_step_gathers_each_block_once_and_reduces_it_once():
    found = rows(stage_3(), 5)
    assert set(found) == {"parameter_gather", "gradient_reduce", "gradient_norm"}
    gather, reduce = found["parameter_gather"], found["gradient_reduce"]
    assert sorted(gather.payloads) == [(48,), (48,), (56,), (56,)]
    assert (reduce.issued_op, reduce.payloads) == ("reduce_scatter", ((48,), (56,), (56,), (48,)))
    assert gather.padding_bytes == reduce.padding_bytes == 2 * (1 + 1) * 4
    assert all(each.exact and each.bytes_exact for each in found.values())
    assert reduce.arrived == (1, 3, 5, 6)


def test_without_keeping_all_but_the_last_three_blocks_are_gathered_twice():
    """While the head is in use, the layers before it are the next blocks.

    The backward pass needs the same amount of memory for gradients.
    """
    gather = rows(stage_3(stage3_max_reuse_distance=0), 5)["parameter_gather"]
    assert (gather.count, gather.payload_bytes) == (5, NUM_BYTES + 48)
    assert not gather.exact and gather.least_bytes == NUM_BYTES
    one_ahead = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 12}
    gather = rows(stage_3(**one_ahead), 5)["parameter_gather"]
    assert (gather.count, gather.payload_bytes) == (6, 2 * NUM_BYTES - 48 - 56)


def test_frozen_layers_leave_no_room_in_the_forward_pass():
    frozen = [each._replace(requires_grad=each.name == "words.weight") for each in MODEL]
    (gather,) = [
        each
        for each in expected_in_step(stage_3(stage3_max_reuse_distance=0), frozen, 2, 5, backend="gloo")
        if each.purpose == "parameter_gather"
    ]
    assert gather.count == 6


def test_torchs_embeddings_are_not_gathered_for_the_backward_pass():
    def gathers(types):
        model = [MODEL[0]._replace(owner_types=types), *MODEL[1:]]
        sent = expected_in_step(stage_3(stage3_max_reuse_distance=0), model, 2, 5, backend="gloo")
        (gather,) = [each for each in sent if each.purpose == "parameter_gather"]
        return gather.count

    assert gathers("Embedding") == 4
    assert gathers(None) == gathers("Embedding,Words") == gathers("Embedding;Linear") == 5
    assert gathers("Embedding,train.Embedding") == 5


def test_the_first_step_gathers_on_demand():
    assert rows(stage_3(), 0)["parameter_gather"].count == 7
    assert "trace_check" not in rows(stage_3(), 1)


def test_an_all_to_all_has_the_padding_too():
    reduce = rows(stage_3(reduce_scatter_impl="auto"), 5)["gradient_reduce"]
    assert (reduce.issued_op, reduce.intended_op) == ("all_to_all", "reduce_scatter")
    assert reduce.payloads[1] == (28, 28)


def test_deepspeed_does_not_know_the_key():
    config = stage_3()
    plain = {"zero_optimization": {"stage": 3}}
    sent = expected_in_step(config, MODEL, 2, 5, runtime="deepspeed")
    assert sent == expected_in_step(plain, MODEL, 2, 5, runtime="deepspeed")


@pytest.mark.parametrize(
    ("keys", "messages"),
    [
        ({}, 4),
        ({"stage3_max_live_parameters": 24}, 6),
        ({"stage3_max_live_parameters": 23, "stage3_param_persistence_threshold": 0}, 3),
        ({"enable_sanity_checks": True, "stage3_param_persistence_threshold": 0}, 1),
    ],
    ids=str,
)
def test_auto_takes_blocks_where_two_fit(keys, messages):
    """Modules gather as much ahead as the limit allows, regardless of blocks.

    They need 104 bytes at first, or everything at once.
    """
    found = rows(stage_3(stage3_gather_unit="auto", **keys), 5)["parameter_gather"]
    assert found.count == messages


def test_what_goes_with_modules_alone_is_refused():
    with pytest.raises(RequestedError, match=r"stage3_gather_unit.*leaf_module"):
        rows(stage_3(leaf_module={"names": ["h.0"]}), 5)


@pytest.mark.parametrize(
    ("keys", "numel"),
    [
        ({}, 48),  # The complete model.
        # The head, and the two blocks that follow in the backward pass.
        ({"stage3_max_reuse_distance": 0}, 36),
        # A block and the next block.
        ({"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 12}, 24),
        ({"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}, 12),
        ({"stage3_max_live_parameters": 36}, 36),
    ],
    ids=str,
)
def test_memory_of_gathered_blocks(keys, numel):
    held = {each.what: each.device for each in holdings(stage_3(**keys), MODEL, 2)}
    assert held["gathered parameters"] == numel * 4
    # Gradients fill one block while another block is being sent. Only a shard arrives.
    assert held["gradient buckets"] == 2 * 12 * 4
