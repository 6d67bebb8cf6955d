"""Other gradient messages in a recorded step: where they are issued and waited for, and what stays."""

from __future__ import annotations

import numpy as np
import pytest

from commprof.errors import UsageError
from commprof.prediction.changes import change
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
    """(kind, payload bytes, ms of compute before it since the step began) of each event on rank 0."""
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
    # Gradient n + 1, which sends bucket n, arrives at 30 + 7.5 (n + 1) ms; the last at the end of the backward pass.
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
    assert after.overlaps  # the default of that reduction
    assert {each.op for each, _ in after.gradients[0]} == {"all_to_all"}


def test_stage_0_sends_all_gradients_at_the_end_and_gathers_nothing():
    before, after = sent(config()), sent(config(stage=0))
    made = run(before)
    changed = change(made.program, made.steps, before, after, shrinks_optimizer=2.0)
    assert {each.purpose for each in changed.program.messages} == {"gradient_reduce"}
    # The optimizer updates all elements instead of half of them: 8 ms instead of 4, and 1 after it.
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


def test_recorded_gathers_of_stage_3_are_not_of_more_ranks():
    given = config(stage=3, reduce_bucket_size=2 * WIDTH * WIDTH, overlap_comm=False)
    before, after = sent(given), sent(given, world=4)
    gradients = [each for each, _ in before.gradients[0]]
    forward = gather(BYTES)._replace(phase="forward")
    made = recorded([forward, *gradients], [[1, 1]] * (2 * len(gradients) + 3), lambda _: 1)
    steps = [
        each._replace(spans=each.spans[:, [0, 1, 0, 1]], calls=each.calls[:, [0, 1, 0, 1]])
        for each in made.steps
    ]
    with pytest.raises(UsageError, match="parameter_gather of this run is kept as it was recorded"):
        change(made.program, steps, before, after)
