"""Test blocks of parameters and the order of their visits against hand-computed values."""

from __future__ import annotations

import pytest
from torch import nn

from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError
from zero_runtime.sharding.gather_schedule.block_order import BlockOrder, Decision
from zero_runtime.sharding.gather_schedule.gather_units import reads_backward
from zero_runtime.sharding.gather_schedule.gathered_blocks import blocks_of, gathers_by_block
from zero_runtime.sharding.gather_schedule.module_order import Limits

UNLIMITED = Limits(prefetch=1000, reuse_distance=1000, max_live=1000)


def test_a_block_is_an_outermost_numbered_module_or_what_is_between_two():
    names = ["wte.w", "wpe.w", "h.0.mlp.experts.0.w", "h.0.norm.w", "h.1.w", "norm.w", "norm.b", "head.w"]
    assert blocks_of(names) == {
        "wte to wpe": names[:2],
        "h.0": names[2:4],
        "h.1": names[4:5],
        "norm to head": names[5:],
    }
    assert blocks_of(["encoder.a.w", "encoder.b.w", "scale", "head.w"]) == {
        "encoder": ["encoder.a.w", "encoder.b.w"],
        "the model": ["scale"],
        "head": ["head.w"],
    }
    assert list(blocks_of(["0.weight", "0.bias", "2.weight"])) == ["0", "2"]


@pytest.mark.parametrize(
    ("numels", "max_live", "by_block"),
    [
        ({"h.0.w": 10, "h.1.w": 10, "head.w": 20}, 40, True),
        ({"h.0.w": 10, "h.1.w": 10, "head.w": 20}, 39, False),
        ({"h.0.w": 10, "head.w": 20}, 1000, False),
        ({"encoder.w": 10, "decoder.w": 10}, 1000, False),
    ],
)
def test_auto_takes_blocks_if_there_are_some_and_two_of_them_fit(numels, max_live, by_block):
    assert gathers_by_block("auto", numels, max_live) is by_block
    assert gathers_by_block("block", numels, max_live) is True
    assert gathers_by_block("module", numels, max_live) is False


def walk(order, visits, turn, differentiates=True):
    """Return the decision at each of ``visits``.

    The first ``turn`` visits are in the forward pass. Decided blocks are gathered and released.
    """
    order.begin()
    gathered, found = set(), []
    for number, block in enumerate(visits):
        if number == turn:
            order.turn()
        if order.expected not in (None, block):
            order.forget()
        order.visit(block)
        found.append(order.decide(tuple(gathered - {block}), differentiates))
        gathered -= set(found[-1].released)
        gathered |= {block, *found[-1].ahead}
    return found


PASSES = [0, 1, 2, 1, 0]  # The last block of the forward pass is the first block of the backward pass.
LONG = [0, 1, 2, 3, 4, 3, 2, 1, 0]


def order_of(*numels, trained=None, **limits):
    return BlockOrder(UNLIMITED._replace(**limits), numels, numels if trained is None else trained)


def test_the_first_iteration_gathers_on_demand_and_later_ones_ahead():
    order = order_of(*[10] * 5, reuse_distance=0)
    assert walk(order, LONG, 5) == [Decision([], [])] + [Decision([], [each]) for each in LONG[:-1]]
    assert walk(order, LONG, 5) == [
        # In the forward pass two blocks are prefetched, because the backward pass has memory for two: 20 are
        # gathered, 20 are sent and arrive, and 10 are filled.
        Decision([1, 2], []),
        Decision([2, 3], [0]),
        Decision([3, 4], [1]),
        Decision([4, 2], []),
        Decision([3, 2], []),
        Decision([2], [4]),
        Decision([1], [3]),
        Decision([0], [2]),
        Decision([], [1]),
    ]


def test_one_block_is_gathered_ahead_where_gradients_need_no_memory():
    order = order_of(*[10] * 5, trained=[1] * 5, reuse_distance=0)
    walk(order, LONG, 5)
    assert [each.ahead for each in walk(order, LONG, 5)[:5]] == [[1], [2], [3], [4], [3]]


def test_the_gradients_of_the_head_are_the_room_of_the_last_layer():
    order = order_of(10, 10, 10, 10, 2, reuse_distance=0)
    walk(order, LONG, 5)
    assert [each.ahead for each in walk(order, LONG, 5)[:5]] == [[1, 2], [2, 3], [3, 4], [4, 2], [3, 2]]
    # The fourth visit has room for 2 * (0 + 10) + 10 as in the backward pass, and uses 2 * 10 itself.
    order = order_of(10, 10, 10, 10, 2, trained=[10, 10, 10, 10, 0], reuse_distance=0)
    walk(order, LONG, 5)
    assert walk(order, LONG, 5)[3].ahead == [4]


def test_a_block_that_the_backward_pass_does_not_read_is_given_back():
    """The block of the embeddings behaves like this."""
    order = order_of(*[10] * 3)
    visits = [0, 1, 2, 1]
    walk(order, visits, 3)
    assert walk(order, visits, 3)[1:] == [Decision([2], [0]), Decision([1], []), Decision([], [2])]


class Own(nn.Embedding):
    pass


def test_only_torchs_own_embedding_does_not_read_its_weight_backward():
    patched = nn.Embedding(2, 2)
    patched.forward = lambda rows: patched.weight[rows] ** 2
    assert [*map(reads_backward, [nn.Embedding(2, 2), Own(2, 2), patched, nn.Linear(2, 2)])] == [
        False,
        True,
        True,
        True,
    ]


def test_prefetching_is_limited_by_its_key_in_both_passes():
    order = order_of(*[10] * 5, reuse_distance=0, prefetch=10)
    walk(order, LONG, 5)
    assert [each.ahead for each in walk(order, LONG, 5)] == [[1], [2], [3], [4], [3], [2], [1], [0], []]


def test_blocks_that_are_used_again_soon_are_kept_within_the_limit():
    order = order_of(*[10] * 3)
    walk(order, PASSES, 3)
    assert [each.released for each in walk(order, PASSES, 3)] == [[], [], [], [2], [1]]
    # Two blocks fit. At the second visit, the prefetched block replaces the first.
    order = order_of(*[10] * 3, max_live=25)
    walk(order, PASSES, 3)
    assert [each.released for each in walk(order, PASSES, 3)] == [[], [0], [], [2], [1]]


def test_small_blocks_are_gathered_ahead_together_up_to_the_size_of_the_largest():
    order = order_of(20, 4, 8, 8, 20)
    visits = [0, 1, 2, 3, 4]
    walk(order, visits, 0)
    assert [each.ahead for each in walk(order, visits, 0)] == [[1, 2, 3], [2, 3], [3], [4], []]
    order = order_of(20, 4, 8, 8, 20, prefetch=0)
    walk(order, visits, 0)
    assert not any(each.ahead for each in walk(order, visits, 0))


def test_an_evaluation_gathers_nothing_of_the_backward_pass():
    order = order_of(*[10] * 3)
    walk(order, PASSES, 3)
    assert walk(order, PASSES[:3], 3, differentiates=False) == [
        Decision([1], []),
        Decision([2], [0]),
        Decision([], [1]),
    ]


def test_another_order_is_recorded_from_where_it_departs():
    order = order_of(*[10] * 3)
    walk(order, PASSES, 3)
    other = [0, 2, 1, 0]
    assert [each.ahead for each in walk(order, other, 3)] == [[1, 2], [], [], []]
    assert [each.ahead for each in walk(order, other, 3)] == [[2, 1], [1, 0], [0], []]


def config(**zero):
    document = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **zero}}
    return RuntimeConfig.from_mapping(document, 2)


@pytest.mark.parametrize(
    "keys",
    [
        {"stage3_allgather_sequential": True},
        {"stage3_use_all_reduce_for_fetch_params": True},
        {"stage3_module_granularity_threshold": 5},
        {"leaf_module": {"names": ["h.0"]}},
        {"zero_hpz_partition_size": 2},
        {"zero_quantized_weights": True},
        {"zero_quantized_nontrainable_weights": True},
        {"zero_quantized_gradients": True},
        {"enable_sanity_checks": True},
        {"offload_param": {"device": "cpu"}},
        {"gradient_reduction": "all_reduce"},
        {"reduce_scatter": False},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_keys_of_modules_refuse_blocks_and_make_auto_take_modules(keys):
    with pytest.raises(ConfigError, match=f"is block.*{next(iter(keys))}.*use module"):
        config(stage3_gather_unit="block", **keys)
    assert config(stage3_gather_unit="auto", **keys).zero.sharding.residency.unit == "module"
    assert config(stage3_gather_unit="auto").zero.sharding.residency.unit == "auto"
