"""Checkpoints: saved by every rank for itself, loaded at any world size, stage and layout.

``engine.save_checkpoint`` and ``engine.load_checkpoint`` are the ways in; the format stands in ``docs/checkpoints.md``.
"""

from __future__ import annotations

from zero_runtime.checkpoint.consolidation import (
    consolidated_state_dict,
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)

__all__ = [
    "consolidated_state_dict",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]
