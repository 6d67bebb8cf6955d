"""Test the former names of moved modules. Each name gives the current module and a warning."""

import importlib
import subprocess
import sys

import pytest

from commprof.moved import MOVED

ROOMS = {target.rpartition(".")[0] for target in MOVED.values()}
# The modules of packages of zero_runtime that moved as a whole.
INSIDE = [
    name for name in sorted(MOVED) if name.startswith("zero_runtime.") and name.rpartition(".")[0] in MOVED
]


@pytest.mark.parametrize("old", [old for old in sorted(MOVED) if old not in ROOMS and old not in INSIDE])
def test_an_old_name_is_the_module_of_the_new_one(old, recwarn):
    old, target = (
        name if name.startswith("zero_runtime.") else f"commprof.{name}" for name in (old, MOVED[old])
    )
    sys.modules.pop(old, None)
    module = importlib.import_module(old)
    new = importlib.import_module(target)
    assert module is new and new.__spec__.name == new.__name__ == target
    assert any(f"{old} is now {target}" in str(warning.message) for warning in recwarn)


@pytest.mark.parametrize("old", INSIDE)
def test_a_module_of_a_moved_package_is_loaded_once(old, recwarn):
    package = old.rpartition(".")[0]
    sys.modules.pop(old, None)
    sys.modules.pop(package, None)
    module = importlib.import_module(old)
    assert module is importlib.import_module(MOVED[old]) and module.__name__ == MOVED[old]
    assert any(f"{package} is now {MOVED[package]}" in str(warning.message) for warning in recwarn)


def test_a_room_with_the_name_of_a_module_has_its_attributes():
    code = (
        "import warnings; warnings.simplefilter('error'); import commprof.analysis.traffic as room\n"
        "try: room.traffic\n"
        "except DeprecationWarning as warning: print(warning)\n"
        "warnings.simplefilter('ignore')\n"
        "from commprof.analysis.traffic import traffic\n"
        "from commprof.analysis.traffic.operation_totals import traffic as new\n"
        "assert traffic is new\n"
        "try: room.nothing\n"
        "except AttributeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        "commprof.analysis.traffic.traffic is now commprof.analysis.traffic.operation_totals.traffic"
        in done.stdout
    )
    assert "module 'commprof.analysis.traffic' has no attribute 'nothing'" in done.stdout


def test_a_module_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"commprof\.analysis\.nothing"):
        importlib.import_module("commprof.analysis.nothing")
