"""``deepspeed.runtime.compiler``: marks for torch.compile."""

from __future__ import annotations

from typing import Any

import torch


def is_compiling() -> bool:
    """Return whether torch.compile is tracing."""
    return torch.compiler.is_compiling()


def is_compile_supported() -> bool:
    """Return whether torch has torch.compile. All versions of torch that this runtime supports have it."""
    return True


def disable(func: Any) -> Any:
    """Return a version of ``func`` that is excluded from compilation."""
    return torch.compiler.disable(func)


def enable(min_version: Any = None) -> Any:
    """Return a decorator that returns functions unchanged, because only ``engine.compile`` compiles."""
    return lambda func: func
