"""Test answers that a separate process computes for a page.

Each answer is computed once, pages never wait for it, and the process ends with the dashboard.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commprof_dash.background import Background


@pytest.fixture
def background():
    return Background()


def answer_of(background, key, function, argument, seconds=30):
    """Return the answer that is finally given."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        said = background.ask(key, function, argument)
        if said is not None:
            return said
        time.sleep(0.02)
    raise AssertionError(f"no answer in {seconds} s")


def facts(argument):
    return {
        "said": argument * 2,
        "pid": os.getpid(),
        "nice": os.nice(0),
        "interrupt": signal.getsignal(signal.SIGINT),
    }


def damaged(argument):
    raise ValueError(f"{argument} is damaged")


def test_an_answer_comes_from_a_process_that_stands_back(background):
    said = answer_of(background, "facts", facts, 21)
    assert said["said"] == 42
    assert said["pid"] != os.getpid()
    assert said["nice"] > os.nice(0) or os.nice(0) > 9
    assert said["interrupt"] == signal.SIG_IGN
    # The answer was fetched, and the cache of answers contains it.
    assert background.ask("facts", facts, 1) is None


def test_an_error_is_raised_and_asked_anew(background):
    with pytest.raises(ValueError, match="the run is damaged"):
        answer_of(background, "damaged", damaged, "the run")
    assert background.ask("damaged", facts, 2) is None


INTERRUPTED = """
import os, signal, sys, time
from commprof.cli.verbs.dashboard import _leave
from commprof_dash.background import Background

if __name__ == "__main__":
    signal.signal(signal.SIGINT, _leave)
    background = Background()
    background.ask("long", time.sleep, 60)
    while background.process is None:
        time.sleep(0.02)
    print(background.process.pid, flush=True)
    os.killpg(0, signal.SIGINT)
    time.sleep(60)
"""


def runs(pid):
    """Return whether the process exists and is not a zombie."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_interrupt_ends_the_dashboard_and_the_process(tmp_path):
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        start_new_session=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    until = time.monotonic() + 10
    while runs(done.stdout.strip()) and time.monotonic() < until:
        time.sleep(0.02)
    assert not runs(done.stdout.strip())


KILLED = """
import os, sys, time
from commprof_dash.background import Background

if __name__ == "__main__":
    background = Background()
    background.ask("long", time.sleep, 60)
    while background.process is None:
        time.sleep(0.02)
    time.sleep(2)
    print(background.process.pid, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_it_exits_with_a_dashboard_that_was_killed(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, timeout=60)
    pid = done.stdout.strip()
    until = time.monotonic() + 20
    while runs(pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert not runs(pid)


UNGUARDED = """
import os, time
from commprof_dash.background import Background

print("started", flush=True)
background = Background()
while (found := background.ask("a", os.path.basename, "runs/first")) is None:
    time.sleep(0.02)
print(found)
"""


def test_a_script_without_a_main_guard_is_not_run_again(tmp_path):
    """A spawned process of multiprocessing would import the script.

    The script would then train or serve a second time.
    """
    script = tmp_path / "serve.py"
    script.write_text(UNGUARDED)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\nfirst\n", "")


def ends(argument):
    os._exit(argument)


def test_a_process_that_ends_without_an_answer_is_an_error(background):
    with pytest.raises(RuntimeError, match=r"computes ends ended with 3 and no answer"):
        answer_of(background, "ends", ends, 3)
