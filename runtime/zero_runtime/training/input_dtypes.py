"""A clear error for inputs whose dtype differs from the model's, in place of torch's."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from zero_runtime.errors import UsageError

# Phrases of torch's errors about dtypes that do not match.
_PHRASES: Final = ("same dtype", "same type", "scalar type", "should be the same")


def mismatch(error: RuntimeError, values: Any, model: torch.dtype | None) -> UsageError | None:
    """Return the error that replaces ``error`` if the dtype of an input caused it; None for any other cause.

    Args:
        error: The error that the model raised in its forward pass.
        values: The inputs of the model, with any nesting.
        model: The dtype of the model. None if the model has the dtype in which it was constructed.
    """
    if model is None or not any(phrase in str(error) for phrase in _PHRASES):
        return None
    floating = [
        leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]
    others = {str(leaf.dtype).removeprefix("torch.") for leaf in floating if leaf.dtype != model}
    if not others:
        return None
    name = str(model).removeprefix("torch.")
    cure = "set fp16.auto_cast to true, or cast them" if model is torch.float16 else "cast them"
    return UsageError(
        f"the model is in {name}, and it was given inputs in {', '.join(sorted(others))}, which are not cast "
        f"({str(error).splitlines()[0]}); {cure}"
    )
