"""The modules that contain the parameters, and the order in which a training step runs these modules.

A parameter list gives the names of the modules, but not their order. The rules make three assumptions. Each module runs
once per forward pass, at the position of its first parameter. The backward pass runs the modules in reverse order. A
module that only numbers its children is a list and does not run. A real run of the model may have another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from commprof.requested.parameters import Parameter


class Module(NamedTuple):
    """A module of the model.

    Attributes:
        name: The qualified name. It is empty for the model itself.
        parameters: The module's own parameters in model order. A leaf also has the parameters of its descendants.
        children: The child modules, in model order.
        runs: Whether the module is called. A module list is not called, because it only contains its children.
    """

    name: str
    parameters: tuple[Parameter, ...]
    children: tuple[Module, ...]
    runs: bool


class Visit(NamedTuple):
    """The event that a module is entered (``enters``) or left, in the ``forward`` or the backward pass."""

    module: Module
    enters: bool
    forward: bool


def module_tree(
    parameters: Sequence[Parameter], is_leaf: Callable[[str], bool] = lambda name: False
) -> Module:
    """Return the model that contains ``parameters``, as a tree of modules.

    Args:
        parameters: All parameters of the model, in model order.
        is_leaf: A function that returns whether the module of a given name is one unit with its descendants.
    """
    return _module("", [(parameter.name.split("."), parameter) for parameter in parameters], is_leaf)


def _module(name: str, contents: list[tuple[list[str], Parameter]], is_leaf: Callable[[str], bool]) -> Module:
    if name and is_leaf(name):
        return Module(name, tuple(parameter for _, parameter in contents), (), True)
    own = tuple(parameter for path, parameter in contents if len(path) == 1)
    inner: dict[str, list[tuple[list[str], Parameter]]] = {}
    for path, parameter in contents:
        if len(path) > 1:
            inner.setdefault(path[0], []).append((path[1:], parameter))
    children = tuple(
        _module(f"{name}.{child}" if name else child, within, is_leaf) for child, within in inner.items()
    )
    only_numbers = bool(name) and not own and all(child.isdecimal() for child in inner)
    return Module(name, own, children, not only_numbers)


def training_visits(model: Module) -> list[Visit]:
    """Return the visits of one forward and one backward pass through ``model``.

    The backward pass does not reach a module if neither the module nor any module before it is trained.
    """
    return [*_forward(model), *_backward(model, _untrained_start(model))]


def _forward(module: Module) -> list[Visit]:
    inner = [visit for child in module.children for visit in _forward(child)]
    if not module.runs:
        return inner
    return [Visit(module, True, True), *inner, Visit(module, False, True)]


def _backward(module: Module, unreached: frozenset[str]) -> list[Visit]:
    if module.name in unreached:
        return []
    inner = [visit for child in reversed(module.children) for visit in _backward(child, unreached)]
    if not module.runs:
        return inner
    return [Visit(module, True, False), *inner, Visit(module, False, False)]


def _untrained_start(model: Module) -> frozenset[str]:
    unreached = []
    for visit in _forward(model):
        if visit.enters and _trains(visit.module):
            if any(parameter.requires_grad for parameter in visit.module.parameters):
                break
        elif visit.enters:
            unreached.append(visit.module.name)
    return frozenset(unreached)


def _trains(module: Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters) or any(
        _trains(child) for child in module.children
    )
