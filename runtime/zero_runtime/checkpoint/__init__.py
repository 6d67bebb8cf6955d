"""Checkpoints: each rank saves its own file, and any world size, ZeRO stage and layout can load the files.

Call ``engine.save_checkpoint`` and ``engine.load_checkpoint``. ``docs/checkpoints.md`` describes the format.
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
