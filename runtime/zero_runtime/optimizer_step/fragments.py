"""What an optimizer holds of each parameter, told by the parameter's name: the unit of checkpoints.

The torch optimizer works on *masters*: the parameters themselves, fp32 copies of them, or flat fp32 pieces into which
parts of many parameters are laid. Whatever the stage, a master is a tensor and a list of the parts in it, and that is
all that saving and loading need: a part that one rank saves may be read by another rank, in another layout::

    stage 0   master = one parameter          parts: (weight, elements 0..n)
    stage 2   master = a rank's flat piece    parts: (weight, elements 600..n) (bias, elements 0..m) padding

A wrapper of an optimizer says which masters it has (``held``); :func:`fragments_of` and :func:`load` do the rest. Padding
belongs to no part, and is never saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

from zero_runtime.errors import CheckpointError

# How an update is computed, not what it computes with: never taken from a checkpoint.
IMPLEMENTATION: Final = ("foreach", "fused", "capturable", "differentiable")
Scalar = bool | int | float | str | None


class Part(NamedTuple):
    """Consecutive elements of one parameter within a master. Counts are elements.

    Attributes:
        name: of the parameter.
        parameter: the model's parameter; at stage 3 it may be empty at the moment.
        group: its param group.
        start: first element within the flattened parameter.
        numel: elements.
        offset: first element within the flattened master.
    """

    name: str
    parameter: torch.nn.Parameter
    group: int
    start: int
    numel: int
    offset: int


class Master(NamedTuple):
    """A tensor that the torch optimizer updates, and what it is made of. What no part covers is padding."""

    tensor: torch.Tensor
    parts: tuple[Part, ...]


class NumberTensor(NamedTuple):
    """A tensor of one element in an optimizer's state, such as ``step``; 0-D, or of another ``shape``."""

    value: bool | int | float
    dtype: torch.dtype
    shape: tuple[int, ...] = ()


class Fragment(NamedTuple):
    """Consecutive elements of one parameter with their share of the optimizer's state.

    Attributes:
        name, parameter, group, start, numel: as in :class:`Part`.
        master: the elements, 1-D; where they are a whole tensor that is not contiguous, that tensor itself.
        state: the optimizer's state tensors that have an element for each of the master's, cut alike.
        scalars: its state values that are one number, or none.
        whole: its state tensors of other shapes; only where the part is the whole parameter.
    """

    name: str
    parameter: torch.nn.Parameter
    group: int
    start: int
    numel: int
    master: torch.Tensor
    state: Mapping[str, torch.Tensor]
    scalars: Mapping[str, Scalar | NumberTensor]
    whole: Mapping[str, torch.Tensor]


class Elements(NamedTuple):
    """Consecutive elements that may be in a file: ``read`` makes a 1-D tensor of them, of dtype ``dtype``."""

    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


class Stored(NamedTuple):
    """A :class:`Fragment` whose tensors are read one by one, when each is wanted."""

    name: str
    parameter: torch.nn.Parameter
    group: int
    start: int
    numel: int
    master: Elements
    state: Mapping[str, Elements]
    scalars: Mapping[str, Scalar | NumberTensor]
    whole: Mapping[str, torch.Tensor]


class Source(Protocol):
    """Where :func:`load` takes values from: a checkpoint that is open."""

    def has(self, name: str) -> bool:
        """Whether parameter ``name`` is in it."""

    def read_master(self, name: str, start: int, target: torch.Tensor) -> None:
        """Fill the 1-D ``target`` with elements from ``start`` of parameter ``name``."""

    def state_dtypes(self, name: str) -> Mapping[str, torch.dtype]:
        """The state tensors kept for parameter ``name``, element by element."""

    def read_state(self, state: str, name: str, start: int, target: torch.Tensor) -> None:
        """As ``read_master``, of one state tensor."""

    def scalars(self, name: str) -> Mapping[str, Scalar | NumberTensor]:
        """The state values of parameter ``name`` that are one number, or none."""

    def whole(self, name: str) -> Mapping[str, torch.Tensor]:
        """The state tensors of parameter ``name`` of other shapes."""


def fragments_of(
    states: Mapping[torch.Tensor, Mapping[str, Any]], masters: Sequence[Master]
) -> Iterator[Fragment]:
    """Every part of ``masters`` with its share of ``states``, an optimizer's, in order.

    Raises:
        CheckpointError: a state value that cannot be told by parameter.
    """
    for master in masters:
        values = states.get(master.tensor, {})
        elementwise, scalars, whole = _sorted_state(values, master)
        for part in master.parts:
            yield Fragment(
                *part[:5],
                master=_cut(master.tensor, part),
                state={name: _cut(value, part) for name, value in elementwise.items()},
                scalars=scalars,
                whole=whole,
            )


def stored(fragment: Fragment) -> Stored:
    """``fragment``, whose tensors are in memory, as one whose tensors are read."""
    return Stored(
        *fragment[:5],
        master=_elements(fragment.master),
        state={name: _elements(tensor) for name, tensor in fragment.state.items()},
        scalars=fragment.scalars,
        whole=fragment.whole,
    )


def _elements(tensor: torch.Tensor) -> Elements:
    return Elements(tensor.dtype, lambda: tensor)


def scalars_of(values: Mapping[str, Any], master: Master) -> Mapping[str, Scalar | NumberTensor]:
    """The state values of ``master`` that are one number, or none, where those with an element for each are elsewhere.

    Raises:
        CheckpointError: a state value that cannot be told by parameter.
    """
    return _sorted_state(values, master)[1]


@torch.no_grad()
def load(
    optimizer: torch.optim.Optimizer, masters: Sequence[Master], source: Source, states: bool = True
) -> None:
    """Fill ``masters`` in place and, with ``states``, make the state of ``optimizer`` what ``source`` has.

    What ``source`` has not keeps its value; a state tensor that it has for some parts only is zero in the others.
    """
    for master in masters:
        known = [part for part in master.parts if source.has(part.name)]
        with _Flat(master.tensor) as flat:
            for part in known:
                source.read_master(part.name, part.start, flat.narrow(0, part.offset, part.numel))
        if states and known:
            _load_state(optimizer, master.tensor, known, source)


def _load_state(
    optimizer: torch.optim.Optimizer, tensor: torch.Tensor, parts: Sequence[Part], source: Source
) -> None:
    if tensor.numel() == 0:
        # Stages disagree on whether it has a state; the optimizer makes one when it wants it.
        optimizer.state.pop(tensor, None)
        return
    names = {part.name: None for part in parts}
    dtypes = {state: dtype for name in names for state, dtype in source.state_dtypes(name).items()}
    values: dict[str, Any] = {}
    for name in names:
        for key, value in source.scalars(name).items():
            values[key] = _later(values.get(key), value)
    group = optimizer.param_groups[parts[0].group]
    on_device = any(group.get(option) for option in ("capturable", "fused"))
    device = tensor.device if on_device else torch.device("cpu")
    for key, value in values.items():
        if isinstance(value, NumberTensor):
            values[key] = torch.full(value.shape, value.value, dtype=value.dtype, device=device)
    for state, dtype in dtypes.items():
        if state in values:  # one number, that parameters of one element have as an element
            continue
        filled = _zeros_like(
            tensor, tensor.dtype if dtype.is_floating_point else dtype, optimizer.state[tensor].get(state)
        )
        with _Flat(filled) as flat:
            for part in parts:
                if state in source.state_dtypes(part.name):
                    target = flat.narrow(0, part.offset, part.numel)
                    source.read_state(state, part.name, part.start, target)
        values[state] = filled.requires_grad_(False)
    for name in names:
        for state, saved in source.whole(name).items():
            if len(parts) > 1 or parts[0].numel != tensor.numel():
                raise CheckpointError(
                    f"the optimizer's state {state!r} of parameter {name!r} is kept for the whole parameter, and this stage "
                    "gives the optimizer pieces; load it at stage 0, or with load_optimizer_states=False"
                )
            values[state] = saved.to(tensor.device)
    if values:
        optimizer.state[tensor] = values
    else:
        optimizer.state.pop(tensor, None)


def _zeros_like(tensor: torch.Tensor, dtype: torch.dtype, used: Any) -> torch.Tensor:
    """Zeros of the shape of ``tensor``, in the memory of ``used`` where that fits."""
    if isinstance(used, torch.Tensor) and used.shape == tensor.shape and used.dtype is dtype:
        return used.detach().zero_()
    return torch.zeros_like(tensor, dtype=dtype)


def _cut(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    tensor = tensor.detach()
    if part.numel == tensor.numel() and not tensor.is_contiguous():
        return tensor
    return tensor.reshape(-1).narrow(0, part.offset, part.numel)


class _Flat:
    """A tensor as 1-D, to be written to: a view, or a copy that is written back where there can be no view."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()

    def __enter__(self) -> torch.Tensor:
        self._flat = self._tensor.reshape(-1)
        return self._flat

    def __exit__(self, *error: object) -> None:
        if not self._tensor.is_contiguous():
            self._tensor.copy_(self._flat.view(self._tensor.shape))


def _sorted_state(
    values: Mapping[str, Any], master: Master
) -> tuple[dict[str, torch.Tensor], dict[str, Scalar | NumberTensor], dict[str, torch.Tensor]]:
    elementwise: dict[str, torch.Tensor] = {}
    scalars: dict[str, Scalar | NumberTensor] = {}
    whole: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            if value.shape == master.tensor.shape and (value.dim() or name != "step"):
                elementwise[name] = value
            elif value.numel() == 1:
                scalars[name] = NumberTensor(value.item(), value.dtype, tuple(value.shape))
            else:
                whole[name] = value.detach()
        elif value is None or isinstance(value, bool | int | float | str):
            scalars[name] = value
        else:
            raise CheckpointError(
                f"the optimizer's state {name!r} of {master.parts[0].name if master.parts else 'a parameter'!r} is a "
                f"{type(value).__name__}; expected a tensor or a number, which are all that a checkpoint can keep"
            )
    if whole and (len(master.parts) != 1 or master.parts[0].numel != master.tensor.numel()):
        name, value = next(iter(whole.items()))
        raise CheckpointError(
            f"the optimizer's state {name!r} has shape {tuple(value.shape)} for a piece of {tuple(master.tensor.shape)}, "
            "which cannot be told by parameter; use stage 0 with this optimizer"
        )
    return elementwise, scalars, whole


def _later(first: Any, second: Any) -> Any:
    """Of two values of one state, the larger: parameters that joined later have taken fewer steps."""
    numbers = [each.value if isinstance(each, NumberTensor) else each for each in (first, second)]
    if all(isinstance(each, int | float) for each in numbers):
        return first if numbers[0] >= numbers[1] else second
    return second if first is None else first
