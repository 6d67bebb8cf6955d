"""Values that a checkpoint stores as JSON: client state, options of param groups, and the state of schedules.

A value without a JSON type is written as an object with one key that begins with ``$``::

    (1, 2)                    {"$tuple": [1, 2]}
    {0: "a"}                  {"$pairs": [[0, "a"]]}       a dict with a key that is no string or begins with $
    Counter({30: 1})          {"$counter": [[30, 1]]}
    tensor                    {"$tensor": "json/7"}        the key of the tensor in the file of rank 0
    inf, nan                  {"$float": "inf"}
    torch.float32             {"$dtype": "float32"}
    torch.device("cpu")       {"$device": "cpu"}
    {1, 2}                    {"$set": [1, 2]}
    Namespace(lr=0.1)         {"$namespace": {"lr": 0.1}}
    array of NumPy            {"$array": ["uint32", "json/8"]}   stored as a tensor

A NumPy number becomes a Python number. All other values are refused, because only pickle could store them, and
reading pickle runs the code in it.
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch

from zero_runtime.errors import CheckpointError

_KEPT: Final = (
    "None, booleans, numbers, strings, tensors, arrays of NumPy, and lists, tuples, sets, dicts and argparse.Namespace of "
    "them"
)


class Encoder:
    """Converts values to JSON, and collects the tensors in them.

    Attributes:
        tensors: The tensors, by the key under which each tensor is to be written.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, where: str, value: Any) -> Any:
        """Return ``value`` as JSON.

        Args:
            where: The name of the value for messages: ``client_state``, followed by keys in brackets.
            value: None, booleans, numbers, strings, tensors, arrays of NumPy, and lists, tuples, sets, dicts
                and argparse.Namespace of them.

        Raises:
            CheckpointError: The value has another type. The message names the position of the value.
        """
        if value is None or isinstance(value, bool | str):
            return value if not isinstance(value, str) else str(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._keep(where, value)}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if _is_of_numpy(value):
            return self._of_numpy(where, value)
        if isinstance(value, set | frozenset):
            return {"$set": [self.encode(f"an element of {where}", each) for each in value]}
        if isinstance(value, Namespace):
            return {"$namespace": self._mapping(where, vars(value))}
        if isinstance(value, list | tuple):
            items = [self.encode(f"{where}[{index}]", each) for index, each in enumerate(value)]
            return {"$tuple": items} if isinstance(value, tuple) else items
        if isinstance(value, Mapping):
            return self._mapping(where, value)
        raise CheckpointError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint does not keep: expected "
            f"{_KEPT}. Convert it, or save it yourself"
        )

    def _of_numpy(self, where: str, value: Any) -> Any:
        if not value.shape and type(value).__name__ != "ndarray":
            return self.encode(where, value.item())
        kind = value.dtype.newbyteorder("=")
        # A tensor file cannot store unsigned numbers of more than a byte, so their bits are stored as signed numbers.
        signed = kind.str.replace("u", "i") if kind.kind == "u" and kind.itemsize > 1 else kind
        try:
            tensor = torch.from_numpy(value.astype(kind).copy().view(signed))
            return {"$array": [kind.name, self._keep(where, tensor)]}
        except TypeError:
            raise CheckpointError(
                f"{where} is an array of {value.dtype}, which a checkpoint does not keep: expected numbers or booleans"
            ) from None

    def _mapping(self, where: str, value: Mapping[Any, Any]) -> Any:
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        if plain and not isinstance(value, Counter):
            return {str(key): self.encode(f"{where}[{key!r}]", each) for key, each in value.items()}
        pairs = []
        for key, each in value.items():
            if not isinstance(key, str | int | float | bool | tuple | None):
                raise CheckpointError(
                    f"{where} has the key {key!r} of type {type(key).__qualname__}, which a checkpoint does not keep; "
                    "use strings or numbers"
                )
            pairs.append(
                [self.encode(f"key {key!r} of {where}", key), self.encode(f"{where}[{key!r}]", each)]
            )
        return {"$counter" if isinstance(value, Counter) else "$pairs": pairs}

    def _keep(self, where: str, tensor: torch.Tensor) -> str:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise CheckpointError(
                f"{where} is a tensor of layout {tensor.layout}, which a checkpoint does not keep; "
                "convert it with to_dense()"
            )
        key = f"json/{len(self.tensors)}"
        self.tensors[key] = tensor.detach()
        return key


def decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Return the value that was passed to :meth:`Encoder.encode`. ``tensor`` reads a tensor by its key.

    Raises:
        CheckpointError: The JSON was not written by :meth:`Encoder.encode`.
    """
    if isinstance(value, list):
        return [decode(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: decode(each, tensor) for key, each in value.items()}
    (kind, content), *_ = value.items()
    inner = partial(decode, tensor=tensor)
    try:
        if kind == "$tensor":
            return tensor(content)
        if kind == "$array":
            name, key = content
            return _array(name, tensor(key))
        if kind in _READERS:
            return _READERS[kind](content, inner)
    except CheckpointError:
        raise
    except (TypeError, ValueError, AttributeError, RuntimeError):
        pass
    raise CheckpointError(
        f"a value of the checkpoint is written as {kind}: {content!r}, which this version cannot read; a newer "
        "version wrote it, or it was changed"
    )


def _pairs(content: Any, inner: Callable[[Any], Any]) -> dict[Any, Any]:
    return {inner(key): inner(each) for key, each in content}


def _dtype(content: Any, _: Callable[[Any], Any]) -> torch.dtype:
    dtype = getattr(torch, content)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(content)
    return dtype


_READERS: Final[Mapping[str, Callable[[Any, Callable[[Any], Any]], Any]]] = {
    "$tuple": lambda content, inner: tuple(inner(each) for each in content),
    "$set": lambda content, inner: {inner(each) for each in content},
    "$pairs": _pairs,
    "$counter": lambda content, inner: Counter(_pairs(content, inner)),
    "$namespace": lambda content, inner: Namespace(**inner(content)),
    "$float": lambda content, _: float(content),
    "$device": lambda content, _: torch.device(content),
    "$dtype": _dtype,
}


def _is_of_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def _array(kind: str, tensor: torch.Tensor) -> Any:
    """Return the NumPy array of dtype ``kind`` that ``tensor`` stores, or the tensor if NumPy is not installed."""
    try:
        import_module("numpy")
    except ImportError:
        return tensor
    return tensor.numpy().view(kind)
