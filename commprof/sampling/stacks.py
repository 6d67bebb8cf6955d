"""Takes the stacks of the threads of a Python process, with py-spy or by the process itself.

py-spy is a program without an API, so its output is parsed. py-spy needs ptrace: the same user, and a system or
container that allows ptrace (SYS_PTRACE). If py-spy is missing or refused, the recorded process gets a signal. On this
signal, the faulthandler of the process writes all stacks into a file of the run. This requires only the same user.
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
STACKS_VARIABLE: Final = "COMMPROF_STACKS"  # py-spy or faulthandler: use only this method

_PY_SPY_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 3.0  # the time that a process without a free core may need to run its signal handler
_QUIET_SECONDS: Final = 0.05  # the text is complete if there is no more output for this time
# Matches files of the standard library of any Python, and of installed packages.
_LIBRARY: Final = re.compile(r"/lib(?:64)?/python\d[\d.]*/|/(?:site|dist)-packages/")
_COMMPROF: Final = f"{Path(__file__).resolve().parent.parent}/"


class Frame(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_program(self) -> bool:
        """Whether the frame is code of the program, not of the standard library, commprof or an installed package."""
        return not self.file.startswith(("<", _COMMPROF)) and _LIBRARY.search(self.file) is None

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


class Stack(NamedTuple):
    """The stack of one thread, the innermost frame first, with the thread's number in Python if known."""

    thread: str
    is_main: bool
    frames: tuple[Frame, ...]
    ident: int | None = None

    @property
    def place(self) -> Frame | None:
        """The innermost frame of the program, or the innermost frame of all if no frame is code of the program."""
        return next((frame for frame in self.frames if frame.is_program), next(iter(self.frames), None))


class Stacks(NamedTuple):
    """The stacks of one process and the method that read them, or the reason why they could not be read."""

    source: str | None
    threads: tuple[Stack, ...] = ()
    problem: str | None = None

    @property
    def main(self) -> Stack | None:
        """The stack of the main thread, or None if it is not known."""
        return next((stack for stack in self.threads if stack.is_main), None)

    def of(self, thread: str | None, ident: int | None) -> Stack | None:
        """Return the stack of the thread with this number, or else of the only thread with this name, or None."""
        by_ident = [stack for stack in self.threads if ident is not None and stack.ident == ident]
        by_name = [stack for stack in self.threads if stack.thread == thread]
        matching = by_ident or (by_name if len(by_name) == 1 else [])
        return matching[0] if matching else None


def take_stacks(
    process: RankProcess, run: Path, answer: Mapping[str, Any] | None, only: str | None = None
) -> Stacks:
    """Return the stacks of ``process``, taken by py-spy if possible, or else by the process's own faulthandler.

    Args:
        process: The process of a rank.
        run: The run directory.
        answer: The ``signal`` and the ``file`` (below ``run``) that the recorder of the process published.
        only: The only method to use, ``py-spy`` or ``faulthandler``. Default: the value of COMMPROF_STACKS.
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
    """Return the path of py-spy: in the directory of this Python, or else on PATH; None if it is not installed."""
    beside = Path(sys.executable).with_name(PY_SPY)
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(PY_SPY)


def spy(pid: int, blocking: bool = True) -> Stacks:
    """Return the stacks of process ``pid``, taken by py-spy.

    Args:
        pid: The process.
        blocking: Whether py-spy stops the process for the few milliseconds of the reading. Otherwise py-spy reads
            while the process runs.
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
        return Stacks(None, problem="py-spy printed output that is not in its known JSON format")


def explain_refusal(text: str) -> str:
    """Return why py-spy failed and what would help, from the text that it printed on standard error."""
    if "ermission denied" in text or "ermission Denied" in text or "Operation not permitted" in text:
        return "py-spy was refused (it needs the same user, kernel.yama.ptrace_scope 0 or root; in a container SYS_PTRACE)"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"py-spy failed: {lines[0] if lines else 'it printed no error'}"


def parse_spy(text: str, pid: int) -> tuple[Stack, ...]:
    """Return the stacks in the output of ``py-spy dump --json``, the main thread first.

    Raises:
        ValueError, KeyError, TypeError: the text is not such an output.
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
    """Return the stacks in the output of faulthandler, the main thread first.

    In the output, the main thread is last.
    """
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
    """Return the stacks that ``process`` writes when it gets the signal that its recorder has chosen.

    The signal would end a process that no longer catches it. So this function checks first that the process does.
    """
    try:
        number, file = int((answer or {})["signal"]), run / str((answer or {})["file"])
    except (KeyError, TypeError, ValueError):
        return Stacks(None, problem="its recorder cannot write stacks by faulthandler")
    if state_of(process) is State.STOPPED:
        return Stacks(None, problem="it is stopped, so it cannot write its stacks by faulthandler")
    if not catches(process.pid, number):
        return Stacks(
            None, problem=f"it no longer catches signal {number}, which tells it to write its stacks"
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
    """Return whether process ``pid`` has a handler for signal ``number`` (SigCgt in its status file, see proc(5))."""
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
    """Return the text in ``file`` after byte ``begin``. Wait until the text is complete or the time has expired."""
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
    """Samples the stacks of each rank on this host with py-spy, for flame graphs.

    Each thread gives one sample with value 1. The ``name`` of the sample is the stack in folded form: the frames joined
    by ``;``, the outermost frame first.

    Args:
        ranks: The function that returns the processes of the ranks on this host.
        say: The function that is called once with a line of text if py-spy cannot read a running rank.
        clock: The function that returns the time of a sample in ns.
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
        """Return one sample for each thread of each rank."""
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
        """Do nothing, because the sampler has no open resources."""


def folded(stack: Stack) -> str:
    """Return a stack in folded form, the outermost frame first, such as ``train.py:main;model.py:forward``."""
    return ";".join(f"{Path(frame.file).name}:{frame.function}" for frame in reversed(stack.frames))
