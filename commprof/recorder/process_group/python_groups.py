"""Calls torch's own method from a wrapper for groups whose class a program defines in Python.

Note [classes made in Python]: torch's methods are virtual. On an object of a Python class, C++ first asks Python whether
that class has a method of this name, finds our wrapper in the base class, takes it for the program's own and calls it, again
and again. pybind knows this from methods that call ``super()``: where the function that runs has the method's name, and this
very object for its first argument, nobody is asked. So there the call goes through a function of that name. On torch's own
classes C++ asks nobody, and nothing lies between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def caller_of(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function called ``name`` that calls ``function``, the method of a class of torch's, on what it is given."""

    def call_beneath(group: Any, /, *args: Any, **kwargs: Any) -> Any:
        return function(group, *args, **kwargs)

    call_beneath.__code__ = call_beneath.__code__.replace(co_name=name)
    return call_beneath
