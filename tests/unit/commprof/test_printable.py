"""Test that foreign texts are escaped for a terminal, and unchanged in JSON and CSV."""

import json
from pathlib import Path

import pytest

from commprof.cli import console, rendering
from commprof.cli.rendering import Heading, Rows
from commprof.printable import command_line, escaped

HOSTILE = "a\x1b[31mb\x07\x9bc\u202ed\u2066e\x7f\u2028f\ud800g\nh\u200b"
SAFE = r"a\x1b[31mb\x07\x9bc\u202ed\u2066e\x7f\u2028f\ud800g\nh\u200b"
FINE = "Größe 訓練\u3000模型 é 12 µs"


def test_nothing_of_a_text_moves_a_cursor_or_hides():
    assert escaped(HOSTILE) == SAFE
    assert escaped(HOSTILE, keep="\n") == SAFE.replace(r"\n", "\n")
    assert escaped(FINE) == FINE


def test_every_character_that_a_terminal_could_obey_is_escaped():
    text = "".join(
        map(chr, [*range(32), *range(0x7F, 0xA0), 0x061C, *range(0x200B, 0x2010), *range(0x2028, 0x202F)])
    )
    assert escaped(text).isascii() and escaped(text).isprintable()


def test_tables_facts_and_paragraphs_are_escaped_where_they_are_printed(capsys):
    rendering.show(
        Rows([Heading(HOSTILE), Heading("n", True)], [(HOSTILE, "1")], title=HOSTILE),
        rendering.facts([("name", HOSTILE)]),
        rendering.paragraph(HOSTILE),
        HOSTILE,
    )
    printed = capsys.readouterr().out
    assert all(each.isprintable() for line in printed.splitlines() for each in line)
    table, _, rest = printed.partition("name  ")
    assert SAFE in table and rest.startswith(SAFE)
    assert not any(line.startswith("h") for line in table.splitlines()[1:])  # No cell begins a line.


def test_sentences_of_commprof_stay_on_their_line(capsys):
    console.say(HOSTILE)
    console.error(HOSTILE)
    assert capsys.readouterr().err == f"commprof: {SAFE}\ncommprof: error: {SAFE}\n"


def test_json_keeps_what_was_recorded(capsys):
    rendering.show_json({"command": HOSTILE})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"command": HOSTILE} and printed.isascii()


@pytest.mark.parametrize("text", ["", "plain", FINE])
def test_other_text_is_as_it_was(text):
    assert escaped(text) == text


def test_a_command_is_shown_as_it_can_be_typed():
    assert command_line("export", "RUN...", "--out", Path("my runs/it's")) == (
        """commprof export RUN... --out 'my runs/it'"'"'s'"""
    )
    assert command_line("finalise", "traces/run-1") == "commprof finalise traces/run-1"
