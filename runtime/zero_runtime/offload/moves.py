"""Moves device memory to host memory and back.

The unit is a block of memory (a storage), not a tensor. The reason is that parameters are views of flat
buffers, and that the masters of an fp32 model are the parameters themselves. A block is copied once, and every
tensor in it becomes a view of the copy. The device frees a block only when no tensor uses it, so the caller
must pass all tensors of the block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch


class _Block(NamedTuple):
    """The tensors of one block of memory, and their original device."""

    tensors: list[torch.Tensor]
    device: torch.device


class Moves:
    """Moves blocks to host memory and back. Blocks are selected by the kind of their contents."""

    def __init__(self) -> None:
        self._away: dict[str, list[_Block]] = {}
        # The event after the last copy that no call has waited for.
        self._copies: torch.cuda.Event | None = None

    @property
    def away(self) -> tuple[str, ...]:
        """The kinds that are in host memory now."""
        return tuple(self._away)

    @torch.inference_mode(False)
    @torch.no_grad()
    def offload(
        self,
        tensors: Mapping[str, Iterable[torch.Tensor]],
        wanted: Collection[str],
        pinned: bool,
        non_blocking: bool,
    ) -> None:
        """Move the kinds in ``wanted`` to host memory, unless they are already in host memory.

        Args:
            tensors: All tensors by kind. A block with tensors of several kinds belongs to the first of these
                kinds.
            wanted: The kinds to move.
            pinned: Whether to use page-locked memory for CUDA tensors.
            non_blocking: Whether to return before the copies are complete. :meth:`settle` waits for the copies.
        """
        blocks = _blocks(tensors)
        if any(each.device.type == "cuda" for theirs in blocks.values() for each in theirs):
            torch.cuda.synchronize()  # Another stream may still read memory that is freed here.
        for kind in wanted:
            if kind in self._away:
                continue
            moved = self._away[kind] = [each for each in blocks.get(kind, []) if not _is_on_host(each)]
            for each in moved:
                on_cuda = each.device.type == "cuda"
                _move(each.tensors, torch.device("cpu"), pinned and on_cuda, non_blocking)
        self._finish(non_blocking)

    @torch.inference_mode(False)
    @torch.no_grad()
    def reload(self, non_blocking: bool) -> None:
        """Move everything back to its original device, and wait until the copies are complete."""
        while self._away:
            kind = next(iter(self._away))
            for each in self._away[kind]:
                _move(each.tensors, each.device, False, non_blocking)
            del self._away[kind]
        self._finish(False)

    def settle(self) -> None:
        """Wait for copies to host memory. The values can be read afterwards."""
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.synchronize()

    def _finish(self, non_blocking: bool) -> None:
        if not torch.cuda.is_initialized():
            return
        self._copies = torch.cuda.Event()
        self._copies.record()
        if not non_blocking:
            self.settle()
        torch.cuda.empty_cache()  # Other processes on the device can then use the memory.


def _blocks(tensors: Mapping[str, Iterable[torch.Tensor]]) -> dict[str, list[_Block]]:
    """Return the blocks by kind, each with all of its tensors."""
    by_place: dict[tuple[torch.device, int], tuple[str, dict[int, torch.Tensor]]] = {}
    for kind, theirs in tensors.items():
        for tensor in theirs:
            # A view keeps its base tensor alive, and therefore the memory of the base tensor.
            for each in (tensor, tensor._base):
                if each is not None and each.untyped_storage().nbytes():
                    place = each.device, each.untyped_storage().data_ptr()
                    by_place.setdefault(place, (kind, {}))[1][id(each)] = each
    blocks: dict[str, list[_Block]] = {}
    for (device, _), (kind, members) in by_place.items():
        blocks.setdefault(kind, []).append(_Block(list(members.values()), device))
    return blocks


def _is_on_host(block: _Block) -> bool:
    return block.device.type == "cpu"


def _move(tensors: Iterable[torch.Tensor], device: torch.device, pinned: bool, non_blocking: bool) -> None:
    """Copy the block of ``tensors`` to ``device``, and make ``tensors`` views of the copy."""
    tensors = list(tensors)
    block = torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(tensors[0].untyped_storage())
    copy = torch.empty(block.numel(), dtype=torch.uint8, device=device, pin_memory=pinned)
    copy.copy_(block, non_blocking=non_blocking)
    storage = copy.untyped_storage()
    for tensor in tensors:
        view = torch.empty(0, dtype=tensor.dtype, device=device)
        tensor.data = view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
