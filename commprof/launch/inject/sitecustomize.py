"""Starts the recorder in every Python process of a recorded program. Python imports this module before the program.

commprof puts this directory first on PYTHONPATH. The module uses only the standard library until the program has
imported torch.distributed. The module never raises into the program and leaves no entry on ``sys.path``. It also
imports the user's sitecustomize, which this module hides.
"""

from __future__ import annotations

import os
import sys

if False:  # typing and importlib.machinery would cost each process milliseconds
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would cost each process 5 ms
_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))  # noqa: PTH120
_NOTES = "processes.jsonl"
_OFF = ("0", "false", "no", "off")
_NOTES_MAX_BYTES = 1 << 16  # a program may start very many processes


def _note(state: str, text: str = "") -> None:
    """Write a note for the launcher, which uses the notes to explain why nothing was recorded. Errors are ignored."""
    try:
        path = os.path.join(os.environ["COMMPROF_RUN"], _NOTES)  # noqa: PTH118
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(descriptor).st_size < _NOTES_MAX_BYTES:
                # Printable text without quotes and backslashes is valid JSON; importing json would cost 2 ms.
                plain = "".join(c if c.isprintable() and c not in '"\\' else "'" for c in text)[:300]
                line = f'{{"pid": {os.getpid()}, "state": "{state}", "text": "{plain}"}}\n'
                os.write(descriptor, line.encode("utf-8", "replace"))
        finally:
            os.close(descriptor)
    except Exception:
        pass


class _Arming:
    """A meta path finder that arms the recorder when torch and torch.distributed have been imported.

    torch imports torch.distributed during its own import, when large parts of torch cannot be used yet. In this case,
    the recorder is armed at the end of the import of torch.
    """

    def __init__(self) -> None:
        self.torch_is_loading = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in ("torch", "torch.distributed"):
            return None
        try:
            return self._watched_spec(name, path, target)
        except Exception as error:
            _note("fault", repr(error))
            return None

    def _watched_spec(self, name: str, path: object, target: object) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                break
        else:
            return None
        loader = spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def execute_and_look(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            if name == "torch":
                self.torch_is_loading = True
            try:
                execute(module)
            finally:
                if name == "torch":
                    self.torch_is_loading = False
            if not self.torch_is_loading and "torch.distributed" in sys.modules:
                self._arm_once()

        # Set the function on the loader instance, which belongs to this module only, not on the loader's class.
        loader.exec_module = execute_and_look  # type: ignore[method-assign]
        return spec

    def _arm_once(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            _arm()


class _package_in_sight:  # noqa: N801 - reads as a statement; contextlib would cost every process its import
    """Put commprof's directory last on ``sys.path`` while commprof is imported.

    The last position gives the packages of the user precedence.
    """

    def __enter__(self) -> None:
        self._added = _PACKAGE_PARENT not in sys.path
        if self._added:
            sys.path.append(_PACKAGE_PARENT)

    def __exit__(self, *raised: object) -> None:
        if self._added and _PACKAGE_PARENT in sys.path:
            sys.path.remove(_PACKAGE_PARENT)


def _arm() -> None:
    try:
        with _package_in_sight():
            from commprof.recorder import session
        session.arm()
        _note("armed")
    except BaseException as error:
        _note("fault", repr(error))


def _watch_config() -> None:
    """In a sweep, write a note when this process opens the config that was derived for the run."""
    wanted = os.environ.get("COMMPROF_WATCHED_FILE")
    if not wanted:
        return
    pending = [wanted]

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if event != "open" or not pending:
            return
        try:
            path = arguments[0]
            if isinstance(path, str | bytes | os.PathLike):
                opened = os.fsdecode(path)
                same_name = opened.endswith(os.path.basename(wanted))  # noqa: PTH119
                if same_name and os.path.realpath(opened) == os.path.realpath(wanted):
                    pending.clear()
                    _note("config_opened")
        except Exception:
            pass

    sys.addaudithook(audit)


def _choose_engine() -> None:
    """Apply ``commprof run --engine``, which selects the package that ``import deepspeed`` imports in this process."""
    if not os.environ.get("COMMPROF_ENGINE"):
        return
    with _package_in_sight():
        from commprof import deepspeed_provider
    deepspeed_provider.install()


def _start() -> None:
    try:
        _choose_engine()
        if not os.environ.get("COMMPROF_RUN") or os.environ.get("COMMPROF", "").lower() in _OFF:
            return
        sys.meta_path.insert(0, _Arming())
        _note("started")
        _watch_config()
    except Exception:
        pass


def _import_hidden_sitecustomize() -> None:
    """Import the user's sitecustomize, which this module hides. Its exceptions reach site.py as usual."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]  # noqa: PTH100
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)


_start()
if __name__ == "sitecustomize":
    _import_hidden_sitecustomize()
