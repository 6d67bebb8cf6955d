"""Placement of an optimizer's masters and states, derived from the configuration and the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zero_runtime.comm import DataParallelGroup
from zero_runtime.config import RuntimeConfig
from zero_runtime.configuration.blocks.offload_block import OPTIMIZER_KEY, OptimizerOffload
from zero_runtime.errors import UnsupportedError
from zero_runtime.offload.folders import new_folder
from zero_runtime.offload.tensor_files import TensorFiles
from zero_runtime.optimizers import Lamb, Muon


class Placement(NamedTuple):
    """The placement of masters and states that are not on the device of the parameters.

    Attributes:
        policy: The block ``offload_optimizer`` of the configuration.
        files: The files for device ``nvme``. None for other devices.
        limit: The largest number of elements that are updated together.
        pinned: Whether host memory is page-locked.
        divisible: Whether the optimizer may update a shard in chunks.
    """

    policy: OptimizerOffload
    files: TensorFiles | None
    limit: int
    pinned: bool
    divisible: bool


def placement(
    config: RuntimeConfig, optimizer: torch.optim.Optimizer, group: DataParallelGroup
) -> Placement | None:
    """Return the placement of the masters and states of ``optimizer``.

    The result is None if they stay on the device of the parameters. This includes device ``cpu`` if the
    parameters themselves are in host memory.

    Raises:
        UnsupportedError: The optimizer does not support this offload device.
        ConfigError: The folder for the files cannot be made.
    """
    policy = config.zero.offload_optimizer
    on_host = group.device.type == "cpu"
    if policy is None or (policy.device == "cpu" and on_host):
        return None
    name = type(optimizer).__name__
    divisible = not isinstance(optimizer, Lamb | Muon)
    if policy.device == "nvme" and not divisible:
        raise UnsupportedError(
            f"{OPTIMIZER_KEY}.device is nvme, and optimizer {name} needs all of its state at once; use cpu or none, or an "
            "optimizer that works element by element, such as AdamW"
        )
    if isinstance(optimizer, Muon):
        raise UnsupportedError(
            f"{OPTIMIZER_KEY}.device is cpu, and Muon works on whole matrices, on the device of their gradients "
            f"({group.device.type}); use none, or AdamW"
        )
    pinned = policy.pin_memory and group.device.type == "cuda"
    files = None
    if policy.nvme_path is not None:
        key = f"{OPTIMIZER_KEY}.nvme_path"
        files = TensorFiles(new_folder(policy.nvme_path, group.rank, "optimizer", key), config.aio, key=key)
    return Placement(policy, files, config.zero.sharding.sub_group_size, pinned, divisible)
