"""Freed memory goes back to the system, unless the user has said how the C library is to keep it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

VARIABLE = "MALLOC_MMAP_THRESHOLD_"
MIB = 2**20
# Every second of 40 tensors of 4 MiB is freed; how much of the 80 MiB is resident no more. First a larger one is freed,
# after which glibc keeps blocks of this size.
PROGRAM = f"""
import torch
from pathlib import Path
from zero_runtime.offload.allocation import give_back_freed_memory, keep_freed_memory
give_back_freed_memory()
keep_freed_memory()  # of another engine: does nothing now
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096
del (first := [torch.ones(24 * {MIB} // 4)])[:]
tensors = [torch.ones({MIB}) for _ in range(40)]
before = resident()
del tensors[::2]
print((before - resident()) // {MIB})
"""
# Page faults of tensors of 1 MiB, 40 MiB together, that are allocated again.
AGAIN = f"""
import resource
import torch
from zero_runtime.offload.allocation import keep_freed_memory
keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    before = faults()
    tensors = [torch.ones({MIB} // 4) for _ in range(40)]
    after = faults()
    del tensors
print(after - before)
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")


def freed_mib(**variables):
    return printed(PROGRAM, **variables)


def printed(program, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment | variables,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout)


def test_freed_tensors_are_resident_no_more():
    assert freed_mib() > 70


def test_the_users_own_setting_stays():
    assert freed_mib(**{VARIABLE: str(32 * MIB)}) < 30


def test_kept_memory_costs_no_page_faults():
    assert printed(AGAIN) < 500


def test_the_users_setting_of_the_end_of_the_heap_stays():
    assert printed(AGAIN, MALLOC_TRIM_THRESHOLD_=str(128 * 1024)) > 5000
