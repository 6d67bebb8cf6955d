"""``commprof verify`` of models with experts.

A program issues the messages by hand, so that this file states each size. There are four ranks, two to a
group of experts. Sizes: 24 dense elements, 60 elements of the two experts of a rank, 32 tokens of 16
elements.
"""

from __future__ import annotations

import functools

import pytest

from commprof.exit_codes import State
from commprof.ledger.verification import verify
from support.recording import record

pytestmark = pytest.mark.ranks

WORLD = 4
CONFIG = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 0}}
TOKENS, HIDDEN, EXPERTS = 32, 16, 4
SLOTS = 12  # 32 tokens / 4 experts x 1.5
# Without dropping, the experts with most tokens have 14 on rank 0, 20 on rank 1, 9 on rank 2, and 11 on rank
# 3.
COUNTS = ([14, 2, 8, 8], [20, 4, 4, 4], [9, 7, 8, 8], [11, 7, 7, 7])
DENSE = (("first", 10), ("moe.deepspeed_moe.gate.wg.weight", 8), ("last", 6))


def parameter(name, numel, index, group, ep_size=None):
    row = {"name": name, "shape": str(numel), "dtype": "float32", "numel": numel, "requires_grad": True}
    return {**row, "param_group": group, "forward_index": index, "ep_size": ep_size}


def train(rank, world, drop_tokens, more_slots, loads, returned="float32"):
    """Run three steps of stage 0 and an evaluation.

    Step 1 sends ``more_slots`` slots more than the rules predict. ``returned`` is the element type of the
    results.
    """
    import torch
    import torch.distributed as dist

    from commprof import hooks

    sharing = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    experts = [f"moe.deepspeed_moe.experts.deepspeed_experts.{2 * (rank % 2) + n}.weight" for n in range(2)]
    hooks.phase("init")
    hooks.describe_config(CONFIG, "zero_runtime test")
    rows = [parameter(name, numel, index, 0) for (name, numel), index in zip(DENSE, (0, 1, 4), strict=True)]
    rows += [parameter(name, 30, 2 + n, 1, 2) for n, name in enumerate(experts)]
    hooks.describe_parameters(rows)
    layer = {"layer": "moe", "num_experts": EXPERTS, "ep_size": 2, "k": 1, "capacity_factor": 1.5}
    layer |= {"eval_capacity_factor": 1.0, "min_capacity": 4, "drop_tokens": drop_tokens, "hidden": HIDDEN}
    hooks.describe_expert_layers([{**layer, "expert_ranks": "0,1" if rank < 2 else "2,3"}])
    with hooks.tag("parameter_broadcast"):
        for row in rows:
            group, first = (None, 0) if row["ep_size"] is None else (replicas, rank % 2)
            dist.broadcast(torch.ones(row["numel"]), first, group=group)

    results = getattr(torch, returned)

    def exchange(slots, dtype):
        tokens = torch.ones(EXPERTS, slots, HIDDEN, dtype=dtype)
        dist.all_to_all_single(torch.empty_like(tokens), tokens, group=sharing)

    def forward(more=0):
        slots = SLOTS
        with hooks.tag("activation", module="moe"):
            if not drop_tokens:
                fullest = torch.tensor(max(COUNTS[rank]))
                dist.all_reduce(fullest, op=dist.ReduceOp.MAX, group=sharing)
                slots = int(fullest)
            for dtype in (torch.float32, results):
                exchange(slots + more, dtype)
        if loads:
            hooks.expert_load("moe", torch.tensor(COUNTS[rank]), slots, TOKENS)
        return slots

    for step in range(3):
        hooks.step(step)
        hooks.phase("forward")
        slots = forward(more_slots if step == 1 else 0)
        hooks.phase("backward")
        with hooks.tag("activation", module="moe"):
            for dtype in (results, torch.float32):
                exchange(slots, dtype)
        with hooks.tag("gradient_reduce"):
            dist.all_reduce(torch.ones(24))
            dist.all_reduce(torch.ones(60), group=replicas)
        hooks.phase("optimizer")
        with hooks.tag("gradient_norm"):
            dist.all_reduce(torch.ones(1))
        hooks.end_step()
        hooks.phase("evaluation")
    forward()
    hooks.phase("other")


def verdict_of(tmp_path, drop_tokens=True, more_slots=0, loads=True, **more):
    run, _ = record(tmp_path / "run", WORLD, functools.partial(train, **more), drop_tokens, more_slots, loads)
    return verify(run)


@pytest.mark.parametrize("drop_tokens", [pytest.param(True, marks=pytest.mark.long), False])
def test_the_ledger_closes(tmp_path, drop_tokens):
    verdict = verdict_of(tmp_path, drop_tokens)
    assert verdict.state == State.CLOSED and not verdict.unexplained, verdict.sentences
    assert verdict.explained_bytes == verdict.issued_bytes
    # In a step each group issues 4 all_to_alls of 4 experts x slots x 16 elements x 4 bytes. Without dropping
    # there are 20 and 11 slots.
    slots = 2 * SLOTS if drop_tokens else 20 + 11
    (tokens,) = (row for row in verdict.rows if row.requested_op == "all_to_all" and row.when == "steps")
    assert tokens.expected_payload_bytes == 3 * 4 * slots * EXPERTS * HIDDEN * 4


def test_results_in_the_type_of_autocast_close_too(tmp_path):
    """The ledger also closes if experts return results in the type of autocast.

    With torch.autocast, a norm before the layer leaves tokens in fp32, but the experts return results in 16
    bits.
    """
    verdict = verdict_of(tmp_path, returned="bfloat16")
    assert verdict.state == State.CLOSED and not verdict.unexplained, verdict.sentences
    (tokens,) = (row for row in verdict.rows if row.requested_op == "all_to_all" and row.when == "steps")
    assert tokens.expected_payload_bytes == 3 * 2 * (2 * SLOTS) * EXPERTS * HIDDEN * (4 + 2)


def test_a_slot_too_many_is_named(tmp_path):
    verdict = verdict_of(tmp_path, more_slots=1)
    assert verdict.state == State.MISMATCH
    found = {(each.op, each.group_ranks): each for each in verdict.unexplained}
    assert set(found) == {("all_to_all", "0-1"), ("all_to_all", "2-3")}
    for each in found.values():  # both all_to_alls of the forward pass
        assert each.steps == "1" and each.payload_bytes == 2 * EXPERTS * (SLOTS + 1) * HIDDEN * 4


@pytest.mark.long
def test_without_the_loads_nothing_says_how_many_tokens_there_should_be(tmp_path):
    verdict = verdict_of(tmp_path, loads=False)
    assert verdict.state == State.UNKNOWN and not verdict.unexplained
    assert any("activation" in text and "not predicted" in text for text in verdict.sentences)
