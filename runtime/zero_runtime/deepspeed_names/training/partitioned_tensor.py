"""``deepspeed.runtime.utils.PartitionedTensor``: a tensor that is partitioned over the ranks of a group."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from zero_runtime.deepspeed_names.ranks import comm_functions
from zero_runtime.deepspeed_names.training.tiling import bounds


class PartitionedTensor:
    """This rank's shard of a tensor that every rank of a group has; :meth:`full` restores the tensor.

    Args:
        tensor: the same on all ranks.
        group: its ranks.

    Attributes:
        local_data: this rank's shard, 1-D.
        orig_size: the tensor's shape.
    """

    def __init__(self, tensor: torch.Tensor, group: Any) -> None:
        self.group = group
        self.num_parts = comm_functions.get_world_size(group)
        self.rank = comm_functions.get_rank(group)
        self.orig_size = list(tensor.shape)
        self.orig_device = tensor.device
        self.partition = bounds(tensor.numel(), self.num_parts)
        start, end = self.partition[self.rank], self.partition[self.rank + 1]
        self.local_data = tensor.detach().reshape(-1)[start:end].clone()

    @classmethod
    def from_meta(
        cls, meta: torch.Tensor, local_part: torch.Tensor, group: Any, device: Any = None
    ) -> PartitionedTensor:
        """A partitioned tensor from a shard and the result of :meth:`to_meta`."""
        numbers = [int(each) for each in meta.tolist()]
        dims, numbers = numbers[0], numbers[1:]
        tensor = cls.__new__(cls)
        tensor.group = group
        tensor.orig_size, numbers = numbers[:dims], numbers[dims:]
        tensor.orig_device = local_part.device if device is None else torch.device(device)
        tensor.num_parts, tensor.rank = numbers[0], numbers[1]
        tensor.partition = numbers[2:]
        tensor.local_data = local_part
        return tensor

    def to_meta(self) -> torch.Tensor:
        """Shape, number of shards, this rank's number and the borders, as one tensor of integers."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.int64, device=self.orig_device)

    def data(self) -> torch.Tensor:
        """This rank's shard."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """Its shape."""
        return self.local_data.shape

    def full_size(self) -> list[int]:
        """The shape of the whole."""
        return self.orig_size

    def full(self, device: Any = None) -> torch.Tensor:
        """The whole tensor, gathered from all shards. All ranks of the group must call it."""
        largest = max(end - start for start, end in zip(self.partition, self.partition[1:], strict=False))
        mine = self.local_data.new_zeros(largest)
        mine[: self.local_data.numel()] = self.local_data
        padded = mine.new_empty(largest * self.num_parts)
        comm_functions.all_gather_into_tensor(padded, mine, group=self.group)
        shards = [
            padded[number * largest :][: self.partition[number + 1] - self.partition[number]]
            for number in range(self.num_parts)
        ]
        flat = torch.cat(shards)
        assert flat.numel() == prod(self.orig_size)
        return flat.view(self.orig_size).to(self.orig_device if device is None else device)
