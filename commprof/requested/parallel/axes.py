"""The ranks as a grid with the axes pipe, data, sequence and model, as a config or an engine defines it.

Rank numbers increase fastest along model, then along sequence, data and pipe. Source: the layout of zero_runtime and of
DeepSpeed's ``PipeModelDataParallelTopology``.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod
from typing import Any, Final, NamedTuple

from commprof.requested.config_keys import count, flag, section
from commprof.requested.errors import RequestedError

PIPE: Final = "pipe"
DATA: Final = "data"
SEQUENCE: Final = "sequence"
MODEL: Final = "model"
KNOWN: Final = (PIPE, DATA, SEQUENCE, MODEL)

Line = tuple[int, ...]


class Axes(NamedTuple):
    """The names of the axes and the number of ranks along each axis. The slowest axis is first."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return prod(self.sizes)

    @property
    def only_data(self) -> bool:
        """Return whether every rank has the full model and its own samples."""
        return all(size == 1 or name == DATA for name, size in zip(self.names, self.sizes, strict=True))

    def size(self, axis: str) -> int:
        """Return the number of ranks along ``axis``, or 1 if there is no such axis."""
        return self.sizes[self.names.index(axis)] if axis in self.names else 1

    def lines(self, *axes: str, **at: int) -> tuple[Line, ...]:
        """Return the lists of ranks that differ only in ``axes``, limited to the positions ``at`` on other axes.

        >>> Axes((PIPE, DATA, MODEL), (2, 2, 2)).lines(DATA, pipe=1)
        ((4, 6), (5, 7))
        """
        ranks_by_place: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(product(*map(range, self.sizes))):
            named = dict(zip(self.names, place, strict=True))
            if all(named.get(axis, 0) == number for axis, number in at.items()):
                key = tuple(number for axis, number in named.items() if axis not in axes)
                ranks_by_place.setdefault(key, []).append(rank)
        return tuple(tuple(ranks) for ranks in ranks_by_place.values())

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in zip(self.names, self.sizes, strict=True))


def axes_of_topology(topology: Mapping[str, Any], world_size: int) -> Axes:
    """Return the axes that an engine publishes as the number of ranks by axis, slowest axis first.

    Raises:
        RequestedError: an axis is not known, a size is not a positive integer, or the product of the sizes is not
            ``world_size``.
    """
    for name, size in topology.items():
        if name not in KNOWN or isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise RequestedError(
                f"the engine's topology has {size!r} ranks along {name!r}; expected positive numbers along "
                f"{', '.join(KNOWN)}"
            )
    axes = Axes(tuple(topology), tuple(topology.values()))
    if axes.world_size != world_size:
        raise RequestedError(
            f"the engine's topology {axes} has {axes.world_size} ranks, and the run has {world_size}"
        )
    return axes


def axes_of_config(config: Mapping[str, Any], world_size: int) -> Axes:
    """Return the axes that ``config`` names. The remaining factor of the ranks is the size of the data axis.

    Raises:
        RequestedError: a size is not a positive integer, two keys differ, or the sizes do not divide ``world_size``.
    """
    sizes = {
        PIPE: _stages(config),
        SEQUENCE: _size(config, "sequence_parallel_size"),
        MODEL: tensor_ranks(config),
    }
    shared = prod(sizes.values())
    if world_size % shared:
        shown = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        raise RequestedError(
            f"{shown} makes {shared} ranks for each model, which does not divide {world_size} ranks; choose a multiple of "
            f"{shared}"
        )
    sizes[DATA] = world_size // shared
    return Axes(KNOWN, tuple(sizes[name] for name in KNOWN))


def tensor_ranks(config: Mapping[str, Any]) -> int:
    """Return the number of ranks that share each tensor.

    Raises:
        RequestedError: two keys have different sizes.
    """
    tensor = section(config, "tensor_parallel")
    sizes = {
        "tp_size": _size(config, "tp_size"),
        "tensor_parallel.autotp_size": count(tensor, "tensor_parallel.autotp_size", 0, least=0) or 1,
        "tensor_parallel.tp.tp_size": _size(section(tensor, "tp"), "tensor_parallel.tp.tp_size"),
    }
    return _agreed(sizes)


def _stages(config: Mapping[str, Any]) -> int:
    theirs, ours = section(config, "pipeline"), section(config, "pipeline_parallel")
    enabled = ours if flag(ours, "pipeline_parallel.enabled", True) else {}
    named = {} if theirs.get("stages") == "auto" else theirs
    return _agreed(
        {
            "pipeline.stages": _size(named, "pipeline.stages"),
            "pipeline_parallel.pp_size": _size(enabled, "pipeline_parallel.pp_size"),
        }
    )


def _size(values: Mapping[str, Any], key: str) -> int:
    return count(values, key, 1, least=1) or 1


def _agreed(sizes: Mapping[str, int]) -> int:
    wide = {name: size for name, size in sizes.items() if size > 1}
    if len(set(wide.values())) > 1:
        raise RequestedError(
            f"{' and '.join(f'{name} {size}' for name, size in wide.items())} differ; keep one of them"
        )
    return next(iter(wide.values()), 1)
