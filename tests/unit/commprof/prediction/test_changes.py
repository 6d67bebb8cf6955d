"""Test a recorded step in which the gradient messages change.

The tests check where the new messages are issued and waited for, and which parts of the step do not change.
"""

from __future__ import annotations

import numpy as np
import pytest

from commprof.errors import UsageError
from commprof.ledger.requests.request import Request
from commprof.prediction.changes import change
from commprof.prediction.event_places import Assumed
from commprof.prediction.predictions import sent_messages
from commprof.prediction.sent import sent_by
from commprof.requested.parameters import Parameter
from unit.commprof.prediction.made_runs import (
    BYTES,
    LAYERS,
    MS,
    WIDTH,
    config,
    gather,
    gradient,
    recorded,
    run,
    sent,
)


def placed(changed):
    """Return (kind, payload bytes, ms of compute since the step began) of each event on rank 0."""
    work = np.cumsum(changed.steps[0].spans[:, 0]) / MS
    return [
        (event.kind, changed.program.messages[event.message].payload_bytes, round(float(at), 3))
        for event, at in zip(changed.program.events, work, strict=False)
    ]


def test_buckets_are_sent_by_the_gradient_that_exceeds_them():
    before = sent(config())
    assert [(each.payload_bytes, count) for each, count in before.gradients[0]] == [
        (80_000, 3), (80_000, 5), (80_000, 7), (80_000, 8),
    ]  # fmt: skip


def test_the_same_config_changes_nothing():
    before = sent(config())
    made = run(before)
    changed = change(made.program, made.steps, before, before)
    assert [each._replace(bucket=None) for each in changed.program.messages] == [
        each._replace(bucket=None) for each in made.program.messages
    ]
    assert changed.program.events == made.program.events
    for old, new in zip(made.steps, changed.steps, strict=True):
        assert new.spans == pytest.approx(old.spans, abs=1)


def test_smaller_buckets_are_sent_where_their_gradients_have_arrived():
    before, after = sent(config()), sent(config(reduce_bucket_size=WIDTH * WIDTH))
    made = run(before)
    issues = [each for each in placed(change(made.program, made.steps, before, after)) if each[0] == "issue"]
    # Gradient n + 1, which triggers bucket n, arrives at 30 + 7.5 (n + 1) ms. The last bucket is sent at the
    # end of the backward pass.
    wanted = [30 + 7.5 * count for count in (2, 3, 4, 5, 6, 7, 8, 8)]
    gradients = [each for each in issues if each[1] == 40_000]
    assert [each[2] for each in gradients] == pytest.approx(wanted)
    assert sum(each[1] for each in gradients) == BYTES


def test_one_bucket_is_sent_at_the_end_and_the_compute_stays():
    before, after = sent(config()), sent(config(reduce_bucket_size=10**6))
    made = run(before)
    changed = change(made.program, made.steps, before, after)
    events = placed(changed)
    assert events[:2] == [("issue", BYTES, 90.0), ("wait", BYTES, 90.0)]
    assert changed.steps[0].spans.sum() == pytest.approx(made.steps[0].spans.sum())


def test_with_overlap_a_bucket_is_waited_for_when_the_next_one_is_sent():
    before, after = sent(config()), sent(config(overlap_comm=True))
    made = run(before)
    changed = change(made.program, made.steps, before, after)
    order = [(event.kind, event.message) for event in changed.program.events][:8]
    assert order == [
        ("issue", 0), ("issue", 1), ("wait", 0), ("issue", 2), ("wait", 1), ("issue", 3), ("wait", 2), ("wait", 3),
    ]  # fmt: skip


def test_deepspeed_does_not_overlap_on_a_cpu():
    assert not sent(config(overlap_comm=True), runtime="deepspeed").overlaps


def test_chunks_of_reduce_scatter_are_sent_from_the_last_one():
    after = sent(config(gradient_reduction="reduce_scatter", reduce_bucket_size=WIDTH * WIDTH))
    counts = [count for _, count in after.gradients[0]]
    assert counts == sorted(counts) and counts[-1] == LAYERS
    assert after.overlaps  # Overlap is the default of this reduction.
    assert {each.op for each, _ in after.gradients[0]} == {"all_to_all"}


def test_stage_0_sends_a_bucket_as_soon_as_it_is_full_and_waits_at_the_end():
    buckets = {"stage": 0, "gradient_reduction": "all_reduce", "overlap_comm": True}
    before, after = sent(config()), sent(config(**buckets))
    made = run(before)
    events = placed(change(made.program, made.steps, before, after))
    # Each two of the eight gradients share a bucket, which is full when its second gradient has arrived.
    issues = [each[2] for each in events if each[0] == "issue"]
    assert issues == pytest.approx([30 + 7.5 * count for count in (2, 4, 6, 8)])
    waits = [each[2] for each in events if each[0] == "wait"]
    assert waits == pytest.approx([90.0] * 4)


def test_stage_0_sends_all_gradients_at_the_end_and_gathers_nothing():
    before, after = sent(config()), sent(config(stage=0))
    made = run(before)
    changed = change(made.program, made.steps, before, after, shrinks_optimizer=2.0)
    assert {each.purpose for each in changed.program.messages} == {"gradient_reduce"}
    # The optimizer updates all elements instead of half of them. The update takes 8 ms instead of 4, and 1 ms
    # follows.
    assert changed.steps[0].spans[-1, 0] == pytest.approx(9 * MS)


def test_more_ranks_change_every_message():
    before, after = sent(config()), sent(config(), world=4)
    made = run(before)
    steps = [
        each._replace(spans=each.spans[:, [0, 1, 0, 1]], calls=each.calls[:, [0, 1, 0, 1]])
        for each in made.steps
    ]
    changed = change(made.program, steps, before, after)
    assert {each.groups for each in changed.program.messages} == {((0, 1, 2, 3),)}
    assert changed.steps[0].spans.shape[1] == 4


def test_gradient_accumulation_reduces_in_each_micro_batch():
    given = {**config(), "gradient_accumulation_steps": 2}
    assert len(sent(given).gradients) == 2
    assert [len(each) for each in sent({**given, "zero_optimization": {"stage": 1}}).gradients] == [0, 1]


def test_gradient_messages_that_the_rules_do_not_explain_are_refused():
    before = sent(config())
    made = run(before)
    other = sent(config(reduce_bucket_size=10**6))
    with pytest.raises(
        UsageError, match="the run's gradient messages are not those of its config: 4 of 320,000 bytes"
    ):
        change(made.program, made.steps, other, before)


def test_a_misspelled_key_is_answered_with_the_nearest():
    request = Request()
    for key in ("zero_optimization.reduce_bucket_sise", "reduce_bucket_size", "zero.reduce_bucket_size"):
        with pytest.raises(UsageError, match=r"Did you mean zero_optimization\.reduce_bucket_size\?$"):
            sent_messages(request, {key: 1}, None, 2, 2)
    with pytest.raises(UsageError, match="These keys can: zero_optimization"):
        sent_messages(request, {"optimizer.params.lr": 1}, None, 2, 2)


def test_a_run_without_gradients_is_refused():
    before = sent(config())
    only = recorded([gather(1000)], [[1, 1], [0, 0], [1, 1]], lambda _: 1)
    with pytest.raises(UsageError, match="gradient messages are not those"):
        change(only.program, only.steps, before, before)


def test_several_reduces_of_a_bucket_are_waited_for_together():
    after = sent(config(gradient_reduction="reduce_to_owner", reduce_bucket_size=10**6, overlap_comm=True))
    assert [each.op for each, _ in after.gradients[0]] == ["reduce", "reduce"]
    assert len({each.bucket for each, _ in after.gradients[0]}) == 1
    assert gradient(1, 0).bucket == 0


def test_messages_that_are_issued_by_another_rule_are_refused():
    before = sent(config())
    made = run(before)
    with pytest.raises(UsageError, match="the run's gradient messages block, and by its config they do not"):
        change(made.program, made.steps, before._replace(overlaps=True), before)


def test_gradients_that_wait_are_added_up():
    several = {**config(), "gradient_accumulation_steps": 4}
    before, after = sent(several), sent({**several, "zero_optimization": {"stage": 1}})
    assert (before.added_bytes, after.added_bytes) == (0, 3 * BYTES)
    boundary = {**several["zero_optimization"], "gradient_accumulation_reduce": "boundary"}
    assert sent({**several, "zero_optimization": boundary}).added_bytes == 3 * BYTES
    messages = [each for of_micro in before.gradients for each, _ in of_micro]
    ends = before.at_end["parameter_gather"]
    spans = [[5, 5]] * (2 * len(messages) + 2 * len(ends) + 1)
    made = recorded([*messages, *ends], spans, lambda _: 1)
    free, there = (
        change(made.program, made.steps, before, after, assumed=Assumed(each)) for each in (0.0, 2.0)
    )
    longer = there.steps[0].spans.sum(axis=0) - free.steps[0].spans.sum(axis=0)
    assert longer == pytest.approx(2.0 * 3 * BYTES)
    assert free.assumed == () and "1.9 ms more per step" in there.assumed[0]
    back = change(there.program, there.steps, after, before, assumed=Assumed(2.0))
    assert back.steps[0].spans.sum() == pytest.approx(made.steps[0].spans.sum())
    assert "less per step" in back.assumed[0]


SHARDED = {"stage": 3, "stage3_param_persistence_threshold": 0}
LAYER = 4 * WIDTH * WIDTH
NOTHING = Assumed()


def stage3(world=2, **zero):
    """Return the traffic of stage 3 without prefetch and without kept parameters.

    Each layer is gathered when it is needed.
    """
    return sent(
        config(**{**SHARDED, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, **zero}), world
    )


def gathers_of(changed):
    """Return (kind, number, ms of compute since the step began) of each event of a gathered parameter on rank 0."""
    work = np.cumsum(changed.steps[0].spans[:, 0]) / MS
    return [
        (event.kind, event.message, round(float(at), 3))
        for event, at in zip(changed.program.events, work, strict=False)
        if changed.program.messages[event.message].phase in ("forward", "backward")
        and changed.program.messages[event.message].purpose == "parameter_gather"
    ]


def test_modules_of_stage_3_gather_where_they_run():
    before, after = sent(config()), stage3()
    made = run(before)
    changed = change(made.program, made.steps, before, after, assumed=NOTHING)
    # With 8 equal layers, the forward pass takes 30 ms and the backward pass 60 ms.
    events = gathers_of(changed)
    issues = [(number, at) for kind, number, at in events if kind == "issue"]
    assert [at for _, at in issues] == pytest.approx(
        [30 / 8 * layer for layer in range(8)] + [30 + 7.5 * layer for layer in range(8)], abs=0.01
    )
    assert [at for kind, _, at in events if kind == "wait"] == [at for _, at in issues]
    messages = [changed.program.messages[number] for number, _ in issues]
    assert [each.phase for each in messages] == ["forward"] * 8 + ["backward"] * 8
    assert {each.payload_bytes for each in messages} == {LAYER} and not any(each.blocks for each in messages)
    assert sum(map(sum, changed.steps[0].spans)) == pytest.approx(sum(map(sum, made.steps[0].spans)))
    assert any("in the order of their parameters" in each for each in changed.assumed)


def test_prefetched_parameters_are_waited_for_by_the_module_that_uses_them():
    before, after = sent(config()), stage3(stage3_prefetch_bucket_size=2 * WIDTH * WIDTH)
    made = run(before)
    events = gathers_of(change(made.program, made.steps, before, after, assumed=NOTHING))
    # The model itself has no parameters. It prefetches the first two layers, and each layer prefetches two
    # more if there is room.
    assert events[:3] == [("issue", 0, 0.0), ("wait", 0, 0.0), ("issue", 1, 0.0)]
    waits = {number: at for kind, number, at in events if kind == "wait"}
    issues = {number: at for kind, number, at in events if kind == "issue"}
    assert waits[1] == pytest.approx(7.5, abs=0.01) and all(issues[each] < waits[each] for each in (1, 2))


def test_filling_gathered_parameters_takes_time_after_the_wait():
    before, after = sent(config()), stage3()
    made = run(before)
    free, filled = (
        change(made.program, made.steps, before, after, assumed=Assumed(copy_ns=each)) for each in (0.0, 2.0)
    )
    longer = filled.steps[0].spans[:, 0] - free.steps[0].spans[:, 0]
    assert longer.sum() == pytest.approx(16 * 2 * LAYER) and (longer >= 0).all()
    places = [
        place + 1
        for place, event in enumerate(filled.program.events)
        if event.kind == "wait" and filled.program.messages[event.message].purpose == "parameter_gather"
    ]
    assert longer[places].sum() == pytest.approx(longer.sum())


def test_hooks_of_deepspeed_take_time_for_each_call_of_a_module():
    """Runs of other stages have no such hooks, so DeepSpeed's stage 3 was predicted 10 to 14 % too short."""
    spans = {}
    for runtime in ("deepspeed", "zero_runtime"):
        before, after = sent(config(), runtime=runtime), sent(config(**SHARDED), runtime=runtime)
        made = run(before)
        free, hooked = (
            change(made.program, made.steps, before, after, assumed=Assumed(hook_ns=each))
            for each in (0.0, MS / 2)
        )
        spans[runtime] = (hooked.steps[0].spans - free.steps[0].spans).sum(axis=0)
        assert any("hooks" in each for each in hooked.assumed) == (runtime == "deepspeed")
    # The modules are the layers and the model itself, in both passes.
    calls = 2 * (LAYERS + 1)
    assert spans["deepspeed"] == pytest.approx([calls * MS / 2] * 2) and not spans["zero_runtime"].any()


def test_from_stage_3_and_back():
    before, after = sent(config()), stage3()
    made = run(before)
    there = change(made.program, made.steps, before, after, assumed=Assumed(copy_ns=1.0))
    back = change(there.program, there.steps, after, before, assumed=Assumed(copy_ns=1.0))
    assert [each._replace(bucket=None) for each in back.program.messages] == [
        each._replace(bucket=None) for each in made.program.messages
    ]
    assert back.program.events == made.program.events
    gradients = 2 * len(before.gradients[0])  # Stage 3 does not record where the optimizer ends.
    for old, new in zip(made.steps, back.steps, strict=True):
        assert new.spans[:gradients] == pytest.approx(old.spans[:gradients], abs=MS / 100)
        assert new.spans.sum() == pytest.approx(old.spans.sum())


def test_other_gathers_of_stage_3():
    before, after = stage3(), stage3(stage3_prefetch_bucket_size=10**6, stage3_max_reuse_distance=10**6)
    first = sent(config())
    made = run(first)
    there = change(made.program, made.steps, first, before, assumed=NOTHING)
    changed = change(there.program, there.steps, before, after, assumed=NOTHING)
    assert [each[:2] for each in gathers_of(changed)] == [("issue", 0), ("wait", 0)]
    # If the parameters belong to a different order of modules, they are not moved.
    other = there.program._replace(
        messages=tuple(
            each._replace(payload_bytes=LAYER + 8) if each.phase == "forward" else each
            for each in there.program.messages
        )
    )
    with pytest.raises(UsageError, match="its modules run in another order"):
        change(other, there.steps, before, after, assumed=NOTHING)


def test_gathers_by_blocks_are_not_predicted_but_can_be_left_out():
    before, blocks = stage3(), stage3(stage3_gather_unit="block")
    first = sent(config())
    made = run(first)
    there = change(made.program, made.steps, first, before, assumed=NOTHING)
    with pytest.raises(UsageError, match="not known when parameters are gathered with stage3_gather_unit"):
        change(there.program, there.steps, before, blocks, assumed=NOTHING)


def test_gathers_of_stage_3_of_more_ranks():
    before, after = stage3(), stage3(world=4)
    first = sent(config())
    made = run(first)
    there = change(made.program, made.steps, first, before, assumed=NOTHING)
    steps = [
        each._replace(spans=each.spans[:, [0, 1, 0, 1]], calls=each.calls[:, [0, 1, 0, 1]])
        for each in there.steps
    ]
    changed = change(there.program, steps, before, after, assumed=NOTHING)
    assert {each.groups for each in changed.program.messages} == {((0, 1, 2, 3),)}
    assert len(gathers_of(changed)) == len(gathers_of(there))


def test_the_order_of_gradients_is_that_of_the_stage():
    parameters = [
        Parameter("a.weight", 100, shape="10x10", forward_index=0),
        Parameter("a.bias", 10, shape="10", forward_index=1),
        Parameter("b.weight", 100, shape="10x10", forward_index=2),
        Parameter("b.bias", 10, shape="10", forward_index=3),
    ]
    listed = tuple(each.name for each in parameters)
    torchs = ("b.bias", "b.weight", "a.bias", "a.weight")
    sharded = ("b.weight", "b.bias", "a.weight", "a.bias")
    orders = {0: listed, 1: listed, 2: torchs, 3: sharded}
    for recorded_stage, order in orders.items():
        given = config(stage=recorded_stage)
        of_run = Request(config=given, parameters=parameters, world_size=2, orders={(0, 1): [order]})
        for stage, wanted in orders.items():
            arriving = sent_by(of_run, config(stage=stage), 2).arriving
            assert tuple(each.name for each in arriving) == wanted, (recorded_stage, stage)
