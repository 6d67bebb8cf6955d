"""Test the traffic of a model with experts against sizes computed by hand from DeepSpeed's rules."""

from __future__ import annotations

import pytest
import torch

from commprof.requested import Parameter, RequestedError, UnsupportedError, expected, expected_in_step
from commprof.requested.experts.layers import ExpertLayer, capacity
from commprof.requested.experts.rank_groups import RankGroups
from commprof.requested.memory.states import holdings

# There are 10 dense elements before the layer, 8 of its gate, two experts of 30 on each rank, and 6 dense
# elements after the layer.
PARAMETERS = [
    Parameter("first", 10, param_group=0),
    Parameter("moe.gate", 8, param_group=0),
    Parameter("moe.experts.0", 30, param_group=1, ep_size=2),
    Parameter("moe.experts.1", 30, param_group=1, ep_size=2),
    Parameter("last", 6, param_group=0),
]
LAYER = ExpertLayer("moe", 4, 2, 1, 1.5, 4, True, 16, tokens=32)
REPLICAS = ((0, 2), (1, 3))
SHARERS = ((0, 1), (2, 3))
BACKWARD = [each.name for each in PARAMETERS[::-1]]


def zero(stage, **keys):
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, **keys}}


def messages(rows, when=None):
    """Return the bytes of each message by (purpose, operation, groups)."""
    sent = {}
    for row in rows:
        if when in (None, row.when):
            assert row.count == len(row.payloads) and row.payload_bytes == sum(map(sum, row.payloads))
            sizes = [sum(each) for each in row.payloads]
            sent.setdefault((row.purpose, row.issued_op, row.groups), []).extend(sizes)
    return sent


def asked(config, world=4, parameters=PARAMETERS, layers=(LAYER,), order=BACKWARD, **keywords):
    return expected(config, parameters, world, order, expert_layers=layers, **keywords)


def test_groups_of_eight_ranks_in_both_orders():
    assert RankGroups(8).of_experts(4) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert RankGroups(8).of_replicas(4) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert RankGroups(8, data_first=True).of_experts(4) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert RankGroups(8, data_first=True).of_replicas(4) == ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("factor", [0.3, 1.0, 1.1, 1.2, 1.25, 2.0])
def test_the_capacity_is_rounded_as_torch_rounds_it(k, factor):
    for tokens in (1, 10, 30, 64, 1000, 4096):
        for experts in (2, 3, 7, 16):
            slots = torch.ceil((tokens / experts) * torch.tensor(factor * k)).to(torch.int64)
            assert capacity(tokens, experts, factor, k, 4) == max(int(slots), 4)


def test_stage_2_sends_dense_and_expert_gradients_of_a_bucket_within_their_groups():
    rows = asked(zero(2))
    assert messages(rows, "init") == {
        ("parameter_broadcast", "broadcast", None): [40, 32, 24],
        ("parameter_broadcast", "broadcast", REPLICAS): [120, 120],
    }
    assert messages(rows, "micro_step") == {
        ("gradient_reduce", "all_reduce", None): [(6 + 8 + 10) * 4],
        ("gradient_reduce", "all_reduce", REPLICAS): [60 * 4],
        # 4 experts x 12 slots x 16 elements, with 12 = 32 / 4 x 1.5. The data goes there and back, in the
        # forward and the backward pass.
        ("activation", "all_to_all", SHARERS): [4 * 12 * 16 * 4] * 4,
    }
    assert messages(rows, "step") == {
        ("gradient_norm", "all_reduce", None): [4, 4],  # There is one message for each optimizer group.
        ("gradient_norm", "all_reduce", REPLICAS): [4],
        ("parameter_gather", "all_gather", None): [24 * 4],  # 24 elements are a multiple of 2 x 4 ranks.
        ("parameter_gather", "all_gather", REPLICAS): [60 * 4],  # 60 elements are a multiple of 2 x 2 ranks.
    }


def test_with_autocast_some_tokens_may_stay_in_fp32():
    rows = asked({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    (tokens,) = (each for each in rows if each.issued_op == "all_to_all")
    assert tokens.payload_bytes == tokens.least_bytes == 4 * (4 * 12 * 16 * 2) and not tokens.bytes_exact
    assert tokens.most_bytes == 2 * tokens.payload_bytes and "torch.autocast" in tokens.estimate


def test_wire_bytes_are_those_of_the_smaller_groups():
    by_group = {row.groups: row for row in asked(zero(2)) if row.purpose == "gradient_reduce"}
    assert by_group[None].wire_bytes == 2 * 3 / 4 * 96
    assert by_group[REPLICAS].wire_bytes == 2 * 1 / 2 * 240


def test_a_bucket_ends_where_dense_and_expert_gradients_together_exceed_it():
    rows = asked(zero(2, reduce_bucket_size=40))
    # In backward order, the elements are 6 + 30 | 30 + 8 | 10.
    assert messages(rows, "micro_step")["gradient_reduce", "all_reduce", None] == [24, 32, 40]
    assert messages(rows, "micro_step")["gradient_reduce", "all_reduce", REPLICAS] == [120, 120]


def test_reduces_go_to_the_owners_within_each_group():
    rows = asked(zero(1, use_multi_rank_bucket_allreduce=False))
    sent = messages(rows, "step")
    assert sent["gradient_reduce", "reduce", None] == [24, 24, 24, 24]  # Each of 4 owners gets 6 elements.
    assert sent["gradient_reduce", "reduce", REPLICAS] == [120, 120]  # Each of 2 owners gets 30 elements.


def test_stage_0_sends_experts_after_all_others():
    rows = asked({"gradient_clipping": 1.0})
    assert messages(rows, "step") == {
        ("gradient_reduce", "all_reduce", None): [96],
        ("gradient_reduce", "all_reduce", REPLICAS): [240],
        ("gradient_norm", "all_reduce", None): [4],
    }


@pytest.mark.parametrize(
    ("runtime", "torch_adam", "norms"),
    [("deepspeed", True, []), ("deepspeed", False, [4]), ("zero_runtime", True, [4])],
)
def test_stage_0_in_16_bit_compares_overflows_where_experts_are_shared(runtime, torch_adam, norms):
    adam = {"type": "AdamW", "params": {"torch_adam": torch_adam}}
    sent = messages(asked({"bf16": {"enabled": True}, "optimizer": adam}, runtime=runtime), "step")
    assert sent["overflow_check", "all_reduce", SHARERS] == [1]
    assert sent.get(("gradient_norm", "all_reduce", SHARERS), []) == norms


def test_flat_gradients_of_bf16_at_stage_1_go_by_group():
    config = zero(1) | {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    assert messages(asked(config), "step") == {
        ("gradient_reduce", "all_reduce", None): [24 * 2],
        ("gradient_reduce", "all_reduce", REPLICAS): [60 * 2],
        ("gradient_norm", "all_reduce", SHARERS): [4],
        ("parameter_gather", "all_gather", None): [24 * 2],
        ("parameter_gather", "all_gather", REPLICAS): [60 * 2],
    }


def test_all_ranks_sharing_the_experts_reduce_them_alone_and_gather_nothing():
    parameters = [each._replace(ep_size=each.ep_size and 4) for each in PARAMETERS]
    layer = LAYER._replace(ep_size=4)
    alone = ((0,), (1,), (2,), (3,))
    sent = messages(asked(zero(2), parameters=parameters, layers=[layer]))
    assert sent["gradient_reduce", "all_reduce", alone] == [240]
    assert ("parameter_gather", "all_gather", alone) not in sent
    assert len(sent["activation", "all_to_all", ((0, 1, 2, 3),)]) == 4


def test_ep_size_1_exchanges_no_tokens_but_reduces_experts_in_messages_of_their_own():
    parameters = [each._replace(ep_size=each.ep_size and 1) for each in PARAMETERS]
    sent = messages(asked(zero(2), parameters=parameters, layers=[LAYER._replace(ep_size=1)]))
    assert sent["gradient_reduce", "all_reduce", None] == [96, 240]
    assert sent["gradient_norm", "all_reduce", None] == [4, 4, 4]
    assert not [key for key in sent if key[0] == "activation"]


def test_data_before_experts_makes_neighbors_replicas():
    sent = messages(asked(zero(2) | {"use_data_before_expert_parallelism": True}))
    assert sent["gradient_reduce", "all_reduce", SHARERS] == [240]
    assert len(sent["activation", "all_to_all", REPLICAS]) == 4


def test_tokens_are_sent_in_each_micro_batch_and_in_the_type_of_the_model():
    config = zero(2) | {"gradient_accumulation_steps": 3, "bf16": {"enabled": True}}
    rows = expected_in_step(config, PARAMETERS, 4, 0, BACKWARD, expert_layers=[LAYER, LAYER._replace(k=2)])
    sent = messages(rows)
    # k = 2 doubles the capacity to 24 slots.
    assert sorted(sent["activation", "all_to_all", SHARERS]) == 12 * [4 * 12 * 16 * 2] + 12 * [
        4 * 24 * 16 * 2
    ]


def test_the_first_module_gets_no_gradient_back():
    sent = messages(asked(zero(2), parameters=PARAMETERS[1:], order=BACKWARD[:-1]))
    assert len(sent["activation", "all_to_all", SHARERS]) == 3


def test_without_dropping_the_bytes_are_bounded_and_the_capacity_is_agreed_upon():
    layer = LAYER._replace(drop_tokens=False, tokens=30)
    tokens, agreed = (row for row in asked(zero(2), layers=[layer]) if row.purpose == "activation")
    a_slot = 4 * 16 * 4  # The bytes of one slot of each of 4 experts.
    assert (tokens.payload_bytes, tokens.least_bytes) == (4 * 8 * a_slot, 4 * 8 * a_slot)  # 8 = ceil(30 / 4).
    assert tokens.most_bytes == 4 * 30 * a_slot and not tokens.bytes_exact and tokens.exact
    assert (agreed.issued_op, agreed.payload_bytes, agreed.groups) == ("all_reduce", 8, SHARERS)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (zero(3), "zero_optimization.stage"),
        (zero(1, reduce_scatter=False), "zero_optimization.reduce_scatter"),
        (zero(2, contiguous_gradients=False), "zero_optimization.contiguous_gradients"),
        (zero(2, gradient_reduction="all_reduce"), "zero_optimization.gradient_reduction"),
        (zero(2) | {"gradient_compression": {"algorithm": "1bit"}}, "gradient_compression"),
    ],
)
def test_what_does_not_go_with_experts_is_refused(config, key):
    with pytest.raises(UnsupportedError) as refusal:
        asked(config)
    assert refusal.value.key == key


@pytest.mark.parametrize(
    ("parameters", "layer", "text"),
    [
        (PARAMETERS, LAYER._replace(ep_size=3), "ep_size is 3 on 4 ranks"),
        (PARAMETERS, LAYER._replace(num_experts=5), "5 experts and ep_size 2"),
        (PARAMETERS, LAYER._replace(k=5), "k 5 and 4 experts"),
        ([each._replace(param_group=0) for each in PARAMETERS], LAYER, "ep_size 2 and None"),
    ],
)
def test_sizes_that_do_not_fit_are_named(parameters, layer, text):
    with pytest.raises(RequestedError, match=text):
        asked(zero(2), parameters=parameters, layers=[layer])


def test_a_reduce_scatter_of_zero_runtime_has_rows_for_the_owners_of_each_group():
    rows = asked(zero(2, gradient_reduction="reduce_scatter"))
    of_all, of_experts = (row for row in rows if row.purpose == "gradient_reduce")
    # 24 dense elements are 6 for each of 4 ranks, and 60 expert elements are 30 for each of 2 ranks. gloo
    # exchanges rows.
    assert (of_all.issued_op, of_all.groups, of_all.payloads) == ("all_to_all", None, ((24, 24, 24, 24),))
    assert (of_experts.groups, of_experts.payloads) == (REPLICAS, ((120, 120),))


def test_each_rank_holds_the_states_of_its_share_of_its_own_experts():
    held = {each.what: each.device for each in holdings(zero(2) | {"bf16": {"enabled": True}}, PARAMETERS, 4)}
    assert held["parameters"] == 84 * 2
    assert held["masters"] == (24 // 4 + 60 // 2) * 4
    assert held["optimizer states"] == (24 // 4 + 60 // 2) * 8
