"""The import finder behind ``import deepspeed``: it creates modules from a table.

The finder copies no files and does not change ``sys.path``. A module such as ``deepspeed.comm`` is created when
it is imported, and looks up each name on demand. Every module is a package without files. Therefore an import
of a name that is not in the table calls the finder again, and the finder raises an error that suggests what to
use instead.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from zero_runtime.deepspeed_names.distribution import DISTRIBUTION, NamesDistribution
from zero_runtime.deepspeed_names.tables.names import INSTEAD, Live, Refused, refuse_module, resolve
from zero_runtime.deepspeed_names.tables.table import MODULES
from zero_runtime.errors import MissingAttributeError, MissingNameError, UsageError
from zero_runtime.startup.uncaught import report_uncaught

PACKAGE: Final = "deepspeed"
MARK: Final = "__runtime__"  # distinguishes these modules from DeepSpeed's own
_FILE: Final = str(Path(__file__).with_name("__init__.py"))


class NamesFinder(MetaPathFinder):
    """A finder of ``deepspeed`` and its submodules, which are listed in the table."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module in the table; None for modules outside ``deepspeed``.

        Raises:
            MissingNameError: This runtime does not provide the module, or the name that is imported from a module.
        """
        if fullname != PACKAGE and not fullname.startswith(f"{PACKAGE}."):
            return None
        inner = _inner(fullname)
        module = MODULES.get(inner)
        if module is None and _main_of(fullname):
            return ModuleSpec(fullname, NamesLoader(), origin=_FILE)
        if module is None:
            raise MissingNameError(_unknown(fullname))
        if module.refused:
            raise refuse_module(fullname, module.refused)
        spec = ModuleSpec(fullname, NamesLoader(), origin=_FILE, is_package=True)
        spec.has_location = True
        return spec

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """Return DeepSpeed as an installed package, for queries of its version."""
        if context.name is None or context.name.lower() == DISTRIBUTION:
            return [NamesDistribution()]
        return []


class NamesLoader(InspectLoader):
    """A loader that creates the modules."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return None, so that Python creates an ordinary module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Make the module look up its names in the table on demand."""
        inner = _inner(module.__name__)
        names = [name for name, row in sorted(MODULES[inner].names.items()) if not isinstance(row, Refused)]
        below = sorted(_children(inner))
        module.__dict__.update(
            {
                MARK: "zero_runtime",
                "__doc__": f"{module.__name__} of DeepSpeed, as zero_runtime gives it.",
                "__all__": [name for name in names if not name.startswith("_")],
                "__getattr__": partial(_look_up, module),
                "__dir__": lambda: sorted({*module.__dict__, *names, *below}),
            }
        )

    def is_package(self, fullname: str) -> bool:
        """Return whether the module is a package. All modules are packages, except those that ``python -m`` runs."""
        return not fullname.endswith(".__main__")

    def get_source(self, fullname: str) -> str | None:
        """Return None, because the modules have no source code."""
        return None

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code that ``python -m`` runs; None if there is none."""
        module, _, function = _main_of(fullname).partition(":")
        if not function:
            return None
        return compile(
            f"import sys\nfrom {module} import {function} as main\nsys.exit(main())\n", fullname, "exec"
        )


def install() -> None:
    """Make later imports of ``deepspeed`` in this process import this runtime. A second call changes nothing.

    Raises:
        UsageError: DeepSpeed itself was imported before.
    """
    loaded = sys.modules.get(PACKAGE)
    if loaded is not None and MARK not in vars(loaded):
        raise UsageError(
            f"deepspeed has been imported already, from {getattr(loaded, '__file__', 'somewhere')}; call as_deepspeed "
            "before the first import of it"
        )
    if not any(isinstance(finder, NamesFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, NamesFinder())
    report_uncaught()


def uninstall() -> None:
    """Undo :func:`install`: remove the finder and the modules that it created."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, NamesFinder)]
    for name, module in list(sys.modules.items()):
        if (name == PACKAGE or name.startswith(f"{PACKAGE}.")) and MARK in vars(module):
            del sys.modules[name]


def _main_of(fullname: str) -> str:
    """Return the function that ``python -m`` runs for ``package.__main__``; an empty string if there is none."""
    row = MODULES.get(_inner(fullname.removesuffix(".__main__")))
    return row.main if row is not None and fullname.endswith(".__main__") else ""


def _look_up(module: ModuleType, name: str) -> Any:
    if name.startswith("__") and name.endswith("__") and name not in MODULES[_inner(module.__name__)].names:
        raise AttributeError(name)
    full = f"{module.__name__}.{name}"
    row = MODULES[_inner(module.__name__)].names.get(name)
    if row is not None:
        value = resolve(full, row)
    elif _inner(full) in MODULES and not MODULES[_inner(full)].refused:
        __import__(full)
        return sys.modules[full]
    else:
        raise MissingAttributeError(_refusal(full), name=name, obj=module)
    if not isinstance(row, Live):
        setattr(module, name, value)
    return value


def _refusal(full: str) -> str:
    module = MODULES.get(_inner(full))
    return str(refuse_module(full, module.refused)) if module is not None else _unknown(full)


def _unknown(full: str) -> str:
    inner = _inner(full)
    above = inner
    while above:
        above = above.rpartition(".")[0]
        if above in MODULES and MODULES[above].refused:
            return str(refuse_module(full, MODULES[above].refused))
    parent, _, name = inner.rpartition(".")
    if parent in MODULES and name in MODULES[parent].names:
        above = f"{PACKAGE}.{parent}" if parent else PACKAGE
        return f"{full} is not a module; it is a name in one: from {above} import {name}"
    known = [*MODULES[parent].names, *_children(parent)] if parent in MODULES else []
    near = get_close_matches(name, known, 1, 0.8)
    hint = f"; did you mean {near[0]}?" if near else ";"
    return (
        f"{full} is not among the names of DeepSpeed that zero_runtime gives{hint} "
        f"`python -m zero_runtime.deepspeed_names --list` lists them; {INSTEAD}"
    )


def _inner(fullname: str) -> str:
    """Return the name within the package: ``zero`` for ``deepspeed.zero``, and an empty string for the package."""
    return fullname[len(PACKAGE) + 1 :]


def _children(inner: str) -> set[str]:
    """Return the names of the importable modules directly below the module ``inner``."""
    prefix = f"{inner}." if inner else ""
    return {
        name[len(prefix) :]
        for name, row in MODULES.items()
        if name.startswith(prefix) and name != inner and "." not in name[len(prefix) :] and not row.refused
    }
