"""The micro-batches of a pipeline step, from an iterator or from tensors of the complete step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zero_runtime.errors import UsageError

Source = Callable[[], Any]


class Share(NamedTuple):
    """The share of a replica in a step.

    Attributes:
        micro_batch: The number of samples of a micro-batch of one replica.
        replicas: The number of replicas.
        replica: The number of this replica.
    """

    micro_batch: int
    replicas: int
    replica: int


def next_of(batches: Iterator[Any] | None, count: int, function: Callable[[Any], Any] | None) -> Source:
    """Return a function that returns the next batch.

    If ``function`` is not None, it is called with the batch, and its result replaces the batch.
    """

    def source() -> Any:
        assert batches is not None
        try:
            batch = next(batches)
        except StopIteration:
            raise UsageError(
                f"the iterator of batches ended in the middle of a step of {count} micro-batches; pass an iterator "
                "that repeats, such as RepeatingLoader(loader)"
            ) from None
        return batch if function is None else function(batch)

    return source


def inputs_of(batch: Any) -> Any:
    """Return the inputs of a batch: the first element of a tuple or list, or the batch itself.

    As in DeepSpeed, a list becomes a tuple. The reason is that torch's DataLoader converts the tuples of a
    dataset to lists, but layers expect tuples.
    """
    return _tuple_of(batch[0] if isinstance(batch, tuple | list) and batch else batch)


def labels_of(batch: Any) -> Any:
    """Return the labels of a batch, which are the second element of a pair, or None without labels.

    As in DeepSpeed, a list becomes a tuple.
    """
    return _tuple_of(batch[1]) if isinstance(batch, tuple | list) and len(batch) > 1 else None


def _tuple_of(values: Any) -> Any:
    return tuple(values) if type(values) is list else values


def micro_batches_of(data: Any, targets: Any, count: int, share: Share) -> Iterator[Any]:
    """Divide ``data`` and ``targets`` of a step into ``count`` micro-batches of this replica.

    If the tensors contain the samples of all replicas, only the samples of this replica are used.

    Raises:
        UsageError: Tensors have different numbers of samples, or ``count`` does not divide the number of
            samples.
    """
    leaves = [leaf for leaf in tree_leaves((data, targets)) if isinstance(leaf, torch.Tensor)]
    numbers = {leaf.shape[0] if leaf.dim() else 0 for leaf in leaves}
    if len(numbers) != 1:
        raise UsageError(
            f"tensors of data and targets have {', '.join(map(str, sorted(numbers)))} samples in the first "
            "dimension; expected the same number in all of them"
        )
    samples = numbers.pop()
    if not samples or samples % count:
        raise UsageError(
            f"data has {samples} samples, which cannot be divided into {count} equal micro-batches; give {count} x "
            "train_micro_batch_size_per_gpu samples, or change gradient_accumulation_steps"
        )
    has_all_replicas = samples == share.micro_batch * count * share.replicas and share.replicas > 1
    first, chunks = (share.replica * count, count * share.replicas) if has_all_replicas else (0, count)
    chosen = [_chunks(each, chunks)[first : first + count] for each in (data, targets)]
    return iter(zip(*chosen, strict=True))


def _chunks(values: Any, count: int) -> list[Any]:
    leaves, structure = tree_flatten(values)
    cut = [leaf.chunk(count) if isinstance(leaf, torch.Tensor) else [leaf] * count for leaf in leaves]
    return [tree_unflatten([each[number] for each in cut], structure) for number in range(count)]
