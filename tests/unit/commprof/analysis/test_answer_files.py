"""Test the files that store answers of commands.

A repeated command is answered at once from its file. If the run changed, the answer is computed again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from commprof.analysis.storage import answer_files
from support.detailed_runs import detailed_run

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = (
    "import sys; from commprof.cli import execute; code = execute(sys.argv[1:]);"
    "print([name for name in ('numpy', 'pandas', 'pyarrow', 'duckdb') if name in sys.modules], file=sys.stderr);"
    "sys.exit(code)"
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    directory = tmp_path / "cache"
    monkeypatch.setattr(answer_files, "cache_directory", lambda: directory)
    return directory


@pytest.fixture
def run(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "run.json").write_text("{}")
    return directory


class Asked:
    def __init__(self, holds: bool = True) -> None:
        self.times, self.holds = 0, holds

    def __call__(self) -> tuple[dict[str, int], bool]:
        self.times += 1
        return {"answer": 42}, self.holds


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return detailed_run(steps=4).write(tmp_path_factory.mktemp("answers") / "run")


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize(
    "words",
    [
        ["report"],
        ["report", "--json"],
        ["report", "--per-step"],
        ["verify"],
        ["verify", "--json"],
        ["compare"],
    ],
)
def test_a_command_says_the_same_again_without_reading_a_table(recorded, tmp_path, words):
    def asked() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", PROGRAM, words[0], str(recorded), *words[1:]],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        )

    first, again = asked(), asked()
    assert first.stdout == again.stdout
    assert len(first.stdout) > 100
    assert first.returncode == again.returncode
    assert "pyarrow" in first.stderr
    assert again.stderr.strip() == "[]"


@pytest.mark.long
def test_a_report_of_a_run_that_was_changed_is_of_the_changed_run(tmp_path, monkeypatch, capsys):
    from commprof.cli.application import invoke

    monkeypatch.setattr(answer_files, "cache_directory", lambda: tmp_path / "cache")
    path = detailed_run(steps=4).write(tmp_path / "run")
    assert invoke(["report", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["overview"]["exit_code"] != 7
    manifest = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**manifest, "exit_code": 7}))
    assert invoke(["report", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["overview"]["exit_code"] == 7


def test_an_answer_is_worked_out_once(cache, run):
    asked = Asked()
    assert [answer_files.remembered("q", [run], asked) for _ in range(3)] == [{"answer": 42}] * 3
    assert asked.times == 1


def test_another_question_and_other_runs_are_asked_by_themselves(cache, run, tmp_path):
    asked = Asked()
    (tmp_path / "other").mkdir()
    for question, runs in (("q", [run]), ("p", [run]), ("q", [run, run]), ("q", [tmp_path / "other"])):
        answer_files.remembered(question, runs, asked)
    assert asked.times == 4


@pytest.mark.parametrize("change", ["grown", "added", "removed", "replaced"])
def test_a_change_of_any_file_of_the_run_has_it_asked_again(cache, run, change):
    asked, file = Asked(), run / "run.json"
    (run / "other.parquet").write_bytes(b"1")
    answer_files.remembered("q", [run], asked)
    if change == "grown":
        file.write_text("{} ")
    elif change == "added":
        (run / "collectives").mkdir()
    elif change == "removed":
        (run / "other.parquet").unlink()
    else:
        (run / "new").write_text("{}")
        (run / "new").replace(file)
    answer_files.remembered("q", [run], asked)
    assert asked.times == 2


def test_another_version_of_commprof_asks_again(cache, run, monkeypatch):
    asked = Asked()
    answer_files.remembered("q", [run], asked)
    monkeypatch.setattr(answer_files, "_code", lambda: ("another",))
    answer_files.remembered("q", [run], asked)
    assert asked.times == 2


def test_what_is_said_of_a_run_that_goes_on_is_not_stored(cache, run):
    asked = Asked(holds=False)
    for _ in range(2):
        answer_files.remembered("q", [run], asked)
    (run / "wire.jsonl").write_text("")
    growing = Asked()
    for _ in range(2):
        answer_files.remembered("q", [run], growing)
    assert (asked.times, growing.times) == (2, 2)
    assert not cache.exists()


def test_a_run_that_changes_while_it_is_asked_is_not_stored(cache, run):
    def changing() -> tuple[int, bool]:
        (run / "late.parquet").write_bytes(b"")
        return 1, True

    answer_files.remembered("q", [run], changing)
    assert not cache.exists()


def test_a_damaged_file_is_replaced(cache, run):
    asked = Asked()
    answer_files.remembered("q", [run], asked)
    (file,) = cache.iterdir()
    file.write_bytes(b'{"answer": ')
    assert [answer_files.remembered("q", [run], asked) for _ in range(2)] == [{"answer": 42}] * 2
    assert asked.times == 2


def test_without_a_place_to_write_to_it_is_asked_each_time(run, tmp_path, monkeypatch):
    asked = Asked()
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "below", None):
        monkeypatch.setattr(answer_files, "cache_directory", lambda place=place: place)
        assert [answer_files.remembered("q", [run], asked) for _ in range(2)] == [{"answer": 42}] * 2
    assert asked.times == 4


def test_a_large_answer_is_not_stored(cache, run, monkeypatch):
    monkeypatch.setattr(answer_files, "_LARGEST", 4)
    answer_files.remembered("q", [run], Asked())
    assert not cache.exists()


def test_the_oldest_answers_make_room(cache, run, monkeypatch):
    monkeypatch.setattr(answer_files, "_MOST_FILES", 8)
    for number in range(9):
        answer_files.remembered(f"q{number}", [run], Asked())
    assert len(list(cache.iterdir())) == 4
    last = Asked()
    answer_files.remembered("q8", [run], last)
    assert last.times == 0
