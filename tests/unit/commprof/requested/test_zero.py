"""Test the traffic that a configuration should cause, per step and purpose."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commprof.requested import Parameter, RequestedError, expected
from commprof.requested.zero.zero_stages import kind_of_step, steady_step
from support.sample import examples

PARAMETERS = [
    Parameter("embedding", 6_000, "float32", 0, True, 0),
    Parameter("norm", 40, "float32", 1, True, 1),
    Parameter("frozen", 900, "float32", 0, False, 2),
    Parameter("weight", 10_000, "float32", 0, True, 3),
    Parameter("bias", 50, "float32", 1, True, 4),
]
TRAINED = [parameter.name for parameter in PARAMETERS if parameter.requires_grad]
TRAINED_NUMEL = 16_090
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True}}


def stage(number, **keys):
    return {"zero_optimization": {"stage": number, **keys}}


def by_purpose(config, parameters=PARAMETERS, world_size=4, **arguments):
    return {row.purpose: row for row in expected(config, parameters, world_size, **arguments)}


def test_stage_0_sends_all_gradients_at_once_and_the_norm_when_it_clips():
    rows = by_purpose(stage(0))
    assert list(rows) == ["parameter_broadcast", "gradient_reduce", "gradient_norm"]
    gradients = rows["gradient_reduce"]
    assert (gradients.when, gradients.requested_op, gradients.issued_op) == (
        "step",
        "all_reduce",
        "all_reduce",
    )
    assert (gradients.count, gradients.payload_bytes) == (1, 4 * TRAINED_NUMEL)
    assert gradients.wire_bytes == pytest.approx(2 * 3 / 4 * 4 * TRAINED_NUMEL)
    assert gradients.exact
    assert "gradient_norm" not in by_purpose(stage(0) | {"gradient_clipping": 0})
    # At stage 0, the 16-bit optimizers compute the norm without a message.
    assert "gradient_norm" not in by_purpose(stage(0) | BF16)
    assert "overflow_check" not in by_purpose(stage(0) | FP16)


def test_stage_0_closes_a_message_once_it_holds_more_than_half_a_billion_elements():
    parameters = [Parameter(f"p{i}", 300_000_000, "float32", 0, True, i) for i in range(5)]
    gradients = by_purpose(stage(0, reduce_bucket_size=10), parameters)["gradient_reduce"]
    assert gradients.count == 3
    assert gradients.payload_bytes == 5 * 300_000_000 * 4


def test_every_parameter_is_broadcast_at_the_start_in_the_dtype_of_the_model():
    for config, size in ((stage(2), 4), (stage(2) | BF16, 2)):
        row = by_purpose(config)["parameter_broadcast"]
        assert (row.when, row.issued_op, row.count) == ("init", "broadcast", len(PARAMETERS))
        assert row.payload_bytes == size * (TRAINED_NUMEL + 900)


def test_stage_2_reduces_in_every_micro_batch_and_stage_1_once_per_step():
    for number, when in ((1, "step"), (2, "micro_step")):
        rows = by_purpose(stage(number) | {"gradient_accumulation_steps": 8})
        assert rows["gradient_reduce"].when == when
        assert rows["gradient_reduce"].payload_bytes == 4 * TRAINED_NUMEL
        assert {rows[p].when for p in ("gradient_norm", "parameter_gather")} == {"step"}


@pytest.mark.parametrize(
    ("keys", "issued", "intended", "count"),
    [
        # Group 0 has 16,000 elements in shards of 4,000. Group 1 has 90 elements, padded to 96, in shards of
        # 24. Only chunks are per group.
        ({}, "all_reduce", None, 1),
        ({"reduce_scatter": False}, "all_reduce", None, 1),
        ({"use_multi_rank_bucket_allreduce": False}, "reduce", None, 4),
        ({"contiguous_gradients": False, "use_multi_rank_bucket_allreduce": False}, "all_reduce", None, 1),
        ({"gradient_reduction": "reduce_scatter"}, "all_to_all", "reduce_scatter", 2),
        (
            {"gradient_reduction": "reduce_scatter", "reduce_scatter_impl": "native"},
            "reduce_scatter",
            None,
            2,
        ),
        ({"gradient_reduction": "reduce_to_owner"}, "reduce", None, 4),
    ],
)
def test_the_rules_say_what_is_issued_in_place_of_what_is_asked_for(keys, issued, intended, count):
    row = by_purpose(stage(2, **keys))["gradient_reduce"]
    assert (row.issued_op, row.intended_op, row.count) == (issued, intended, count)
    assert row.exact  # One bucket contains everything, so the order does not matter.
    trips = 2 if issued == "all_reduce" else 1
    assert row.wire_bytes == pytest.approx(trips * 3 / 4 * row.payload_bytes)


def test_a_native_reduce_scatter_is_native_unless_the_backend_is_gloo():
    config = stage(2, gradient_reduction="reduce_scatter")
    assert by_purpose(config, backend="nccl")["gradient_reduce"].issued_op == "reduce_scatter"
    assert by_purpose(config, backend="gloo")["gradient_reduce"].issued_op == "all_to_all"
    forced = stage(2, gradient_reduction="reduce_scatter", reduce_scatter_impl="all_to_all")
    assert by_purpose(forced, backend="nccl")["gradient_reduce"].issued_op == "all_to_all"


def test_contiguous_gradients_false_is_noted():
    row = by_purpose(stage(2, contiguous_gradients=False))["gradient_reduce"]
    assert row.requested_op == "reduce_scatter"
    assert row.issued_op == "all_reduce"
    assert "contiguous_gradients: false overrides" in row.note


def test_each_parameter_group_has_its_norm_and_its_gather_padded_to_twice_the_ranks():
    rows = by_purpose(stage(1))
    assert rows["gradient_norm"].count == 2
    assert rows["gradient_norm"].payload_bytes == 2 * 4
    gather = rows["parameter_gather"]
    assert (gather.issued_op, gather.count) == ("all_gather", 2)
    assert gather.payload_bytes == 4 * (16_000 + 96)
    assert "gradient_norm" not in by_purpose(stage(1, compute_grad_norm=False) | {"gradient_clipping": 0})


@pytest.mark.parametrize(
    ("precision", "checked"),
    [
        ({}, False),
        (BF16, True),
        (FP16, True),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, False),
    ],
)
def test_16_bit_gradients_are_checked_for_overflow(precision, checked):
    rows = by_purpose(stage(2) | precision)
    assert ("overflow_check" in rows) == checked
    if checked:
        row = rows["overflow_check"]
        assert (row.issued_op, row.count, row.payload_bytes) == ("all_reduce", 1, 1)


def test_the_communication_dtype_is_that_of_gradients_alone():
    rows = by_purpose(stage(1) | BF16 | {"communication_data_type": "fp32"})
    assert rows["gradient_reduce"].payload_bytes == 4 * TRAINED_NUMEL
    assert rows["parameter_gather"].payload_bytes == 2 * (16_000 + 96)


def test_bf16_with_fp32_accumulation_at_stage_1_reduces_flat_groups_with_their_padding():
    accumulate = {"data_types": {"grad_accum_dtype": "fp32"}}
    rows = by_purpose(stage(1, reduce_bucket_size=10) | BF16 | accumulate)
    assert list(rows) == ["parameter_broadcast", "gradient_reduce", "parameter_gather"]
    assert (rows["gradient_reduce"].count, rows["gradient_reduce"].issued_op) == (1, "all_reduce")
    assert rows["gradient_reduce"].requested_op == "reduce_scatter"
    assert rows["gradient_reduce"].payload_bytes == 2 * (16_000 + 96)
    # The norm message is missing only in this case. It exists at stage 2 and with the optimizer on the CPU.
    assert "gradient_norm" in by_purpose(stage(2) | BF16 | accumulate)
    assert "gradient_norm" in by_purpose(stage(1, offload_optimizer={"device": "cpu"}) | BF16 | accumulate)


@pytest.mark.parametrize(
    "config",
    [
        {"prescale_gradients": True},
        {"gradient_predivide_factor": 4.0},
        {"gradient_allreduce_op": "sum"},
    ],
)
def test_what_only_changes_the_arithmetic_changes_no_message(config):
    for number in (0, 1, 2):
        assert expected(stage(number) | config, PARAMETERS, 2) == expected(stage(number), PARAMETERS, 2)


@pytest.mark.parametrize(
    ("config", "issued", "count"),
    [
        (stage(1), "all_gather", 2),
        (stage(1, allgather_partitions=False), "broadcast", 2 * 4),
        (stage(1) | {"disable_allgather": True}, "broadcast", 2 * 4),
        # Shards of 4,000 and 24 elements are sent in chunks of 1,000 // 4 = 250.
        (stage(1, allgather_bucket_size=1_000), "all_gather", 16 + 1),
    ],
)
def test_keys_about_the_gathering_work_here_and_do_nothing_in_deepspeed(config, issued, count):
    row = by_purpose(config)["parameter_gather"]
    assert (row.issued_op, row.count) == (issued, count)
    assert row.payload_bytes == 4 * (16_000 + 96)
    ignored = by_purpose(config, runtime="deepspeed")["parameter_gather"]
    assert (ignored.requested_op, ignored.issued_op, ignored.count) == (row.requested_op, "all_gather", 2)
    assert ("ignores" in ignored.note) == (config != stage(1))


def test_deepspeed_does_not_know_the_keys_of_zero_runtime():
    config = stage(2, gradient_reduction="reduce_scatter")
    row = by_purpose(config, runtime="deepspeed")["gradient_reduce"]
    assert (row.requested_op, row.issued_op) == ("reduce_scatter", "all_reduce")


def test_one_rank_still_reduces_but_gathers_nothing():
    rows = by_purpose(stage(2), world_size=1)
    assert rows["gradient_reduce"].count == 1
    assert "parameter_gather" not in rows
    assert all(row.wire_bytes == 0 for row in rows.values())


def test_a_split_that_needs_the_order_says_so_and_the_order_settles_it():
    config = stage(2, reduce_bucket_size=10_050, use_multi_rank_bucket_allreduce=False)
    guessed = by_purpose(config)["gradient_reduce"]
    assert not guessed.exact
    assert "reverse parameter order" in guessed.note
    backwards = by_purpose(config, gradient_order=TRAINED[::-1])["gradient_reduce"]
    assert backwards.exact
    assert backwards.count == guessed.count
    # At stage 1 without overlap, the gradients enter the buckets in the order of the groups.
    assert by_purpose(stage(1, reduce_bucket_size=10_050))["gradient_reduce"].exact
    assert not by_purpose(stage(1, reduce_bucket_size=10_050, overlap_comm=True))["gradient_reduce"].exact


def test_a_parameter_without_gradient_is_left_out_and_named():
    for number in (1, 2):
        row = by_purpose(stage(number), gradient_order=["bias", "weight", "norm"])["gradient_reduce"]
        assert row.payload_bytes == 4 * 10_090
        assert "embedding" in row.note
    # Stage 0 sends zeros for a gradient that never arrives.
    row = by_purpose(stage(0), gradient_order=["bias", "weight", "norm"])["gradient_reduce"]
    assert row.payload_bytes == 4 * TRAINED_NUMEL


def test_parameters_outside_the_optimizer_are_reduced_at_stage_0_only():
    parameters = [*PARAMETERS, Parameter("loose", 7, "float32", -1)]
    assert by_purpose(stage(0), parameters)["gradient_reduce"].payload_bytes == 4 * (TRAINED_NUMEL + 7)
    assert by_purpose(stage(2), parameters)["gradient_reduce"].payload_bytes == 4 * TRAINED_NUMEL


def test_a_model_that_trains_nothing_sends_only_its_parameters():
    frozen = [Parameter("a", 10, requires_grad=False)]
    for number in (0, 1, 2):
        assert list(by_purpose(stage(number) | FP16, frozen)) == ["parameter_broadcast"]
    assert expected(stage(1), [], 2) == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"world_size": 0}, "world size is 0"),
        ({"runtime": "fsdp"}, "'fsdp'.* deepspeed"),
        ({"parameters": [Parameter("a", 1), Parameter("a", 2)]}, "'a' is listed twice"),
        ({"parameters": [Parameter("a", -1)]}, "-1 elements"),
        ({"parameters": [Parameter("a", 1, "complex64")]}, "'complex64'"),
        ({"gradient_order": ["bias", "bias"]}, "'bias' twice"),
        ({"gradient_order": ["biass"]}, "'biass'"),
        ({"gradient_order": ["frozen"]}, "'frozen'"),
    ],
)
def test_input_that_cannot_be_used_is_named(arguments, part):
    with pytest.raises(RequestedError, match=part):
        by_purpose(stage(2), **arguments)


def test_torch_spelling_of_dtypes_is_read():
    assert by_purpose(stage(1), [Parameter("a", 8, "torch.float64")])["parameter_gather"].payload_bytes == 64


REDUCTION_KEYS = [
    {},
    {"reduce_scatter": False},
    {"use_multi_rank_bucket_allreduce": False},
    {"contiguous_gradients": False},
    {"gradient_reduction": "reduce_scatter"},
    {"round_robin_gradients": True, "use_multi_rank_bucket_allreduce": False},
]


@settings(max_examples=examples(80), deadline=None)
@given(st.data())
def test_bytes_depend_neither_on_the_order_nor_on_the_buckets(data):
    sizes = data.draw(st.lists(st.integers(1, 500), min_size=1, max_size=10))
    parameters = [
        Parameter(f"p{i}", size, "float32", data.draw(st.integers(0, 1)), True, i)
        for i, size in enumerate(sizes)
    ]
    order = data.draw(st.permutations([parameter.name for parameter in parameters]))
    config = stage(
        data.draw(st.sampled_from([1, 2])),
        reduce_bucket_size=data.draw(st.integers(1, 2_000)),
        overlap_comm=data.draw(st.booleans()),
        **data.draw(st.sampled_from(REDUCTION_KEYS)),
    )
    world_size = data.draw(st.integers(1, 5))
    with_order = by_purpose(config, parameters, world_size, gradient_order=order)
    without = by_purpose(config, parameters, world_size)
    for purpose, row in with_order.items():
        assert (row.issued_op, row.payload_bytes) == (
            without[purpose].issued_op,
            without[purpose].payload_bytes,
        )
        assert row.wire_bytes == without[purpose].wire_bytes
    assert with_order["gradient_reduce"].payload_bytes == 4 * sum(sizes)
    if without["gradient_reduce"].exact:
        assert without["gradient_reduce"].count == with_order["gradient_reduce"].count


@pytest.mark.parametrize("stage_number", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_wire_bytes_are_those_of_the_operation(stage_number, world_size):
    trips = {
        "all_reduce": 2,
        "reduce": 1,
        "broadcast": 1,
        "all_gather": 1,
        "all_to_all": 1,
        "reduce_scatter": 1,
    }
    for keys in REDUCTION_KEYS:
        for row in expected(stage(stage_number, **keys) | BF16, PARAMETERS, world_size):
            share = (world_size - 1) / world_size
            assert row.wire_bytes == pytest.approx(trips[row.issued_op] * share * row.payload_bytes)


def test_nothing_but_the_standard_library_is_imported():
    program = (
        "import sys, commprof.requested\n"
        "found = {name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(sorted(name for name in found if not name.startswith('_')))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "['commprof']"


# The payload bytes of one rank, computed by hand for 16,090 elements at stage 1 on 4 ranks.
COMPRESSED = {
    "topk": ({"topk_ratio": 0.01}, 161 * 8),
    "1bit": ({"algorithm": "1bit", "huffman_coding": True}, 2012 + 8 * 4),
    "2bit": ({"algorithm": "2bit"}, 4023 + 8 * 8),
    "default": (None, 161 * 8),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_gradients_are_gathered_by_all(name):
    keys, payload = COMPRESSED[name]
    asked = {"compress_communication": True} if keys is None else {"gradient_compression": keys}
    row = by_purpose(stage(1) | asked)["gradient_reduce"]
    assert (row.requested_op, row.issued_op, row.intended_op) == (
        "reduce_scatter",
        "all_gather",
        "all_reduce",
    )
    assert (row.count, row.payload_bytes, row.wire_bytes) == (1, 4 * payload, 3 * payload)
    assert row.exact and row.note.startswith("gradient_compression: ")
    assert by_purpose(stage(1) | asked, runtime="deepspeed")["gradient_reduce"].issued_op == "all_reduce"
    assert by_purpose(stage(1) | asked, world_size=1)["gradient_reduce"].issued_op == "all_reduce"


def test_the_first_steps_are_not_compressed():
    config = stage(2) | {"gradient_compression": {"warmup_steps": 2}, "gradient_accumulation_steps": 3}
    ops = [by_purpose(config, iteration=number)["gradient_reduce"].issued_op for number in (0, 5, 6, None)]
    assert ops == ["all_reduce", "all_reduce", "all_gather", "all_gather"]
    assert steady_step(config | {"gradient_compression": {"warmup_steps": 7}}) == 7
    assert steady_step(stage(3)) == 2


def test_the_share_that_topk_sends_falls_before_all_steps_send_the_same():
    keys = {"topk_ratio": 0.01, "topk_warmup_ratio": 0.16, "topk_warmup_steps": 4, "warmup_steps": 1}
    config = stage(1) | {"gradient_compression": keys, "gradient_accumulation_steps": 2}
    # The values are 16 %, 8 %, 4 %, 2 % and 1 % of 16,090 elements, rounded up, each with its position, from
    # four ranks.
    expected_bytes = [4 * TRAINED_NUMEL, *(4 * 8 * count for count in (2575, 1288, 644, 322, 161, 161))]
    for step, payload in enumerate(expected_bytes):
        for iteration in (2 * step, 2 * step + 1):
            found = by_purpose(config, iteration=iteration)["gradient_reduce"]
            assert found.payload_bytes == payload, iteration
    assert steady_step(config) == 5
    assert by_purpose(config)["gradient_reduce"].payload_bytes == expected_bytes[-1]
    assert len({kind_of_step(config, step) for step in range(9)}) == 6
    assert (
        "1 uncompressed steps, and 16 % at first, which falls over 4 steps"
        in by_purpose(config)["gradient_reduce"].note
    )


@pytest.mark.parametrize("number", [0, 1])
def test_clipping_before_the_residual_needs_no_norm_of_the_sum(number):
    keys = {"clip_before_residual": True, "warmup_steps": 3}
    for iteration in (0, None):  # The uncompressed steps are included.
        rows = by_purpose(stage(number) | {"gradient_compression": keys}, iteration=iteration)
        assert ("gradient_norm" in rows) == (number == 1)  # Stage 1 reports the norm in any case.
    assert "gradient_norm" in by_purpose(stage(0) | {"gradient_compression": {}})


@pytest.mark.parametrize(
    ("number", "keys", "named"),
    [
        (2, {"hierarchical_compress": True}, "gradient_compression.hierarchical_compress"),
        (3, {}, "gradient_compression"),
    ],
)
def test_compression_whose_bytes_are_not_known_is_named(number, keys, named):
    with pytest.raises(RequestedError, match=named):
        by_purpose(stage(number) | {"gradient_compression": keys})


@pytest.mark.parametrize(
    "keys",
    [
        {"topk_ratio": 0},
        {"topk_ratio": 2},
        {"algorithm": "4bit"},
        {"warmup_steps": -1},
        {"topk_warmup_steps": -1},
        {"topk_warmup_ratio": 0},
        {"clip_before_residual": 3},
    ],
)
def test_bad_compression_is_refused(keys):
    with pytest.raises(RequestedError, match=f"gradient_compression.{next(iter(keys))}"):
        by_purpose(stage(1) | {"gradient_compression": keys})
