"""Test stacks as printed by py-spy and as written by faulthandler.

The tests also check the message if neither may read the process.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from commprof.recorder.process.stack_signal import StackSignal, free_signal
from commprof.sampling import stacks
from commprof.sampling.processes import ProcessSampler, RankProcess, State, state_of, usage_of
from commprof.sampling.stacks import (
    Frame,
    StackSampler,
    ask_process,
    catches,
    explain_refusal,
    folded,
    parse_faulthandler,
    parse_spy,
    spy,
    take_stacks,
)

SPY = json.dumps(
    [
        {
            "pid": 7, "thread_id": 2, "thread_name": None, "os_thread_id": 9, "active": False, "owns_gil": False,
            "frames": [{"name": "get", "filename": "/usr/lib/python3/queue.py", "line": 171}],
        },
        {
            "pid": 7, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 7, "active": True, "owns_gil": True,
            "frames": [
                {"name": "wait", "filename": "/x/site-packages/torch/distributed/c10d.py", "line": 5},
                {"name": "train", "filename": "/home/me/train.py", "line": 40},
            ],
        },
    ]
)  # fmt: skip


def test_py_spys_threads_with_the_main_one_first():
    main, other = parse_spy(SPY, 7)
    assert (main.thread, main.is_main) == ("MainThread", True)
    assert main.frames[1] == Frame("/home/me/train.py", 40, "train")
    assert main.place == Frame("/home/me/train.py", 40, "train")  # The place is not a frame of torch.
    assert (other.thread, other.is_main) == ("thread 9", False)
    assert folded(main) == "train.py:train;c10d.py:wait"


def test_a_stack_without_the_programs_own_code_has_its_innermost_frame_as_place():
    (_, other) = parse_spy(SPY, 7)
    assert other.place == Frame("/usr/lib/python3/queue.py", 171, "get")


def test_faulthandlers_text_as_this_python_writes_it(tmp_path):
    """A real process with two threads writes the text."""
    script = """
        import faulthandler, sys, threading
        def waits(event): event.wait()
        def inner(): faulthandler.dump_traceback(file=open(sys.argv[1], "w"), all_threads=True)
        event = threading.Event()
        thread = threading.Thread(target=waits, args=(event,)); thread.start()
        inner(); event.set(); thread.join()
    """
    file = tmp_path / "out.txt"
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(file)], check=True, timeout=60)
    main, other = parse_faulthandler(file.read_text())
    assert (main.thread, main.is_main) == ("MainThread", True)
    assert [frame.function for frame in main.frames] == ["inner", "<module>"]
    assert "waits" in [frame.function for frame in other.frames] and not other.is_main


def test_faulthandlers_text_with_names_of_threads():
    text = (
        'Thread 0x00007f1 [loader] (most recent call first):\n  File "a b.py", line 3 in load\n\n'
        'Current thread 0x00007f2 [python] (most recent call first):\n  File "train.py", line 9 in <module>\n'
    )
    main, loader = parse_faulthandler(text)
    assert main.frames == (Frame("train.py", 9, "<module>"),)
    assert (loader.thread, loader.frames) == ("loader", (Frame("a b.py", 3, "load"),))
    assert parse_faulthandler("nothing of the kind\n") == ()


@pytest.mark.parametrize(
    "text",
    [
        "Permission Denied: Try running again with elevated permissions by going 'sudo env ...'",
        "Error: Failed to get process executable name. Check that the process is running.\n"
        "Reason: Permission denied (os error 13)",
        "Error: Operation not permitted (os error 1)",
    ],
)
def test_a_refusal_says_what_is_needed(text):
    assert explain_refusal(text).startswith(
        "py-spy was refused (it needs the same user, kernel.yama.ptrace_scope 0"
    )


def test_other_failures_of_py_spy_are_quoted():
    assert (
        explain_refusal("Error: No python processes found\n")
        == "py-spy failed: Error: No python processes found"
    )
    assert explain_refusal("") == "py-spy failed: it printed no error"


def test_without_py_spy_that_is_said(monkeypatch):
    monkeypatch.setattr(stacks, "py_spy_program", lambda: None)
    assert spy(os.getpid()).problem == "py-spy is not installed (pip install 'commprof[sampling]')"


def fake_py_spy(tmp_path, monkeypatch, text):
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setattr(stacks, "py_spy_program", lambda: str(program))


def test_a_py_spy_that_is_refused_leaves_faulthandler_to_answer(tmp_path, monkeypatch):
    fake_py_spy(tmp_path, monkeypatch, 'echo "Error: Permission denied (os error 13)" >&2; exit 1')
    with answering_child(tmp_path) as (process, answer):
        found = take_stacks(process, tmp_path, answer)
        assert found.source == "faulthandler"
        assert [frame.function for frame in found.main.frames] == ["waits", "<module>"]
        neither = take_stacks(process, tmp_path, None)
    assert neither.source is None
    assert (
        neither.problem.startswith("py-spy was refused")
        and "cannot write stacks by faulthandler" in neither.problem
    )


def test_output_of_py_spy_that_is_something_else(tmp_path, monkeypatch):
    fake_py_spy(tmp_path, monkeypatch, "echo '{\"a\": 1}'")
    assert spy(1).problem == "py-spy printed output that is not in its known JSON format"


def test_a_sampler_whose_py_spy_is_refused_says_so_once(tmp_path, monkeypatch):
    fake_py_spy(tmp_path, monkeypatch, 'echo "Error: Permission denied (os error 13)" >&2; exit 1')
    said: list[str] = []
    sampler = StackSampler(lambda: [RankProcess(rank, os.getpid()) for rank in range(2)], said.append)
    assert sampler.read() == sampler.read() == []
    (text,) = said
    assert text.startswith("--sample stacks: no stack of rank 0: py-spy was refused")
    gone = StackSampler(lambda: [RankProcess(0, os.getpid(), start_ticks=1)], said.append)
    assert gone.read() == [] and len(said) == 1, "a rank that has ended meanwhile is no failure"


class answering_child:  # noqa: N801 - reads as a statement
    """A process that waits and offers its stacks as a recorded process does."""

    def __init__(self, run, after=""):
        self.run, self.after = run, after

    def __enter__(self):
        script = f"""
            import json, pathlib, sys, time
            from commprof.recorder.process.stack_signal import StackSignal
            answer = StackSignal()
            print(json.dumps(answer.install(pathlib.Path(sys.argv[1]), "rank-00000-0-1")), flush=True)
            {self.after}
            def waits():
                print("waits", flush=True)
                time.sleep(300)
            waits()
        """
        self.child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(self.run)], stdout=subprocess.PIPE, text=True
        )
        row = json.loads(self.child.stdout.readline())
        assert self.child.stdout.readline() == "waits\n"
        return RankProcess(0, self.child.pid), row

    def __exit__(self, *error):
        self.child.kill()
        self.child.wait()
        self.child.stdout.close()


def test_the_signal_is_real_time_and_asked_for_twice_answers_twice(tmp_path):
    with answering_child(tmp_path) as (process, answer):
        assert signal.SIGRTMIN < answer["signal"] < signal.SIGRTMAX
        assert answer["file"] == "stacks/rank-00000-0-1.txt"
        assert catches(process.pid, answer["signal"]) and not catches(process.pid, signal.SIGUSR1)
        for _ in range(2):
            found = ask_process(process, tmp_path, answer)
            assert [frame.function for frame in found.main.frames] == ["waits", "<module>"], found.problem
        assert state_of(process) is State.RUNS


def test_a_process_that_no_longer_catches_the_signal_is_not_killed_by_it(tmp_path):
    with answering_child(tmp_path, after="answer.remove()") as (process, answer):
        assert "no longer catches signal" in ask_process(process, tmp_path, answer).problem
        assert state_of(process) is State.RUNS


def test_a_stopped_process_is_not_asked(tmp_path):
    with answering_child(tmp_path) as (process, answer):
        os.kill(process.pid, signal.SIGSTOP)
        while state_of(process) is not State.STOPPED:
            pass
        assert "it is stopped" in ask_process(process, tmp_path, answer).problem
        os.kill(process.pid, signal.SIGCONT)
    assert take_stacks(process, tmp_path, answer).problem == "its process is gone"


def test_a_signal_that_somebody_has_is_not_taken(tmp_path):
    status = tmp_path / "status"
    every = (1 << 64) - 1
    highest = signal.SIGRTMAX - 3

    def write(caught=0, ignored=0, blocked=0):
        status.write_text(
            f"Name:\tx\nSigBlk:\t{blocked:016x}\nSigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}\n"
        )
        return free_signal(status)

    assert write() == highest
    assert write(caught=1 << (highest - 1)) == highest - 1
    assert write(ignored=1 << (highest - 1), blocked=1 << (highest - 2)) == highest - 2
    assert write(caught=every) is None
    assert free_signal(tmp_path / "missing") is None


def test_handlers_of_the_user_stay_and_come_back_to_default(tmp_path):
    taken = signal.SIGRTMAX - 3
    before = signal.signal(taken, lambda number, frame: None)
    try:
        answer = StackSignal()
        row = answer.install(tmp_path, "rank-00000-0-1")
        assert row["signal"] != taken
        assert catches(os.getpid(), row["signal"])
        answer.remove()
        assert not catches(os.getpid(), row["signal"])
        assert not (tmp_path / "stacks").exists()  # No dump was requested, so nothing remains.
    finally:
        signal.signal(taken, before)
    assert not faulthandler.unregister(row["signal"])


def test_a_handler_that_the_program_sets_later_is_left_alone(tmp_path):
    answer = StackSignal()
    number = answer.install(tmp_path, "rank-00000-0-1")["signal"]
    called = []
    before = signal.signal(number, lambda number, frame: called.append(number))
    try:
        answer.remove()
        os.kill(os.getpid(), number)
        assert called == [number]
    finally:
        signal.signal(number, before)
        faulthandler.unregister(number)


def test_a_directory_that_cannot_be_written_to_offers_nothing(tmp_path):
    answer = StackSignal()
    assert answer.install(tmp_path / "missing", "rank-00000-0-1") is None
    answer.remove()


def test_usage_and_state_of_a_process():
    usage = usage_of(os.getpid())
    assert usage.rss_bytes > 1 << 20 and usage.threads >= 1 and usage.cpu_ns > 0
    assert state_of(RankProcess(0, os.getpid())) is State.RUNS
    # These values belong to a different process with the same process id.
    assert state_of(RankProcess(0, os.getpid(), start_ticks=1)) is State.GONE
    assert usage_of(2**22 + 5) is None


def test_processor_time_is_a_share_of_one_core_since_the_reading_before(tmp_path):
    stat = tmp_path / "11" / "stat"
    stat.parent.mkdir()
    clock = iter([1_000_000_000, 3_000_000_000])
    sampler = ProcessSampler(
        lambda: [RankProcess(4, 11), RankProcess(5, 12)], lambda: next(clock, 0), tmp_path
    )

    def write(utime, stime):
        fields = ["S", *["0"] * 10, str(utime), str(stime), *["0"] * 4, "3", *["0"] * 3, "10", "0"]
        stat.write_text(f"11 (a b) c) {' '.join(fields)}")

    per_second = os.sysconf("SC_CLK_TCK")
    write(per_second, 0)
    first = {s.name: s.value for s in sampler.read() if s.device == "rank 4"}
    assert first == {"rss_bytes": 10 * os.sysconf("SC_PAGE_SIZE"), "threads": 3}
    write(per_second * 2, per_second // 2)
    clock = iter([3_000_000_000])
    second = {s.name: s.value for s in sampler.read()}
    assert second["cpu_percent"] == pytest.approx(75.0)


def test_a_process_whose_stack_is_being_taken_is_not_stopped(tmp_path, monkeypatch):
    stat = tmp_path / "7" / "stat"
    stat.parent.mkdir()
    stat.write_text("7 (python) t 1 7 7\n")
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            stat.write_text("7 (python) S 1 7 7\n")

    monkeypatch.setattr("commprof.sampling.processes.time.sleep", sleep)
    assert state_of(RankProcess(0, 7), tmp_path) is State.RUNS and len(looks) == 3
    # The process is stopped by a signal, so there is no reason to wait.
    stat.write_text("7 (python) T 1 7 7\n")
    assert state_of(RankProcess(0, 7), tmp_path) is State.STOPPED and len(looks) == 3


def test_a_process_that_a_debugger_holds_is_stopped(tmp_path, monkeypatch):
    stat = tmp_path / "7" / "stat"
    stat.parent.mkdir()
    stat.write_text("7 (python) t 1 7 7\n")
    monkeypatch.setattr("commprof.sampling.processes._LONGEST_SAMPLE_S", 0.05)
    assert state_of(RankProcess(0, 7), tmp_path) is State.STOPPED
