"""Writes a checkpoint as a universal folder, which DeepSpeed loads with ``checkpoint.load_universal``.

::

    <out>/latest_universal                                   the tag
    <out>/<tag>/zero/<parameter>/fp32.pt                     the complete fp32 master
    <out>/<tag>/zero/<parameter>/exp_avg.pt ... step.pt      its optimizer state
    <out>/<tag>/zero/optimizer_state.pt                      options of param groups, loss scale
    <out>/<tag>/mp_rank_00_model_states.pt                   the model, the schedule, counters, client state
    <out>/<tag>/zero_pp_rank_0_mp_rank_00_model_states.pt    the same, under the name that stage 3 reads

One folder is sufficient for stages 1, 2 and 3, because the files that these stages read do not conflict.
"""

from __future__ import annotations

import io
import math
import os
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from zero_runtime.checkpoint.consolidation import state_dict
from zero_runtime.checkpoint.deepspeed.flat_partitions import STATES
from zero_runtime.checkpoint.deepspeed.folder import UNIVERSAL
from zero_runtime.checkpoint.deepspeed.universal import GLOBAL, PARAMETER, STEP, VALUE
from zero_runtime.checkpoint.files.checkpoint_manifest import LATEST_UNIVERSAL, check_tag
from zero_runtime.checkpoint.files.tensor_file import replace_file, sync_directory
from zero_runtime.checkpoint.opened import OpenCheckpoint
from zero_runtime.errors import CheckpointError
from zero_runtime.optimizer_step.fragments import IMPLEMENTATION, NumberTensor

_VERSION: Final = "0.19.8"  # The version of DeepSpeed that defines this format.
_MODEL: Final = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_SCALER: Final = "deepspeed.runtime.fp16.loss_scaler"


class DynamicLossScaler:
    """Has the attributes of DeepSpeed's class of this name. Its objects are written under DeepSpeed's module name."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.cur_scale = float(state["value"])
        self.cur_iter = int(state["steps"])
        self.last_overflow_iter = int(state["last_overflow"])
        self.cur_hysteresis = int(state["overflows_left"])
        self.scale_factor = 2.0
        self.scale_window = int(state.get("window", 1000))
        self.min_scale = float(state.get("minimum", 1.0))
        self.delayed_shift = int(state.get("hysteresis", 2))
        self.consecutive_hysteresis = bool(state.get("consecutive_hysteresis", False))
        self.raise_error_at_min_scale = True
        self.dynamic = True
        self.dtype = torch.float16


def write_universal(
    checkpoint: OpenCheckpoint, out: Path, steps_as_tensors: bool = False, replace: bool = False
) -> Path:
    """Write ``checkpoint`` as a DeepSpeed universal folder.

    In addition to the model, only one parameter is in memory at a time.

    Args:
        checkpoint: A checkpoint of this runtime or of DeepSpeed.
        out: The directory in which the folder is created. The name of the folder is the checkpoint's tag.
        steps_as_tensors: Whether to write step counts as tensors, which torch's optimizers need (torch_adam, or
            an optimizer that the script makes). False writes integers, which DeepSpeed's own FusedAdam and
            DeepSpeedCPUAdam need.
        replace: Whether an existing folder may be replaced.

    Returns:
        The path of the folder.

    Raises:
        CheckpointError: The folder exists or cannot be written, or the checkpoint has no optimizer state by
            parameter name.
    """
    tag = checkpoint.manifest.tag
    check_tag(tag)
    folder, fresh = out / tag, out / f".{tag}.writing"
    if folder.exists() and not replace:
        raise CheckpointError(
            f"{folder} is there already; pass --force to replace it, or choose another directory"
        )
    trained = [name for name, facts in checkpoint.parameters.items() if facts.group is not None]
    if not trained or checkpoint.manifest.optimizer is None:
        raise CheckpointError(
            f"{checkpoint.directory} has no optimizer state by parameter name, which a universal folder needs; "
            "load it into an engine of the same model and param groups, save a new checkpoint, and export the new one"
        )
    strange = [name for name in trained if "/" in name]
    if strange:
        raise CheckpointError(f"parameter {strange[0]!r} cannot name a directory; rename its module")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        for name in trained:
            _write_parameter(checkpoint, fresh / UNIVERSAL / name, name, steps_as_tensors)
        _write_global(checkpoint, fresh / UNIVERSAL / GLOBAL, trained[0], steps_as_tensors)
        torch.save(_model_states(checkpoint), fresh / _MODEL[0])
        shutil.copy2(fresh / _MODEL[0], fresh / _MODEL[1])
        if folder.exists():
            shutil.rmtree(folder)
        fresh.rename(folder)
        sync_directory(out)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{folder} could not be written: {error}; make room or choose another directory"
        ) from None
    replace_file(out / LATEST_UNIVERSAL, tag)
    return folder


def _write_parameter(checkpoint: OpenCheckpoint, directory: Path, name: str, as_tensor: bool) -> None:
    directory.mkdir(parents=True)
    facts = checkpoint.parameters[name]
    numel = math.prod(facts.shape)
    flat = torch.empty(numel, dtype=torch.float32)
    checkpoint.read_value(name, 0, flat)
    torch.save({PARAMETER: flat.view(facts.shape)}, directory / f"{VALUE}.pt")
    for state, dtype in checkpoint.state_dtypes(name).items():
        flat = torch.empty(numel, dtype=dtype)
        checkpoint.read_state(state, name, 0, flat)
        torch.save({PARAMETER: flat.view(facts.shape)}, directory / f"{state}.pt")
    step = _step(checkpoint, name, as_tensor)
    if step is not None:
        torch.save(step, directory / f"{STEP}.pt")


def _step(checkpoint: OpenCheckpoint, name: str, as_tensor: bool) -> Any:
    stored = checkpoint.scalars(name).get(STEP)
    value = stored.value if isinstance(stored, NumberTensor) else stored
    if not isinstance(value, int | float):
        return None
    return torch.tensor(float(value)) if as_tensor else int(value)


def _write_global(checkpoint: OpenCheckpoint, path: Path, first: str, as_tensor: bool) -> None:
    manifest = checkpoint.manifest
    groups = [
        {name: value for name, value in group.items() if name not in IMPLEMENTATION}
        for group in checkpoint.decode(manifest.param_groups)
    ]
    # Stage 3 applies the options of the first group to all groups, so only options that are equal in all groups are
    # written. The learning rate is also written if a schedule sets it, because otherwise the first step would use the
    # learning rate of the configuration.
    scheduled = manifest.lr_scheduler is not None
    shared = {
        name: value
        for name, value in groups[0].items()
        if all(each.get(name) == value for each in groups) or (name == "lr" and scheduled)
    }
    scale = checkpoint.decode(manifest.loss_scale)
    step = _step(checkpoint, first, as_tensor)
    content: dict[str, Any] = {
        "ds_version": _VERSION,
        "overflow": False,
        "zero_stage": manifest.stage,
        "param_groups": [{**group, "params": [number]} for number, group in enumerate(groups)],
        STATES: {
            "state": {0: {} if step is None else {STEP: step}},
            "param_groups": [{**shared, "params": []}],
        },
    }
    if scale is not None and scale.get("dynamic", scale["steps"] > 0):
        content |= {"dynamic_loss_scale": True, "loss_scaler": DynamicLossScaler(scale)}
    _save_renamed(content, path)


def _save_renamed(content: Mapping[str, Any], path: Path) -> None:
    """Write ``content`` with torch.save, with DeepSpeed's name for the class of the loss scaler.

    pickle cannot write the name of a class that is not installed, so the name is replaced afterwards.
    """
    written = io.BytesIO()
    torch.save(content, written)
    here, there = (f"c{module}\n{DynamicLossScaler.__name__}\n".encode() for module in (__name__, _SCALER))
    with zipfile.ZipFile(written) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as target:
        for record in source.infolist():
            data = source.read(record)
            target.writestr(
                record.filename, data.replace(here, there) if record.filename.endswith("data.pkl") else data
            )
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _model_states(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    count = len(checkpoint.decode(manifest.param_groups))
    shapes: list[OrderedDict[str, torch.Size]] = [OrderedDict() for _ in range(count)]
    frozen: OrderedDict[str, torch.Size] = OrderedDict()
    for name, facts in checkpoint.parameters.items():
        target = frozen if facts.group is None else shapes[facts.group]
        target[name] = torch.Size(facts.shape)
    module = state_dict(checkpoint, fp32=False)
    counters = manifest.counters
    return {
        **checkpoint.decode(manifest.client_state),
        "module": module,
        "buffer_names": list(manifest.buffers),
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": frozen,
        "frozen_param_fragments": OrderedDict((name, module[name]) for name in frozen),
        "shared_params": {
            alias: name for alias, name in manifest.aliases.items() if name in manifest.parameters
        },
        "lr_scheduler": checkpoint.decode(manifest.lr_scheduler),
        "data_sampler": None,
        "random_ltd": None,
        **{name: counters.get(name, 0) for name in ("skipped_steps", "global_steps", "global_samples")},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
        "ds_config": {},
        "ds_version": _VERSION,
    }
