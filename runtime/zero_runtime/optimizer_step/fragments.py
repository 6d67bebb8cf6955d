"""Fragments: the values and optimizer state of each parameter by its name. A fragment is the unit of checkpoints.

The torch optimizer updates *masters*. These are the parameters themselves, fp32 copies of them, or flat fp32
shards that contain parts of many parameters. At every stage, a master is a tensor and a list of the parts in
it. Saving and loading need nothing else, and another rank may read a saved part in another layout::

    stage 0   master = one parameter          parts: (weight, elements 0..n)
    stage 2   master = a rank's flat shard    parts: (weight, elements 600..n) (bias, elements 0..m) padding

A wrapped optimizer lists its masters (``masters_with_parts``). :func:`fragments_of` and :func:`load` then save
and load them. Padding belongs to no part and is never saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

from zero_runtime.errors import CheckpointError

# These options select an implementation and do not change the result, so they are never loaded from a checkpoint.
IMPLEMENTATION: Final = ("foreach", "fused", "capturable", "differentiable")
Scalar = bool | int | float | str | None


class Part(NamedTuple):
    """A range of one parameter within a master. Counts are in elements.

    Attributes:
        name: The name of the parameter.
        parameter: The model's parameter. At stage 3 the parameter may be released.
        group: The number of the parameter's param group.
        start: The first element of the range within the flattened parameter.
        numel: The number of elements.
        offset: The first element of the range within the flattened master.
    """

    name: str
    parameter: torch.nn.Parameter
    group: int
    start: int
    numel: int
    offset: int


class Master(NamedTuple):
    """A tensor that the torch optimizer updates, and the parts in it. Elements outside of all parts are padding."""

    tensor: torch.Tensor
    parts: tuple[Part, ...]


class NumberTensor(NamedTuple):
    """A tensor of one element in an optimizer's state, such as ``step``. The tensor is 0-D unless ``shape`` is set."""

    value: bool | int | float
    dtype: torch.dtype
    shape: tuple[int, ...] = ()


class Fragment(NamedTuple):
    """A range of one parameter with its part of the optimizer's state.

    Attributes:
        name, parameter, group, start, numel: The same values as in :class:`Part`.
        master: The elements, 1-D. If they are a whole tensor that is not contiguous, this is the tensor itself.
        state: The same range of the optimizer's elementwise state tensors.
        scalars: The state values of the optimizer that are one number or None.
        whole: The state tensors of other shapes. Present only if the part is the whole parameter.
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
    """Elements that may be in a file. ``read`` returns them as a 1-D tensor of dtype ``dtype``."""

    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


class Stored(NamedTuple):
    """A :class:`Fragment` whose tensors are read on demand, one at a time."""

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
    """The source of values for :func:`load`, such as an open checkpoint."""

    def has(self, name: str) -> bool:
        """Return whether the source contains parameter ``name``."""

    def read_master(self, name: str, start: int, target: torch.Tensor) -> None:
        """Fill the 1-D ``target`` with the elements of parameter ``name`` that begin at ``start``."""

    def state_dtypes(self, name: str) -> Mapping[str, torch.dtype]:
        """Return the dtypes of the elementwise state tensors of parameter ``name``."""

    def read_state(self, state: str, name: str, start: int, target: torch.Tensor) -> None:
        """Fill ``target`` with elements of one state tensor, in the same way as ``read_master``."""

    def scalars(self, name: str) -> Mapping[str, Scalar | NumberTensor]:
        """Return the state values of parameter ``name`` that are one number or None."""

    def whole(self, name: str) -> Mapping[str, torch.Tensor]:
        """Return the state tensors of parameter ``name`` whose shape differs from the parameter's."""


def fragments_of(
    states: Mapping[torch.Tensor, Mapping[str, Any]], masters: Sequence[Master]
) -> Iterator[Fragment]:
    """Yield every part of ``masters`` with its part of the optimizer's ``states``, in order.

    Raises:
        CheckpointError: A state value cannot be assigned to a parameter.
    """
    for master in masters:
        values = states.get(master.tensor, {})
        elementwise, scalars, unsplit = _sorted_state(values, master)
        for part in master.parts:
            yield Fragment(
                *part[:5],
                master=_cut(master.tensor, part),
                state={name: _cut(value, part) for name, value in elementwise.items()},
                scalars=scalars,
                whole=unsplit,
            )


def stored(fragment: Fragment) -> Stored:
    """Return ``fragment``, whose tensors are in memory, as a :class:`Stored`."""
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
    """Return the state values of ``master`` that are one number or None, if its elementwise state is not in memory.

    Raises:
        CheckpointError: A state value cannot be assigned to a parameter.
    """
    return _sorted_state(values, master)[1]


@torch.no_grad()
def load(
    optimizer: torch.optim.Optimizer, masters: Sequence[Master], source: Source, states: bool = True
) -> None:
    """Fill ``masters`` in place from ``source``. With ``states``, set the state of ``optimizer`` too.

    Values that ``source`` lacks do not change. If ``source`` has a state tensor for some parts only, the tensor
    is zero in the other parts.
    """
    for master in masters:
        known = [part for part in master.parts if source.has(part.name)]
        with _Flat(master.tensor) as flat:
            for part in known:
                source.read_master(part.name, part.start, flat.narrow(0, part.offset, part.numel))
        if states and known:
            _load_state(optimizer, master.tensor, known, source)


def _load_state(
    optimizer: torch.optim.Optimizer, tensor: torch.Tensor, known_parts: Sequence[Part], source: Source
) -> None:
    if tensor.numel() == 0:
        # Some stages save a state for an empty tensor and some do not. The optimizer creates a state when needed.
        optimizer.state.pop(tensor, None)
        return
    names = {part.name: None for part in known_parts}
    dtypes = {state: dtype for name in names for state, dtype in source.state_dtypes(name).items()}
    values: dict[str, Any] = {}
    for name in names:
        for key, value in source.scalars(name).items():
            values[key] = _later(values.get(key), value)
    group = optimizer.param_groups[known_parts[0].group]
    on_device = any(group.get(option) for option in ("capturable", "fused"))
    device = tensor.device if on_device else torch.device("cpu")
    for key, value in values.items():
        if isinstance(value, NumberTensor):
            values[key] = torch.full(value.shape, value.value, dtype=value.dtype, device=device)
    for state, dtype in dtypes.items():
        # A state that is a number for larger parameters is elementwise state for a parameter of one element.
        if state in values:
            continue
        filled = _zeros_like(
            tensor, tensor.dtype if dtype.is_floating_point else dtype, optimizer.state[tensor].get(state)
        )
        with _Flat(filled) as flat:
            for part in known_parts:
                if state in source.state_dtypes(part.name):
                    target = flat.narrow(0, part.offset, part.numel)
                    source.read_state(state, part.name, part.start, target)
        values[state] = filled.requires_grad_(False)
    for name in names:
        for state, saved in source.whole(name).items():
            if len(known_parts) > 1 or known_parts[0].numel != tensor.numel():
                raise CheckpointError(
                    f"the optimizer's state {state!r} of parameter {name!r} is one tensor for the whole parameter, and this "
                    "stage shards parameters; load it at stage 0, or with load_optimizer_states=False"
                )
            values[state] = saved.to(tensor.device)
    if values:
        optimizer.state[tensor] = values
    else:
        optimizer.state.pop(tensor, None)


def _zeros_like(tensor: torch.Tensor, dtype: torch.dtype, used: Any) -> torch.Tensor:
    """Return zeros of the shape of ``tensor``. Reuse the memory of ``used`` if its shape and dtype match."""
    if isinstance(used, torch.Tensor) and used.shape == tensor.shape and used.dtype is dtype:
        return used.detach().zero_()
    return torch.zeros_like(tensor, dtype=dtype)


def _cut(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    tensor = tensor.detach()
    if part.numel == tensor.numel() and not tensor.is_contiguous():
        return tensor
    return tensor.reshape(-1).narrow(0, part.offset, part.numel)


class _Flat:
    """A tensor as a writable 1-D tensor.

    This is a view, or a copy that is written back if the tensor is not contiguous.
    """

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
    unsplit: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            if value.shape == master.tensor.shape and (value.dim() or name != "step"):
                elementwise[name] = value
            elif value.numel() == 1:
                scalars[name] = NumberTensor(value.item(), value.dtype, tuple(value.shape))
            else:
                unsplit[name] = value.detach()
        elif value is None or isinstance(value, bool | int | float | str):
            scalars[name] = value
        else:
            raise CheckpointError(
                f"the optimizer's state {name!r} of {master.parts[0].name if master.parts else 'a parameter'!r} is a "
                f"{type(value).__name__}; expected a tensor, a number, a string or None, which a checkpoint can store"
            )
    if unsplit and (len(master.parts) != 1 or master.parts[0].numel != master.tensor.numel()):
        name, value = next(iter(unsplit.items()))
        raise CheckpointError(
            f"the optimizer's state {name!r} has shape {tuple(value.shape)} for a shard of {tuple(master.tensor.shape)}, "
            "which cannot be assigned to parameters; use stage 0 with this optimizer"
        )
    return elementwise, scalars, unsplit


def _later(first: Any, second: Any) -> Any:
    """Return the larger of two values of one state, because parameters that were added later have taken fewer steps."""
    numbers = [each.value if isinstance(each, NumberTensor) else each for each in (first, second)]
    if all(isinstance(each, int | float) for each in numbers):
        return first if numbers[0] >= numbers[1] else second
    return second if first is None else first
