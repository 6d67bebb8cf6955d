"""``deepspeed.runtime.utils.PartitionedTensor``: a tensor that is partitioned over the ranks of a group."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from zero_runtime.deepspeed_names.ranks import comm_functions
from zero_runtime.deepspeed_names.training.tiling import bounds


class PartitionedTensor:
    """This rank's shard of a tensor that every rank of a group has. :meth:`full` restores the tensor.

    Args:
        tensor: The tensor, which must be the same on all ranks.
        group: The group of ranks that the tensor is partitioned over.

    Attributes:
        local_data: This rank's shard, 1-D.
        orig_size: The shape of the tensor.
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
        """Construct a partitioned tensor from a shard and the result of :meth:`to_meta`."""
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
        """Return the description of this tensor as one tensor of integers.

        The integers are the number of dimensions, the shape, the number of shards, this rank and the bounds. The
        bounds are the first elements of the shards and the end of the last shard.
        """
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.int64, device=self.orig_device)

    def data(self) -> torch.Tensor:
        """Return this rank's shard."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """Return the shape of this rank's shard."""
        return self.local_data.shape

    def full_size(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return self.orig_size

    def full(self, device: Any = None) -> torch.Tensor:
        """Gather the whole tensor from all shards and return it. All ranks of the group must call this method."""
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
