"""Sharded parameters (stage 3): what each rank keeps of a parameter while nobody needs the whole of it.

Every parameter is cut by itself: ``ceil(numel / world_size)`` elements for each rank, in rank order. The last ranks may
hold padding, which is zero. While a parameter is not gathered its ``data`` is an empty tensor; its :class:`Shard` knows
the shape that it really has. The slice is in memory, on the parameter's device or on the host, or in files
(:mod:`zero_runtime.sharding.pages`).
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, Protocol

import torch

from zero_runtime.comm import DataParallelGroup
from zero_runtime.sharding.pages import Pager
from zero_runtime.sharding.place import Place

_ATTRIBUTE: Final = "zero_shard"
_numbers = itertools.count()


class Status(enum.Enum):
    """Where the elements of a sharded parameter are. The names are DeepSpeed's (``ds_status``)."""

    AVAILABLE = 1  # whole on every rank
    NOT_AVAILABLE = 2  # each rank has its slice
    INFLIGHT = 3  # being gathered


class OnItsWay(Protocol):
    """Messages that make parameters whole."""

    def wait(self) -> None:
        """Wait until the parameters are whole."""


_BESIDE: Final = Place()


def slice_numel(numel: int, world_size: int) -> int:
    """Elements of each rank's slice of a parameter of ``numel`` elements, padding included."""
    return -(-numel // world_size)


class Shard:
    """This rank's slice of one parameter, and the facts of the whole.

    Args:
        parameter: to be cut; it stays whole until :meth:`release`.
        group: the ranks that share it out.
        place: where the slice is kept.

    Attributes:
        parameter: the parameter that carries this shard.
        group: the ranks that have the other slices.
        number: counts sharded parameters of the process in the order of their making; messages are sorted by it.
        name: of the parameter in its model; empty until the model is known.
        shape, numel, dtype: of the whole parameter.
        slice_numel: elements of each rank's slice.
        place: where the slice is kept while it is in memory.
        pager: what keeps the slice in files; None where it is in memory.
        secondary: a larger slice shared out inside the secondary group (hpZ), or None.
        active: who is using the parameter now: modules by number, contexts of scripts by negative numbers.
        gathering: the messages that the parameter is on its way in, or None.
        rounded: the whole parameter has travelled quantized, and is not exactly what the slices are.
        changed: a script has changed the slice since ``changed`` was last set to False; copies of it are out of date.
    """

    __slots__ = (
        "_empty",
        "_own",
        "_persistent",
        "_status",
        "active",
        "changed",
        "dtype",
        "gathering",
        "group",
        "name",
        "number",
        "numel",
        "pager",
        "parameter",
        "place",
        "rounded",
        "secondary",
        "shape",
        "slice_numel",
    )

    def __init__(
        self, parameter: torch.nn.Parameter, group: DataParallelGroup, place: Place = _BESIDE
    ) -> None:
        self.parameter = parameter
        self.group = group
        self.number = next(_numbers)
        self.name = ""
        self.shape = parameter.shape
        self.numel = parameter.numel()
        self.dtype = parameter.dtype
        self.slice_numel = slice_numel(self.numel, group.world_size)
        self._persistent = False
        self.active: set[int] = set()
        self.secondary: torch.Tensor | None = None
        self.gathering: OnItsWay | None = None
        self.changed = False
        self.rounded = False
        self._empty: torch.Tensor | None = None
        self.place = place
        self.pager: Pager | None = None
        self._own: torch.Tensor | None = place.zeros(self.slice_numel, parameter)
        self._status = Status.AVAILABLE
        self.cut(self._own, group.rank)
        setattr(parameter, _ATTRIBUTE, self)
        _tell_scripts(self)

    @property
    def own(self) -> torch.Tensor:
        """This rank's slice, which must be in memory: 1-D, ``slice_numel`` elements of ``dtype``; padding is zeros."""
        assert self._own is not None, f"the slice of {self.name} is in files"
        return self._own

    @own.setter
    def own(self, own: torch.Tensor | None) -> None:
        self._own = own
        self.parameter.ds_tensor = torch.empty(0, dtype=self.dtype) if own is None else own  # type: ignore[attr-defined]

    @property
    def persistent(self) -> bool:
        """Whether the parameter stays gathered between steps."""
        return self._persistent

    @persistent.setter
    def persistent(self, persistent: bool) -> None:
        self._persistent = persistent
        self.parameter.ds_persist = persistent  # type: ignore[attr-defined]

    @property
    def available(self) -> bool:
        """Whether the parameter is whole on this rank now."""
        return self._status is Status.AVAILABLE

    @property
    def status(self) -> Status:
        """Where the elements are."""
        return self._status

    @status.setter
    def status(self, status: Status) -> None:
        self._status = status
        self.parameter.ds_status = status  # type: ignore[attr-defined]

    def cut(self, piece: torch.Tensor, index: int) -> None:
        """Copy slice ``index`` of the whole parameter into ``piece``, whose length says how large slices are."""
        start = index * piece.numel()
        numel = max(0, min(piece.numel(), self.numel - start))
        if numel:
            flat = self.parameter.detach().reshape(-1)
            piece.narrow(0, 0, numel).copy_(flat.narrow(0, start, numel))

    def keep(self) -> None:
        """Take the values of the whole parameter, which a script has changed, over into the slice."""
        with self.lent() as own:
            self.cut(own, self.group.rank)
        self.secondary = None
        self.changed = True

    def tensors(self) -> Iterator[torch.Tensor]:
        """What is in memory of it: the parameter, the slice and the secondary slice."""
        yield self.parameter
        yield from (each for each in (self._own, self.secondary) if each is not None)

    def wait(self) -> None:
        """Wait until the parameter is whole, if it is on its way."""
        gathering, self.gathering = self.gathering, None
        if gathering is not None:
            gathering.wait()

    def move(self, own: torch.Tensor) -> None:
        """Keep the slice in ``own`` (1-D, ``slice_numel`` elements), such as a part of a larger buffer, from now on."""
        own.copy_(self.own)
        self.own = own

    def begin_to_read(self, part: slice) -> None:
        """These elements of the slice are read next: begin to, where they are in files."""
        if self.pager is not None:
            self.pager.begin([self], part.start, part.stop)

    def read(self, out: torch.Tensor, start: int = 0) -> None:
        """Fill ``out``, 1-D and of any dtype on any device, with the slice's elements from ``start``."""
        if self.pager is None:
            out.copy_(self.own.narrow(0, start, out.numel()))
        else:
            self.pager.read(self, out, start)

    def write(self, values: torch.Tensor, start: int = 0) -> None:
        """Make ``values``, the slice's elements from ``start``; to files, this only begins to write them."""
        if self.pager is None:
            self.own.narrow(0, start, values.numel()).copy_(values)
        else:
            self.pager.write(self, values, start)

    @contextmanager
    def lent(self) -> Iterator[torch.Tensor]:
        """The slice, to be looked at and changed inside."""
        if self.pager is None:
            yield self.own
            return
        own = torch.empty(self.slice_numel, dtype=self.dtype)
        self.pager.read(self, own)
        yield own
        self.pager.write(self, own)

    def page_out(self, pager: Pager) -> None:
        """``pager`` has the slice from now on."""
        self.pager = pager
        self.own = None

    def page_in(self) -> None:
        """Keep the slice in memory again."""
        pager = self.pager
        if pager is not None:
            own = self.place.zeros(self.slice_numel, self.parameter)
            pager.read(self, own)
            pager.forget(self)
            self.pager = None
            self.own = own

    def cast(self, dtype: torch.dtype) -> None:
        """Keep the slice, and gather the parameter, in ``dtype`` from now on. Not while the parameter is whole."""
        pager = self.pager
        self.page_in()
        self.dtype = dtype
        self.own = self.own.to(dtype)
        if pager is not None:
            pager.adopt(self)
        self.secondary = None
        self.release()

    def fill(self, whole: torch.Tensor) -> None:
        """Make the parameter whole. ``whole`` has at least ``numel`` elements, the first of which become its data."""
        self.parameter.data = whole.view(-1).narrow(0, 0, self.numel).view(self.shape)
        self.status = Status.AVAILABLE

    def release(self) -> None:
        """Give up the whole parameter, and keep the slice."""
        empty = self._empty
        if empty is None or empty.dtype != self.dtype or empty.device != self.parameter.device:
            with torch.inference_mode(False):
                empty = self._empty = torch.empty(0, dtype=self.dtype, device=self.parameter.device)
        self.parameter.data = empty
        self.rounded = False
        self.status = Status.NOT_AVAILABLE

    def detach(self) -> None:
        """Make of the parameter, which must be whole, an ordinary one again."""
        if self.pager is not None:
            self.pager.forget(self)
            self.pager = None
        delattr(self.parameter, _ATTRIBUTE)
        for name in _SCRIPT_ATTRIBUTES:
            delattr(self.parameter, name)


def shard_of(parameter: torch.Tensor) -> Shard | None:
    """The shard of a parameter; None where it is not sharded."""
    return getattr(parameter, _ATTRIBUTE, None)


def shards_of(parameters: Iterable[torch.Tensor]) -> list[Shard]:
    """The shards of those of ``parameters`` that have one, each once, by number."""
    found = {shard.number: shard for shard in map(shard_of, parameters) if shard is not None}
    return [found[number] for number in sorted(found)]


_SCRIPT_ATTRIBUTES: Final = (
    *("ds_id", "ds_shape", "ds_numel", "ds_tensor", "ds_status", "ds_persist", "partition_numel"),
)


def _tell_scripts(shard: Shard) -> None:
    """The attributes by which scripts written for DeepSpeed know a sharded parameter."""
    parameter = shard.parameter
    partition_numel = partial(int, shard.slice_numel)  # a call without arguments, for Lightning's summary
    values = (
        *(shard.number, shard.shape, shard.numel, shard.own, shard.status, shard.persistent),
        partition_numel,
    )
    for name, value in zip(_SCRIPT_ATTRIBUTES, values, strict=True):
        setattr(parameter, name, value)
