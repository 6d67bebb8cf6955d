"""Results of functional collectives that are not waited for yet, and the records of their waits.

A result is identified by its storage, as torch itself finds its handle. When a storage is freed, another may get its
address. So each is identified by a weak reference, which keeps no tensor memory alive and whose number no other storage
can get while it exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from commprof.trace.rank_files.segments import Token

_MOST: Final = 4096  # remembered at most


class Results:
    """The records of results, by their storages."""

    def __init__(self) -> None:
        self._of_storage: dict[int, tuple[StorageWeakRef, Token]] = {}

    def remember(self, tokens: Sequence[Token], result: Any) -> None:
        """Which record the wait for each result belongs to: several results of one collective, or each of its own."""
        results = result if isinstance(result, (list, tuple)) else [result]
        for position, tensor in enumerate(results):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = StorageWeakRef(tensor.untyped_storage())
                token = tokens[position if len(tokens) == len(results) else 0]
                self._of_storage[storage.cdata] = storage, token
        while len(self._of_storage) > _MOST:
            self._of_storage.pop(next(iter(self._of_storage)), None)

    def take(self, tensor: Any) -> Token | None:
        """The record of the result that ``tensor`` lies in; only once, and None where it is no such result."""
        if not self._of_storage or not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            return None
        entry = self._of_storage.pop(tensor.untyped_storage()._cdata, None)
        return None if entry is None else entry[1]

    def clear(self) -> None:
        """Forget all."""
        self._of_storage.clear()
