"""The commands of the tutorials, run in the order of the page, print the output that the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commprof.cli import main
from support.tutorials import missing, plain, steps

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("tutorial.md", "tutorial-ddp.md")


@pytest.mark.parametrize("page", PAGES)
def test_each_command_of_a_tutorial_exists_with_its_options(page, capsys):
    commands = [step.words for step in steps(ROOT / "docs" / page)]
    assert len(commands) >= 5
    for words in commands:
        scripts = [word for word in words if word.endswith((".py", ".json"))]
        assert all((ROOT / script).is_file() for script in scripts if not script.startswith("traces/"))
        if words[0] != "commprof":
            continue
        verb = words[1:3] if words[1] == "nccl" else words[1:2]
        with pytest.raises(SystemExit) as ended:
            main([*verb, "--help"])
        assert not ended.value.code
        help_text = capsys.readouterr().out
        ours = words[: next((words.index(script) for script in scripts), len(words))]
        for option in (word for word in ours if word.startswith("--")):
            assert re.search(rf"{option}\b", help_text), f"{' '.join(verb)} has no {option}"


def test_shown_output_is_compared_without_times_and_widths():
    output = "a   12.5 ms\n────\nb 1,234 records, 95 % (1 us to 2 us)\nlast"
    assert plain(output) == "a TIME b 1,234 records, TIME (TIME to TIME) last"
    assert missing("a 3 ms\n...\nlast", output) is None
    assert missing("last\n...\na 3 ms", output) is not None
    assert missing("b 1,235 records", output) is not None


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial_prints_what_it_shows(page, tmp_path):
    for name in ("examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "runtime", "dashboards"))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    for step in steps(ROOT / "docs" / page):
        if step.not_run:
            continue
        start = [sys.executable, "-m", "commprof"] if step.words[0] == "commprof" else [sys.executable]
        done = subprocess.run(
            [*start, *step.words[1:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, f"{' '.join(step.words)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        lacking = missing(step.shown, done.stdout)
        assert lacking is None, f"{' '.join(step.words)} does not print:\n{lacking}\n--- but\n{done.stdout}"
