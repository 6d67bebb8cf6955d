"""Test that freed memory is returned to the system, unless the user has configured the C library differently."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from zero_runtime.startup.huge_pages import huge_pages_state

VARIABLE = "MALLOC_MMAP_THRESHOLD_"
MIB = 2**20
# A warm interpreter imports torch and allocates nothing. Each program in its arguments runs in a fork of the
# interpreter.
FORKS = """
import os, sys
import zero_runtime
import torch
for program in sys.argv[1:]:
    if (child := os.fork()) == 0:
        exec(program, {})
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""
# Every second of 40 tensors of 4 MiB is freed. The program prints how much of the 80 MiB is no longer
# resident. A larger tensor is freed first, because glibc then keeps blocks of this size.
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
KEEP = "from zero_runtime.offload.allocation import keep_freed_memory; keep_freed_memory()"
BY_BLOCK = """
from zero_runtime.sharding.gather_schedule.policy import SliceOffload
from zero_runtime.sharding.placement.shard_storage import SliceStorage
SliceStorage(SliceOffload({offload!r}), torch.device("cpu"), 0, by_block={by_block})
"""


def faults_again(setting=KEEP, mib=1):
    """Return a program that prints the page faults of tensors that are allocated again.

    The tensors have ``mib`` MiB each and 40 MiB together.
    """
    return f"""
import resource
import zero_runtime
import torch
{setting}
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    before = faults()
    tensors = [torch.ones({mib * MIB // 4}) for _ in range({40 // mib})]
    after = faults()
    del tensors
print(after - before)
"""


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")


def printed(*programs, **variables):
    """Return the number that each program prints. The C library reads ``variables`` when a process starts."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", FORKS, *programs], env=environment | variables,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [int(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def numbers():
    """Return the numbers, by name, that the programs print without variables.

    One interpreter imports torch for all programs.
    """
    programs = {"freed": PROGRAM, "kept": faults_again()} | {
        case: faults_again(BY_BLOCK.format(offload=case[0], by_block=case[1]), mib=3)
        for case in (("none", True), ("none", False), ("cpu", True))
    }
    return dict(zip(programs, printed(*programs.values()), strict=True))


@pytest.mark.long
def test_freed_tensors_are_resident_no_more(numbers):
    assert numbers["freed"] > 70


@pytest.mark.long
def test_the_users_own_setting_stays():
    (freed_mib,) = printed(PROGRAM, **{VARIABLE: str(32 * MIB)})
    assert freed_mib < 30


def test_kept_memory_costs_no_page_faults(numbers):
    assert numbers["kept"] < 500


def test_the_users_setting_of_the_end_of_the_heap_stays():
    (faults,) = printed(faults_again(), MALLOC_TRIM_THRESHOLD_=str(128 * 1024))
    assert faults > 5000


@pytest.mark.parametrize(("offload", "by_block", "stays"), [
    ("none", True, True),
    ("none", False, False),
    ("cpu", True, False),
])  # fmt: skip
@pytest.mark.skipif(
    not huge_pages_state().startswith("for"),
    reason="without huge pages, stage 3 leaves glibc's setting alone",
)
def test_memory_of_stage_3_stays_if_it_gathers_by_block_without_offload(numbers, offload, by_block, stays):
    faults = numbers[offload, by_block]
    assert faults < 500 if stays else faults > 1000, faults
