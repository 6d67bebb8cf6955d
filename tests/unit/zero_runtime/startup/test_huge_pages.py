"""Test large tensors on pages of 2 MiB.

The import requests such pages, unless the user or the kernel is configured differently.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero_runtime.startup.huge_pages import huge_pages_state, use_huge_pages

VARIABLE = "THP_MEM_ALLOC_ENABLE"
KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")
TOUCHED_MIB = 64
# An interpreter with torch, which reads the variable when it first allocates memory. Each program runs in a
# fork of the interpreter.
FORKS = """
import os, sys
import torch
for program in sys.argv[1:]:
    if (child := os.fork()) == 0:
        exec(program, {"os": os, "torch": torch})
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""
# The program prints the page faults of a large tensor that is created after the imports, and the state in the
# report.
PROGRAM = f"""
import resource
{{before}}
import zero_runtime
from zero_runtime.startup.huge_pages import huge_pages_state
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
first = faults()
torch.ones({TOUCHED_MIB} * 2**18)
print(faults() - first, huge_pages_state(), sep=";")
"""

given = pytest.mark.skipif(
    not KERNEL.exists() or "[never]" in KERNEL.read_text(), reason="this kernel gives no huge pages"
)


BEFORE = {"": "", "variable": f"os.environ[{VARIABLE!r}] = '0'", "tensor": "torch.zeros(1)"}


@pytest.fixture(scope="module")
def found():
    """Return (faults, state) by the action before the import."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", FORKS, *(PROGRAM.format(before=before) for before in BEFORE.values())],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = [line.split(";") for line in done.stdout.splitlines()]
    return {name: (int(faults), state) for name, (faults, state) in zip(BEFORE, lines, strict=True)}


@pytest.mark.long
@given
def test_after_the_import_a_large_tensor_needs_few_pages(found):
    faults, state = found[""]
    assert faults < TOUCHED_MIB * 256 / 4  # With pages of 4 KiB, there would be 256 faults per MiB.
    assert state == "for tensors of 2 MiB and more"


@pytest.mark.long
@given
def test_a_variable_that_is_set_stays(found):
    faults, state = found["variable"]
    assert state == f"no: {VARIABLE} is 0"
    if "[madvise]" in KERNEL.read_text():
        assert faults > TOUCHED_MIB * 256 / 2


@pytest.mark.long
@given
def test_a_tensor_that_was_made_before_is_said(found):
    _, state = found["tensor"]
    assert state.startswith(f"no: a tensor was made before {VARIABLE} was set")


@pytest.mark.parametrize(
    ("setting", "set_now"), [("always madvise [never]", False), ("[always] madvise never", True)]
)
def test_the_kernel_is_asked(tmp_path, setting, set_now):
    file = tmp_path / "enabled"
    file.write_text(setting)
    environment = {}
    use_huge_pages(environment, file)
    assert environment == ({VARIABLE: "1"} if set_now else {})
    if not set_now:
        assert huge_pages_state(file) == f"no: the kernel does not allow them ({file}: never)"


def test_a_kernel_without_the_setting(tmp_path):
    environment = {}
    use_huge_pages(environment, tmp_path / "missing")
    assert environment == {}
    assert huge_pages_state(tmp_path / "missing") == "no: the kernel does not allow them"
