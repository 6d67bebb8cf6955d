"""Ctrl-C while a command starts, and a reader that closes its pipe.

A command may print at most one line, and must return the exit code that a shell expects.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from support.rank_files import write_rank

# The program interrupts itself during the import of a module, before anything of commprof is loaded.
INTERRUPTED_IN = """
import importlib.abc, os, signal, sys

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
        return None

sys.meta_path.insert(0, Interrupting())
from commprof.cli import main
main(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "run"
    write_rank(directory)
    done = subprocess.run(
        [sys.executable, "-m", "commprof", "report", directory], capture_output=True, check=True
    )
    assert done.stdout
    return directory


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("module", "verb"),
    [
        ("typer", "--help"),
        ("commprof.cli.verbs.doctor", "doctor"),
        ("pyarrow.lib", "report"),
        ("numpy.linalg", "report"),
        ("pandas._libs.tslibs", "report"),
        ("duckdb", "query"),
        ("commprof.ledger.verification", "verify"),
        ("commprof.launch.job", "run"),
        ("plotly", "dashboard"),
        ("waitress", "dashboard"),
    ],
)
def test_an_interrupt_within_an_import_ends_the_command_in_one_line(tmp_path, run, module, verb):
    (tmp_path / "train.py").write_text("")
    arguments = {
        "--help": [], "doctor": [], "query": [run, "select 1"], "run": ["train.py"],
        "dashboard": [run.parent, "--port", "0"],
    }.get(verb, [run])  # fmt: skip
    words = [sys.executable, "-c", INTERRUPTED_IN, module, verb, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 130, done
    assert done.stderr in ("", "commprof: error: interrupted\n"), done.stderr


@pytest.mark.sampled
@pytest.mark.parametrize("verb", ["report", "doctor", "dashboard"])
def test_an_interrupt_at_any_time_after_the_start_shows_no_traceback(tmp_path, run, verb):
    words = [sys.executable, "-X", "importtime", "-m", "commprof", verb]
    words += {"report": [str(run)], "dashboard": [str(run.parent), "--port", "0"]}.get(verb, [])
    codes = []
    for tenths in (0, 1, 3, 6):
        process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
        for line in process.stderr:  # before commprof starts, Python handles an interrupt
            if line.rstrip().endswith("commprof.errors"):
                break
        time.sleep(0.05 + tenths / 10)
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
        codes.append(process.returncode)
        own = [line for line in said.splitlines() if not line.startswith("import time:")]
        assert "Traceback" not in said and "KeyboardInterrupt" not in said, own
        assert process.returncode != 130 or [line for line in own if "http" not in line] in (
            [], ["commprof: error: interrupted"]
        )  # fmt: skip
    # If Python has already removed its handlers, the signal itself ends the process. A shell reports this as
    # 130.
    assert set(codes) <= {0, 1, 130, -signal.SIGINT} and 130 in codes, codes


@pytest.mark.long
def test_a_reader_that_leaves_and_output_that_cannot_be_written_give_no_traceback(run):
    words = f"{sys.executable} -m commprof report {run}"
    for command, code, said in (
        (f"{words} | true; exit ${{PIPESTATUS[0]}}", {0, 141}, ""),
        (
            f"{words} >/dev/full",
            {1},
            "commprof: error: the output cannot be written: No space left on device\n",
        ),
        (f"{words} >&-", {0}, ""),
    ):
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode in code and done.stderr == said, (command, done)
