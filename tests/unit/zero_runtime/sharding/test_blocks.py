"""Blocks of parameters and the order of their visits, by hand."""

from __future__ import annotations

import pytest

from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError
from zero_runtime.sharding.gather_schedule.block_order import BlockOrder, Decision
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
    """The decision at each of ``visits``, of which ``turn`` are forward; decided blocks are gathered and released."""
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


PASSES = [0, 1, 2, 1, 0]  # the last block of the forward pass is the first of the backward pass


def test_the_first_iteration_gathers_on_demand_and_later_ones_ahead():
    order = BlockOrder(UNLIMITED._replace(reuse_distance=0), [10, 10, 10])
    assert walk(order, PASSES, 3) == [
        Decision([], []),
        Decision([], [0]),
        Decision([], [1]),
        Decision([], [2]),
        Decision([], [1]),
    ]
    assert walk(order, PASSES, 3) == [
        Decision([1], []),
        Decision([2], [0]),
        Decision([1], []),
        Decision([0], [2]),
        Decision([], [1]),
    ]


def test_blocks_that_are_used_again_soon_are_kept_within_the_limit():
    order = BlockOrder(UNLIMITED, [10, 10, 10])
    walk(order, PASSES, 3)
    assert [each.released for each in walk(order, PASSES, 3)] == [[], [], [], [2], [1]]
    # 35 elements: at the second visit, two blocks and the one ahead do not fit.
    order = BlockOrder(UNLIMITED._replace(max_live=25), [10, 10, 10])
    walk(order, PASSES, 3)
    assert [each.released for each in walk(order, PASSES, 3)] == [[], [0], [], [2], [1]]


def test_small_blocks_are_gathered_ahead_together_up_to_the_size_of_the_largest():
    order = BlockOrder(UNLIMITED, [20, 4, 8, 8, 20])
    visits = [0, 1, 2, 3, 4]
    walk(order, visits, 5)
    assert [each.ahead for each in walk(order, visits, 5)] == [[1, 2, 3], [2, 3], [3], [4], []]
    order = BlockOrder(UNLIMITED._replace(prefetch=0), [20, 4, 8, 8, 20])
    walk(order, visits, 5)
    assert not any(each.ahead for each in walk(order, visits, 5))


def test_an_evaluation_gathers_nothing_of_the_backward_pass():
    order = BlockOrder(UNLIMITED, [10, 10, 10])
    walk(order, PASSES, 3)
    assert walk(order, PASSES[:3], 3, differentiates=False) == [
        Decision([1], []),
        Decision([2], [0]),
        Decision([], [1]),
    ]


def test_another_order_is_recorded_from_where_it_departs():
    order = BlockOrder(UNLIMITED, [10, 10, 10])
    walk(order, PASSES, 3)
    other = [0, 2, 1, 0]
    assert [each.ahead for each in walk(order, other, 3)] == [[1], [], [], []]
    assert [each.ahead for each in walk(order, other, 3)] == [[2], [1], [0], []]


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
