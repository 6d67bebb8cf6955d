"""Putting the wrappers in place of torch's methods, and taking them out again.

All of torch.distributed, FSDP, DeepSpeed and zero_runtime issue their collectives through the methods of
ProcessGroup; no method calls another through Python, so nothing is counted twice. C++ issuers (DDP's reducer)
enter below; the self-check tells of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import ProcessGroup, Work

from commprof.recorder.groups import Group, Groups
from commprof.recorder.journal import Journal
from commprof.recorder.methods import METHODS
from commprof.recorder.wrappers import Wrappers
from commprof.trace.writer import count_of


class Interception:
    """The wrappers of one recording.

    Args:
        journal: what the records go to.
        open_group: called at the first sight of a process group, before anything of it is recorded.
    """

    def __init__(self, journal: Journal, open_group: Callable[[Group], None]) -> None:
        self.journal = journal
        self.groups = Groups(open_group, self._forget)
        self.wrappers = Wrappers(journal, self.groups.find)
        self._installed: list[tuple[type, str, Any, Any]] = []
        self._blocks = 0
        self._begun: dict[str, int] = {}  # by group: its collectives when the open coalescing block began

    def _forget(self, address: int) -> None:
        self.wrappers.forget(address)

    def install(self) -> None:
        """Wrap every method of the table that this torch has. Wrappers that others made stay beneath ours."""
        for method in METHODS:
            original = vars(ProcessGroup).get(method.name)
            if original is not None:
                self._replace(ProcessGroup, method.name, original, self.wrappers.wrap(method, original))
        for name, wrap in (
            ("_start_coalescing", self._wrap_start_coalescing),
            ("_end_coalescing", self._wrap_end_coalescing),
        ):
            original = vars(ProcessGroup).get(name)
            if original is not None:
                self._replace(ProcessGroup, name, original, wrap(original))
        for kind in _work_classes():
            original = vars(kind).get("wait")
            if original is not None:
                self._replace(kind, "wait", original, self.wrappers.wrap_wait(original))

    def remove(self) -> None:
        """Put torch's methods back, except where somebody else has wrapped ours since."""
        for owner, name, original, wrapper in self._installed:
            if vars(owner).get(name) is wrapper:
                setattr(owner, name, original)
        self._installed.clear()
        self.wrappers.pending.clear()

    def _replace(self, owner: type, name: str, original: Any, wrapper: Any) -> None:
        wrapper.__name__ = name
        wrapper.__qualname__ = f"{owner.__name__}.{name}"
        wrapper.__doc__ = original.__doc__
        wrapper.__wrapped__ = original
        setattr(owner, name, wrapper)
        self._installed.append((owner, name, original, wrapper))

    def _wrap_start_coalescing(self, original: Any) -> Any:
        def start_coalescing(pg: Any, /, *args: Any, **kwargs: Any) -> Any:
            result = original(pg, *args, **kwargs)
            try:
                group = self.groups.find(pg)
                self._blocks += 1
                group.coalesce_id = self._blocks
                self.journal.look_closer(group)
                self._begun[group.name] = count_of(group.collectives)
            except Exception as error:
                self.journal.fault(error)
            return result

        return start_coalescing

    def _wrap_end_coalescing(self, original: Any) -> Any:
        def end_coalescing(pg: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                group = self.groups.find(pg)
                group.coalesce_id = 0
                self.journal.look_closer(group)
                issued = count_of(group.collectives) - self._begun.pop(group.name, 0)
                if issued > 1:
                    group.extra -= (
                        issued - 1
                    )  # NCCL, the only backend that coalesces, counts the block as one
            except Exception as error:
                self.journal.fault(error)
            return original(pg, *args, **kwargs)

        return end_coalescing


def _work_classes() -> list[type]:
    """torch's class of handles and those of its subclasses that are torch's own."""
    found: list[type] = [Work]
    for kind in found:
        subclasses: list[type] = kind.__subclasses__()
        found.extend(sub for sub in subclasses if sub.__module__.startswith("torch."))
    return found
