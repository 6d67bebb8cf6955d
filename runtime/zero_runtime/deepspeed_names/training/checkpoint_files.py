"""Functions that find the files of a checkpoint of DeepSpeed, with the names of ``deepspeed.utils.zero_to_fp32``."""

from __future__ import annotations

import re
from pathlib import Path

from zero_runtime.errors import CheckpointError


def get_checkpoint_files(checkpoint_dir: str | Path, glob_pattern: str) -> list[str]:
    """Return the files in a folder that match a pattern, ordered by the numbers in their names.

    Raises:
        CheckpointError: No file matches.
    """
    paths = sorted(Path(checkpoint_dir).glob(glob_pattern), key=lambda path: _parts(path.name))
    if not paths:
        raise CheckpointError(f"{checkpoint_dir} has no file {glob_pattern}; give the folder of one tag")
    return [str(path) for path in paths]


def get_optim_files(checkpoint_dir: str | Path) -> list[str]:
    """Return the files with the optimizer's state, in the order of the ranks."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_file(checkpoint_dir: str | Path, zero_stage: int) -> str:
    """Return the file with the model state that the first rank wrote."""
    start = "zero_pp_rank_0_" if zero_stage == 3 else ""
    return get_checkpoint_files(checkpoint_dir, f"{start}mp_rank_00_model_states.pt")[0]


def _parts(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]
