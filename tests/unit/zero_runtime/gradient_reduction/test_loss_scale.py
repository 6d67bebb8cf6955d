"""Test the loss scale against tables computed by hand from DeepSpeed's rules, and against its invariants."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.sample import examples
from zero_runtime.errors import ConfigError, LossScaleError
from zero_runtime.gradient_reduction.loss_scale import UNSCALED, LossScale, ScaleRules

OVERFLOW, FINE = "x", "."


def values(rules: ScaleRules, steps: str) -> list[float]:
    """Return the scale after each of ``steps``."""
    scale = LossScale(rules)
    found = []
    for step in steps:
        scale.update(step == OVERFLOW)
        found.append(scale.value)
    return found


@pytest.mark.parametrize(
    ("rules", "steps", "expected"),
    [
        # With hysteresis 1, every overflow halves the scale.
        (ScaleRules(8, True, 100, hysteresis=1), "xx.x", [4, 2, 2, 1]),
        # With hysteresis 2, the first overflow only uses up the hysteresis. Later overflows halve the scale
        # at once, until the hysteresis is refilled.
        (ScaleRules(8, True, 100, hysteresis=2), "xx.x", [8, 4, 4, 2]),
        (ScaleRules(64, True, 100, hysteresis=3), "xxxx", [64, 64, 32, 16]),
        # Doubling refills the hysteresis. Window 2 counts the steps after the step that follows the overflow.
        (ScaleRules(8, True, 2, hysteresis=2), "xx...xx", [8, 4, 4, 4, 8, 8, 4]),
        # consecutive_hysteresis refills the hysteresis in every good step.
        (ScaleRules(8, True, 100, hysteresis=2, consecutive_hysteresis=True), "x.x.xx", [8, 8, 8, 8, 8, 4]),
        # From the start, the scale doubles in steps 3, 5, ... with window 2, and in every step but the first
        # with window 1.
        (ScaleRules(1, True, 2), "......", [1, 1, 2, 2, 4, 4]),
        (ScaleRules(1, True, 1), "....", [1, 2, 4, 8]),
        # The last halving ends at a minimum that is not a power of two.
        (ScaleRules(1, True, 100, hysteresis=1, minimum=0.3), "xx", [0.5, 0.3]),
        (ScaleRules(2.0**-16, True, 100, hysteresis=1, minimum=1e-5), "x", [1e-5]),
        # A fixed scale does not change.
        (ScaleRules(128.0), "x..x", [128.0] * 4),
        (ScaleRules(), "x.", [1.0, 1.0]),
    ],
)
def test_worked_out_by_hand(rules, steps, expected):
    assert values(rules, steps) == expected


def test_overflow_at_the_minimum_says_what_to_do():
    scale = LossScale(ScaleRules(2, True, hysteresis=1, minimum=1))
    scale.update(True)
    before = scale.state_dict()
    with pytest.raises(
        LossScaleError, match=r"loss scale 1, which is the smallest.*fp16.min_loss_scale"
    ) as error:
        scale.update(True)
    assert "\n" not in str(error.value)
    assert scale.state_dict() == before


def test_a_scale_given_by_hand_wins_until_it_is_taken_back():
    scale = LossScale(ScaleRules(8, True, hysteresis=1))
    scale.override(3.0)
    scale.update(True)
    assert scale.value == 3.0
    scale.override(None)
    assert scale.value == 4.0


def test_foreign_state_is_refused():
    with pytest.raises(ConfigError, match="no number for value, steps"):
        LossScale().load_state_dict({"last_overflow": 0, "overflows_left": 1, "value": "1"})


def test_the_state_of_a_fixed_scale_does_not_change_a_dynamic_one():
    """A training in bf16 or fp32 has the scale 1.

    A training that continues it in fp16 begins at its own scale.
    """
    dynamic = ScaleRules(2.0**16, dynamic=True)
    for fixed in (UNSCALED, ScaleRules(128.0)):
        state = LossScale(fixed).state_dict()
        without_rules = {name: state[name] for name in ("value", "steps", "last_overflow", "overflows_left")}
        for each in (state, without_rules):
            scale = LossScale(dynamic)
            scale.load_state_dict(each)
            assert scale.value == 2.0**16


RULES = st.builds(
    ScaleRules,
    value=st.integers(0, 24).map(lambda power: 2.0**power),
    dynamic=st.just(True),
    window=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    consecutive_hysteresis=st.booleans(),
    minimum=st.sampled_from([2.0**-60, 1e-5, 0.3, 1.0]),
)
STEPS = st.text(alphabet=OVERFLOW + FINE, max_size=40)


def run(scale: LossScale, steps: str) -> list[float]:
    """Return the scale after each step, up to the first step that raises an error."""
    found = []
    for step in steps:
        try:
            scale.update(step == OVERFLOW)
        except LossScaleError:
            break
        found.append(scale.value)
    return found


@settings(max_examples=examples(200), deadline=None)
@given(RULES, STEPS)
def test_what_always_holds(rules, steps):
    before = rules.value
    for step, after in zip(steps, run(LossScale(rules), steps), strict=False):
        assert after >= rules.minimum
        if step == OVERFLOW:
            assert after in (before, max(before / 2, rules.minimum))
        else:
            assert after in (before, 2 * before)
        before = after


@settings(max_examples=examples(200), deadline=None)
@given(RULES, STEPS, STEPS)
def test_a_reloaded_scale_goes_on_as_if_nothing_had_happened(rules, first, second):
    whole = LossScale(rules)
    if len(run(whole, first)) < len(first):
        return
    reloaded = LossScale(rules)
    reloaded.load_state_dict(whole.state_dict())
    assert run(reloaded, second) == run(whole, second)


@settings(max_examples=examples(100), deadline=None)
@given(RULES, st.integers(1, 30))
def test_without_overflow_it_doubles_once_in_a_window(rules, count):
    assert run(LossScale(rules), FINE * count)[-1] == rules.value * 2.0 ** ((count - 1) // rules.window)
