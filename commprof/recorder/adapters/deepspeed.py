"""Adapter for DeepSpeed: reports its steps, phases, parameters, configuration and purposes.

zero_runtime reports these itself, but DeepSpeed does not call commprof. So commprof wraps DeepSpeed's methods
when the process imports its modules. The wrappers pass arguments, results and exceptions on unchanged. Versions
outside the supported range are not wrapped.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Final

from commprof import hooks
from commprof.recorder.adapters.deepspeed_buckets import BUCKETS, Buckets
from commprof.recorder.adapters.deepspeed_engine import ENGINE_MODULE, Engines
from commprof.recorder.adapters.deepspeed_experts import EXPERT_MODULES, ExpertLayers
from commprof.recorder.adapters.deepspeed_methods import FIRST_VERSION, LAST_VERSION, METHODS, Method
from commprof.recorder.adapters.deepspeed_padding import PADDED, Paddings
from commprof.recorder.adapters.imports import ImportWatch
from commprof.recorder.adapters.patching import Patches, tagged
from commprof.recorder.process.journal import Journal

_PACKAGE: Final = "deepspeed"
_ANOTHER: Final = "__runtime__"
_VERSION_MODULE: Final = "deepspeed.git_version_info"
_MODULES: Final = frozenset(
    {_PACKAGE, _VERSION_MODULE, ENGINE_MODULE, *PADDED, *EXPERT_MODULES, *(m.module for m in METHODS)}
)


class DeepSpeedAdapter:
    """Wraps DeepSpeed's methods when its modules are imported, and removes the wrappers.

    Args:
        journal: The journal that receives faults, and notes on methods that could not be wrapped.
        explicit: A function that returns whether the program itself reports its steps with ``hooks.step``.
    """

    def __init__(self, journal: Journal, explicit: Callable[[], bool]) -> None:
        self._journal = journal
        self._explicit = explicit
        self._patches = Patches()
        self._watch = ImportWatch(_MODULES, self._on_import, journal.fault)
        self._waiting: list[ModuleType] = []  # imported before the version was known
        self._version: tuple[int, ...] | None = None
        self._refused = False
        names: dict[int, str] = {}
        self._experts = ExpertLayers(journal.fault)
        self._engines = Engines(names, self._experts, explicit, journal.fault)
        self._buckets = Buckets(names, journal.fault)
        self._paddings = Paddings(journal.fault)

    def install(self) -> None:
        """Wrap the methods of modules that are already imported, and of other modules when they are imported."""
        self._watch.start()

    def remove(self) -> None:
        """Remove every wrapper."""
        self._watch.stop()
        self._patches.remove()
        self._waiting.clear()
        self._engines.take_back()

    def _on_import(self, module: ModuleType) -> None:
        if self._refused:
            return
        # Another runtime imitates DeepSpeed's module names, and reports its own steps and purposes.
        if _ANOTHER in vars(module):
            self._refused = True
            self._watch.stop()
            return
        self._waiting.append(module)
        if self._version is None:
            text = _version_text()
            if text is None:
                return
            self._version = parse_version(text)
            if not is_supported(self._version):
                self._refuse(text)
                return
            self._engines.version = text
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self._wrap_module(each)

    def _refuse(self, text: str) -> None:
        self._refused = True
        self._waiting.clear()
        self._watch.stop()
        first, last = (".".join(map(str, version)) for version in (FIRST_VERSION, LAST_VERSION))
        message = (
            f"commprof does not support DeepSpeed {text} (only {first} to {last}): its collectives are recorded "
            "without purposes, parameters and configuration"
        )
        self._journal.note(message)
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"commprof: {message}\n")

    def _wrap_module(self, module: ModuleType) -> None:
        missing = []
        if module.__name__ == ENGINE_MODULE:
            missing += self._engines.wrap(module, self._patches)
        for bucket in BUCKETS:
            if bucket.module == module.__name__ and not self._buckets.wrap(module, bucket, self._patches):
                missing.append(bucket.path)
        for method in METHODS:
            if method.module == module.__name__ and not self._wrap_method(module, method):
                missing.append(method.path)
        missing += self._experts.wrap(module, self._patches)
        self._paddings.wrap(module, self._patches)
        if missing:
            shown = ".".join(map(str, self._version or ()))
            self._journal.note(
                f"DeepSpeed {shown}: {module.__name__} lacks {len(missing)} of the methods that commprof wraps, "
                f"so some collectives may have no purpose: {', '.join(missing)}"
            )

    def _wrap_method(self, module: ModuleType, method: Method) -> bool:
        """Wrap ``method``, and return whether it was wrapped or does not belong to this version."""
        tag = hooks.tag(method.purpose.value)
        if self._patches.wrap(module, method.path, lambda original: tagged(original, tag)):
            return True
        version = self._version or ()
        later = version < parse_version(method.since)
        return later or bool(method.until and version >= parse_version(method.until))


def _version_text() -> str | None:
    """Return DeepSpeed's version; None if no module that defines it is imported yet."""
    for name, attribute in ((_PACKAGE, "__version__"), (_VERSION_MODULE, "version")):
        text = getattr(sys.modules.get(name), attribute, None)
        if isinstance(text, str):
            return text
    return None


def parse_version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version.

    >>> parse_version("0.19.8+unknown"), parse_version("0.15"), parse_version("next")
    ((0, 19, 8), (0, 15), ())
    """
    numbers = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def is_supported(version: tuple[int, ...]) -> bool:
    """Return whether ``version`` is in the supported range."""
    return FIRST_VERSION <= version[:2] <= LAST_VERSION
