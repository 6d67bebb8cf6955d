"""Test the options of a recording: which are accepted, which are refused, and what happens to the others."""

import pytest

from commprof.cli import execute
from commprof.recorder.process.recorder_options import (
    DEFAULTS,
    Options,
    from_json,
    from_mapping,
    parse_size,
    parse_steps,
)


def test_options_survive_the_way_through_the_environment():
    options = Options(
        steps=(10, 20), warmup=3, aggregate=True, max_bytes=5_000_000, watchdog=30.0, samplers=("nvml",)
    )
    assert from_json(options.to_json()) == (options, ())
    assert DEFAULTS.to_json() == "{}"
    assert from_json(Options(steps=(-1, 20)).to_json())[0].steps == (-1, 20)
    assert from_json(None) == from_json("") == (DEFAULTS, ())


@pytest.mark.parametrize(
    ("content", "note"),
    [
        ({"colour": "red"}, "option 'colour' is ignored: there is no such option"),
        ({"warmup": -1}, "option warmup -1 is ignored: a whole number of 0 or more was expected"),
        ({"aggregate": "yes"}, "option aggregate 'yes' is ignored: true or false was expected"),
        ({"watchdog": "soon"}, "option watchdog 'soon' is ignored: a number of seconds above 0"),
        ({"steps": "0:5", "warmup": 9}, "the first 9 steps are left out, and recording ends before step 5"),
    ],
)
def test_what_cannot_be_used_is_named_and_left_out(content, note):
    options, notes = from_mapping({**content, "complete": True})
    assert options == Options(complete=True)
    assert len(notes) == 1 and note in notes[0]


@pytest.mark.parametrize("text", ["{", "[1]", "null", '"x"'])
def test_text_that_is_no_object_is_named(text):
    options, notes = from_json(text)
    assert options == DEFAULTS and "COMMPROF_OPTIONS is ignored" in notes[0]


@pytest.mark.parametrize(
    ("options", "window"),
    [
        (Options(), None),
        (Options(steps=(10, 20)), (10, 20)),
        (Options(steps=(-1, 20)), (-1, 20)),
        (Options(warmup=3), (3, None)),
        (Options(steps=(2, 9), warmup=5), (5, 9)),
        (Options(steps=(8, 9), warmup=5), (8, 9)),
    ],
)
def test_steps_and_warmup_make_one_window(options, window):
    assert options.window == window


@pytest.mark.parametrize("text", ["", "10", "5:5", "9:3", "-1:4", "a:b", "1:2:3", ":0", "1.5:3"])
def test_steps_that_are_none(text):
    with pytest.raises(ValueError, match=r"expected|no step"):
        parse_steps(text)


def test_sizes():
    assert [parse_size(text) for text in ("1MB", "1 MiB", "2gib", "1.5GB", "1000000")] == [
        10**6,
        2**20,
        2**31,
        1_500_000_000,
        10**6,
    ]
    for text in ("1M", "big", "-5MB", "", "1000", "MB"):
        with pytest.raises(ValueError, match="expected"):
            parse_size(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "20:10"], "--steps 20:10: no step is from 20 up to but not including 10"),
        (["--steps", "x"], "--steps x: A:B was expected"),
        (["--warmup", "-2"], "--warmup -2: a whole number of 0 or more"),
        (["--max-size", "1M"], "--max-size 1M: a number of bytes was expected, or one with kB, MB"),
        (["--max-size", "5kB"], "--max-size 5kB: at least 1000000 bytes"),
        (["--watchdog", "0"], "--watchdog 0: a number of seconds above 0"),
        (["--sample", "gpu"], "--sample gpu: gpu: there is no such sampler; there are nvml"),
        (["--steps", "0:5", "--warmup", "5"], "--steps 0:5 --warmup 5: the first 5 steps are left out"),
    ],
)
@pytest.mark.parametrize("verb", [["run"], ["sweep", "--set", "a=1"]])
def test_the_command_line_refuses_at_once(verb, words, message, capsys):
    assert execute([*verb, *words, "train.py"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
