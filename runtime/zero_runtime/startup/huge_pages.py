"""Huge pages (2 MiB) for large tensors in host memory.

The kernel allocates memory page by page, at the first access. Each 4 KiB costs a page fault and the clearing of
a page. For tensors of many MiB that are allocated in every step this takes a large part of the step
(benchmarks/huge_pages.py). torch requests pages of 2 MiB for blocks of at least 2 MiB, if THP_MEM_ALLOC_ENABLE
is set when a process creates its first tensor on the CPU. The import of torch creates no tensor. Therefore it
is sufficient to import zero_runtime before the model is constructed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

import torch

VARIABLE: Final = "THP_MEM_ALLOC_ENABLE"  # c10/core/impl/alloc_cpu.cpp
_KERNEL: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# The C library maps a block of this size separately. The block begins at a page boundary only if torch has
# requested this.
_BLOCK: Final = 64 << 20


def use_huge_pages(environment: MutableMapping[str, str] = os.environ, kernel: Path = _KERNEL) -> None:
    """Let torch request pages of 2 MiB, unless the variable is already set or the kernel does not allow them.

    Args:
        environment: The environment of this process and its children.
        kernel: The file with the kernel's setting.
    """
    if VARIABLE not in environment and _kernel_setting(kernel) in ("always", "madvise"):
        environment[VARIABLE] = "1"


def huge_pages_in_use() -> bool:
    """Return whether torch requests pages of 2 MiB in this process."""
    return torch.empty(_BLOCK, dtype=torch.uint8, device="cpu").data_ptr() % mmap.PAGESIZE == 0


def huge_pages_state(kernel: Path = _KERNEL) -> str:
    """Return one line that says whether large tensors of this process use pages of 2 MiB, and if not, why."""
    setting = _kernel_setting(kernel)
    if setting not in ("always", "madvise"):
        return "no: the kernel does not allow them" + (f" ({kernel}: {setting})" if setting else "")
    if huge_pages_in_use():
        return "for tensors of 2 MiB and more"
    value = os.environ.get(VARIABLE)
    if value == "1":
        return f"no: a tensor was made before {VARIABLE} was set: import zero_runtime earlier, or set it to 1"
    return f"no: {VARIABLE} is {value or 'not set'}"


def _kernel_setting(kernel: Path) -> str:
    """Return the setting in brackets in the kernel's file; empty if there is none."""
    try:
        words = kernel.read_text().split()
    except OSError:
        return ""
    return next((word.strip("[]") for word in words if word.startswith("[")), "")
