"""Runs Python programs in forks of a warm process, which has already imported torch.

:class:`Popen` replaces ``subprocess.Popen`` in a forked command (``support.warm``). The command then starts its
ranks, or a launcher its workers, without spending 3 seconds of processor time for each. A program has the
arguments, environment, descriptors, process id, parent, signals, ``sys.path`` and ``__main__`` of a new
interpreter. commprof is injected as in a new interpreter: by the sitecustomize on the PYTHONPATH, which waits
for the import of torch. Therefore the modules of torch and of zero_runtime are hidden until the program imports
them.

The tests in integration/launch start real interpreters (isolated mode, other interpreters, ``COMMPROF=1``).
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib
import io
import multiprocessing.process
import multiprocessing.util
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
import warnings
import weakref
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

# The modules to hide. The import of zero_runtime also imports torch, if the program has not imported torch yet.
_HIDDEN: Final = ("torch", "zero_runtime")
# Modules that the program must import again. For example, Lightning binds functions of torch when it is imported. In a
# recorded program, the recorder has wrapped these functions before that.
_DROPPED: Final = ("deepspeed", "sitecustomize", "__main__", "lightning", "lightning_fabric", "torchmetrics")
# The default seed of torch's generator (c10::detail::default_rng_seed_val).
_SEED: Final = 67280421310721


def import_all(*libraries: str) -> None:
    """Import the modules that ranks import, and ``libraries``, so that the forks do not repeat the imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("torch.distributed", "commprof.recorder.session", "zero_runtime", *libraries):
            importlib.import_module(name)


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A ``subprocess.Popen`` that forks this process instead of starting a Python interpreter.

    It forks for ``python SCRIPT``, ``python -m MODULE`` and ``python -c CODE``, and starts any other program as usual.
    """

    def _execute_child(self, args, executable, *more):
        words = [] if isinstance(args, str | bytes | os.PathLike) else [os.fsdecode(word) for word in args]
        while words[1:2] in (["-B"], ["-u"]):  # from PYTHONDONTWRITEBYTECODE and PYTHONUNBUFFERED
            del words[1]
        if executable is not None or not _is_known(words):
            super()._execute_child(args, executable, *more)
            return
        preexec, _, pass_fds, cwd, env, _, _, shell, *ends, _, _, _, _, umask, new_session, group = more
        assert not shell and umask < 0
        self.pid = os.fork()
        if self.pid == 0:
            _become(words, [ends[0], ends[3], ends[5]], pass_fds, cwd, env, preexec, new_session, group)
        if group is not None and group >= 0:
            # The parent sets the group too, as shells do. The next process may join the group before the child has run.
            with contextlib.suppress(OSError):
                os.setpgid(self.pid, group)
        self._child_created = True
        self._close_pipe_fds(*ends)


def _is_known(words: list[str]) -> bool:
    if len(words) < 2 or words[0] != sys.executable:
        return False
    return words[1] in ("-m", "-c") if words[1].startswith("-") else Path(words[1]).is_file()


def _become(words, streams, pass_fds, cwd, env, preexec, new_session, group) -> NoReturn:
    """Do in the child what ``exec`` and the start of an interpreter do, then run the program and exit."""
    code = 1
    try:
        gc.freeze()  # otherwise the first collection copies every page of the test process
        _rewire(streams, pass_fds)
        if cwd is not None:
            os.chdir(cwd)
        if new_session:
            os.setsid()
        if group is not None and group >= 0:
            os.setpgid(0, group)
        _reset_signals()
        if preexec is not None:
            preexec()
        _reset_state(words, os.environ.copy() if env is None else env)
        code = _run(words)
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def _rewire(streams: list[int], pass_fds: Any) -> None:
    """Set the standard streams of the program, and close the files that a new process would not inherit.

    Their descriptors stay in use and refer to the null device. Otherwise an object of the test process could close a
    descriptor that the program opens.
    """
    for number, stream in enumerate(streams):
        if stream >= 0:
            os.dup2(stream, number)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor not in pass_fds:
            # The descriptor with which the directory was listed is already closed.
            with contextlib.suppress(OSError):
                os.fstat(descriptor)
                os.dup2(nothing, descriptor, inheritable=False)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):
            if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL, None):
                signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _reset_state(words: list[str], environment: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    atexit._clear()
    weakref.finalize._registry.clear()
    weakref.finalize._registered_with_atexit = False
    multiprocessing.util._finalizer_registry.clear()
    multiprocessing.process._children.clear()
    atexit.register(multiprocessing.util._exit_function)
    atexit.register(importlib.import_module("commprof.recorder.session").detach)
    warnings.simplefilter("ignore", ResourceWarning)
    sys.stdin, sys.stdout, sys.stderr = (stream(number, mode) for number, mode in enumerate("rww"))
    sys.argv, sys.orig_argv[:] = words[1:], words
    installed = [entry for entry in sys.path if entry.startswith((sys.prefix, sys.base_prefix))]
    added = os.environ.get("PYTHONPATH")
    sys.path[:] = [*map(os.path.abspath, added.split(os.pathsep) if added else ()), *installed]
    _reset_torch()
    _Hidden.hide()
    importlib.invalidate_caches()
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")


def _reset_torch() -> None:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.default_generator.manual_seed(_SEED)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


class _Hidden:
    """A finder that provides modules that are already imported when the program imports them."""

    def __init__(self, name: str, modules: dict[str, types.ModuleType]) -> None:
        self.name, self.modules, self.spec = name, modules, modules[name].__spec__

    @classmethod
    def hide(cls) -> None:
        for name in _DROPPED:
            for module in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
                del sys.modules[module]
        for name in _HIDDEN:
            modules = {
                one: sys.modules.pop(one)
                for one in list(sys.modules)
                if one == name or one.startswith(f"{name}.")
            }
            if name in modules:
                sys.meta_path.insert(0, cls(name, modules))

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        spec = ModuleSpec(name, self, origin=self.modules[name].__file__, is_package=True)
        spec.submodule_search_locations = list(self.modules[name].__path__)
        return spec

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return self.modules[self.name]

    def exec_module(self, module: types.ModuleType) -> None:
        sys.meta_path.remove(self)
        module.__spec__ = self.spec
        if self.name != "torch":
            importlib.import_module("torch")
        sys.modules.update(self.modules)


def stream(number: int, mode: str) -> TextIO:
    """Return standard stream ``number`` as a new interpreter would create it."""
    raw = os.fdopen(number, mode + "b", closefd=False)
    errors = "backslashreplace" if number == 2 else "strict"
    return io.TextIOWrapper(
        raw,
        encoding="utf-8",
        errors=errors,
        line_buffering=number == 2,
        write_through=bool(os.environ.get("PYTHONUNBUFFERED")),
    )


def _run(words: list[str]) -> int:
    """Run the program and return its exit code."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    try:
        if words[1] == "-m":
            sys.path.insert(0, str(Path.cwd()))
            del sys.argv[0]
            runpy._run_module_as_main(words[2])
        elif words[1] == "-c":
            sys.path.insert(0, "")
            sys.argv[:2] = ["-c"]
            exec(compile(words[2], "<string>", "exec"), main.__dict__)
        else:
            sys.path.insert(0, str(Path(words[1]).resolve().parent))
            main.__dict__["__file__"] = words[1]
            exec(compile(Path(words[1]).read_bytes(), words[1], "exec"), main.__dict__)
    except SystemExit as leaving:
        if isinstance(leaving.code, int) or leaving.code is None:
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException as error:
        beneath = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, beneath)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _leave(code: int) -> NoReturn:
    """Exit as an interpreter does: wait for threads, call the functions of atexit, flush the streams."""
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    finally:
        os._exit(code & 0xFF)
