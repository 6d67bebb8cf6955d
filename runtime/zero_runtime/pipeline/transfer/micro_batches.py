"""The micro-batches of a pipeline step: from an iterator, or from tensors of the complete step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zero_runtime.errors import UsageError

Source = Callable[[], Any]


class Share(NamedTuple):
    """A replica's share of a step: samples of a micro-batch, the number of replicas, and this replica's number."""

    micro_batch: int
    replicas: int
    replica: int


def next_of(batches: Iterator[Any] | None, count: int, function: Callable[[Any], Any] | None) -> Source:
    """A function that returns the next batch, passed through ``function`` if that is not None."""

    def source() -> Any:
        assert batches is not None
        try:
            batch = next(batches)
        except StopIteration:
            raise UsageError(
                f"the iterator of batches has ended within a step of {count} micro-batches; pass one that repeats, such as "
                "RepeatingLoader(loader)"
            ) from None
        return batch if function is None else function(batch)

    return source


def inputs_of(batch: Any) -> Any:
    """The inputs of a batch: the first of a pair, or the batch itself. A list becomes a tuple, as in DeepSpeed.

    torch's DataLoader makes lists of the tuples of a dataset, and layers look for tuples.
    """
    return _tuple_of(batch[0] if isinstance(batch, tuple | list) and batch else batch)


def labels_of(batch: Any) -> Any:
    """The labels of a batch: the second of a pair; None without labels. A list becomes a tuple, as in DeepSpeed."""
    return _tuple_of(batch[1]) if isinstance(batch, tuple | list) and len(batch) > 1 else None


def _tuple_of(values: Any) -> Any:
    return tuple(values) if type(values) is list else values


def micro_batches_of(data: Any, targets: Any, count: int, share: Share) -> Iterator[Any]:
    """Divide ``data`` and ``targets`` of a step into ``count`` micro-batches of this replica.

    If they hold the samples of all replicas, only this replica's are used.

    Raises:
        UsageError: tensors have different numbers of samples, or ``count`` does not divide them.
    """
    leaves = [leaf for leaf in tree_leaves((data, targets)) if isinstance(leaf, torch.Tensor)]
    numbers = {leaf.shape[0] if leaf.dim() else 0 for leaf in leaves}
    if len(numbers) != 1:
        raise UsageError(
            f"data and targets have tensors of {', '.join(map(str, sorted(numbers)))} samples in the first "
            "dimension; expected tensors of the same number"
        )
    samples = numbers.pop()
    if not samples or samples % count:
        raise UsageError(
            f"data has {samples} samples, which {count} micro-batches do not divide; give {count} x "
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
