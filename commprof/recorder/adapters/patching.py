"""Installs wrappers around a framework's functions, and removes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from commprof import hooks
from commprof.schema import Purpose


class Patches:
    """The wrappers that one adapter has installed, in the order of installation."""

    def __init__(self) -> None:
        self._installed: list[tuple[Any, str, Any, Any]] = []

    def wrap(self, owner: Any, path: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
        """Replace the function at ``path`` (``function`` or ``Class.method``) within ``owner`` by its wrapper.

        An inherited method is not wrapped; only the class that defines the method can be patched. Static
        methods and class methods keep their kind.

        Returns:
            Whether the function exists.
        """
        *parents, name = path.split(".")
        for parent in parents:
            owner = vars(owner).get(parent)
            if owner is None:
                return False
        original = vars(owner).get(name)
        if isinstance(original, staticmethod | classmethod):
            wrapper: Any = type(original)(_dressed(original.__func__, wrap))
        elif callable(original):
            wrapper = _dressed(original, wrap)
        else:
            return False
        setattr(owner, name, wrapper)
        self._installed.append((owner, name, original, wrapper))
        return True

    def remove(self) -> None:
        """Restore each original function, unless other code has wrapped the wrapper since."""
        for owner, name, original, wrapper in reversed(self._installed):
            if vars(owner).get(name) is wrapper:
                setattr(owner, name, original)
        self._installed.clear()


def _dressed(original: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    return functools.wraps(original)(wrap(original))


def tagged(original: Callable[..., Any], tag: hooks.tag) -> Callable[..., Any]:
    """Return a wrapper of ``original`` that issues its collectives under ``tag``.

    Some outer tags remain in effect. An outer tag with the same purpose is more specific. An outer tag of an
    access to whole parameters or of a checkpoint remains because everything that is gathered within it is
    gathered for the program.
    """
    stay = {tag.purpose, Purpose.PARAMETER_ACCESS.value, Purpose.CHECKPOINT.value}

    def call(*args: Any, **kwargs: Any) -> Any:
        outer = hooks.current_tag()
        if outer is not None and outer.purpose in stay:
            return original(*args, **kwargs)
        with tag:
            return original(*args, **kwargs)

    return call


def tagged_by_default(original: Callable[..., Any], tag: hooks.tag) -> Callable[..., Any]:
    """Return a wrapper of ``original`` that issues its collectives under ``tag``, unless an outer tag is open."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if hooks.current_tag() is not None:
            return original(*args, **kwargs)
        with tag:
            return original(*args, **kwargs)

    return call
