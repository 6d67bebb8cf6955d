"""Blocks of parameters that are gathered by one message (``stage3_gather_unit: block``).

The rule reads only names, so that a list of parameters is sufficient to apply it:

1. A numbered module is a child of a ModuleList or Sequential, so a part of its name is a number. The parameters of an
   outermost numbered module, such as ``h.3``, are a block.
2. Other consecutive parameters of the model, without a numbered module between them, are a block. An example is the
   embeddings before the layers.
3. In a model without numbered modules, the parameters of each child of the model are a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Final

MODULE: Final = "module"
BLOCK: Final = "block"
AUTO: Final = "auto"
_FEWEST: Final = 2  # smallest number of numbered modules for which auto selects blocks


def blocks_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the parameters of each block, by the name of the block.

    ``names`` are in the order of the model.

    >>> blocks_of(["embedding.weight", "h.0.weight", "h.0.bias", "h.1.weight", "norm.weight", "head.weight"])
    {'embedding': ['embedding.weight'], 'h.0': ['h.0.weight', 'h.0.bias'], 'h.1': ['h.1.weight'],
     'norm to head': ['norm.weight', 'head.weight']}
    """
    listed = list(names)
    has_numbered = any(map(_numbered_module, listed))

    def key(name: str) -> str:
        return _numbered_module(name) if has_numbered else _module(name).partition(".")[0]

    blocks: dict[str, list[str]] = {}
    for numbered, run in groupby(listed, key):
        members = list(run)
        # A numbered module is one block even if other parameters are between its parameters.
        blocks.setdefault(numbered or _span(members), []).extend(members)
    return blocks


def gathers_by_block(unit: str, numels: Mapping[str, int], max_live: int) -> bool:
    """Return whether a model is gathered block by block.

    With ``auto`` two conditions must be met. The model has at least two numbered modules, and its largest block
    fits twice into ``max_live``, because the next block is gathered while a block is used.

    Args:
        unit: The value of ``stage3_gather_unit``.
        numels: The number of elements of each parameter by name, in the order of the model.
        max_live: The value of ``stage3_max_live_parameters``, in elements.
    """
    if unit != AUTO:
        return unit == BLOCK
    numbered = {_numbered_module(name) for name in numels} - {""}
    largest = max((sum(numels[name] for name in block) for block in blocks_of(numels).values()), default=0)
    return len(numbered) >= _FEWEST and 2 * largest <= max_live


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _numbered_module(parameter: str) -> str:
    """Return the outermost numbered module of a parameter; empty if there is none."""
    parts = _module(parameter).split(".")
    depth = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return "" if depth is None else ".".join(parts[: depth + 1])


def _span(parameters: Sequence[str]) -> str:
    """Return a name for the modules of ``parameters``, from the first and the last module."""
    modules = list(dict.fromkeys(_module(name) or "the model" for name in parameters))
    return modules[0] if len(modules) == 1 else f"{modules[0]} to {modules[-1]}"
