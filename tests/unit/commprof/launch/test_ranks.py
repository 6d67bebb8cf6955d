"""Test the supervisor with real processes that do not import torch."""

import functools
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from commprof.errors import LaunchError
from commprof.launch.ranks import Rank, RankGroup


def group(*programs: str, grace_seconds: float = 0.3) -> tuple[RankGroup, list[str]]:
    said: list[str] = []
    ranks = [
        Rank(n, [sys.executable, "-S", "-c", textwrap.dedent(text)], {**os.environ, "RANK": str(n)}, n == 0)
        for n, text in enumerate(programs)
    ]
    return RankGroup(ranks, said.append, grace_seconds=grace_seconds), said


def outcome(*programs: str, grace_seconds: float = 0.3):
    started, _ = group(*programs, grace_seconds=grace_seconds)
    started.start()
    return started.wait()


def test_all_well():
    assert outcome("pass", "pass")[:4] == (0, None, None, ())


def ending(path, code: int) -> str:
    """Return a program that writes its process id to ``path`` and exits with ``code``."""
    return f"""
        import os
        with open({f"{path}.new"!r}, "w") as file:
            file.write(str(os.getpid()))
        os.rename({f"{path}.new"!r}, {str(path)!r})
        raise SystemExit({code})
    """


def ending_after(path, code: int) -> str:
    """Return a program that exits with ``code`` once the program that wrote ``path`` has exited."""
    return f"""
        import os, time
        while not os.path.exists({str(path)!r}):
            time.sleep(0.01)
        other = f"/proc/{{open({str(path)!r}).read()}}/stat"
        while os.path.exists(other) and open(other).read().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        raise SystemExit({code})
    """


def test_the_exit_code_is_that_of_the_rank_that_failed_first(tmp_path):
    # Rank 1 fails after rank 2 fails.
    first = tmp_path / "first"
    result = outcome("import time; time.sleep(30)", ending_after(first, 8), ending(first, 7), grace_seconds=2)
    assert result[:4] == (7, 2, None, (0,))


def test_failures_are_told_apart_even_when_seen_together(tmp_path):
    first = tmp_path / "first"
    started, _ = group(ending_after(first, 3), ending(first, 4))
    started.start()
    for pid in started.pids:  # Both processes have exited before the supervisor looks at them.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert started.wait()[:2] == (4, 1)


def test_a_signal_is_128_and_its_number():
    result = outcome("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert (result.exit_code, result.first_failed_rank, result.signal_name) == (139, 0, "SIGSEGV")


def test_a_rank_that_ignores_sigterm_is_killed():
    begin = time.monotonic()
    result = outcome(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(30)",
        "import time; time.sleep(0.2); raise SystemExit(5)",
    )
    assert result[:4] == (5, 1, None, (0,))
    assert time.monotonic() - begin < 5


def test_standard_input_is_rank_0s_only(tmp_path):
    program = f"""
        import sys, os
        open(os.path.join({str(tmp_path)!r}, os.environ["RANK"]), "w").write(sys.stdin.read())
    """
    read_end, write_end = os.pipe()
    os.write(write_end, b"hello")
    os.close(write_end)
    saved = os.dup(0)
    os.dup2(read_end, 0)
    try:
        assert outcome(program, program).exit_code == 0
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        os.close(read_end)
    assert [(tmp_path / "0").read_text(), (tmp_path / "1").read_text()] == ["hello", ""]


def test_a_program_that_cannot_be_started():
    started = RankGroup([Rank(0, ["/no/such/program"], {})], print)
    with pytest.raises(LaunchError, match="rank 0 could not be started"):
        started.start()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGINT, signal.SIGCHLD} == set()


DRIVER = """
import os, sys
from commprof.launch.ranks import Rank, RankGroup
program = sys.argv[1]
ranks = [Rank(n, [sys.executable, "-S", "-c", program, str(n)], os.environ, n == 0) for n in range(2)]
grace = float(os.environ.get("GRACE", "5"))
group = RankGroup(ranks, lambda text: print(text, file=sys.stderr, flush=True), grace_seconds=grace)
group.start()
raise SystemExit(group.wait().exit_code)
"""
COUNTING = """
import os, signal, sys, time
got = []
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
    signal.signal(getattr(signal, name), lambda number, frame: got.append(signal.Signals(number).name))
os.write(1, b"ready\\n")
end = time.monotonic() + float(os.environ.get("COUNT_SECONDS", "0.5"))
while time.monotonic() < end:
    time.sleep(0.02)
os.write(1, f"{sys.argv[1]}:{','.join(got)}\\n".encode())
"""


@pytest.fixture(autouse=True)
def a_terminal_that_closes_ends_programs():
    """Restore the default SIGHUP action.

    Below nohup, SIGHUP is ignored, the programs inherit this, and commprof keeps it.
    """
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def driver(program: str, supervisor: str = DRIVER, **options) -> subprocess.Popen:
    started = subprocess.Popen(
        [sys.executable, "-c", supervisor, program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[4],
        **options,
    )
    assert [started.stdout.readline(), started.stdout.readline()] == ["ready\n", "ready\n"]
    return started


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
@pytest.mark.parametrize("to_group", [False, True])
def test_a_signal_reaches_each_rank_once(name, to_group):
    started = driver(COUNTING)
    number = getattr(signal, name)
    if to_group:
        os.killpg(started.pid, number)
    else:
        started.send_signal(number)
    out, _ = started.communicate(timeout=20)
    assert sorted(out.split()) == [f"0:{name}", f"1:{name}"]
    assert started.returncode == 0


def test_a_pause_changes_nothing():
    """The pauses are Ctrl-Z with fg, or the pause of a container.

    They are shorter and longer than every timeout.
    """
    started = driver(COUNTING, env={**os.environ, "COUNT_SECONDS": "3"})
    for seconds in (0.1, 1.5):
        started.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        started.send_signal(signal.SIGCONT)
        time.sleep(0.1)
    started.send_signal(signal.SIGUSR1)
    out, err = started.communicate(timeout=20)
    assert (sorted(out.split()), err) == (["0:SIGUSR1", "1:SIGUSR1"], "")
    assert started.returncode == 0


def test_signals_that_came_while_it_stood_still_reach_each_rank():
    started = driver(COUNTING)
    started.send_signal(signal.SIGSTOP)
    started.send_signal(signal.SIGUSR1)
    started.send_signal(signal.SIGHUP)
    started.send_signal(signal.SIGCONT)
    out, _ = started.communicate(timeout=20)
    # Any order is allowed, because the supervisor may read the first signal before the stop takes effect.
    got = dict(line.split(":") for line in out.split())
    both = ["SIGHUP", "SIGUSR1"]
    assert {rank: sorted(names.split(",")) for rank, names in got.items()} == {"0": both, "1": both}
    assert started.returncode == 0


def test_without_pidfds_the_ranks_are_watched_all_the_same(monkeypatch, tmp_path):
    def refuse(pid):
        raise OSError("no such call")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    first = tmp_path / "first"
    assert outcome(ending_after(first, 0), ending(first, 4), grace_seconds=2)[:2] == (4, 1)
    assert outcome("pass", "pass")[:4] == (0, None, None, ())


def test_no_descriptor_is_left_open():
    before = len(list(Path("/proc/self/fd").iterdir()))
    outcome("pass", "raise SystemExit(3)")
    with pytest.raises(LaunchError):
        RankGroup([Rank(0, ["/no/such/program"], {})], print).start()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_second_interrupt_kills():
    started = driver(COUNTING, env={**os.environ, "COUNT_SECONDS": "30"})
    started.send_signal(signal.SIGINT)
    time.sleep(0.2)
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=10)
    assert started.returncode == 128 + signal.SIGINT
    assert "interrupted again" in err


def test_a_descriptor_that_was_opened_for_the_program_reaches_it():
    """A shell's <(command) is such a descriptor, and so is the connection of an MPI to its ranks."""
    program = """
import os, sys, time
os.write(1, b"ready\\n")
time.sleep(0.5)
if sys.argv[1] == "0":
    os.write(1, os.read(int(os.environ["OPENED"]), 100))
"""
    read_end, write_end = os.pipe()
    os.write(write_end, b"words")
    started = driver(program, pass_fds=[read_end], env={**os.environ, "OPENED": str(read_end)})
    out, err = started.communicate(timeout=20)
    os.close(read_end)
    os.close(write_end)
    assert (out, err, started.returncode) == ("words", "", 0)


def test_output_that_is_not_buffered_stays_so():
    """torchrun starts its ranks with -u, and therefore also a commprof that is started as a rank."""
    program = "from commprof.launch.environment import python_command; print('-u' in python_command())"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for words, expected in ((["-u"], "True\n"), ([], "False\n")):
        done = subprocess.run(
            [sys.executable, *words, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env=buffered,
            cwd=Path(__file__).parents[4],
        )
        assert done.stdout == expected


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])
def test_a_signal_that_is_ignored_from_the_start_reaches_nobody(name):
    """The signal is ignored below nohup and in a background job of a shell script."""
    ignore = functools.partial(signal.signal, getattr(signal, name), signal.SIG_IGN)
    started = driver(COUNTING, preexec_fn=ignore)
    for _ in range(2):  # A second interrupt would kill the process.
        started.send_signal(getattr(signal, name))
    out, err = started.communicate(timeout=20)
    assert (sorted(out.split()), err, started.returncode) == (["0:", "1:"], "", 0)


def test_a_rank_that_writes_a_checkpoint_on_sigterm_gets_the_time():
    program = """
import os, signal, sys, time
def save(*_):
    time.sleep(1.5)
    os.write(1, b"saved\\n")
    os._exit(0)
if sys.argv[1] == "0":
    signal.signal(signal.SIGTERM, save)
os.write(1, b"ready\\n")
time.sleep(60)
"""
    started = driver(program, env={**os.environ, "GRACE": "0.2"})
    started.send_signal(signal.SIGTERM)
    out, _ = started.communicate(timeout=20)
    assert (out, started.returncode) == ("saved\n", 128 + signal.SIGTERM)


def test_a_signal_that_comes_twice_does_not_end_what_closes_the_run():
    """timeout sends the signal twice: to commprof, and to the process group of commprof."""
    closing = DRIVER.replace(
        "raise SystemExit(group.wait().exit_code)",
        "code = group.wait().exit_code; os.write(1, b'closing\\n'); time.sleep(0.5); raise SystemExit(code + 1)",
    ).replace("import os, sys", "import os, sys, time")
    started = driver("import os, time; os.write(1, b'ready\\n'); time.sleep(60)", closing)
    started.send_signal(signal.SIGTERM)
    while started.stdout.readline() != "closing\n":
        pass
    started.send_signal(signal.SIGTERM)
    started.communicate(timeout=20)
    assert started.returncode == 128 + signal.SIGTERM + 1


COMMAND_DRIVER = """
import os, sys
from commprof.launch.ranks import Rank, RankGroup
group = RankGroup([Rank(0, ["bash", "-c", *sys.argv[1:]], os.environ)], print, is_command=True)
group.start()
raise SystemExit(group.wait().exit_code)
"""


def command(*words: str) -> subprocess.Popen:
    """Start a driver of ``bash -c`` with ``words``."""
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND_DRIVER, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[4],
    )


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_the_program_of_a_shell_script_ends_with_the_script(name):
    """On SIGTERM, the shell dies and leaves its program running. On SIGINT, the shell waits for its program."""
    program = "import os, time; os.write(1, f'{os.getpid()}\\n'.encode()); time.sleep(60)"
    started = command('"$0" -S -c "$1"; exit $?', sys.executable, program)
    pid = int(started.stdout.readline())
    os.killpg(started.pid, getattr(signal, name))  # timeout signals the process group in the same way.
    started.communicate(timeout=20)
    assert started.returncode == 128 + getattr(signal, name)
    assert not _alive(pid)


def test_a_second_interrupt_reaches_a_command_which_stops_its_own_ranks():
    """torchrun stops its own ranks if an interrupt did not stop them.

    The ranks are in their own sessions and would otherwise keep running.
    """
    started = command("trap 'n=x$n; [ $n = xx ] && exit 7' INT; echo ready; while :; do sleep 0.1; done")
    assert started.stdout.readline() == "ready\n"
    for _ in range(2):
        started.send_signal(signal.SIGINT)
        time.sleep(0.5)
    started.communicate(timeout=20)
    assert started.returncode == 7


def test_ranks_do_not_outlive_their_launcher():
    program = (
        "import os, time\nos.write(1, b'ready\\n')\nos.write(2, f'{os.getpid()}\\n'.encode())\ntime.sleep(60)"
    )
    started = driver(program)
    pids = [int(started.stderr.readline()) for _ in range(2)]
    started.kill()
    started.wait()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(_alive(pid) for pid in pids):
        time.sleep(0.02)
    assert [_alive(pid) for pid in pids] == [False, False]
    started.stdout.close()
    started.stderr.close()


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_ctrl_c_in_a_terminal_reaches_each_rank_once():
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(Path(__file__).parents[4])
        os.execv(sys.executable, [sys.executable, "-c", DRIVER, COUNTING])
    text = b""
    while text.count(b"ready") < 2:
        text += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    try:
        while chunk := os.read(terminal, 1000):
            text += chunk
    except OSError:  # The terminal is closed when its last process exits.
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    words = text.decode().replace("^C", " ").split()
    assert sorted(word for word in words if ":" in word) == ["0:SIGINT", "1:SIGINT"]
