"""A commprof command in a process that is forked from the warm test process: its imports are there already.

The child has the arguments, directory, environment, standard streams, exit code and process id that ``python -m commprof``
would have. What pytest and other tests have changed in this process is undone in it.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import pkgutil
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn

from commprof.analysis.storage import answer_cache, answer_files
from support import warm_programs

ROOT: Final = Path(__file__).resolve().parents[2]
# Which engine and which parts in C are taken is decided while modules are imported.
_READ_AT_IMPORT: Final = ("COMMPROF_COMPILED",)
_ROOMS: Final = (
    "align",
    "analysis",
    "calibration",
    "cli",
    "export",
    "imports",
    "ledger",
    "nccl",
    "plan",
    "prediction",
    "requested",
    "sampling",
    "trace",
)
_NOT_IMPORTED: Final = ("commprof.analysis.relations.spark",)
# What these, and the libraries below them, import in their first call.
_LIBRARIES: Final = (
    "commprof.recorder.session",
    "commprof_dash.app",
    "pandas.core.arrays.arrow._arrow_utils",
    "pyarrow.acero",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "rich.console",
    "rich.table",
    "typer._adapters",
    "typer._click.decorators",
)
_IMPORT: Final = builtins.__import__
_CACHE_DIRECTORY: Final = answer_files.cache_directory
# DuckDB's engines of the test process: their threads are not in the child, and to close one there would wait for them.
_ENGINES: Final[list[Any]] = []


def commprof(
    words: list[str],
    cwd: Path,
    env: dict[str, str],
    timeout: float,
    text: str | None,
    new_interpreters: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``commprof WORDS`` in ``cwd`` with exactly the variables ``env``; ``text`` is typed on its standard input.

    The Python programs that it starts are forked too, unless they have to be ``new_interpreters``.

    Raises:
        subprocess.TimeoutExpired: it has not ended, or not closed its output, within ``timeout`` seconds; it is killed.
    """
    command = [sys.executable, "-m", "commprof", *words]
    if any(env.get(name) for name in _READ_AT_IMPORT):
        return subprocess.run(
            command,
            cwd=cwd,
            env=env,
            timeout=timeout,
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
    import_all()
    # --engine has to be there before accelerate and its like are imported, which the test process may have done.
    starts = words[:1] in (["run"], ["sweep"]) and "--engine" not in words
    forks_programs = starts and not new_interpreters
    if forks_programs:
        warm_programs.import_all()
    ends = [os.pipe(), os.pipe()]
    typed = None if text is None else _typed(text)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _child(words, cwd, env, typed, [write for _, write in ends], forks_programs)
    for _, write in ends:
        os.close(write)
    if typed is not None:
        os.close(typed)
    try:
        out, err = _read([read for read, _ in ends], time.monotonic() + timeout)
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        raise subprocess.TimeoutExpired(command, timeout) from None
    finally:
        for read, _ in ends:
            os.close(read)
        _, status = os.waitpid(pid, 0)
    return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(status), out, err)


@cache
def import_all() -> None:
    """What commands import while they run: once in this process in place of once in each."""
    from commprof.cli import application

    application.build()
    for room in _ROOMS:
        package = importlib.import_module(f"commprof.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name not in _NOT_IMPORTED:
                importlib.import_module(module.name)
    for name in _LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _typed(text: str) -> int:
    """A descriptor from which ``text`` is read."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        return os.dup(file.fileno())


def _read(ends: list[int], deadline: float) -> list[str]:
    """What comes out of each of ``ends`` until all are closed."""
    chunks: dict[int, list[bytes]] = {end: [] for end in ends}
    open_ends = list(ends)
    while open_ends:
        left = deadline - time.monotonic()
        ready = select.select(open_ends, [], [], max(0.0, left))[0]
        if not ready:
            raise TimeoutError
        for end in ready:
            chunk = os.read(end, 1 << 16)
            if chunk:
                chunks[end].append(chunk)
            else:
                open_ends.remove(end)
    texts = [b"".join(chunks[end]).decode() for end in ends]
    # As text=True of subprocess does.
    return [text.replace("\r\n", "\n").replace("\r", "\n") for text in texts]


def _child(
    words: list[str],
    cwd: Path,
    env: dict[str, str],
    typed: int | None,
    outputs: list[int],
    forks_programs: bool,
) -> NoReturn:
    code = 1
    try:
        if typed is not None:
            os.dup2(typed, 0)
        for number, end in enumerate(outputs, start=1):
            os.dup2(end, number)
            os.close(end)
        gc.freeze()  # or the first collection copies every page of the test process
        _as_started(words, cwd, env)
        if forks_programs:
            subprocess.Popen = warm_programs.Popen
        code = _run(words)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _as_started(words: list[str], cwd: Path, env: dict[str, str]) -> None:
    """Undo what a new interpreter would not have."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    sys.argv = [str(ROOT / "commprof" / "__main__.py"), *words]
    sys.orig_argv[:] = [sys.executable, "-m", "commprof", *words]
    sys.path.insert(0, str(cwd))
    sys.stdin, sys.stdout, sys.stderr = (
        warm_programs.stream(number, mode) for number, mode in enumerate("rww")
    )
    faulthandler.disable()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    builtins.__import__ = _IMPORT
    warnings.resetwarnings()
    for category in (ImportWarning, PendingDeprecationWarning, DeprecationWarning):
        warnings.simplefilter("ignore", category)
    warnings.showwarning = _show_warning
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    answer_files.cache_directory = _CACHE_DIRECTORY
    _ENGINES.extend(vars(answer_cache.answer_cache).values())
    answer_cache.answer_cache.__init__()


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def _run(words: list[str]) -> int:
    """The exit code of ``commprof WORDS``; what its threads and streams still have to say is said."""
    from commprof.cli import main

    code: object = 0
    try:
        main(words)
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return int(code) if isinstance(code, int) else int(code is not None)
