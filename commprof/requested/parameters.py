"""The parameters of a model, and functions that select and order them for the rules."""

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
        name: The qualified name.
        numel: The number of elements that a rank has: of the full parameter, or of its shard on the model axis.
        dtype: The element type in the model, such as ``"float32"`` or ``"torch.float32"``.
        param_group: The number of the optimizer parameter group, or -1 or None if the optimizer lacks the parameter.
        requires_grad: Whether the parameter is trained.
        forward_index: The position in ``model.named_parameters()``, or None if it is the position in the list.
        shape: The shape of the tensor on a rank, such as ``"64x32"``. It is empty if it is not known.
        cut: How the tensor is partitioned along the model axis, a value of schema.CUTS, or None if it is not
            partitioned.
        whole_shape: The full shape, if a rank has only a shard of the tensor.
        stages: The numbers of the pipeline stages that have the parameter, such as ``"0,2"``. A plus at the end means
            that the stages keep their copies equal.
        owner_types: The class of the module that owns the parameter, followed by its base classes, such as
            ``"MyNorm,LayerNorm"``. Several owners are separated by semicolons. None if the classes are not known.
        ep_size: For a parameter of an expert, the number of ranks that share the experts of its layer. Otherwise None.
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
        """The qualified name of the module that owns the parameter."""
        return self.name.rpartition(".")[0]

    @property
    def extents(self) -> tuple[int, ...]:
        """The extents in ``shape`` as numbers."""
        return _extents(self.shape)

    @property
    def whole_extents(self) -> tuple[int, ...]:
        """The extents of the full parameter."""
        return _extents(self.whole_shape or self.shape)

    @property
    def whole_numel(self) -> int:
        """The number of elements of the full parameter."""
        return prod(self.whole_extents) if self.whole_shape else self.numel

    @property
    def stage_numbers(self) -> tuple[int, ...]:
        """The numbers of the stages that have the parameter, or only stage 0 if ``stages`` is empty.

        Raises:
            RequestedError: ``stages`` is not a list of numbers.
        """
        numbers = (self.stages or "0").rstrip("+").split(",")
        if not all(each.isdecimal() for each in numbers):
            raise RequestedError(f"parameter {self.name!r} has the stages {self.stages!r}; expected 0,2")
        return tuple(map(int, numbers))

    @property
    def is_tied(self) -> bool:
        """Return whether several stages have copies of the parameter and keep the copies equal."""
        return bool(self.stages) and str(self.stages).endswith("+")


def _extents(shape: str) -> tuple[int, ...]:
    extents = [each for each in shape.split("x") if each]
    if not all(each.isdecimal() for each in extents):
        raise RequestedError(f"a parameter has the shape {shape!r}; expected extents such as 64x32")
    return tuple(map(int, extents))


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element of ``dtype``, a name with or without ``torch.``."""
    size = ITEM_BYTES.get(dtype.removeprefix("torch."))
    if size is None:
        raise RequestedError(f"element type {dtype!r} is not known; expected one of: {', '.join(ITEM_BYTES)}")
    return size


def check_parameters(parameters: Sequence[Parameter]) -> None:
    """Raise RequestedError if a name occurs twice or a size is negative."""
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
    """Return the parameters in the order of ``model.named_parameters()``."""
    if any(parameter.forward_index is None for parameter in parameters):
        return list(parameters)
    return sorted(parameters, key=lambda parameter: parameter.forward_index or 0)


def of_one_rank(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Return the part of ``parameters`` that one rank has.

    ``parameters`` contains the experts of all ranks. The result keeps the first expert parameter of each position in
    the model.
    """
    of_rank: list[Parameter] = []
    places = set()
    for each in parameters:
        if each.ep_size is None or each.forward_index is None or each.forward_index not in places:
            of_rank.append(each)
        if each.ep_size is not None:
            places.add(each.forward_index)
    return of_rank


def ep_sizes(parameters: Iterable[Parameter]) -> list[int | None]:
    """Return the distinct ``ep_size`` values of ``parameters``, where None represents the dense parameters."""
    return list(dict.fromkeys(each.ep_size for each in parameters))


def trained_groups(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """Return the trained parameters of each optimizer parameter group, in the order of the group numbers.

    Each group keeps the order of ``parameters``. Groups without a trained parameter are left out, because they send
    nothing.
    """
    groups: dict[int, list[Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad and parameter.param_group is not None and parameter.param_group >= 0:
            groups.setdefault(parameter.param_group, []).append(parameter)
    return [groups[number] for number in sorted(groups)]


def in_gradient_order(
    parameters: Sequence[Parameter], gradient_order: Sequence[str]
) -> tuple[list[Parameter], list[str]]:
    """Return ``parameters`` in the order of their gradients, and the names of parameters without a gradient.

    Raises:
        RequestedError: ``gradient_order`` repeats a name, or contains a name that is not in ``parameters``.
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
