"""Huge pages (2 MiB) for large tensors in host memory.

The kernel allocates memory page by page, at the first access: a page fault and a cleared page for each 4 KiB. For tensors of
many MiB that are allocated in every step this takes a good part of the step (benchmarks/huge_pages.py). torch requests pages
of 2 MiB for blocks of at least that size, if THP_MEM_ALLOC_ENABLE is set when a process creates its first tensor on the CPU.
Importing torch creates none, so it suffices to import zero_runtime before the model is constructed.
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
# The C library maps such a block separately; it begins at a page boundary only if torch has requested that.
_BLOCK: Final = 64 << 20


def use_huge_pages(environment: MutableMapping[str, str] = os.environ, kernel: Path = _KERNEL) -> None:
    """Let torch request pages of 2 MiB, unless the variable is set already or the kernel has none.

    Args:
        environment: of this process and its children.
        kernel: the file with the kernel's setting.
    """
    if VARIABLE not in environment and _kernel_setting(kernel) in ("always", "madvise"):
        environment[VARIABLE] = "1"


def huge_pages_in_use() -> bool:
    """Whether torch requests pages of 2 MiB in this process."""
    return torch.empty(_BLOCK, dtype=torch.uint8, device="cpu").data_ptr() % mmap.PAGESIZE == 0


def huge_pages_state(kernel: Path = _KERNEL) -> str:
    """Whether large tensors of this process are on pages of 2 MiB, and if not, why: one line."""
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
    """The setting in brackets in the kernel's file; empty without one."""
    try:
        words = kernel.read_text().split()
    except OSError:
        return ""
    return next((word.strip("[]") for word in words if word.startswith("[")), "")
