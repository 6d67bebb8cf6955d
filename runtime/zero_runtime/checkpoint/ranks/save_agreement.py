"""Agreement among ranks that save or load together.

A failure on one rank raises an error on all ranks, so that no rank waits forever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

import torch

from commprof import hooks
from zero_runtime import log
from zero_runtime.checkpoint.files.tensor_file import Written
from zero_runtime.comm import DataParallelGroup, ReduceOp
from zero_runtime.errors import CheckpointError

CHECKPOINT: Final = hooks.tag("checkpoint")
Result = TypeVar("Result")


def attempt(function: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """Call ``function``, and return its result and None, or None and the exception that it raised."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def barrier(group: DataParallelGroup) -> None:
    """Wait for all ranks of ``group``."""
    group.barrier(why=CHECKPOINT)


def agree(group: DataParallelGroup, error: Exception | None, doing: str) -> None:
    """Return if no rank has failed. Otherwise raise an error on all ranks. Issue one all_reduce MAX of one number.

    Args:
        group: The group of the ranks.
        error: The failure of this rank. None if this rank has not failed.
        doing: The operation of all ranks, for the message.

    Raises:
        CheckpointError: A rank has failed. Every rank raises an error. A rank that has failed raises its own
            ``error`` if that is a CheckpointError, and otherwise a CheckpointError with ``error`` as its cause.
    """
    failed = torch.tensor([0 if error is None else group.rank + 1], dtype=torch.int64, device=group.device)
    group.all_reduce(failed, ReduceOp.MAX, why=CHECKPOINT)
    _raise(error, int(failed.item()) - 1, doing)


def agree_all(groups: Iterable[DataParallelGroup], error: Exception | None, doing: str) -> None:
    """Call :func:`agree` in each group, one after another. The groups together must connect all ranks."""
    for group in groups:
        try:
            agree(group, error, doing)
        except CheckpointError as failure:
            error = failure
    if error is not None:
        raise error


def exchange(
    group: DataParallelGroup, written: Written | None, error: Exception | None, doing: str
) -> list[Written]:
    """Share what each rank has written with all ranks: one all_gather of three numbers.

    Errors are raised in the same way as in :func:`agree`.
    """
    report = written or Written(0, 0)
    mine = torch.tensor([error is not None, *report], dtype=torch.int64, device=group.device)
    everybody = mine.new_empty(3 * group.world_size)
    group.all_gather_single(everybody, mine, why=CHECKPOINT)
    rows = everybody.view(-1, 3).tolist()
    failed = [rank for rank, row in enumerate(rows) if row[0]]
    _raise(error, failed[-1] if failed else -1, doing)
    return [Written(*row[1:]) for row in rows]


def agree_on(group: DataParallelGroup, error: Exception | None, number: int, doing: str) -> bool:
    """Return whether all ranks have the same ``number`` (up to 62 bits).

    Errors are raised in the same way as in :func:`agree`. This function also issues only one all_reduce MAX.
    """
    failed = 0 if error is None else group.rank + 1
    report = torch.tensor([failed, number, -number], dtype=torch.int64, device=group.device)
    group.all_reduce(report, ReduceOp.MAX, why=CHECKPOINT)
    failed, highest, lowest = report.tolist()
    _raise(error, failed - 1, doing)
    return bool(highest == -lowest)


def validate_tag(group: DataParallelGroup, tag: str, mode: str) -> None:
    """Check that all ranks save the same tag: all_reduce MAX and MIN of the tag's hash of 20 bytes.

    Args:
        group: The group of the ranks.
        tag: The tag of this rank.
        mode: The value of ``checkpoint.tag_validation``. Ignore sends nothing, Warn prints a warning on rank 0,
            and Fail raises an error.

    Raises:
        CheckpointError: The tags differ and ``mode`` is Fail. Every rank raises the error.
    """
    if mode.lower() == "ignore":
        return
    digest = list(hashlib.sha1(tag.encode(), usedforsecurity=False).digest())
    highest = torch.tensor(digest, dtype=torch.uint8, device=group.device)
    lowest = highest.clone()
    group.all_reduce(highest, ReduceOp.MAX, why=CHECKPOINT)
    group.all_reduce(lowest, ReduceOp.MIN, why=CHECKPOINT)
    if torch.equal(highest, lowest):
        return
    message = (
        f"the ranks save different tags; rank {group.rank} has {tag!r}. A checkpoint needs one tag on all ranks: make it of "
        "values that are the same everywhere, such as the number of steps"
    )
    if mode.lower() == "fail":
        raise CheckpointError(message)
    if group.rank == 0:
        log.warning(message)


def _raise(error: Exception | None, failed: int, doing: str) -> None:
    if isinstance(error, CheckpointError):
        raise error
    if error is not None:
        raise CheckpointError(f"{doing} failed: {type(error).__name__}: {error}") from error
    if failed >= 0:
        raise CheckpointError(f"{doing} failed on rank {failed}; see the message of that rank for the reason")
