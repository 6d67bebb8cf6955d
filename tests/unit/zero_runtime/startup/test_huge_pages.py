"""Large tensors on pages of 2 MiB: asked for by the import, unless the user or the kernel says otherwise."""

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
# The faults of a large tensor that is made after the imports, and what the report says of it.
PROGRAM = f"""
import resource
import torch
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


def run(before="", **variables):
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | variables
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    faults, state = done.stdout.strip().split(";")
    return int(faults), state


@given
def test_after_the_import_a_large_tensor_needs_few_pages():
    faults, state = run()
    assert faults < TOUCHED_MIB * 256 / 4  # of 4 KiB it would need 256 for each MiB
    assert state == "for tensors of 2 MiB and more"


@given
def test_a_variable_that_is_set_stays():
    faults, state = run(**{VARIABLE: "0"})
    assert state == f"no: {VARIABLE} is 0"
    if "[madvise]" in KERNEL.read_text():
        assert faults > TOUCHED_MIB * 256 / 2


@given
def test_a_tensor_that_was_made_before_is_said():
    _, state = run(before="torch.zeros(1)")
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
