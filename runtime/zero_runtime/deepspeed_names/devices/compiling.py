"""``deepspeed.runtime.compiler``: marks for torch.compile."""

from __future__ import annotations

from typing import Any

import torch


def is_compiling() -> bool:
    """Whether torch.compile is tracing."""
    return torch.compiler.is_compiling()


def is_compile_supported() -> bool:
    """Whether torch has torch.compile; always, in the versions that this runtime runs on."""
    return True


def disable(func: Any) -> Any:
    """``func``, excluded from compilation."""
    return torch.compiler.disable(func)


def enable(min_version: Any = None) -> Any:
    """A decorator that returns functions unchanged: only ``engine.compile`` compiles."""
    return lambda func: func
