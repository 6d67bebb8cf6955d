"""Detects code that issues collectives from C++, below the methods of ProcessGroup: DDP's reducer and two functions.

At the first use of this code, kernels are installed in front of c10d's operators. A program that does not use this code
gets no kernels.
"""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from commprof.recorder.training.reducer_waits import Stalls

_CLASS: Final = "Reducer"
_FUNCTIONS: Final = ("_broadcast_coalesced", "_verify_params_across_processes")
_DETAILED_REBUILDS: Final = 3  # the number of first calls of a reducer that are measured in detail
# DDP calls this method of the reducer before every forward pass, but the method rebuilds the buckets only once.
_REBUILD: Final = "_rebuild_buckets"


class CppIssuers:
    """Detects the first use of code that issues collectives from C++.

    Args:
        on_first: A function that is called once, before the first use.
        on_fault: A function that is called with an exception of ``on_first``.
        stalls: The object that is notified when a function in which C++ may wait begins and ends.
    """

    def __init__(
        self, on_first: Callable[[], None], on_fault: Callable[[Exception], None], stalls: Stalls
    ) -> None:
        self._on_first = on_first
        self._on_fault = on_fault
        self._stalls = stalls
        self._seen = False
        self._patched: list[tuple[Any, str, Any, Any]] = []

    def install(self) -> bool:
        """Install the wrappers; return False if this version of torch lacks a class or function to wrap."""
        reducer = getattr(_distributed_c10d, _CLASS, None)
        if reducer is not None:
            self._patch(reducer, "__init__")
            if hasattr(reducer, _REBUILD):
                self._patch(reducer, _REBUILD)
        for name in _FUNCTIONS:
            for module in (dist, _distributed_c10d):
                if hasattr(module, name):
                    self._patch(module, name)
        return self.are_known()

    @staticmethod
    def are_known() -> bool:
        """Return whether this version of torch has all classes and functions that are wrapped."""
        return all(hasattr(_distributed_c10d, name) for name in (_CLASS, *_FUNCTIONS))

    def remove(self) -> None:
        """Remove the wrappers, unless other code has wrapped them since."""
        for owner, name, original, wrapper in self._patched:
            if vars(owner).get(name) is wrapper:
                setattr(owner, name, original)
        self._patched.clear()

    def _patch(self, owner: Any, name: str) -> None:
        original = vars(owner)[name]
        enter, leave, waits = self._stalls.enter, self._stalls.leave, name != "__init__"
        # The number of calls by the reducer's address. A reducer rebuilds its buckets once, in one of its first steps.
        calls: Counter[int] = Counter()

        @functools.wraps(original)
        def noticed(*args: Any, **kwargs: Any) -> Any:
            self._notice()
            if not waits:
                return original(*args, **kwargs)
            detailed = name != _REBUILD
            if not detailed:
                calls[id(args[0])] += 1
                detailed = calls[id(args[0])] <= _DETAILED_REBUILDS
            entered = enter(detailed)
            try:
                return original(*args, **kwargs)
            finally:
                leave(entered, name)

        setattr(owner, name, noticed)
        self._patched.append((owner, name, original, noticed))

    def _notice(self) -> None:
        if self._seen:
            return
        self._seen = True
        try:
            self._on_first()
        except Exception as error:
            self._on_fault(error)


def reducer_is_alive() -> bool:
    """Return whether this process has a DistributedDataParallel module, whose reducer was created before recording."""
    kind = torch.nn.parallel.DistributedDataParallel
    return any(issubclass(candidate, kind) for candidate in set(map(type, gc.get_objects())))
