"""Test stage 3 with a model of two layers, small enough to write down every message.

The parameters are first.weight 12, first.bias 3, second.weight 9 and second.bias 3. These are 27 elements,
padded on 2 ranks to 12, 4, 10, 4.
"""

from __future__ import annotations

import pytest

from commprof.requested import Parameter, describe, expected, expected_in_step, reduction_share
from commprof.requested.zero.sharded import sub_groups
from support.requested_cases import parameters_of

SIZES = {"first.weight": 12, "first.bias": 3, "second.weight": 9, "second.bias": 3}
MODEL = [Parameter(name, numel, forward_index=index) for index, (name, numel) in enumerate(SIZES.items())]
PADDED_BYTES = (12 + 4 + 10 + 4) * 4
ARRIVED = ["second.bias", "second.weight", "first.bias", "first.weight"]


def stage_3(**keys):
    own = {"param_persistence_threshold": 0, "reduce_scatter_impl": "native"}
    return {"zero_optimization": {"stage": 3, **own, **keys}}


def sent(rows):
    return {(row.when, row.purpose, row.issued_op): (row.count, row.payload_bytes) for row in rows}


def test_each_parameter_is_broadcast_twice_and_gathered_once_at_the_start():
    start = sent(expected_in_step(stage_3(), MODEL, 2, -1))
    assert start == {
        ("init", "parameter_broadcast", "broadcast"): (8, 2 * 27 * 4),
        ("init", "parameter_gather", "all_gather"): (4, PADDED_BYTES),
    }
    within_init = sent(expected_in_step(stage_3(), MODEL, 2, -1, zero_init=True))
    assert within_init["init", "parameter_broadcast", "broadcast"] == (4, 27 * 4)


def test_a_later_step_gathers_everything_at_once_and_scatters_the_gradients():
    rows = expected_in_step(stage_3(), MODEL, 2, 5, ARRIVED)
    assert sent(rows) == {
        ("step", "parameter_gather", "all_gather"): (1, PADDED_BYTES),
        ("step", "gradient_reduce", "reduce_scatter"): (1, PADDED_BYTES),
        ("step", "gradient_norm", "all_reduce"): (1, 8),
    }
    assert all(row.exact and row.bytes_exact for row in rows)


def test_the_first_two_micro_batches_agree_on_the_order_of_modules():
    first = sent(expected_in_step(stage_3(), MODEL, 2, 0, ARRIVED))
    # In the forward and the backward pass, each of two layers gathers its own two parameters.
    assert first["step", "parameter_gather", "all_gather"] == (4, 2 * PADDED_BYTES)
    assert first["step", "trace_check", "broadcast"] == (2, 8)
    second = sent(expected_in_step(stage_3(), MODEL, 2, 1, ARRIVED))
    # There are lists of 6 calls (the model and two layers, in two passes) and two lists of 8 uses, each with
    # its length.
    assert second["step", "trace_check", "broadcast"] == (6, 3 * 8 + (6 + 8 + 8) * 8)
    assert second["step", "parameter_gather", "all_gather"] == (1, PADDED_BYTES)


def test_without_gathering_ahead_or_keeping_each_layer_gathers_in_both_passes():
    config = stage_3(stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0)
    [gather] = [
        r for r in expected(config, MODEL, 2) if (r.when, r.purpose) == ("micro_step", "parameter_gather")
    ]
    assert (gather.count, gather.payload_bytes) == (4, 2 * PADDED_BYTES)
    assert not gather.exact and not gather.bytes_exact
    assert "order" in gather.note


def test_without_gathering_ahead_the_bytes_are_certain_where_nothing_is_given_back():
    config = stage_3(stage3_prefetch_bucket_size=0)
    [gather] = [
        r for r in expected(config, MODEL, 2) if (r.when, r.purpose) == ("micro_step", "parameter_gather")
    ]
    assert (gather.count, gather.payload_bytes) == (2, PADDED_BYTES)
    assert not gather.exact and gather.bytes_exact


def test_parameters_that_stay_gathered_are_gathered_one_by_one_after_the_step():
    rows = sent(expected_in_step(stage_3(param_persistence_threshold=3), MODEL, 2, 7, ARRIVED))
    assert rows["step", "parameter_gather", "all_gather"] == (1 + 2, (12 + 10) * 4 + (4 + 4) * 4)
    limited = {"param_persistence_threshold": 3, "stage3_model_persistence_threshold": 4}
    rows = expected(stage_3(**limited), MODEL, 2)
    [kept] = [row for row in rows if (row.when, row.purpose) == ("step", "parameter_gather")]
    assert (kept.count, kept.payload_bytes) == (1, 16)


def test_every_micro_batch_reduces_and_gathers_again():
    config = stage_3() | {"gradient_accumulation_steps": 3}
    rows = sent(expected_in_step(config, MODEL, 2, 4, ARRIVED))
    assert rows["step", "gradient_reduce", "reduce_scatter"] == (3, 3 * PADDED_BYTES)
    assert rows["step", "parameter_gather", "all_gather"] == (3, 3 * PADDED_BYTES)
    assert rows["step", "gradient_norm", "all_reduce"] == (1, 8)


@pytest.mark.parametrize(
    ("keys", "gradients"),
    [
        # In order of arrival, the buckets are 3 + 9 | 3 | 12.
        ({}, {"reduce_scatter": (3, (4 + 10) * 4 + 4 * 4 + 12 * 4)}),
        ({"reduce_scatter": False}, {"all_reduce": (3, 27 * 4)}),
        ({"reduce_scatter": False, "contiguous_gradients": False}, {"reduce_scatter": (3, PADDED_BYTES)}),
        # A weight of 12 is larger than a bucket of 10, but is scattered nevertheless: 3 | 9 | 3 | 12.
        (
            {"reduce_scatter": False, "reduce_bucket_size": 10},
            {"all_reduce": (3, (3 + 9 + 3) * 4), "reduce_scatter": (1, 12 * 4)},
        ),
    ],
)
def test_a_bucket_is_scattered_unless_it_fits_and_nobody_wants_that(keys, gradients):
    config = stage_3(**{"reduce_bucket_size": 12, **keys})
    rows = [row for row in expected(config, MODEL, 2, ARRIVED) if row.purpose == "gradient_reduce"]
    assert {row.issued_op: (row.count, row.payload_bytes) for row in rows} == gradients
    asked = "reduce_scatter" if keys.get("reduce_scatter", True) else "all_reduce"
    assert {row.requested_op for row in rows} == {asked}


@pytest.mark.parametrize(
    ("keys", "sent_here"),
    [
        # There are 27 elements. An all_to_all carries no padding.
        ({}, {"all_to_all": 27 * 4}),
        ({"reduce_scatter_impl": "native"}, {"reduce_scatter": PADDED_BYTES}),
        ({"gradient_reduction": "all_reduce"}, {"all_reduce": 27 * 4}),
        ({"gradient_reduction": "reduce_scatter", "reduce_scatter": False}, {"all_to_all": 27 * 4}),
        ({"reduce_scatter": False, "contiguous_gradients": False}, {"all_to_all": 27 * 4}),
    ],
)
def test_zero_runtime_reduces_as_its_own_keys_say(keys, sent_here):
    config = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 20, **keys}}
    rows = [row for row in expected(config, MODEL, 2, ARRIVED) if row.purpose == "gradient_reduce"]
    assert {row.issued_op: row.payload_bytes for row in rows} == sent_here
    exchanged = [row.intended_op for row in rows if row.issued_op == "all_to_all"]
    assert exchanged in ([], ["reduce_scatter"])
    theirs = [
        row
        for row in expected(config, MODEL, 2, ARRIVED, runtime="deepspeed")
        if row.purpose == "gradient_reduce"
    ]
    assert "all_to_all" not in {row.issued_op for row in theirs}


@pytest.mark.parametrize(
    ("size", "parts"), [(100, 1), (15, 1), (14, 1), (13, 2), (8, 2), (7, 2), (6, 3), (1, 4)]
)
def test_slices_of_a_rank_are_optimised_in_parts(size, parts):
    # On 2 ranks, the shards have 6, 2, 5 and 2 elements, which are 15 in total.
    assert sub_groups([MODEL], size, 2) == parts


def test_one_rank_gathers_nothing_but_sends_the_rest():
    rows = sent(expected_in_step(stage_3(param_persistence_threshold=100), MODEL, 1, 3, ARRIVED))
    assert rows == {
        ("step", "gradient_reduce", "reduce_scatter"): (1, 27 * 4),
        ("step", "gradient_norm", "all_reduce"): (1, 8),
    }


def test_the_norm_of_an_offloaded_optimizer_is_fp32_and_fp16_checks_for_overflow():
    offloaded = expected(stage_3(offload_optimizer={"device": "cpu"}), MODEL, 2)
    assert sent(offloaded)["step", "gradient_norm", "all_reduce"] == (1, 4)
    half = sent(expected(stage_3() | {"fp16": {"enabled": True}}, MODEL, 2))
    assert half["step", "overflow_check", "all_reduce"] == (1, 1)
    assert half["micro_step", "parameter_gather", "all_gather"] == (1, PADDED_BYTES // 2)
    assert "overflow_check" not in {
        r.purpose for r in expected(stage_3() | {"bf16": {"enabled": True}}, MODEL, 2)
    }


@pytest.mark.parametrize(
    ("keys", "share"),
    [
        ({"stage": 2}, (0.75, 1.5)),
        ({"stage": 2, "use_multi_rank_bucket_allreduce": False}, (0.75, 0.75)),
        ({"stage": 1, "reduce_scatter": False}, (1.5, 1.5)),
        ({"stage": 3}, (0.75, 0.75)),
        ({"stage": 3, "reduce_scatter": False}, (1.5, 1.5)),
        ({"stage": 3, "reduce_scatter": False, "contiguous_gradients": False}, (1.5, 0.75)),
    ],
)
def test_the_share_of_the_gradients_that_each_of_four_ranks_sends(keys, share):
    assert reduction_share({"zero_optimization": keys}, 4)[:2] == pytest.approx(share)


def test_a_reduce_scatter_of_zero_runtime_is_an_exchange_on_gloo():
    config = {"zero_optimization": {"stage": 2, "gradient_reduction": "reduce_scatter"}}
    on_gloo = reduction_share(config, 4, "gloo", "zero_runtime")
    assert (on_gloo.issued, on_gloo.issued_op) == (0.75, "all_to_all")
    assert reduction_share(config, 4, "nccl", "zero_runtime").issued_op == "reduce_scatter"
    assert reduction_share(config, 4).issued_op == "all_reduce"


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({}, ("reduce_scatter: true", "one per bucket in each micro-batch")),
        ({"reduce_scatter": False}, ("requests an all_reduce", "larger than reduce_bucket_size")),
        (
            {"reduce_scatter": False, "contiguous_gradients": False},
            ("contiguous_gradients: false overrides it", "one reduce_scatter per bucket"),
        ),
    ],
)
def test_a_sentence_says_what_stage_3_makes_of_reduce_scatter(keys, parts):
    for part in parts:
        assert part in describe(stage_3(**keys))


def gathers(config, step, world=4):
    rows = expected_in_step(config, MODEL, world, step, ARRIVED, runtime="deepspeed")
    return {
        row.group_size: (row.count, row.payload_bytes, row.wire_bytes)
        for row in rows
        if row.purpose == "parameter_gather"
    }


def test_a_second_copy_serves_what_the_step_gathered_before():
    config = stage_3(zero_hpz_partition_size=2)
    padded = (12 + 4 + 12 + 4) * 4
    # The hooks gathered everything. The first step only reads the copies, and sends 1/2 of each message.
    assert gathers(config, 0) == {2: (4, 2 * padded, padded)}
    # Later steps gather everything once, from all four ranks.
    assert gathers(config, 3) == {None: (1, padded, padded * 3 / 4)}
    twice = gathers(config | {"gradient_accumulation_steps": 2}, 3)
    assert twice == {None: (1, padded, padded * 3 / 4), 2: (1, padded, padded / 2)}
    assert gathers(stage_3(zero_hpz_partition_size=4), 0) == {None: (4, 2 * padded, 2 * padded * 3 / 4)}


def test_released_parameters_keep_their_second_copy_unless_the_step_before_was_skipped():
    """The biases are persistent.

    DeepSpeed 0.19.8 gathers them from their copies after ``empty_partition_cache``.
    """
    config = stage_3(zero_hpz_partition_size=2, param_persistence_threshold=3)

    def released(by):
        rows = expected(config, MODEL, 4, ARRIVED, runtime="deepspeed", iteration=5, released_by=by)
        mine = [row for row in rows if row.when == "micro_step" and row.purpose == "parameter_gather"]
        return {row.group_size: row.payload_bytes for row in mine}

    weights, biases = (12 + 12) * 4, (4 + 4) * 4
    assert released("") == {None: weights}
    assert released("skip") == {None: weights + biases}
    assert released("program") == {None: weights, 2: biases}


def test_frozen_parameters_keep_their_second_copy():
    """The expected values are from the third step of DeepSpeed 0.19.8 on four gloo ranks.

    The second block of the network is frozen, and modules gather the parameters.
    """
    sizes = {
        "emb.weight": 256,
        "0.up.weight": 128,
        "0.up.bias": 16,
        "1.up.weight": 128,
        "1.up.bias": 16,
        "head.weight": 256,
    }
    model = [Parameter(name, numel, requires_grad=not name.startswith("1.")) for name, numel in sizes.items()]
    keys = ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")
    config = stage_3(zero_hpz_partition_size=2, **{f"stage3_{key}": 0 for key in keys})
    for runtime in ("deepspeed", "zero_runtime"):
        rows = expected_in_step(config, model, 4, 2, runtime=runtime)
        found = {row.group_size: row.payloads for row in rows if row.purpose == "parameter_gather"}
        # The frozen block has one message in the forward pass and one in the backward pass, both in pairs of
        # ranks.
        near = ((576,), (1024,), (576,), (576,), (1024,))
        assert found == {None: ((1024,), (576,), (1024,)), 2: near}


def test_a_second_copy_under_tight_limits_sends_what_was_measured():
    """Reference run B_s3_hpz2_tight_w4 has 15 + 11 gathers.

    The gathers contribute 146,272 + 181,504 bytes per rank.
    """
    tight = {
        "stage3_max_live_parameters": 20_000,
        "stage3_prefetch_bucket_size": 1000,
        "stage3_max_reuse_distance": 0,
    }
    rows = expected(
        stage_3(zero_hpz_partition_size=2, **tight), parameters_of({"config": {}}), 4, runtime="deepspeed"
    )
    mine = [row for row in rows if row.purpose == "parameter_gather" and row.when == "micro_step"]
    assert sum(row.count for row in mine) == 15 + 11
    assert sum(row.payload_bytes // (row.group_size or 4) for row in mine) == 146_272 + 181_504


@pytest.mark.parametrize("stage", [2, 3])
def test_each_further_micro_batch_of_a_step_adds_the_same(stage):
    """``plan`` used to take 40 s for 2,048 micro-batches per step, and minutes for more."""
    parameters = [Parameter(f"{layer}.weight", 1000 + layer) for layer in range(20)]

    def sums(micro_batches):
        config = {"gradient_accumulation_steps": micro_batches, "zero_optimization": {"stage": stage}}
        rows = expected_in_step(config, parameters, 4, 2)
        return [value for row in rows for value in (row.count, row.payload_bytes, len(row.payloads))]

    few, more, many = sums(3), sums(4), sums(50_003)
    assert many == [one + 50_000 * (two - one) for one, two in zip(few, more, strict=True)]
    assert few != more
