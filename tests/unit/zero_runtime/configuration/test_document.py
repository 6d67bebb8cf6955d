"""Test JSON configuration files, and other objects that users pass in their place."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_runtime.configuration.reading import document
from zero_runtime.errors import ConfigError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.sampled_from([None, 1]))
def test_what_json_writes_is_read_back(value, indent):
    assert document.parse(json.dumps(value, indent=indent)) == value


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ('{\n  "a": True\n}', (2, 8), "True is Python; in JSON it is true"),
        ('{"a": None}', (1, 7), "in JSON it is null"),
        ('{"a": 500_000_000}', (1, 7), "in JSON it is 500000000"),
        ('{"a": NaN}', (1, 7), "NaN is no JSON number"),
        ('{"a": 1, // why\n"b": True}', (1, 10), "// begins a comment"),
        ('{\n "a": 1,\n "a": 2,\n}', (3, 2), 'key "a" occurs twice'),
        ("a: {b: 1", (1, 1), "expecting value"),
        ('{"a": {"b": 1, "c": {"b": 2}, "b": 3}}', (1, 31), 'key "b" occurs twice'),
        ('{"a": 1 "b": 2}', (1, 9), "expecting ',' delimiter"),
        ('{"a": "True // 5_0, }", "b": }', (1, 30), "expecting value"),
        ("", (1, 1), "expecting value"),
    ],
)
def test_the_place_and_the_slip_are_named(text, place, what):
    with pytest.raises(ConfigError) as refusal:
        document.parse(text, "ds.json")
    message = str(refusal.value)
    assert message.startswith(f"ds.json, line {place[0]}, column {place[1]}: ") and what in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"a": 1, // why\n"b": [1, 2,],}',
            "line 1, column 10: not JSON, and read as Hjson: // begins a comment",
        ),
        ('# why\n{"a": 1 /* one */, "b": [1, 2]}', "# begins a comment"),
        ("{'a': 1, 'b': [1, 2]}", "double quotes"),
        ("a: 1\nb:\n[\n  1\n  2\n]", "expecting value"),
    ],
)
def test_hjson_is_read_with_one_warning(text, said, capsys):
    assert document.parse(text, "ds.json") == {"a": 1, "b": [1, 2]}
    assert said in capsys.readouterr().err


def test_text_without_quotes_ends_with_its_line():
    text = "type: AdamW # what is updated\npath: /tmp/a, b\nflag: true, next: null, share: 1e-8\nlong: '''\nx\ny\n'''"
    assert document.parse(text) == {
        "type": "AdamW # what is updated", "path": "/tmp/a, b", "flag": True, "next": None, "share": 1e-8, "long": "x\ny",
    }  # fmt: skip


def test_equal_keys_of_different_objects_are_no_repetition():
    assert document.parse('{"a": {"a": 1}, "b": [{"a": 2}, {"a": "a: {"}]}')["b"][1] == {"a": "a: {"}


@pytest.mark.parametrize("text", ["[1]", "3", '"a"', "null"])
def test_only_an_object_is_a_configuration(text):
    with pytest.raises(ConfigError, match="expected a JSON object"):
        document.parse(text)


def test_infinity_is_read_as_python_writes_it():
    assert document.parse(json.dumps({"steps_per_print": float("inf")})) == {"steps_per_print": float("inf")}
