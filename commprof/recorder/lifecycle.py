"""Noticing that process groups are made and destroyed, by wrapping the two functions of torch.distributed that do it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from commprof.recorder.groups import live_groups


class GroupLifecycle:
    """Wraps init_process_group and destroy_process_group.

    Args:
        on_init: called with one of the new groups.
        before_destroy: called with the name of the group that will be destroyed, None for all, while it is still there.
        on_destroy: called with the name of the group that was destroyed, None for all.
        on_fault: called with what one of these raised.
    """

    def __init__(
        self,
        on_init: Callable[[Any], object],
        before_destroy: Callable[[str | None], None],
        on_destroy: Callable[[str | None], None],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._on_init = on_init
        self._before_destroy = before_destroy
        self._on_destroy = on_destroy
        self._on_fault = on_fault
        self._patched: list[tuple[Any, str, Any, Any]] = []

    def install(self) -> None:
        """Put the wrappers in place. A program that has imported the functions by name before keeps torch's own."""
        self._patch("init_process_group", self._wrap_init)
        self._patch("destroy_process_group", self._wrap_destroy)

    def remove(self) -> None:
        """Take the wrappers out, except where somebody else has wrapped ours since."""
        for module, name, original, wrapper in self._patched:
            if getattr(module, name, None) is wrapper:
                setattr(module, name, original)
        self._patched.clear()

    def _patch(self, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(distributed_c10d, name)
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

    def _wrap_destroy(self, original: Any) -> Any:
        @functools.wraps(original)
        def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
            name = None
            try:
                group = kwargs.get("group", args[0] if args else None)
                if group is not None and group is not dist.GroupMember.WORLD:
                    name = group.group_name
                self._before_destroy(name)
            except Exception as error:
                self._on_fault(error)
            result = original(*args, **kwargs)
            try:
                self._on_destroy(name)
            except Exception as error:
                self._on_fault(error)
            return result

        return destroy_process_group
