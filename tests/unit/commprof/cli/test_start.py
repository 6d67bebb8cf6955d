"""Test which modules the commands load.

A command loads only the modules that its answer needs, so that it starts fast.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commprof.cli import execute, verbs
from commprof.cli.application import verb_modules
from support.detailed_runs import detailed_run

ROOT = Path(__file__).resolve().parents[4]
ARRAYS = {"numpy", "pyarrow"}
TABLES = {"pandas", "duckdb"}
DRAWING = {"torch", "plotly", "dash", "flask", "matplotlib", "PIL"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return detailed_run(steps=4).write(tmp_path_factory.mktemp("start") / "run")


def loaded(statement: str) -> set[str]:
    """Return the modules that a new interpreter has loaded after ``statement``."""
    program = f"import json, sys\n{statement}\nprint(); print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        # Without these directories, no earlier answer is cached.
        env={**os.environ, "XDG_CACHE_HOME": "", "HOME": ""},
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def of_command(*arguments: object) -> set[str]:
    return loaded(f"from commprof.cli import execute; execute({[str(word) for word in arguments]!r})")


@pytest.mark.sampled
@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["report", "--help"], ["--version"]])
def test_a_page_of_help_loads_no_library_of_numbers(arguments):
    assert not of_command(*arguments) & (ARRAYS | TABLES | DRAWING | {"rich.console"})


def test_a_verb_loads_no_other_verb(run):
    every = {f"commprof.cli.verbs.{module}" for module in verb_modules().values()}
    assert of_command("verify", run) & every == {"commprof.cli.verbs.verify"}


def test_a_module_of_verbs_is_a_verb(tmp_path, monkeypatch, capsys):
    (tmp_path / "greet.py").write_text(
        "HELP_ORDER = 15\ndef greet():\n    'Greet.'\n    print('hello')\n    return 3\n"
    )
    monkeypatch.setattr(verbs, "__path__", [*verbs.__path__, str(tmp_path)])
    try:
        assert execute(["greet"]) == 3 and capsys.readouterr().out == "hello\n"
        execute(["--help"])
    finally:
        sys.modules.pop("commprof.cli.verbs.greet", None)
    shown = re.findall(r"^  (\w+) ", capsys.readouterr().out.split("Commands:")[1], re.MULTILINE)
    assert shown[:3] == ["run", "greet", "report"]


def test_what_starts_ranks_loads_no_library_of_numbers():
    found = loaded("import commprof.cli.verbs.run, commprof.launch.job, commprof.launch.foreign")
    assert not found & (ARRAYS | TABLES | DRAWING)


def test_the_ledger_needs_no_frames_and_no_database(run):
    found = of_command("verify", run)
    assert "pyarrow" in found
    assert not found & (DRAWING | TABLES)


@pytest.mark.sampled
@pytest.mark.parametrize("verb", ["report", "compare"])
def test_a_text_about_runs_loads_nothing_that_draws(run, verb):
    assert not of_command(verb, run) & DRAWING


def test_the_questions_can_be_imported_without_what_answers_them():
    assert not loaded("from commprof.analysis import api") & (ARRAYS | TABLES | DRAWING)


def test_each_name_of_the_questions_is_there():
    from commprof.analysis import api

    assert all(getattr(api, name) is not None for name in api.__all__)
    with pytest.raises(AttributeError, match="no_such_question"):
        api.no_such_question  # noqa: B018 - that it is looked up is what is tested


WITHOUT = """
import sys
from types import SimpleNamespace

def find_spec(name, path=None, target=None):
    if name in ("pandas", "duckdb"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, SimpleNamespace(find_spec=find_spec))
from commprof.cli import execute
sys.exit(execute(sys.argv[1:]))
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    "words",
    [
        ["report", "RUN"],
        ["compare", "RUN"],
        ["query", "RUN", "select count(*) from collectives"],
        ["finalise", "RUN"],
        ["export", "RUN", "--out", "OUT"],
        ["verify", "RUN"],
    ],
    ids=lambda words: words[0],
)
def test_without_the_packages_for_tables_a_command_says_in_one_line_what_to_install(run, tmp_path, words):
    places = {"RUN": str(run), "OUT": str(tmp_path / "out")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *(places.get(word, word) for word in words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": "", "HOME": ""},
    )
    if words[0] == "verify":  # ``verify`` needs no package for tables.
        assert "ledger" in done.stdout
        assert not done.stderr
    else:
        assert done.returncode == 1, done.stderr
        (line,) = done.stderr.strip().splitlines()
        assert "is needed to" in line
        assert "pip install" in line
