"""Publishes a framework's gradient bucket when it is flushed, and makes the tag for its collectives."""

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
    """Publish a bucket that is about to be reduced; the tag is for the collectives that do it.

    Args:
        number: within the step and micro-batch.
        numel: elements of the parameters in it.
        nbytes: as it travels.
        capacity: elements that it may hold.
    """
    bucket, tag = _known(number, numel, nbytes, dtype, names, capacity, module)
    bucket.flushed()
    return tag


# The same buckets recur every step, and reused objects are cheaper for the recorder.
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
        """The number of the next one."""
        at = (hooks.position.step, hooks.position.micro_step)
        if at != self._at:
            self._at, self._next = at, 0
        number, self._next = self._next, self._next + 1
        return number
