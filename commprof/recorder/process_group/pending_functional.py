"""Results of functional collectives without a wait so far, and the records to which the waits belong.

A result is identified by its storage, in the same way as torch finds the handle of the result. When a storage is freed,
a new storage may get its address. Each storage is therefore identified by a weak reference. The reference keeps no
tensor memory alive, and while it exists, no new storage can get the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from commprof.trace.rank_files.segments import Token

_MOST: Final = 4096  # the most results that are remembered


class Results:
    """The records of results, by their storages."""

    def __init__(self) -> None:
        self._of_storage: dict[int, tuple[StorageWeakRef, Token]] = {}

    def remember(self, tokens: Sequence[Token], result: Any) -> None:
        """Remember the record to which the wait for each result belongs.

        Args:
            tokens: Either one record for each result, or the record of the collective that returned all results.
            result: A tensor, or a list or tuple of tensors.
        """
        results = result if isinstance(result, (list, tuple)) else [result]
        for position, tensor in enumerate(results):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = StorageWeakRef(tensor.untyped_storage())
                token = tokens[position if len(tokens) == len(results) else 0]
                self._of_storage[storage.cdata] = storage, token
        while len(self._of_storage) > _MOST:
            self._of_storage.pop(next(iter(self._of_storage)), None)

    def take(self, tensor: Any) -> Token | None:
        """Return, only once, the record of the result that shares the storage of ``tensor``; None if there is none."""
        if not self._of_storage or not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            return None
        entry = self._of_storage.pop(tensor.untyped_storage()._cdata, None)
        return None if entry is None else entry[1]

    def clear(self) -> None:
        """Forget all results."""
        self._of_storage.clear()
