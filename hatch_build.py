"""Compiles the C modules (``commprof/**/_*.c``, for the recorder and the NCCL reader) when the package is built.

If compilation is not possible (no C compiler, no Python headers, or a system other than Linux), the package contains
only the equivalent Python modules. An installation therefore never fails because of a missing compiler.
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
    """A build hook that compiles the C modules. If they were compiled, it makes the wheel specific to this platform."""

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
            # In a read-only tree, the compiled modules remain. A module with a different VERSION is not used at run
            # time.
            with contextlib.suppress(OSError):
                source.with_suffix(SUFFIX).unlink(missing_ok=True)

    def _sources(self) -> list[Path]:
        return sorted(Path(self.root, "commprof").rglob("_*.c"))

    def _macros(self) -> list[str]:
        """Return the layout of a record, as declared in the schema, as compiler options."""
        sys.path.insert(0, self.root)
        try:
            from commprof.trace.rank_files.layout import C_MACROS
        finally:
            sys.path.remove(self.root)
        return [f"-D{name}={value}" for name, value in C_MACROS.items()]

    def _compile(self) -> list[Path]:
        """Compile all C modules and return the built files. If one compilation fails, no files are built."""
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
            # git and hatch ignore files with this name.
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
                    # The rename is atomic. A program that has the old file open continues to use the old file.
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
