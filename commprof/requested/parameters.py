"""The parameters of a model, and the lists of them that the rules need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Final, NamedTuple

from commprof.requested.errors import RequestedError

ITEM_BYTES: Final[dict[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class Parameter(NamedTuple):
    """One parameter of the model, as in the ``parameters`` table.

    Attributes:
        name: qualified name.
        numel: elements.
        dtype: element type in the model, ``"float32"`` or ``"torch.float32"``.
        param_group: number of its optimizer parameter group; -1 or None when the optimizer does not have it.
        requires_grad: whether it is trained.
        forward_index: position in ``model.named_parameters()``; None when that is the position in the list.
        shape: of what a rank holds, ``"64x32"``; empty where it is not known.
        cut: how its tensor is partitioned along the model axis, a value of schema.CUTS; None where it is not.
        whole_shape: its full shape, where a rank holds a shard of it.
        stages: numbers of the pipeline stages that have it, ``"0,2"``, with a plus at the end where they keep copies equal.
        owner_types: the class of the module that owns it, and those that this derives from, ``"MyNorm,LayerNorm"``; of
            several owners with a semicolon between them. None where that is not known.
        ep_size: ranks that share the experts of its layer, where it is an expert's; else None.
    """

    name: str
    numel: int
    dtype: str = "float32"
    param_group: int | None = 0
    requires_grad: bool = True
    forward_index: int | None = None
    shape: str = ""
    cut: str | None = None
    whole_shape: str | None = None
    stages: str | None = None
    owner_types: str | None = None
    ep_size: int | None = None

    @property
    def module(self) -> str:
        """Qualified name of the module that owns it."""
        return self.name.rpartition(".")[0]

    @property
    def extents(self) -> tuple[int, ...]:
        """``shape`` as numbers."""
        return _extents(self.shape)

    @property
    def whole_extents(self) -> tuple[int, ...]:
        """The extents of the full parameter."""
        return _extents(self.whole_shape or self.shape)

    @property
    def whole_numel(self) -> int:
        """Elements of the full parameter."""
        return prod(self.whole_extents) if self.whole_shape else self.numel

    @property
    def stage_numbers(self) -> tuple[int, ...]:
        """The stages that have it; the first alone where ``stages`` is empty.

        Raises:
            RequestedError: ``stages`` has another form.
        """
        numbers = (self.stages or "0").rstrip("+").split(",")
        if not all(each.isdecimal() for each in numbers):
            raise RequestedError(f"parameter {self.name!r} has the stages {self.stages!r}; expected 0,2")
        return tuple(map(int, numbers))

    @property
    def is_tied(self) -> bool:
        """Whether stages keep copies of it equal."""
        return bool(self.stages) and str(self.stages).endswith("+")


def _extents(shape: str) -> tuple[int, ...]:
    extents = [each for each in shape.split("x") if each]
    if not all(each.isdecimal() for each in extents):
        raise RequestedError(f"a parameter has the shape {shape!r}; expected extents such as 64x32")
    return tuple(map(int, extents))


def item_bytes(dtype: str) -> int:
    """Bytes of one element of ``dtype``, which is spelled with or without ``torch.``."""
    size = ITEM_BYTES.get(dtype.removeprefix("torch."))
    if size is None:
        raise RequestedError(f"element type {dtype!r} is not known; known are: {', '.join(ITEM_BYTES)}")
    return size


def check_parameters(parameters: Sequence[Parameter]) -> None:
    """Raise RequestedError unless the names differ and no size is negative."""
    seen: set[str] = set()
    for parameter in parameters:
        if parameter.name in seen:
            raise RequestedError(f"parameter {parameter.name!r} is listed twice; names must be unique")
        if parameter.numel < 0:
            raise RequestedError(
                f"parameter {parameter.name!r} has {parameter.numel} elements; expected 0 or more"
            )
        seen.add(parameter.name)


def in_model_order(parameters: Sequence[Parameter]) -> list[Parameter]:
    """The parameters as ``model.named_parameters()`` lists them."""
    if any(parameter.forward_index is None for parameter in parameters):
        return list(parameters)
    return sorted(parameters, key=lambda parameter: parameter.forward_index or 0)


def of_one_rank(parameters: Iterable[Parameter]) -> list[Parameter]:
    """What one rank holds of ``parameters``, those of the experts of all ranks: of each place in the model the first one."""
    of_rank: list[Parameter] = []
    places = set()
    for each in parameters:
        if each.ep_size is None or each.forward_index is None or each.forward_index not in places:
            of_rank.append(each)
        if each.ep_size is not None:
            places.add(each.forward_index)
    return of_rank


def ep_sizes(parameters: Iterable[Parameter]) -> list[int | None]:
    """The ``ep_size`` of each kind of parameters: None for dense ones, and those of experts."""
    return list(dict.fromkeys(each.ep_size for each in parameters))


def trained_groups(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """The trained parameters of each optimizer parameter group, by group number, in the order given.

    Groups that train nothing are left out: nothing is sent for them.
    """
    groups: dict[int, list[Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad and parameter.param_group is not None and parameter.param_group >= 0:
            groups.setdefault(parameter.param_group, []).append(parameter)
    return [groups[number] for number in sorted(groups)]


def in_gradient_order(
    parameters: Sequence[Parameter], gradient_order: Sequence[str]
) -> tuple[list[Parameter], list[str]]:
    """``parameters`` as their gradients arrived, and the names of those that got none.

    Raises:
        RequestedError: ``gradient_order`` repeats a name, or has one that is not the name of any parameter given.
    """
    by_name = {parameter.name: parameter for parameter in parameters}
    if len(set(gradient_order)) != len(gradient_order):
        twice = next(name for name in gradient_order if gradient_order.count(name) > 1)
        raise RequestedError(f"the gradient order names {twice!r} twice; each gradient arrives once")
    unknown = [name for name in gradient_order if name not in by_name]
    if unknown:
        raise RequestedError(
            f"the gradient order names {unknown[0]!r}, which is no trained parameter of an optimizer group"
        )
    arrived = set(gradient_order)
    return [by_name[name] for name in gradient_order], [name for name in by_name if name not in arrived]
