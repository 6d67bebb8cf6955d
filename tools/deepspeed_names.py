"""Compares the table of DeepSpeed's names to an installed DeepSpeed.

::

    PYTHONPATH=.:runtime python tools/deepspeed_names.py

Run it with a Python interpreter that has the real DeepSpeed. It prints the names of the table that are missing in
DeepSpeed. For the modules in the table, it also prints the public functions and classes that DeepSpeed defines in these
modules and that are missing in the table.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

from zero_runtime.deepspeed_names.tables.names import Given, Refused, resolve
from zero_runtime.deepspeed_names.tables.table import MODULES


def module(inner: str) -> ModuleType | None:
    """Return the module of DeepSpeed, or None if it does not exist or cannot be imported."""
    try:
        return importlib.import_module(f"deepspeed.{inner}" if inner else "deepspeed")
    except Exception:
        return None


def defined(real: ModuleType) -> set[str]:
    """Return the names of the public functions and classes that are defined in the module itself."""
    return {
        name
        for name, value in vars(real).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and getattr(value, "__module__", "") == real.__name__
    }


def parameters(value: Any) -> list[str]:
    """Return the names of the arguments of a function or class, without ``self`` and the arguments for logging.

    The result is empty if the signature is not known.
    """
    made = value.__new__ if inspect.isclass(value) and value.__init__ is object.__init__ else value
    try:
        found = inspect.signature(inspect.unwrap(made)).parameters
    except (TypeError, ValueError):
        return []
    return [
        name for name in found if name not in ("cls", "self", "prof", "log_name", "debug", "args", "kwargs")
    ]


def main() -> int:
    """Print the comparison and return 0."""
    both = absent = refused = missing = arguments = 0
    for inner, row in MODULES.items():
        real = module(inner)
        shown = f"deepspeed.{inner}".rstrip(".")
        if real is None:
            if not row.refused:
                print(f"not a module of this DeepSpeed: {shown}")
            continue
        if row.refused:
            continue
        for name, entry in row.names.items():
            there = hasattr(real, name)
            both += there
            absent += not there
            refused += there and isinstance(entry, Refused)
            if not there:
                print(f"not in this DeepSpeed: {shown}.{name}")
            elif isinstance(entry, Given):
                lacking = set(parameters(getattr(real, name))) - set(
                    parameters(resolve(f"{shown}.{name}", entry))
                )
                if lacking:
                    arguments += 1
                    print(f"arguments that it has not here: {shown}.{name}: {', '.join(sorted(lacking))}")
        left = sorted(defined(real) - set(row.names))
        missing += len(left)
        if left:
            print(f"not in the table: {shown}: {', '.join(left)}")
    print(
        f"{both} names in both, {refused} of them refused; {absent} in the table alone; {missing} in DeepSpeed alone; "
        f"{arguments} lack an argument"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
