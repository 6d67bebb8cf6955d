"""The configuration block ``activation_checkpointing``: its keys and its checked values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from zero_runtime.configuration.reading import key_table
from zero_runtime.configuration.reading.checks import boolean, integer, optional, unknown_key
from zero_runtime.configuration.reading.key_table import Table, used
from zero_runtime.errors import ConfigError

BLOCK: Final = "activation_checkpointing"
KEYS: Final[Table] = {
    "partition_activations": used(
        boolean,
        False,
        "each rank of a model-parallel group keeps only its shard of every activation checkpoint",
    ),
    "cpu_checkpointing": used(boolean, False, "keep activation checkpoints in host memory"),
    "contiguous_memory_optimization": used(
        boolean,
        False,
        "copy activation checkpoints into buffers that are allocated once. This requires "
        "partition_activations",
    ),
    "number_checkpoints": used(
        optional(integer(0)),
        None,
        "the number of activation checkpoints in each buffer of contiguous_memory_optimization. Set it to "
        "the largest number of checkpoints that exist at the same time",
    ),
    "synchronize_checkpoint_boundary": used(
        boolean, False, "wait for the device at each activation checkpoint"
    ),
    "profile": used(boolean, False, "print the forward and backward times of each activation checkpoint"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationCheckpointing:
    """The settings of ``zero_runtime.checkpointing.checkpoint``. The fields are the keys of the block."""

    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: int | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False

    def __post_init__(self) -> None:
        if not self.contiguous_memory_optimization:
            return
        if not self.partition_activations:
            raise ConfigError(
                f"{BLOCK}.contiguous_memory_optimization is true without partition_activations; set "
                "partition_activations to true as well, which changes nothing where there is no model-parallel group"
            )
        if not self.number_checkpoints:
            raise ConfigError(
                f"{BLOCK}.contiguous_memory_optimization is true and number_checkpoints is {self.number_checkpoints}; "
                "set number_checkpoints to the calls of checkpoint() in one forward pass"
            )

    def changed(self, changes: Mapping[str, Any]) -> ActivationCheckpointing:
        """Return these settings, updated with ``changes``. Raises ConfigError if a key or value is not valid."""
        for name in changes:
            if name not in KEYS:
                raise ConfigError(unknown_key(f"{BLOCK}.{name}", name, KEYS, BLOCK, {}))
        values = key_table.read(KEYS, BLOCK, changes)
        return dataclasses.replace(self, **{name: values[name] for name in changes})
