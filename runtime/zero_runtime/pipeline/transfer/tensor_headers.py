"""Headers of the messages between pipeline stages, which describe dtypes, shapes and structure as numbers.

A header consists of 256 int32 in DeepSpeed's layout:

* The header of one tensor is ``0, dtype, dimensions, sizes...``.
* The header of a tuple of tensors is ``2, number of tensors``, and then ``dtype, dimensions, sizes...`` of each
  tensor.
* The header of any other value is ``3, n``. Such values are lists, dictionaries, nested tuples, values that are
  not tensors, and tuples that are too long for 256 numbers. A second message with n numbers follows. It
  contains the number of tensors, ``dtype, dimensions, sizes...`` of each tensor, and the structure as JSON,
  with one number for each byte.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from zero_runtime.errors import UsageError

HEADER_NUMEL: Final = 256
_TENSOR, _TUPLE, _NESTED = 0, 2, 3
# A header contains the position of a dtype in this tuple, so the order must not change.
_DTYPES: Final = (
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float16, torch.bfloat16,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_NUMBER_OF: Final = {dtype: number for number, dtype in enumerate(_DTYPES)}


class TensorForm(NamedTuple):
    """The dtype and sizes of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def has_gradient(self) -> bool:
        """Whether the receiver sends a gradient back: for floating-point and complex tensors."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor of this form."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class Form(NamedTuple):
    """The form of a message, which is everything except the values of its tensors.

    Attributes:
        tensors: The forms of the tensors, in the order in which the tensors are sent.
        structure: None for one tensor, ``tuple`` for a flat tuple of tensors, or JSON for any other value.
    """

    tensors: tuple[TensorForm, ...]
    structure: str | None

    def header(self) -> tuple[list[int], list[int]]:
        """Return the numbers of the header and the numbers of the second message, which is empty in most cases."""
        plain = [number for each in self.tensors for number in _encode(each)]
        if self.structure is None:
            return [_TENSOR, *plain], []
        if self.structure == "tuple":
            numbers = [_TUPLE, len(self.tensors), *plain]
            if len(numbers) <= HEADER_NUMEL:
                return numbers, []
        more = [len(self.tensors), *plain, *self.structure.encode()]
        return [_NESTED, len(more)], more

    def restore(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the value that was sent, from the ``tensors`` of a message of this form."""
        if self.structure is None:
            return tensors[0]
        if self.structure == "tuple":
            return tuple(tensors)
        description = json.loads(self.structure)
        coming = iter(tensors)
        leaves = [next(coming) if leaf is None else leaf[0] for leaf in description["leaves"]]
        return tree_unflatten(leaves, treespec_loads(description["structure"]))


def _encode(form: TensorForm) -> list[int]:
    return [_NUMBER_OF[form.dtype], len(form.shape), *form.shape]


def form_of(value: Any) -> tuple[Form, list[torch.Tensor]]:
    """Return the form of ``value`` and its tensors.

    Raises:
        UsageError: ``value`` contains something other than tensors, numbers, strings and None, or contains a
            tensor that cannot be sent.
    """
    leaves, structure = tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for each in tensors:
        if (
            each.dtype not in _NUMBER_OF
            or each.layout is not torch.strided
            or max(each.shape, default=0) >= 2**31
        ):
            raise UsageError(
                f"a stage returns a tensor of {each.dtype}, layout {each.layout} and shape {tuple(each.shape)}, "
                "which cannot be sent to the next one; return dense tensors of the usual dtypes"
            )
    forms = tuple(TensorForm(each.dtype, tuple(each.shape)) for each in tensors)
    if isinstance(value, torch.Tensor):
        return Form(forms, None), tensors
    if type(value) is tuple and len(tensors) == len(leaves) == len(value):
        return Form(forms, "tuple"), tensors
    plain = [None if isinstance(leaf, torch.Tensor) else [leaf] for leaf in leaves]
    try:
        text = json.dumps({"leaves": plain, "structure": treespec_dumps(structure)})
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"a stage returns a {type(value).__name__} that cannot be sent to the next one: {error}; return tensors, "
            "numbers, strings and None in tuples, lists and dictionaries"
        ) from None
    return Form(forms, text), tensors


def more_numel(header: Sequence[int]) -> int:
    """Return the number of numbers in the second message, or 0 if no second message follows ``header``."""
    return header[1] if header[0] == _NESTED else 0


def form_from(header: Sequence[int], more: Sequence[int]) -> Form:
    """Return the form that :meth:`Form.header` has encoded."""
    if header[0] == _TENSOR:
        return Form(tuple(_decode(header, 1, 1)[0]), None)
    if header[0] == _TUPLE:
        return Form(tuple(_decode(header, 2, header[1])[0]), "tuple")
    tensors, position = _decode(more, 1, more[0])
    return Form(tuple(tensors), bytes(more[position:]).decode())


def _decode(numbers: Sequence[int], position: int, count: int) -> tuple[list[TensorForm], int]:
    forms = []
    for _ in range(count):
        dtype, dimensions = numbers[position : position + 2]
        position += 2
        forms.append(TensorForm(_DTYPES[dtype], tuple(numbers[position : position + dimensions])))
        position += dimensions
    return forms, position
