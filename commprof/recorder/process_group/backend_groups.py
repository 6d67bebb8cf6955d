"""Finds the process group of a Backend whose methods a program calls directly."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from commprof.program_exceptions import pass_on
from commprof.recorder.process_group.groups import Group, Groups, live_groups


class BackendGroups:
    """Finds the group of a Backend. A Backend that belongs to no group of torch.distributed is a group of its own.

    Each Backend is identified by its address while the object is alive, and no reference is kept, as in
    :class:`~commprof.recorder.process_group.groups.Groups`.

    Args:
        groups: The process groups of this process.
        on_forget: A function that is called with the address of a Backend when its entry is removed.
    """

    def __init__(self, groups: Groups, on_forget: Callable[[int], None]) -> None:
        self._groups = groups
        self._on_forget = on_forget
        self._known: dict[int, Group] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._lone = 0

    def find(self, backend: Any) -> Group:
        """Return the group that ``backend`` belongs to."""
        address = id(backend)
        group = self._known.get(address)
        if group is None:
            pg = group_of(backend)
            if pg is None:
                group = self._describe(backend)
                self._groups.add(group)
            else:
                group = self._groups.find(pg)
            self._references[address] = weakref.ref(backend, lambda _: self._forget(address))
            self._known[address] = group
        return group

    def retire(self, group: Group) -> None:
        """Forget the backends of ``group``, because they belong to a different group from now on."""
        for address in [a for a, known in self._known.items() if known is group]:
            self._forget(address)

    def _forget(self, address: int) -> None:
        self._known.pop(address, None)
        self._references.pop(address, None)
        self._on_forget(address)

    def _describe(self, backend: Any) -> Group:
        self._lone += 1
        name = str(backend.name())
        return Group(f"{name}:{self._lone}", None, list(range(backend.size())), backend.rank(), {"cpu": name})


def group_of(backend: Any) -> Any:
    """Return the live ProcessGroup that ``backend`` belongs to; None if the backend was created without a group."""
    for pg in live_groups():
        for device in getattr(pg, "_device_types", ()):
            try:
                if pg._get_backend(device) is backend:
                    return pg
            except Exception as error:
                pass_on(error)
    return None
