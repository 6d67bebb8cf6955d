"""Tests whether each layer records a call exactly once in this version of torch.

The test uses a private group that sends nothing. It runs once in each process, before anything is recorded. It
takes a few milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._C import _distributed_c10d

from commprof.recorder.process.journal import PROCESS_GROUP, Journal
from commprof.recorder.process_group.groups import Group
from commprof.schema import LAYERS, Layer
from commprof.trace.rank_files.segments import NO_WORDS

NEWEST_TESTED: Final = (2, 15)  # docs/coverage.md: the newest torch with which the tests were run
_UNTRIED: Final = "waits, DDP's reducer, compiled graphs and groups that change"

_C10D: Final[Any] = _distributed_c10d
_NAME: Final = "commprof-trial"
_OWN: Final = frozenset({_NAME, "fake:1"})  # the names of the group, and of its backend if called directly
_OUTCOME: list[dict[str, int]] = []


class TrialJournal(Journal):
    """A journal that counts records by layer and keeps no record."""

    def __init__(self) -> None:
        super().__init__(completion_every=0)
        self.counts: dict[str, int] = {}

    def append(self, group: Group, *fields: int, layer: int = PROCESS_GROUP) -> Any:
        """Count one record of the trial's own group."""
        if group.name in _OWN:
            self.counts[LAYERS[layer]] = self.counts.get(LAYERS[layer], 0) + 1
        return NO_WORDS, 0

    def intern_thread(self) -> int:
        """Return 0. No thread number is kept, because the next journal would not know it."""
        return 0


def silent_layers(make: Callable[[Journal, bool], Any]) -> dict[str, int]:
    """Return the layers that do not record a call exactly once in this version of torch.

    Args:
        make: A function that creates an interception from a journal and from whether complete mode is on.

    Returns:
        For each such layer, how often it recorded the call.

    Raises:
        Exception: The test cannot run in this version of torch, so the result is not known.
    """
    if not _OUTCOME:
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("a torch mode is active, which would intercept the calls")
        _OUTCOME.append(_try_layers(make))
    return _OUTCOME[0]


def newer_torch(version: str) -> str | None:
    """Return a warning if torch is newer than :data:`NEWEST_TESTED`; otherwise None.

    >>> newer_torch("2.13.0+cpu"), newer_torch("2.16.0a0+git1234567") is None, newer_torch("unknown")
    (None, False, None)
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or tuple(map(int, match.groups())) <= NEWEST_TESTED:
        return None
    newest = ".".join(map(str, NEWEST_TESTED))
    return (
        f"torch {version} is newer than {newest}, the newest version that commprof was tested with. At the start each layer "
        f"is tested with one call; {_UNTRIED} are not tested. The self-check compares all counts with those of torch"
    )


def _try_layers(make: Callable[[Journal, bool], Any]) -> dict[str, int]:
    pg, backend = _make_group()
    failures = {}
    for is_complete, calls in (
        (
            False,
            {
                Layer.PROCESS_GROUP: lambda: pg.allreduce([_tensor()]),
                Layer.BACKEND: lambda: backend.allreduce([_tensor()]),
                Layer.FUNCTIONAL: _call_functional,
            },
        ),
        (True, {Layer.C10D: lambda: pg.allreduce([_tensor()])}),
    ):
        journal = TrialJournal()
        interception = make(journal, is_complete)
        _C10D._register_process_group(_NAME, pg)
        try:
            interception.install()
            for layer, call in calls.items():
                journal.counts.clear()
                call()
                if journal.counts != {layer: 1}:
                    failures[str(layer)] = sum(journal.counts.values())
        finally:
            interception.remove()
            _C10D._unregister_process_group(_NAME)
    return failures


def _tensor() -> torch.Tensor:
    return torch.zeros(1, device="cpu")


def _call_functional() -> None:
    operators = torch.ops._c10d_functional
    operators.wait_tensor(operators.all_reduce(_tensor(), "sum", _NAME))


def _make_group() -> tuple[Any, Any]:
    """Return a process group of one rank that sends nothing, and its backend."""
    backend = _C10D.FakeProcessGroup._create_internal(0, 1)
    pg = _C10D.ProcessGroup(_C10D.HashStore(), 0, 1)
    kind = _C10D.ProcessGroup.BackendType.CUSTOM
    pg._set_default_backend(kind)
    pg._register_backend(torch.device("cpu"), kind, backend)
    pg._set_group_name(_NAME)
    return pg, backend
