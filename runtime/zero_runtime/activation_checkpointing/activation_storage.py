"""Storage of the inputs of checkpointed functions between forward and backward: sharded, in host memory, or in buffers.

A stored tensor is a copy in memory order. If it is sharded, each of the ``n`` ranks of a model-parallel group
stores ``ceil(numel / n)`` elements, and one all_gather restores the tensor. A tensor that is passed to several
functions, such as a mask, is stored once.

Some tensors are not stored here and stay unchanged. These are parameters, tensors that are not floating point,
have gaps or overlaps in memory, are marked ``no_checkpointing``, or have fewer elements than the group has
ranks.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from commprof import hooks
from zero_runtime.activation_checkpointing.slots import Kind, Slot, Slots
from zero_runtime.comm import DataParallelGroup
from zero_runtime.configuration.blocks.activation_block import ActivationCheckpointing

_GATHER: Final = hooks.tag("activation")
_HOST: Final = torch.device("cpu")


class StoredTensor:
    """A tensor in the store.

    Attributes:
        requires_grad: Whether the original tensor requires a gradient.
    """

    __slots__ = ("__weakref__", "_device", "_group", "_shape", "_shard", "_slot", "_strides", "requires_grad")

    def __init__(
        self, tensor: torch.Tensor, shard: torch.Tensor, slot: Slot | None, group: DataParallelGroup | None
    ) -> None:
        self.requires_grad = tensor.requires_grad
        self._shape = tensor.shape
        self._strides = tensor.stride()
        self._device = tensor.device
        self._shard = shard
        self._slot = slot
        self._group = group

    @torch.no_grad()
    def whole(self) -> torch.Tensor:
        """Return the restored tensor, in new memory, with the shape, strides and values of the original tensor.

        All ranks of the group must call this method.
        """
        shard = self._shard.to(self._device, non_blocking=True)
        if self._group is not None:
            flat = torch.empty(shard.numel() * self._group.world_size, dtype=shard.dtype, device=self._device)
            self._group.all_gather_single(flat, shard, why=_GATHER)
        else:
            flat = shard.clone() if shard is self._shard else shard
        # The result is not a view, because the function may change it in place, as it may change the original tensor.
        return flat.new_empty(0).set_(flat.untyped_storage(), 0, self._shape, self._strides)


class Store:
    """A store that keeps tensors in the way that the settings require.

    Args:
        settings: Whether tensors are sharded, in host memory and in buffers.
        group: The model-parallel ranks, which all have the same activations; None without model parallelism.
    """

    def __init__(self, settings: ActivationCheckpointing, group: DataParallelGroup | None) -> None:
        self._group = group if settings.partition_activations else None
        self._on_host = settings.cpu_checkpointing
        self._slots = (
            Slots(settings.number_checkpoints or 0) if settings.contiguous_memory_optimization else None
        )
        # Maps each tensor to the version that it had when it was stored, and to a weak reference to the stored copy.
        self._stored = WeakTensorKeyDictionary()

    def takes(self, value: Any) -> bool:
        """Return whether ``value``, an argument of a checkpointed function, is stored here.

        All other arguments stay unchanged.
        """
        if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
            return False
        if value.layout is not torch.strided or not value.is_floating_point() or not value.numel():
            return False
        if getattr(value, "no_checkpointing", False) or not _is_dense(value):
            return False
        moves = self._on_host and value.device.type != "cpu"
        return moves or self._slots is not None or self._group_of(value) is not None

    def _group_of(self, tensor: torch.Tensor) -> DataParallelGroup | None:
        group = self._group
        return group if group is not None and tensor.numel() >= group.world_size else None

    def keep(self, tensor: torch.Tensor, place: int) -> StoredTensor:
        """Store a copy of ``tensor``, or of this rank's shard of it.

        Args:
            tensor: The tensor to store.
            place: The position of the tensor among the arguments of the checkpointed function.
        """
        if tensor.is_inference():  # an inference tensor has no version counter
            return self._copy(tensor, place)
        version, reference = self._stored.get(tensor, (-1, None))
        stored = reference() if reference is not None and version == tensor._version else None
        if stored is None or stored.requires_grad != tensor.requires_grad:
            stored = self._copy(tensor, place)
            self._stored[tensor] = tensor._version, weakref.ref(stored)
        return stored

    @torch.no_grad()
    def _copy(self, tensor: torch.Tensor, place: int) -> StoredTensor:
        group = self._group_of(tensor)
        size, rank = (1, 0) if group is None else (group.world_size, group.rank)
        numel = -(-tensor.numel() // size)
        device = _HOST if self._on_host else tensor.device
        slot = None
        if self._slots is not None:
            slot = self._slots.take(Kind(place, numel, tensor.dtype, device))
            shard = slot.row
        else:
            pinned = device.type == "cpu" and tensor.device.type == "cuda"
            shard = torch.empty(numel, dtype=tensor.dtype, device=device, pin_memory=pinned)
        flat = tensor.as_strided((tensor.numel(),), (1,))
        start = min(rank * numel, tensor.numel())
        end = min(start + numel, tensor.numel())
        shard[: end - start].copy_(flat[start:end], non_blocking=True)
        shard[end - start :].zero_()
        return StoredTensor(tensor, shard, slot, group)

    def reset(self) -> None:
        """Drop the buffers, so that the next stored tensors allocate new ones."""
        if self._slots is not None:
            self._slots.reset()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements are contiguous in memory without overlaps, in any order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
