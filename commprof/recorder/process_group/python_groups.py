"""Calls torch's own method from a wrapper for groups whose class a program defines in Python.

Note [classes made in Python]: torch's methods are virtual. For an object of a Python class, pybind first looks for a
Python method of this name. It finds the recorder's wrapper in the base class, takes it for an override by the program
and calls it: an infinite recursion. pybind breaks such a recursion for methods that call ``super()``: it skips the
lookup if the running function has the method's name and the same object as its first argument. So for such classes the
wrapper calls torch's method through a function of that name. For torch's own classes pybind does no lookup, and the
wrapper calls the method directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def caller_of(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function called ``name`` that passes its arguments to ``function``, a method of a class of torch."""

    def call_beneath(group: Any, /, *args: Any, **kwargs: Any) -> Any:
        return function(group, *args, **kwargs)

    call_beneath.__code__ = call_beneath.__code__.replace(co_name=name)
    return call_beneath
