"""Publishes a framework's gradient bucket when it is flushed, and creates the tag for its collectives."""

from __future__ import annotations

from functools import lru_cache

import torch

from commprof import hooks
from commprof.schema import Purpose


def open_bucket(
    number: int,
    numel: int,
    nbytes: int,
    dtype: torch.dtype,
    names: tuple[str, ...],
    capacity: int | None = None,
    module: str | None = None,
) -> hooks.tag:
    """Publish a bucket that is about to be reduced, and return the tag for the collectives that reduce it.

    Args:
        number: The number of the bucket within the step and micro-batch.
        numel: The number of elements in the bucket.
        nbytes: The number of bytes that are reduced.
        dtype: The dtype of the bucket.
        names: The names of the parameters in the bucket.
        capacity: The maximum number of elements; None if there is no limit.
        module: The name of the module to which the parameters belong, if there is one.
    """
    bucket, tag = _known(number, numel, nbytes, dtype, names, capacity, module)
    bucket.flushed()
    return tag


# The results are cached, because the same buckets recur in every step. Reused objects are cheaper for the recorder.
@lru_cache(maxsize=4096)
def _known(
    number: int,
    numel: int,
    nbytes: int,
    dtype: torch.dtype,
    names: tuple[str, ...],
    capacity: int | None,
    module: str | None,
) -> tuple[hooks.bucket, hooks.tag]:
    bucket = hooks.bucket(
        bucket=number,
        numel=numel,
        bytes=nbytes,
        capacity=capacity,
        dtype=str(dtype).removeprefix("torch."),
        owners=None,
        parameters=",".join(names) or None,
        flush_reason=None,
    )
    purpose = Purpose.GRADIENT_REDUCE.value
    return bucket, hooks.tag(purpose, bucket=number, parameters=names, bucket_bytes=nbytes, module=module)


class Numbers:
    """Counts buckets within each step and micro-batch."""

    def __init__(self) -> None:
        self._at = (-1, 0)
        self._next = 0

    def take(self) -> int:
        """Return the number of the next bucket."""
        at = (hooks.position.step, hooks.position.micro_step)
        if at != self._at:
            self._at, self._next = at, 0
        number, self._next = self._next, self._next + 1
        return number
