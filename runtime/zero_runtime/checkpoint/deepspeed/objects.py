"""Replacements for the classes that DeepSpeed's files name. They store values and have no behavior.

This is the closed list of classes that such a file may name, in addition to torch's own classes. Each name
becomes one of the classes in this module. Reading a file therefore imports and runs no code of DeepSpeed, of
NumPy or of the script that saved the file.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch


class Attributes:
    """The attributes of an object, such as a loss scaler or an address in a flat tensor."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


class Number(int):
    """A member of an integer enumeration, such as a ZeRO stage."""


class Text(str):
    """A member of a string enumeration, such as the device of offload."""

    __slots__ = ()


class ArrayType:
    """The dtype of a NumPy value: its ``code``, such as f8, and its byte order."""

    def __init__(self, code: str, *_: Any) -> None:
        self.code = code
        self.order = "<"

    def __setstate__(self, state: Sequence[Any]) -> None:
        self.order = ">" if state[1] == ">" else "<"


class Array:
    """A NumPy array: its shape, dtype and bytes."""

    def __init__(self, *_: Any) -> None:
        self.shape: tuple[int, ...] = (0,)
        self.kind = ArrayType("f8")
        self.data = b""

    def __setstate__(self, state: Sequence[Any]) -> None:
        _, shape, kind, by_columns, data = state
        if by_columns or not isinstance(kind, ArrayType) or not isinstance(data, bytes):
            raise ValueError("a NumPy array contains objects, or is in column-major order")
        self.shape, self.kind, self.data = tuple(shape), kind, data


_CODES: Final = {
    "b1": "?",
    "i1": "b",
    "i2": "h",
    "i4": "i",
    "i8": "q",
    "u1": "B",
    "u2": "H",
    "u4": "I",
    "u8": "Q",
    "f2": "e",
    "f4": "f",
    "f8": "d",
}


def scalar(kind: ArrayType, data: bytes) -> bool | int | float:
    """Return a NumPy number as a Python number."""
    (value,) = struct.unpack(kind.order + _CODES[kind.code], data)
    return value  # type: ignore[no-any-return]


def reconstruct(*_: Any) -> Array:
    """Return an empty array, which NumPy's pickles fill afterwards."""
    return Array()


STAND_INS: Final[Mapping[str, Any]] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Attributes,
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase": Attributes,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Attributes,
    "deepspeed.utils.tensor_fragment.fragment_address": Attributes,
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape": Attributes,
    "deepspeed.runtime.zero.config.ZeroStageEnum": Number,
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum": Text,
    "argparse.Namespace": argparse.Namespace,
    "builtins.set": set,
    "numpy.core.multiarray.scalar": scalar,
    "numpy._core.multiarray.scalar": scalar,
    "numpy.core.multiarray._reconstruct": reconstruct,
    "numpy._core.multiarray._reconstruct": reconstruct,
    "numpy.ndarray": Array,
    "numpy.dtype": ArrayType,
}


def plain(value: Any) -> Any:
    """Return ``value`` in the types of Python and torch.

    Arrays become tensors, members of enumerations become their values, and tensors are copied.
    """
    if isinstance(value, Array):
        numbers = [
            each for (each,) in struct.iter_unpack(value.kind.order + _CODES[value.kind.code], value.data)
        ]
        is_integer = value.kind.code[0] != "f"
        return torch.tensor(numbers, dtype=torch.int64 if is_integer else torch.float64).view(value.shape)
    if isinstance(value, torch.Tensor):
        return value.clone()  # The copy stays valid after the mapped file is closed.
    if isinstance(value, Number):
        return int(value)
    if isinstance(value, Text):
        return str(value)
    if isinstance(value, list):
        return [plain(each) for each in value]
    if type(value) is tuple:
        return tuple(plain(each) for each in value)
    if type(value) is dict:
        return {key: plain(each) for key, each in value.items()}
    return value
