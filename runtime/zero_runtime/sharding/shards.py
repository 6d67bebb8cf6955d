"""Sharded parameters (stage 3): each rank's shard of a parameter, and the state of the parameter.

Every parameter is partitioned separately. Each rank has ``ceil(numel / world_size)`` elements, in rank order.
The last ranks may have padding, which is zero. While a parameter is released, its ``data`` is an empty tensor
and its :class:`Shard` stores the real shape. The shard is in memory, on the parameter's device or on the host,
or on NVMe (:mod:`zero_runtime.sharding.placement.pages`).
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
from zero_runtime.sharding.placement.pages import Pager
from zero_runtime.sharding.placement.place import Place

_ATTRIBUTE: Final = "zero_shard"
_numbers = itertools.count()


class Status(enum.Enum):
    """The state of a sharded parameter. The names are DeepSpeed's (``ds_status``)."""

    AVAILABLE = 1  # gathered
    NOT_AVAILABLE = 2  # released; each rank has only its shard
    INFLIGHT = 3  # being gathered


class OnItsWay(Protocol):
    """A gather in flight."""

    def wait(self) -> None:
        """Wait until the parameters are gathered."""


_BESIDE: Final = Place()


def slice_numel(numel: int, world_size: int) -> int:
    """Return the number of elements of each rank's shard of a parameter of ``numel`` elements, including padding."""
    return -(-numel // world_size)


class Shard:
    """This rank's shard of one parameter, and the state of the parameter.

    Args:
        parameter: The parameter to shard. It stays gathered until :meth:`release`.
        group: The ranks among which the parameter is partitioned.
        place: The memory of the shard.

    Attributes:
        parameter: The parameter to which this shard belongs.
        group: The ranks that have the other shards.
        number: The number of the parameter among the sharded parameters of the process, in the order of their
            creation. Messages are sorted by this number.
        name: The name of the parameter in its model; empty until the model is known.
        shape, numel, dtype: The shape, number of elements and dtype of the whole parameter.
        slice_numel: The number of elements of each rank's shard.
        place: The memory of the shard while the shard is in memory.
        pager: The pager that stores the shard on NVMe; None while the shard is in memory.
        secondary: The larger shard of the secondary partition (hpZ), or None.
        active: The users of the parameter. Modules have numbers, and contexts of scripts have negative numbers.
        gathering: The gather in flight, or None.
        rounded: Whether the parameter was gathered in 8 bits, and therefore differs from the shards by
            rounding.
        changed: Whether a script has changed the shard since ``changed`` was last set to False. If so, copies
            of the shard are out of date.
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
        """This rank's shard, which must be in memory: 1-D, ``slice_numel`` elements of ``dtype``.

        Padding is zeros.
        """
        assert self._own is not None, f"the shard of {self.name} is in files"
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
        """Whether the parameter is gathered on this rank."""
        return self._status is Status.AVAILABLE

    @property
    def status(self) -> Status:
        """The state of the parameter."""
        return self._status

    @status.setter
    def status(self, status: Status) -> None:
        self._status = status
        self.parameter.ds_status = status  # type: ignore[attr-defined]

    def cut(self, target: torch.Tensor, index: int) -> None:
        """Copy shard ``index`` of the gathered parameter to ``target``, which has the length of a shard."""
        start = index * target.numel()
        numel = max(0, min(target.numel(), self.numel - start))
        if numel:
            flat = self.parameter.detach().reshape(-1)
            target.narrow(0, 0, numel).copy_(flat.narrow(0, start, numel))

    def keep(self) -> None:
        """Copy the values of the gathered parameter to the shard, after a script has changed them."""
        with self.lent() as own:
            self.cut(own, self.group.rank)
        self.secondary = None
        self.changed = True

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors in memory: the parameter, the shard and the secondary shard."""
        yield self.parameter
        yield from (each for each in (self._own, self.secondary) if each is not None)

    def wait(self) -> None:
        """Wait until the parameter is gathered, if a gather is in flight."""
        gathering, self.gathering = self.gathering, None
        if gathering is not None:
            gathering.wait()

    def move(self, own: torch.Tensor) -> None:
        """Move the shard to ``own`` (1-D, ``slice_numel`` elements), such as a view of a larger buffer."""
        own.copy_(self.own)
        self.own = own

    def begin_to_read(self, part: slice) -> None:
        """Start to read the elements ``part`` of the shard, if they are on NVMe."""
        if self.pager is not None:
            self.pager.begin([self], part.start, part.stop)

    def read(self, out: torch.Tensor, start: int = 0) -> None:
        """Fill ``out``, 1-D and of any dtype on any device, with the shard's elements from ``start``."""
        if self.pager is None:
            out.copy_(self.own.narrow(0, start, out.numel()))
        else:
            self.pager.read(self, out, start)

    def write(self, values: torch.Tensor, start: int = 0) -> None:
        """Write ``values`` as the shard's elements from ``start``. On NVMe the write is only started."""
        if self.pager is None:
            self.own.narrow(0, start, values.numel()).copy_(values)
        else:
            self.pager.write(self, values, start)

    @contextmanager
    def lent(self) -> Iterator[torch.Tensor]:
        """A context in which the shard may be read and changed."""
        if self.pager is None:
            yield self.own
            return
        own = torch.empty(self.slice_numel, dtype=self.dtype)
        self.pager.read(self, own)
        yield own
        self.pager.write(self, own)

    def page_out(self, pager: Pager) -> None:
        """Let ``pager`` store the shard."""
        self.pager = pager
        self.own = None

    def page_in(self) -> None:
        """Move the shard back to memory."""
        pager = self.pager
        if pager is not None:
            own = self.place.zeros(self.slice_numel, self.parameter)
            pager.read(self, own)
            pager.forget(self)
            self.pager = None
            self.own = own

    def cast(self, dtype: torch.dtype) -> None:
        """Cast the shard to ``dtype``, so that the parameter is gathered in ``dtype``.

        The parameter must not be gathered.
        """
        pager = self.pager
        self.page_in()
        self.dtype = dtype
        self.own = self.own.to(dtype)
        if pager is not None:
            pager.adopt(self)
        self.secondary = None
        self.release()

    def fill(self, values: torch.Tensor) -> None:
        """Set the gathered parameter to the first ``numel`` elements of ``values``."""
        self.parameter.data = values.view(-1).narrow(0, 0, self.numel).view(self.shape)
        self.status = Status.AVAILABLE

    @torch.inference_mode(False)
    def stand_in(self) -> None:
        """Give the released parameter its shape without its memory, so that a gradient can be accumulated.

        The values of the parameter are NaN, so that they are not mistaken for the real values.
        """
        element = torch.full((), torch.nan, dtype=self.dtype, device=self.parameter.device)
        self.parameter.data = element.expand(self.shape)

    def release(self) -> None:
        """Release the parameter. The shard remains."""
        empty = self._empty
        if empty is None or empty.dtype != self.dtype or empty.device != self.parameter.device:
            with torch.inference_mode(False):
                empty = self._empty = torch.empty(0, dtype=self.dtype, device=self.parameter.device)
        self.parameter.data = empty
        self.rounded = False
        self.status = Status.NOT_AVAILABLE

    def detach(self) -> None:
        """Make the parameter an ordinary parameter again. It must be gathered."""
        if self.pager is not None:
            self.pager.forget(self)
            self.pager = None
        delattr(self.parameter, _ATTRIBUTE)
        for name in _SCRIPT_ATTRIBUTES:
            delattr(self.parameter, name)


def shard_of(parameter: torch.Tensor) -> Shard | None:
    """Return the shard of a parameter; None if it is not sharded."""
    return getattr(parameter, _ATTRIBUTE, None)


def shards_of(parameters: Iterable[torch.Tensor]) -> list[Shard]:
    """Return the shards of those ``parameters`` that are sharded, without duplicates, sorted by number."""
    by_number = {shard.number: shard for shard in map(shard_of, parameters) if shard is not None}
    return [by_number[number] for number in sorted(by_number)]


_SCRIPT_ATTRIBUTES: Final = (
    "ds_id", "ds_shape", "ds_numel", "ds_tensor", "ds_status", "ds_persist", "partition_numel",
)  # fmt: skip


def _tell_scripts(shard: Shard) -> None:
    """Set DeepSpeed's attributes of a sharded parameter, which scripts read."""
    parameter = shard.parameter
    partition_numel = partial(int, shard.slice_numel)  # a call without arguments, for Lightning's summary
    values = (
        shard.number,
        shard.shape,
        shard.numel,
        shard.own,
        shard.status,
        shard.persistent,
        partition_numel,
    )
    for name, value in zip(_SCRIPT_ATTRIBUTES, values, strict=True):
        setattr(parameter, name, value)
