"""The process groups of this process, identified by name and rank list.

The recorder never keeps a reference to a ProcessGroup, because the ProcessGroup would then outlive torch's teardown.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import _resolve_process_group

from commprof.program_exceptions import pass_on
from commprof.recorder.coverage.dispatch_hooks import DispatchCount
from commprof.schema import format_ranks


class Group:
    """One process group of this process: its attributes, and counters of its calls."""

    __slots__ = (
        "accelerated",
        "addresses",
        "backends",
        "coalesce_id",
        "collectives",
        "desc",
        "dispatched",
        "extra",
        "messages",
        "name",
        "raised",
        "rank",
        "ranks",
        "size",
        "unseen",
    )

    def __init__(
        self,
        name: str,
        desc: str | None,
        ranks: list[int],
        rank: int,
        backends: dict[str, str],
        size: int | None = None,
    ):
        self.name = name
        self.desc = desc
        self.ranks = ranks  # empty if torch does not report the members
        self.rank = rank
        self.size = len(ranks) if size is None else size
        self.backends = backends
        self.addresses: set[int] = set()  # the addresses of its live ProcessGroups; see :class:`Groups`
        self.accelerated = False  # whether the group has transferred tensors of a GPU
        self.collectives = itertools.count()  # numbers the collectives in issue order
        self.messages = itertools.count()  # numbers the sends and receives in issue order
        self.coalesce_id = 0  # the number of the open coalescing block; 0 outside a block
        # The number that the backend counts in addition to one per call; see commprof.recorder.coverage.sequence.
        self.extra = 0
        self.raised = 0  # the number of calls that raised; the backend may have counted some of them
        self.unseen = 0
        self.dispatched: DispatchCount | None = None  # the count by torch's hooks; see SelfCheck.add

    def global_rank(self, group_rank: int | None) -> int:
        """Return the global rank of the group's ``group_rank``; -1 for None or a rank that is not in the group."""
        if group_rank is None or not 0 <= group_rank < len(self.ranks):
            return -1
        return self.ranks[group_rank]

    def backend_for(self, device_type: str | None) -> str | None:
        """Return the backend for tensors on ``device_type``; the first backend if the call has no tensor."""
        if device_type in self.backends:
            return self.backends[device_type]
        return next(iter(self.backends.values()), None)

    def row(self) -> dict[str, Any]:
        """Return the row of the group in the events file."""
        return {
            "pg": self.name,
            "group_desc": self.desc,
            "group_ranks": format_ranks(self.ranks),
            "group_size": self.size,
            "group_rank": self.rank,
            "backend": ",".join(f"{device}:{backend}" for device, backend in self.backends.items()) or None,
        }


class Groups:
    """The process groups that this process has used, found by the address of a live ProcessGroup.

    An address is a valid key only while its object is alive. A weak reference removes the entry when the object dies.

    Args:
        on_new: A function that is called with a new group and its ProcessGroup; None if there is no ProcessGroup.
        on_forget: A function that is called with an address when its entry is removed, so that other tables with this
            key can also remove their entries.
    """

    def __init__(self, on_new: Callable[[Group, Any], None], on_forget: Callable[[int], None]) -> None:
        self.known: dict[int, Group] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._by_name: dict[str, Group] = {}
        self._generations: dict[str, int] = {}
        # By torch's name of the group: its current name, and its first rank and size; see :meth:`renew`.
        self._renewed: dict[str, tuple[str, tuple[int, int]]] = {}
        self._all: list[Group] = []
        self._unnamed = 0
        self._on_new = on_new
        self._on_forget = on_forget

    def find(self, pg: Any) -> Group:
        """Return the group of ``pg``. At the first use of ``pg``, its attributes are read from torch."""
        address = id(pg)
        group = self.known.get(address)
        if group is not None:
            return group
        name = pg.group_name
        group = self._by_name.get(name)
        if group is not None and (group.rank, group.size) != (pg.rank(), pg.size()):
            # The old group was destroyed by a function that the program imported by name before recording began.
            self.retire(name)
            group = None
        if group is None:
            group = self._read(pg, name or self._own_name())
            if name:
                self._by_name[name] = group
            self._all.append(group)
            self._on_new(group, pg)
        self._references[address] = weakref.ref(pg, lambda _: self._forget(address))
        self.known[address] = group
        group.addresses.add(address)
        return group

    def named(self, name: str) -> Group:
        """Return the group that currently has ``name`` in torch."""
        group = self._by_name.get(name)
        return self.find(_resolve_process_group(cast("c10d.GroupName", name))) if group is None else group

    def world(self) -> Group:
        """Return the group of all ranks."""
        return self.find(c10d._get_default_group())

    def add(self, group: Group) -> None:
        """Add a group that does not belong to torch.distributed."""
        self._all.append(group)
        self._on_new(group, None)

    def _forget(self, address: int) -> None:
        group = self.known.pop(address, None)
        if group is not None:
            group.addresses.discard(address)
        self._references.pop(address, None)
        self._on_forget(address)

    def _own_name(self) -> str:
        """Return a new name for a ProcessGroup that the program created without a name. Each is a separate group."""
        self._unnamed += 1
        return f"unnamed:{self._unnamed}"

    def unique_name(self, name: str) -> str:
        """Return the recorded name of the group that currently has ``name`` in torch."""
        group = self._by_name.get(name)
        return self._recorded_name(name) if group is None else group.name

    def every(self) -> list[Group]:
        """Return every group that this process has used, including destroyed groups."""
        return list(self._all)

    def retire(self, name: str | None = None) -> None:
        """Remove the destroyed group ``name`` (None: every group). A new group may get the same name in torch."""
        for retired in list(self._by_name) if name is None else [name]:
            group = self._by_name.pop(retired, None)
            if group is None:
                continue
            self._generations[retired] = self._generations.get(retired, 1) + 1
            self._forget_group(group)
        for renewed in list(self._renewed) if name is None else [name]:
            self._renewed.pop(renewed, None)

    def renew(self, pg: Any, communicator: Any, before: tuple[int, int]) -> Group | None:
        """Handle that the members of ``pg`` changed in place. Later calls belong to a different group of the trace.

        Args:
            pg: The ProcessGroup, which stays the same object and keeps its name.
            communicator: A text that names the new communicator, and that is equal on all its members.
            before: The rank and the size of ``pg`` before the change.

        Returns:
            The group of the earlier calls; None if the recorder did not know the group.
        """
        name = pg.group_name
        group = self._by_name.pop(name, None) if name else self.known.get(id(pg))
        _, first = self._renewed.get(name, ("", before))
        self._renewed[name] = f"{name}@{communicator}", first
        if group is not None:
            self._forget_group(group)
        return group

    def _forget_group(self, group: Group) -> None:
        for address in list(group.addresses):
            self._forget(address)

    def _read(self, pg: Any, name: str) -> Group:
        rank, size = pg.rank(), pg.size()
        try:
            ranks = list(c10d.get_process_group_ranks(pg))
        except Exception as error:
            pass_on(error)
            ranks = list(range(size))  # the group was not created through torch.distributed
        if name in self._renewed and self._renewed[name][1] != (rank, size):
            ranks = []  # torch still reports the original members
        desc = getattr(pg, "group_desc", None)
        return Group(
            self._recorded_name(name),
            None if desc in ("", "undefined") else desc,
            ranks,
            rank,
            backends_by_device(pg),
            size,
        )

    def _recorded_name(self, name: str) -> str:
        if name in self._renewed:
            return self._renewed[name][0]
        return _numbered(name, self._generations.get(name, 1))


def _numbered(name: str, generation: int) -> str:
    # After destroy_process_group, torch numbers group names from 0 again. A second group with the same name therefore
    # gets a suffix, on every rank.
    return name if generation == 1 else f"{name}#{generation}"


def backends_by_device(pg: Any) -> dict[str, str]:
    """Return the name of the backend of ``pg`` for each device type, in torch's order."""
    backends: dict[str, str] = {}
    for device in getattr(pg, "_device_types", ()):
        try:
            backends[device.type] = pg._get_backend(device).name()
        except Exception as error:
            pass_on(error)
    return backends


def live_groups(name: str | None = None) -> list[Any]:
    """Return every ProcessGroup that torch has registered in this process, or only the ProcessGroup called ``name``.

    Callers must not keep a reference to a ProcessGroup.
    """
    if name is None:
        return list(c10d._world.pg_names)
    try:  # a search through thousands of groups would take as long as hundreds of collectives
        pg: Any = _resolve_process_group(cast("c10d.GroupName", name))
    except RuntimeError:
        return []
    return [pg] if pg in c10d._world.pg_names else []
