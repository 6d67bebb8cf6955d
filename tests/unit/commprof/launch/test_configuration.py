"""Test the message for configuration files that are not JSON.

The message names the position and the text there.
"""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commprof.errors import UsageError
from commprof.launch.sweeps.config_file import parse_config, read_config


@pytest.mark.parametrize(
    ("text", "line", "column", "what"),
    [
        ('{"a": True}', 1, 7, "True is Python; JSON writes true"),
        ('{\n  "a": {"b": False}\n}', 2, 14, "False is Python; JSON writes false"),
        ('{"a": None}', 1, 7, "None is Python; JSON writes null"),
        ('{"a": 500_000_000}', 1, 7, "500_000_000 is Python; JSON writes 500000000"),
        ('{"a": 1_000.5, "b": 1}', 1, 7, "1_000.5 is Python; JSON writes 1000.5"),
        ('{\n  // stage\n  "a": 1}', 2, 3, "JSON has no comments"),
        ('{"a": 1, # one\n "b": 2}', 1, 10, "JSON has no comments"),
        ('{"a": 1 /* one */}', 1, 9, "JSON has no comments"),
        ('{"a": 1,\n}', 1, 8, "a comma before the closing bracket"),
        ('{"a": [1, 2, ]}', 1, 12, "a comma before the closing bracket"),
        ("{'a': 1}", 1, 2, "a single quote"),
        ("{a: 1}", 1, 2, "a is not in quotes"),
        ('{"a": yes}', 1, 7, "yes is not in quotes"),
        ('{"a": 1 "b": 2}', 1, 9, "a comma is missing before"),
        ('{"a" 1}', 1, 6, "a colon or comma is missing before"),
        ('{"a": }', 1, 7, "a value is missing after the colon"),
        ('{"a": {"b": 1}', 1, 15, "ends too early"),
        ('{"a": .5}', 1, 7, ".5 is not a JSON number"),
        ('{"a": 1} {', 1, 10, "more text after the end"),
        ("", 1, 1, "the file is empty"),
    ],
)
def test_the_slip_is_named_with_its_place(text, line, column, what):
    with pytest.raises(UsageError) as caught:
        parse_config(text, "ds.json")
    message = str(caught.value)
    assert message.startswith(f"ds.json is not JSON: line {line}, column {column}: ")
    assert what in message


@given(
    st.dictionaries(
        st.text(),
        st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=20),
    )
)
def test_json_objects_are_read_as_they_are(config):
    assert parse_config(json.dumps(config), "x") == config


@given(st.text())
def test_any_text_is_read_or_refused_in_one_message(text):
    try:
        assert isinstance(parse_config(text, "x"), dict)
    except UsageError as error:
        assert str(error).startswith("x ")


def test_other_values_and_double_keys():
    with pytest.raises(UsageError, match="holds a JSON array"):
        parse_config("[1]", "x")
    with pytest.raises(UsageError, match="the key 'a' occurs twice"):
        parse_config('{"a": 1, "a": 2}', "x")
    with pytest.raises(UsageError, match="nested too deeply"):
        parse_config("[" * 100_000, "x")
    with pytest.raises(UsageError, match="x is no config: Exceeds the limit"):
        parse_config(f'{{"a": {"9" * 5_000}}}', "x")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="no such config file"):
        read_config(tmp_path / "none.json")
    with pytest.raises(UsageError, match="is a directory"):
        read_config(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(UsageError, match="is not text"):
        read_config(tmp_path / "binary.json")
    (tmp_path / "bom.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_config(tmp_path / "bom.json") == {"a": 1}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path):
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "secret.json").chmod(0)
    with pytest.raises(UsageError, match="no permission"):
        read_config(tmp_path / "secret.json")
