"""Test predictions from several hand-made runs of one setting."""

from __future__ import annotations

from statistics import median

import pytest

from commprof.errors import UsageError
from commprof.prediction.predictions import OF_A_RUN, OF_THE_MODEL, predict_from, replayed_steps
from commprof.prediction.repeats import predict_from_several
from unit.commprof.prediction.made_runs import config, request, run, sent


def base(given, latency_ms, **changes):
    made = run(sent(given), lambda each: latency_ms, **changes)
    return replayed_steps(made, request(given))


def half_width(answer):
    return (answer.high_ns - answer.low_ns) / 2 / answer.median_ns


def test_one_run_is_predicted_as_alone():
    alone = base(config(), 5.0)
    assert predict_from_several({"a": alone}, [({}, None)]) == predict_from(alone, [({}, None)])


def test_three_runs_give_their_median_and_a_smaller_interval():
    bases = {
        name: base(config(), ms, seed=seed)
        for seed, (name, ms) in enumerate({"a": 5.0, "b": 5.3, "c": 9.0}.items())
    }
    # A step of c is an outlier, so the interval is as wide as for runs that differ by this much.
    answer = predict_from_several(bases, [({}, None)])
    singles = [predict_from(each, [({}, None)]).settings[0] for each in bases.values()]
    (predicted,) = answer.settings
    assert predicted.median_ns == median(each.median_ns for each in singles)
    assert answer.recorded_ns == median(each.recorded_ns for each in bases.values())
    assert answer.steps == sum(len(each.recorded.steps) for each in bases.values())
    assert any("3 runs of the same setting" in note for note in answer.notes)
    equal = {name: base(config(), 5.0, seed=seed, jitter=0.01) for seed, name in enumerate("abc")}
    narrow = predict_from_several(equal, [({}, None)]).settings[0]
    assert half_width(narrow) < half_width(predict_from(equal["a"], [({}, None)]).settings[0])
    assert half_width(narrow) < half_width(predicted)
    # The width stays above the error of the model, however many runs agree.
    assert half_width(narrow) > 1.28 * OF_THE_MODEL and OF_A_RUN > 0


def test_runs_of_other_settings_are_refused():
    several = {"a": base(config(), 5.0), "b": base(config(reduce_bucket_size=2000), 5.0)}
    with pytest.raises(UsageError, match="configs of b and of a differ"):
        predict_from_several(several, [({}, None)])
    ranks = base(config(), 5.0)
    other = ranks._replace(recorded=ranks.recorded._replace(world_size=4))
    with pytest.raises(UsageError, match=r"b sends \d+ messages per step on 4 ranks, and a \d+ on 2"):
        predict_from_several({"a": ranks, "b": other}, [({}, None)])


def test_what_one_run_refuses_is_refused():
    several = {name: base(config(), 5.0) for name in "ab"}
    answer = predict_from_several(several, [({}, None), ({"zero_optimization.nothing": 1}, config())])
    setting, why = answer.settings[1]
    assert setting == {"zero_optimization.nothing": 1} and "cannot be predicted" in why
