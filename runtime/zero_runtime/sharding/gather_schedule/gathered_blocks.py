"""Blocks of parameters that are gathered by one message (``stage3_gather_unit: block``).

The rule reads names only, so that a list of parameters is enough to apply it:

1. A numbered module is the child of a ModuleList or Sequential: a part of its name is a number. The parameters of an
   outermost numbered module, such as ``h.3``, are a block.
2. Other parameters that follow one another in the model without a numbered module between them are a block, such as the
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
_FEWEST: Final = 2  # numbered modules of a model that has blocks


def blocks_of(names: Iterable[str]) -> dict[str, list[str]]:
    """The names of the parameters of each block, by its name; ``names`` are in the order of the model.

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
        # A numbered module is one block even if other parameters are between its own.
        blocks.setdefault(numbered or _span(members), []).extend(members)
    return blocks


def gathers_by_block(unit: str, numels: Mapping[str, int], max_live: int) -> bool:
    """Whether a model is gathered block by block.

    With ``auto`` it is if it has two numbered modules or more, and its largest block fits twice into ``max_live``: while one
    is used, the next is gathered.

    Args:
        unit: the value of ``stage3_gather_unit``.
        numels: elements of the parameters by name, in the order of the model.
        max_live: ``stage3_max_live_parameters``.
    """
    if unit != AUTO:
        return unit == BLOCK
    numbered = {_numbered_module(name) for name in numels} - {""}
    largest = max((sum(numels[name] for name in block) for block in blocks_of(numels).values()), default=0)
    return len(numbered) >= _FEWEST and 2 * largest <= max_live


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _numbered_module(parameter: str) -> str:
    """The outermost numbered module of a parameter; empty without one."""
    parts = _module(parameter).split(".")
    depth = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return "" if depth is None else ".".join(parts[: depth + 1])


def _span(parameters: Sequence[str]) -> str:
    """A name for the modules of ``parameters``: of the first and the last."""
    modules = list(dict.fromkeys(_module(name) or "the model" for name in parameters))
    return modules[0] if len(modules) == 1 else f"{modules[0]} to {modules[-1]}"
