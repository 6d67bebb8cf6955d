"""Data loaders that return each rank's share of a dataset in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from zero_runtime import comm
from zero_runtime.errors import ConfigError

TRAIN: Final = "train"


class RankLoader(DataLoader[Any]):
    """A loader of this rank's share of a dataset, in batches.

    As in DeepSpeed, every pass has the same shuffled order until ``set_epoch`` is called.
    """

    @property
    def data_sampler(self) -> Any:
        """The sampler that chooses the samples of this rank."""
        return self.sampler

    def set_epoch(self, epoch: int) -> None:
        """Shuffle the next pass in the order of ``epoch``. All ranks must call this method with the same number."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


class RepeatingLoader:
    """An iterator over a loader that restarts the loader whenever it is exhausted.

    Args:
        loader: The loader to repeat. It must not be empty.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def rank_loader(
    dataset: Any,
    batch_size: int,
    *,
    drop_last: bool,
    shuffle: bool = True,
    sampler: Sampler[Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    workers: int = 0,
    pin_memory: bool = False,
    replicas: int | None = None,
    replica: int = 0,
) -> RankLoader:
    """Return a loader of this rank's share of ``dataset``.

    Args:
        dataset: A dataset with ``__len__`` and ``__getitem__``, or an IterableDataset. Each rank iterates
            over a complete IterableDataset.
        batch_size: The number of samples of a batch.
        drop_last: Whether to leave out a last batch that is not full.
        shuffle: Whether to distribute the samples in random order. The order is equal on all ranks.
        sampler: A sampler that replaces the default choice of this rank's samples.
        collate_fn: The function that makes a batch from a list of samples.
        workers: The number of processes that load samples.
        pin_memory: Whether to use page-locked host memory if there is a GPU.
        replicas: The number of replicas, which train on different samples. None if every rank is a replica.
        replica: The number of this rank's replica.

    Raises:
        ConfigError: ``dataset`` is neither kind of dataset.
    """
    iterated = isinstance(dataset, IterableDataset)
    if not iterated and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigError(
            f"training_data is a {type(dataset).__name__}; expected a dataset with __len__ and __getitem__, or an "
            "IterableDataset"
        )
    if sampler is None and not iterated:
        if replicas is None:
            replicas, replica = comm.get_world_size(), comm.get_rank()
        sampler = DistributedSampler(dataset, num_replicas=replicas, rank=replica, shuffle=shuffle)
    return RankLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=workers,
        pin_memory=pin_memory and torch.cuda.is_available(),
    )
