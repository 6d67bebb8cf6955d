"""Runs commprof commands in forks of the warm test process, which has already imported all modules.

The child has the arguments, directory, environment, standard streams, exit code and a new process id, as with
``python -m commprof``. The child undoes the changes of pytest and of other tests to the state of the process.
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
# Variables that commprof reads while modules are imported. They determine the use of the compiled parts.
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
# Modules that commands, or the libraries that commands use, import only in their first call.
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
# The DuckDB engines of the test process. They must stay alive in the child: their threads do not exist there, so that
# closing an engine would wait forever.
_ENGINES: Final[list[Any]] = []


def commprof(
    words: list[str],
    cwd: Path,
    env: dict[str, str],
    timeout: float,
    text: str | None,
    new_interpreters: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``commprof WORDS`` in ``cwd`` with exactly the variables ``env``, and with ``text`` on its standard input.

    Python programs that the command starts are also forked, unless ``new_interpreters`` is true.

    Raises:
        subprocess.TimeoutExpired: the command has not exited or not closed its output within ``timeout`` seconds. The
            command is then killed.
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
    # --engine must take effect before accelerate and similar libraries are imported. The test process may already have
    # imported them, so the programs of such a command run in new interpreters.
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
    """Import the modules that commands import while they run, so that the forks do not repeat the imports."""
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
    """Return a file descriptor from which ``text`` can be read."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        return os.dup(file.fileno())


def _read(ends: list[int], deadline: float) -> list[str]:
    """Return the text that is read from each of ``ends`` until all of them are closed."""
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
    # subprocess translates newlines in the same way with text=True.
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
        gc.freeze()  # otherwise the first collection copies every page of the test process
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
    """Reset the state that a new interpreter would not have, and set the state that it would have."""
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
    """Run ``commprof WORDS``, wait for its threads, flush its streams, and return its exit code."""
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
