"""Where the inputs of checkpointed functions are kept between forward and backward: in parts, on the host, in buffers.

A kept tensor is a copy in the order of its memory. Over the ``n`` ranks of a model-parallel group each keeps
``ceil(numel / n)`` elements, and one all_gather makes the tensor whole again. Tensors that this does not fit stay as
they are: parameters, what is not floating point, what has gaps or overlaps in memory, what is marked
``no_checkpointing``, and tensors of fewer elements than the group has ranks. A tensor that several functions are given,
as a mask is, is kept once.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from commprof import hooks
from zero_runtime.activation_checkpointing.slots import Kind, Slot, Slots
from zero_runtime.comm import DataParallelGroup
from zero_runtime.configuration.activation_checkpointing import ActivationCheckpointing

_GATHER: Final = hooks.tag("activation")
_HOST: Final = torch.device("cpu")


class StoredTensor:
    """A tensor that is kept elsewhere.

    Attributes:
        requires_grad: whether the tensor did.
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
        """The tensor: new memory with the same shape, strides and values. On all ranks of the group, where there is one."""
        shard = self._shard.to(self._device, non_blocking=True)
        if self._group is not None:
            flat = torch.empty(shard.numel() * self._group.world_size, dtype=shard.dtype, device=self._device)
            self._group.all_gather_single(flat, shard, why=_GATHER)
        else:
            flat = shard.clone() if shard is self._shard else shard
        # Not a view, so that the function may change it in place, as it may change the tensor itself.
        return flat.new_empty(0).set_(flat.untyped_storage(), 0, self._shape, self._strides)


class Store:
    """Keeps tensors as the settings say.

    Args:
        settings: which of the ways.
        group: the model-parallel ranks, all of which have the same activations; None for none.
    """

    def __init__(self, settings: ActivationCheckpointing, group: DataParallelGroup | None) -> None:
        self._group = group if settings.partition_activations else None
        self._on_host = settings.cpu_checkpointing
        self._slots = (
            Slots(settings.number_checkpoints or 0) if settings.contiguous_memory_optimization else None
        )
        self._stored = (
            WeakTensorKeyDictionary()
        )  # tensor -> its version when it was kept, and what it is kept in

    def takes(self, value: Any) -> bool:
        """Whether ``value``, an argument of a checkpointed function, is kept here; what is not stays where it is."""
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
        """Keep a copy of ``tensor``, or of this rank's part, which is argument number ``place``."""
        if tensor.is_inference():  # which counts no versions
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
        """Make new buffers from now on."""
        if self._slots is not None:
            self._slots.reset()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie side by side in memory, in any order, each once."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
