"""Detects when process groups are created, destroyed, aborted or reconfigured, by wrapping torch's functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend, ProcessGroup
from torch.distributed import distributed_c10d

from commprof.recorder.process_group.backend_groups import group_of
from commprof.recorder.process_group.groups import live_groups
from commprof.recorder.process_group.handle_waits import unbound
from commprof.recorder.process_group.python_groups import caller_of


class GroupLifecycle:
    """Wraps ``init_process_group``, ``destroy_process_group``, ``_abort_process_group`` and ``reconfigure``.

    ``shrink_group`` needs no wrapper, because it destroys the old group, aborts other groups, and creates a new group.

    Args:
        on_init: A function that is called with one of the new groups.
        before_destroy: A function that is called before a group is destroyed, with the name of the group (None: all
            groups) and whether the other ranks of the group are expected to take part.
        on_destroy: A function that is called with the name of the destroyed group (None: all groups).
        before_reconfigure: A function that is called with a group before the members of the group change in place.
        on_reconfigure: A function that is called after this change, with the group, with the name of its new
            communicator, which is equal on all its members, and with the result of ``before_reconfigure``.
        on_fault: A function that is called with an exception that one of these functions raised.
    """

    def __init__(
        self,
        on_init: Callable[[Any], object],
        before_destroy: Callable[[str | None, bool], None],
        on_destroy: Callable[[str | None], None],
        before_reconfigure: Callable[[Any], Any],
        on_reconfigure: Callable[[Any, Any, Any], None],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._on_init = on_init
        self._before_destroy = before_destroy
        self._on_destroy = on_destroy
        self._before_reconfigure = before_reconfigure
        self._on_reconfigure = on_reconfigure
        self._on_fault = on_fault
        self._patched: list[tuple[Any, str, Any, Any]] = []

    def install(self) -> None:
        """Install the wrappers. A program that imported a function by name earlier keeps torch's function."""
        self._patch("init_process_group", self._wrap_init)
        self._patch("destroy_process_group", lambda original: self._wrap_destroy(original, True))
        self._patch("_abort_process_group", lambda original: self._wrap_destroy(original, False))
        for owner in (ProcessGroup, Backend):
            original = vars(owner).get("reconfigure")  # torch 2.14 and later
            if original is not None:
                wrapper = self._wrap_reconfigure(owner, original)
                setattr(owner, "reconfigure", wrapper)  # noqa: B010 - older versions of torch do not have it
                self._patched.append((owner, "reconfigure", original, wrapper))

    def remove(self) -> None:
        """Remove the wrappers, unless other code has wrapped them since."""
        for owner, name, original, wrapper in self._patched:
            if vars(owner).get(name) is wrapper:
                setattr(owner, name, original)
        self._patched.clear()

    def _patch(self, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(distributed_c10d, name, None)
        if original is None:
            return
        wrapper = wrap(original)
        for module in (dist, distributed_c10d):
            if getattr(module, name, None) is original:
                setattr(module, name, wrapper)
                self._patched.append((module, name, original, wrapper))

    def _wrap_init(self, original: Any) -> Any:
        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            try:
                for group in live_groups()[:1]:
                    self._on_init(group)
            except Exception as error:
                self._on_fault(error)
            return result

        return init_process_group

    def _wrap_destroy(self, original: Any, has_peers: bool) -> Any:
        @functools.wraps(original)
        def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
            name = None
            group = kwargs.get("group", args[0] if args else None)
            if group == dist.GroupMember.NON_GROUP_MEMBER:  # nothing is destroyed on this rank
                return original(*args, **kwargs)
            try:
                if group is not None and group is not dist.GroupMember.WORLD:
                    name = group.group_name
                self._before_destroy(name, has_peers)
            except Exception as error:
                self._on_fault(error)
            result = original(*args, **kwargs)
            try:
                self._on_destroy(name)
            except Exception as error:
                self._on_fault(error)
            return result

        return destroy_process_group

    def _wrap_reconfigure(self, owner: type, original: Any) -> Any:
        function = unbound(original)
        beneath = caller_of("reconfigure", function)

        @functools.wraps(original)
        def reconfigure(issuer: Any, /, *args: Any, **kwargs: Any) -> Any:
            pg = before = None
            try:
                pg = issuer if owner is ProcessGroup else group_of(issuer)
                before = None if pg is None else self._before_reconfigure(pg)
            except Exception as error:
                self._on_fault(error)
            result = (function if type(issuer) is owner else beneath)(issuer, *args, **kwargs)
            try:
                if before is not None:
                    options = kwargs.get("opts", args[0] if args else None)
                    self._on_reconfigure(pg, getattr(options, "uuid", None), before)
            except Exception as error:
                self._on_fault(error)
            return result

        return reconfigure
