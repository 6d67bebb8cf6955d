"""Stacks of the threads of a Python process, by py-spy or by the process itself.

py-spy is a program without an API, so its output is parsed. It needs ptrace: the same user, and a system or container that
allows it (SYS_PTRACE). If it is missing or refused, the recorded process gets the signal on which its faulthandler writes
all stacks into a file of the run; that needs only the same user.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.sampling.processes import RankProcess, State, state_of
from commprof.sampling.samples import Sample

PY_SPY: Final = "py-spy"
FAULTHANDLER: Final = "faulthandler"
STACKS_VARIABLE: Final = "COMMPROF_STACKS"  # py-spy or faulthandler: only this one

_PY_SPY_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 3.0  # how long a process without a free core may take to run its signal handler
_QUIET_SECONDS: Final = 0.05  # without more output for so long, the text is complete
# The standard library of any Python, and installed packages below or beside it.
_LIBRARY: Final = re.compile(r"/lib(?:64)?/python\d[\d.]*/|/(?:site|dist)-packages/")
_COMMPROF: Final = f"{Path(__file__).resolve().parent.parent}/"


class Frame(NamedTuple):
    """One call on a stack."""

    file: str
    line: int
    function: str

    @property
    def is_program(self) -> bool:
        """Whether it belongs to the program: not to the standard library, commprof or an installed package."""
        return not self.file.startswith(("<", _COMMPROF)) and _LIBRARY.search(self.file) is None

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


class Stack(NamedTuple):
    """One thread: its frames, the innermost first, and its number in Python, if known."""

    thread: str
    is_main: bool
    frames: tuple[Frame, ...]
    ident: int | None = None

    @property
    def place(self) -> Frame | None:
        """The innermost frame of the program itself, else the innermost frame."""
        return next((frame for frame in self.frames if frame.is_program), next(iter(self.frames), None))


class Stacks(NamedTuple):
    """The threads of one process and how they were read, or why they could not be read."""

    source: str | None
    threads: tuple[Stack, ...] = ()
    problem: str | None = None

    @property
    def main(self) -> Stack | None:
        """The main thread."""
        return next((stack for stack in self.threads if stack.is_main), None)

    def of(self, thread: str | None, ident: int | None) -> Stack | None:
        """The thread of this number, else the only one of this name; None if there is none."""
        by_ident = [stack for stack in self.threads if ident is not None and stack.ident == ident]
        by_name = [stack for stack in self.threads if stack.thread == thread]
        matching = by_ident or (by_name if len(by_name) == 1 else [])
        return matching[0] if matching else None


def take_stacks(
    process: RankProcess, run: Path, answer: Mapping[str, Any] | None, only: str | None = None
) -> Stacks:
    """The stacks of ``process``, by py-spy if possible, else by its own faulthandler.

    Args:
        answer: ``signal`` and ``file`` (below ``run``) that its recorder published.
        only: use only this way of the two. Default: the value of COMMPROF_STACKS.
    """
    only = only or os.environ.get(STACKS_VARIABLE) or None
    state = state_of(process)
    if state is State.GONE:
        return Stacks(None, problem="its process is gone")
    problems = []
    if only in (None, PY_SPY):
        stacks = spy(process.pid, blocking=state is not State.STOPPED)
        if stacks.source is not None:
            return stacks
        problems.append(str(stacks.problem))
    if only in (None, FAULTHANDLER):
        stacks = ask_process(process, run, answer)
        if stacks.source is not None:
            return stacks
        problems.append(str(stacks.problem))
    return Stacks(
        None,
        problem="; ".join(problems) or f"{STACKS_VARIABLE}={only} is neither {PY_SPY} nor {FAULTHANDLER}",
    )


def py_spy_program() -> str | None:
    """The program py-spy: the one beside this Python, else the one on PATH."""
    beside = Path(sys.executable).with_name(PY_SPY)
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(PY_SPY)


def spy(pid: int, blocking: bool = True) -> Stacks:
    """The stacks of process ``pid`` by py-spy.

    Args:
        blocking: stop the process for the few milliseconds that this takes; else read while it runs.
    """
    program = py_spy_program()
    if program is None:
        return Stacks(None, problem="py-spy is not installed (pip install 'commprof[sampling]')")
    command = [program, "dump", "--json", "--pid", str(pid), *([] if blocking else ["--nonblocking"])]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_PY_SPY_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Stacks(None, problem=f"py-spy did not answer within {_PY_SPY_SECONDS:g} s")
    except OSError as error:
        return Stacks(None, problem=f"{program} could not be started: {error.strerror}")
    if done.returncode:
        return Stacks(None, problem=explain_refusal(done.stderr))
    try:
        return Stacks(PY_SPY, parse_spy(done.stdout, pid))
    except (ValueError, KeyError, TypeError):
        return Stacks(None, problem="what py-spy printed is not the JSON that it is known to print")


def explain_refusal(text: str) -> str:
    """Why py-spy failed, from its standard error, and what would help."""
    if "ermission denied" in text or "ermission Denied" in text or "Operation not permitted" in text:
        return "py-spy was refused (it needs the same user, kernel.yama.ptrace_scope 0 or root; in a container SYS_PTRACE)"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"py-spy failed: {lines[0] if lines else 'it said nothing'}"


def parse_spy(text: str, pid: int) -> tuple[Stack, ...]:
    """The threads in the output of ``py-spy dump --json``, the main one first.

    Raises:
        ValueError, KeyError, TypeError: it is something else.
    """
    stacks = []
    for thread in json.loads(text):
        frames = tuple(Frame(f["filename"], f["line"], f["name"]) for f in thread["frames"])
        name = thread["thread_name"] or f"thread {thread['os_thread_id'] or thread['thread_id']}"
        is_main = thread["os_thread_id"] == pid or thread["thread_name"] == "MainThread"
        stacks.append(Stack(name, is_main, frames, thread.get("thread_id")))
    return _main_first(stacks)


_THREAD: Final = re.compile(
    r"(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*?)\])?.*\(most recent call first\):"
)
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def parse_faulthandler(text: str) -> tuple[Stack, ...]:
    """The threads in the output of faulthandler; the main one, which is last there, comes first."""
    threads: list[tuple[str, int, list[Frame]]] = []
    for line in text.splitlines():
        thread = _THREAD.match(line)
        frame = _FRAME.fullmatch(line)
        if thread is not None:
            threads.append((thread[2] or f"thread {thread[1]}", int(thread[1], 16), []))
        elif frame is not None and threads:
            threads[-1][2].append(Frame(frame[1], int(frame[2]), frame[3]))
    last = len(threads) - 1
    return _main_first(
        [
            Stack("MainThread" if number == last else name, number == last, tuple(frames), ident)
            for number, (name, ident, frames) in enumerate(threads)
        ]
    )


def _main_first(stacks: Sequence[Stack]) -> tuple[Stack, ...]:
    return tuple(sorted(stacks, key=lambda stack: not stack.is_main))


def ask_process(process: RankProcess, run: Path, answer: Mapping[str, Any] | None) -> Stacks:
    """The stacks that ``process`` writes when it gets the signal that its recorder has chosen.

    The signal would end a process that no longer catches it, so this is checked first.
    """
    try:
        number, file = int((answer or {})["signal"]), run / str((answer or {})["file"])
    except (KeyError, TypeError, ValueError):
        return Stacks(None, problem="its recorder offers no stacks by faulthandler")
    if state_of(process) is State.STOPPED:
        return Stacks(None, problem="it is stopped, so it cannot write its stacks by faulthandler")
    if not catches(process.pid, number):
        return Stacks(
            None, problem=f"it no longer catches signal {number}, on which it would write its stacks"
        )
    begin = _size(file)
    try:
        os.kill(process.pid, number)
    except OSError as error:
        return Stacks(
            None, problem=f"signal {number}, on which it writes its stacks, was refused: {error.strerror}"
        )
    text = _await_text(file, begin)
    threads = parse_faulthandler(text)
    if not threads:
        return Stacks(
            None, problem=f"it wrote no stacks within {_ANSWER_SECONDS:g} s of signal {number} (faulthandler)"
        )
    return Stacks(FAULTHANDLER, threads)


def catches(pid: int, number: int, proc: Path = Path("/proc")) -> bool:
    """Whether process ``pid`` has a handler for signal ``number`` (SigCgt in its status file, see proc(5))."""
    try:
        for line in (proc / str(pid) / "status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.partition(":")[2], 16) >> (number - 1) & 1)
    except (OSError, ValueError):
        pass
    return False


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _await_text(file: Path, begin: int) -> str:
    """The text in ``file`` after ``begin``, once it is complete."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    size = _size(file)
    while time.monotonic() < deadline:
        time.sleep(_QUIET_SECONDS)
        before, size = size, _size(file)
        if size > begin and size == before:
            break
    try:
        with file.open("rb") as stream:
            stream.seek(begin)
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""


class StackSampler:
    """The stacks of each rank on this host by py-spy, for flame graphs: one sample of value 1 for each thread.

    ``name`` is the stack in folded form, the outermost frame first, joined by ``;``.

    Args:
        say: called once with a line of text if py-spy cannot read a rank that runs.
    """

    def __init__(
        self,
        ranks: Callable[[], list[RankProcess]],
        say: Callable[[str], None],
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._ranks = ranks
        self._say = say
        self._clock = clock
        self._has_said = False

    def read(self) -> list[Sample]:
        """One sample for each thread of each rank."""
        samples = []
        for process in self._ranks():
            now = self._clock()
            stacks = spy(process.pid)
            if stacks.source is None and not self._has_said and state_of(process) is State.RUNS:
                self._has_said = True
                self._say(f"--sample stacks: no stack of {process.name}: {stacks.problem}")
            for stack in stacks.threads:
                device = f"{process.name} {stack.thread}"
                samples.append(Sample(PY_SPY, device, folded(stack), 1.0, now))
        return samples

    def close(self) -> None:
        """Nothing to close."""


def folded(stack: Stack) -> str:
    """``train.py:main;model.py:forward``: the frames of a stack, the outermost first."""
    return ";".join(f"{Path(frame.file).name}:{frame.function}" for frame in reversed(stack.frames))
