"""Test the plan of a sweep.

The tests cover the points, the derived configurations, the order, and whether the engine used the settings.
"""

import pytest

from commprof.errors import UsageError
from commprof.launch.sweeps.points import derive, label, mismatches, parse_setting, points, turns


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("a.b=true,false", "a.b", [True, False]),
        ("a=1,2.5,5e8,-3", "a", [1, 2.5, 500_000_000, -3]),
        ("a=1.5e1,1e-3,1.0,1e300", "a", [15, 1e-3, 1.0, 1e300]),
        ('a={"b":1E5}', "a", [{"b": 100_000}]),
        ("a=auto,all_reduce", "a", ["auto", "all_reduce"]),
        ("a=null", "a", [None]),
        ("a=[0.9,0.95],[0.9,0.999]", "a", [[0.9, 0.95], [0.9, 0.999]]),
        ('a="x,y",z', "a", ["x,y", "z"]),
        ("a=k=v", "a", ["k=v"]),
        ('a=""', "a", [""]),
    ],
)
def test_values_are_json_or_text(text, key, values):
    parsed_key, parsed = parse_setting(text)
    assert parsed_key == key
    assert [(type(v), v) for v in parsed] == [(type(v), v) for v in values]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "key=value1,value2 was expected"),
        ("=1", "was expected"),
        ("a..b=1", "was expected"),
        ("a=", "an empty value"),
        ("a=1,,2", "an empty value"),
        ("a=True", "True is Python; JSON writes true"),
        ("a=500_000", "JSON writes 500000"),
        ("a=1,1", "twice"),
        ("a=[1,", "not JSON at column"),
        ("a=" + "9" * 5_000, "no usable JSON: Exceeds the limit"),
        ("a=" + "[" * 100_000, "no usable JSON"),
    ],
)
def test_settings_that_cannot_be_meant(text, message):
    with pytest.raises(UsageError, match=message):
        parse_setting(text)


def test_points_are_the_product_of_all_settings():
    assert points(["a=1,2", "b.c=true,false"]) == [
        {"a": 1, "b.c": True},
        {"a": 1, "b.c": False},
        {"a": 2, "b.c": True},
        {"a": 2, "b.c": False},
    ]
    with pytest.raises(UsageError, match="given twice"):
        points(["a=1", "a=2"])
    with pytest.raises(UsageError, match="within the other"):
        points(["a=1", "a.b=2"])


def test_derived_configs_leave_the_original_alone():
    config = {"zero_optimization": {"stage": 2}, "x": 1}
    derived = derive(config, {"zero_optimization.stage": 1, "optimizer.params.lr": 0.1})
    assert derived == {"zero_optimization": {"stage": 1}, "x": 1, "optimizer": {"params": {"lr": 0.1}}}
    assert config == {"zero_optimization": {"stage": 2}, "x": 1}
    with pytest.raises(UsageError, match="x is 1 in the config, which is not an object"):
        derive(config, {"x.y.z": 2})


def test_repeats_are_interleaved():
    order = [(turn.point["a"], turn.repeat) for turn in turns(points(["a=1,2,3"]), 2)]
    assert order == [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (3, 1)]


def test_labels_are_short_and_unambiguous():
    assert label({"z.reduce_scatter": True, "b": "auto"}) == "reduce_scatter=true b=auto"
    assert label({"a.x": 1, "b.x": 2}) == "a.x=1 b.x=2"


def test_the_engines_own_config_must_hold_the_point():
    used = {"zero_optimization": {"stage": 2, "reduce_scatter": False, "bucket": 500000000}}
    assert mismatches({"zero_optimization.bucket": 5e8, "zero_optimization.stage": 2}, used) == []
    assert mismatches({"zero_optimization.reduce_scatter": "auto", "not.there": 1}, used) == []
    found = mismatches({"zero_optimization.reduce_scatter": True, "zero_optimization.stage": 1}, used)
    assert [(m.key, m.asked, m.used) for m in found] == [
        ("zero_optimization.reduce_scatter", True, False),
        ("zero_optimization.stage", 1, 2),
    ]
    assert len(mismatches({"a": 1}, {"a": True})) == 1
