"""Builds the compiled parts (``commprof/**/_*.c``: of the recorder and the NCCL reader) where the package is built.

Where it is not (no C compiler, no headers of Python, another system than Linux), the package holds the Python parts alone,
which do the same: an installation never fails for the want of a compiler.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX") or ".so"


class CompiledParts(BuildHookInterface[Any]):
    """Compile, and make the wheel one for this platform; or leave the wheel as it is."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See :class:`BuildHookInterface`."""
        built = self._compile()
        if built:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            build_data["artifacts"].extend(f"/{each.relative_to(self.root)}" for each in built)

    def clean(self, versions: list[str]) -> None:
        """See :class:`BuildHookInterface`."""
        for source in self._sources():
            # A tree that nobody may write to keeps what it has; what is older than the sources is not taken at run time.
            with contextlib.suppress(OSError):
                source.with_suffix(SUFFIX).unlink(missing_ok=True)

    def _sources(self) -> list[Path]:
        return sorted(Path(self.root, "commprof").rglob("_*.c"))

    def _macros(self) -> list[str]:
        """The layout of a record, which the schema declares, as options of the compiler."""
        sys.path.insert(0, self.root)
        try:
            from commprof.trace.rank_files.layout import C_MACROS
        finally:
            sys.path.remove(self.root)
        return [f"-D{name}={value}" for name, value in C_MACROS.items()]

    def _compile(self) -> list[Path]:
        """The files that were built: all of them, or none."""
        self.clean([])
        if (
            sys.platform != "linux"
            or sys.implementation.name != "cpython"
            or sysconfig.get_config_var("Py_GIL_DISABLED")
        ):
            return []
        built = []
        macros = self._macros()
        for source in self._sources():
            target = source.with_suffix(SUFFIX)
            # A name that git and hatch leave alone.
            unfinished = target.with_name(f"{source.stem}.{os.getpid()}.so")
            command = [
                "-O2",
                "-Wall",
                "-Wextra",
                "-Wno-missing-field-initializers",
                "-fPIC",
                "-shared",
                *macros,
                f"-I{sysconfig.get_paths()['include']}",
                str(source),
                "-o",
                str(unfinished),
            ]
            try:
                compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
                done = subprocess.run(
                    [*compiler, *command], capture_output=True, text=True, errors="replace", check=False
                )
                failure = done.stderr if done.returncode else None
                if failure is None:
                    # Under its own name at once and whole: a program that has the old file open keeps it.
                    unfinished.replace(target)
            except (OSError, ValueError) as error:
                failure = str(error)
            if failure is not None:
                with contextlib.suppress(OSError):
                    unfinished.unlink(missing_ok=True)
                self.app.display_warning(
                    f"{source.name} could not be compiled, so Python does the same: recording costs a little more, reading "
                    f"NCCL logs takes many times longer: {failure.strip()}"
                )
                self.clean([])
                return []
            built.append(target)
        return built
