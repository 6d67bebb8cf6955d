"""Detects that process groups are created, destroyed, aborted or reconfigured, by wrapping the functions that do it."""

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

    ``shrink_group`` needs no wrapper: it destroys the old group, aborts others, and makes a new one.

    Args:
        on_init: called with one of the new groups.
        before_destroy: called with the name of the group that will be destroyed (None: all of them) while it is still
            there, and with whether its peers are expected to take part.
        on_destroy: called with the name of the group that was destroyed, None for all.
        before_reconfigure: called with a group that will be given other members in place.
        on_reconfigure: called with that group, with what names its new communicator on all its members, and with what
            ``before_reconfigure`` returned.
        on_fault: called with what one of these raised.
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
        """Put the wrappers in place. A program that has imported the functions by name before keeps torch's own."""
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
        """Remove the wrappers, unless other code has wrapped ours since."""
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
