"""The process groups of this process, identified by name and rank list.

The recorder never keeps a reference to a ProcessGroup, because the group would then outlive torch's teardown.
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
        self.ranks = ranks  # empty where torch does not say who the members are
        self.rank = rank
        self.size = len(ranks) if size is None else size
        self.backends = backends
        self.addresses: set[int] = set()  # of its live ProcessGroups, in :class:`Groups`
        self.accelerated = False  # it has carried tensors of a GPU
        self.collectives = itertools.count()  # issue order, collectives
        self.messages = itertools.count()  # issue order, sends and receives
        self.coalesce_id = 0  # of the open coalescing block; 0 outside
        # What the backend counts beyond one per call; see commprof.recorder.coverage.sequence.
        self.extra = 0
        self.raised = 0  # calls that raised, of which the backend may have counted some
        self.unseen = 0
        self.dispatched: DispatchCount | None = None  # by torch's hooks; see SelfCheck.add

    def global_rank(self, group_rank: int | None) -> int:
        """The global rank of the group's ``group_rank``; -1 for none or one that the group does not have."""
        if group_rank is None or not 0 <= group_rank < len(self.ranks):
            return -1
        return self.ranks[group_rank]

    def backend_for(self, device_type: str | None) -> str | None:
        """The backend that serves tensors on ``device_type``; the only or first one when the call has no tensor."""
        if device_type in self.backends:
            return self.backends[device_type]
        return next(iter(self.backends.values()), None)

    def row(self) -> dict[str, Any]:
        """The group as it stands in the events file."""
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

    An address is good as a key only while its object lives, so a weak reference takes the entry out when it dies.
    ``on_new`` gets the ProcessGroup as well, None where there is none.
    ``on_forget`` is told, so that whoever keys by the same address can do the same.
    """

    def __init__(self, on_new: Callable[[Group, Any], None], on_forget: Callable[[int], None]) -> None:
        self.known: dict[int, Group] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._by_name: dict[str, Group] = {}
        self._generations: dict[str, int] = {}
        # See :meth:`renew`: by torch's name of the group.
        self._renewed: dict[str, tuple[str, tuple[int, int]]] = {}
        self._all: list[Group] = []
        self._unnamed = 0
        self._on_new = on_new
        self._on_forget = on_forget

    def find(self, pg: Any) -> Group:
        """The group of ``pg``, read from torch at the first sight of it."""
        address = id(pg)
        group = self.known.get(address)
        if group is not None:
            return group
        name = pg.group_name
        group = self._by_name.get(name)
        if group is not None and (group.rank, group.size) != (pg.rank(), pg.size()):
            self.retire(name)  # by a function that the program had imported by name before recording began
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
        """The group that torch calls ``name`` now."""
        group = self._by_name.get(name)
        return self.find(_resolve_process_group(cast("c10d.GroupName", name))) if group is None else group

    def world(self) -> Group:
        """The group of all ranks."""
        return self.find(c10d._get_default_group())

    def add(self, group: Group) -> None:
        """Take up a group that is none of torch.distributed's."""
        self._all.append(group)
        self._on_new(group, None)

    def _forget(self, address: int) -> None:
        group = self.known.pop(address, None)
        if group is not None:
            group.addresses.discard(address)
        self._references.pop(address, None)
        self._on_forget(address)

    def _own_name(self) -> str:
        """The name of a ProcessGroup that its program made itself and did not name: each is a group of its own."""
        self._unnamed += 1
        return f"unnamed:{self._unnamed}"

    def unique_name(self, name: str) -> str:
        """The name under which the group that torch calls ``name`` now is recorded."""
        group = self._by_name.get(name)
        return self._recorded_name(name) if group is None else group.name

    def every(self) -> list[Group]:
        """Every group that was ever seen, destroyed ones included."""
        return list(self._all)

    def retire(self, name: str | None = None) -> None:
        """The group called ``name``, or every group, was destroyed; its name may come again for a new one."""
        for retired in list(self._by_name) if name is None else [name]:
            group = self._by_name.pop(retired, None)
            if group is None:
                continue
            self._generations[retired] = self._generations.get(retired, 1) + 1
            self._forget_group(group)
        for renewed in list(self._renewed) if name is None else [name]:
            self._renewed.pop(renewed, None)

    def renew(self, pg: Any, communicator: Any, before: tuple[int, int]) -> Group | None:
        """``pg`` was given other members in place: what it issues from now on belongs to another group of the trace.

        Args:
            pg: the ProcessGroup, which stays the same object and keeps its name.
            communicator: names the new communicator, equally on all its members.
            before: rank and size of ``pg`` before.

        Returns:
            The group that it was until now, if it had issued anything.
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
            ranks = list(range(size))  # not made through torch.distributed
        if name in self._renewed and self._renewed[name][1] != (rank, size):
            ranks = []  # torch still says who the members were at first
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
    # torch counts names from 0 again after destroy_process_group; a second group of a name gets a suffix, on every rank.
    return name if generation == 1 else f"{name}#{generation}"


def backends_by_device(pg: Any) -> dict[str, str]:
    """Which backend of ``pg`` serves which device type, in torch's order."""
    backends: dict[str, str] = {}
    for device in getattr(pg, "_device_types", ()):
        try:
            backends[device.type] = pg._get_backend(device).name()
        except Exception as error:
            pass_on(error)
    return backends


def live_groups(name: str | None = None) -> list[Any]:
    """Every ProcessGroup of this process that torch has registered, or the one called ``name``, if there is one.

    For the moment only: never keep one.
    """
    if name is None:
        return list(c10d._world.pg_names)
    try:  # among thousands of groups, a search takes as long as hundreds of collectives
        pg: Any = _resolve_process_group(cast("c10d.GroupName", name))
    except RuntimeError:
        return []
    return [pg] if pg in c10d._world.pg_names else []
