"""The activation-checkpointing settings of this process. As in DeepSpeed, each process has one set of settings."""

from __future__ import annotations

from typing import Final

from zero_runtime.activation_checkpointing.activation_storage import Store
from zero_runtime.activation_checkpointing.model_parallel import ModelParallel
from zero_runtime.configuration.blocks.activation_block import ActivationCheckpointing


class Process:
    """The activation-checkpointing settings of a process.

    Attributes:
        settings: The settings in use.
        ranks: The model-parallel ranks.
        store: The store that keeps tensors in the way that the settings require; None if all tensors stay unchanged.
        configured_by: The function that applied the settings: ``configure`` or ``initialize``, or None.
    """

    def __init__(self) -> None:
        self.settings = ActivationCheckpointing()
        self.ranks = ModelParallel()
        self.store: Store | None = None
        self.configured_by: str | None = None

    def use(self, settings: ActivationCheckpointing, ranks: ModelParallel) -> None:
        """Use ``settings`` for later checkpoints. Existing checkpoints stay unchanged."""
        self.settings, self.ranks = settings, ranks
        moves = (
            settings.partition_activations and ranks.group is not None,
            settings.cpu_checkpointing,
            settings.contiguous_memory_optimization,
        )
        self.store = Store(settings, ranks.group) if any(moves) else None

    def idle_settings(self, device: str) -> list[str]:
        """Return a sentence for each setting that has no effect. ``device`` is the type of the model's device."""
        sentences = []
        if self.settings.partition_activations and self.ranks.group is None:
            sentences.append(
                "activation_checkpointing.partition_activations: there is no model-parallel group, so each rank keeps "
                "complete checkpoints; pass a group with zero_runtime.checkpointing.configure(mpu)"
            )
        if self.settings.cpu_checkpointing and device == "cpu":
            sentences.append(
                "activation_checkpointing.cpu_checkpointing: the model is in host memory, and so are its checkpoints"
            )
        return sentences


process: Final = Process()


# Scripts call these queries, as in DeepSpeed's module.


def partitions_activations() -> bool:
    """Return whether each rank of a model-parallel group keeps only its shard of every checkpoint."""
    return process.settings.partition_activations


def moves_to_host() -> bool:
    """Return whether checkpoints are kept in host memory."""
    return process.settings.cpu_checkpointing


def uses_buffers() -> bool:
    """Return whether checkpoints are copied into buffers that are allocated once."""
    return process.settings.contiguous_memory_optimization


def synchronizes() -> bool:
    """Return whether each checkpoint waits for the device."""
    return process.settings.synchronize_checkpoint_boundary


def measures_times() -> bool:
    """Return whether the times of each checkpoint are printed."""
    return process.settings.profile
