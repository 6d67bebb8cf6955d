"""Masters: the flat tensors that the optimizer updates for the shards of this rank.

Masters are on the device, in host memory or on NVMe. A shard has one master. If the shard is offloaded and the
optimizer is elementwise, it has one master for each chunk, and the chunks are updated one after another
(:mod:`zero_runtime.offload.stretches`). The optimizer state of a master is on the same device as the master.
The fp32 parameters themselves may be on NVMe. Their masters are then read from NVMe for the update, chunk by
chunk, and written back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from zero_runtime.gradient_reduction.reducer import ParameterGroup
from zero_runtime.offload.offload_placement import Placement
from zero_runtime.offload.offloaded_states import MASTER, StateFiles, absent
from zero_runtime.offload.stretches import Stretch, cut, stretch_numel, whole
from zero_runtime.optimizer_step.fragments import (
    Elements,
    Fragment,
    Master,
    Part,
    Source,
    Stored,
    fragments_of,
    load,
    scalars_of,
    stored,
)
from zero_runtime.optimizer_step.owned_shards import OwnedShards
from zero_runtime.optimizers import Lamb, Muon


class Masters:
    """The masters of an optimizer.

    Args:
        optimizer: The torch optimizer. Its param groups and its state are changed.
        parameters: The shards of this rank.
        dtype: The dtype of the masters of 16-bit parameters.
        rank: The rank of this process among the data-parallel ranks.
        placement: The placement of masters and states. None if they are on the device of the parameters.

    Attributes:
        tensors: The masters, one or more for each group. Do not read masters while they are on NVMe.
        stretches: The chunk of a shard that each master represents.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: OwnedShards,
        dtype: torch.dtype,
        rank: int,
        placement: Placement | None = None,
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        self.stretches: list[Stretch] = []
        self._optimizer = optimizer
        self._parameters = parameters
        self._dtype = dtype
        self._rank = rank
        self._placement = placement
        self._groups: list[ParameterGroup] = []
        # The numbers of the masters that are in memory only during their update.
        self._borrowed: list[int] = []
        self._staging: torch.Tensor | None = None
        self._files: StateFiles | None = None
        if placement is not None and placement.files is not None:
            self._files = StateFiles(optimizer, placement.files, placement.policy, placement.pinned)

    def close(self) -> None:
        """Remove the files."""
        if self._files is not None:
            self._files.close()

    def add(self, groups: Sequence[ParameterGroup]) -> list[list[torch.Tensor]]:
        """Create masters for further groups, and return the masters of each group."""
        first, new_masters = len(self._groups), []
        self._groups += groups
        total = sum(each.layout.shard_numel for each in groups)
        for index, each in enumerate(groups, first):
            begin = len(self.tensors)
            for stretch in self._cut(index, each.layout.shard_numel, total):
                self.stretches.append(stretch)
                self.tensors.append(self._master(len(self.tensors), stretch))
            new_masters.append(self.tensors[begin:])
        return new_masters

    @torch.no_grad()
    def watch(self) -> None:
        """Move optimizer state that the optimizer's constructor created to the files, for offloaded chunks.

        Offloaded chunks whose masters stay in memory are registered, so that their state is written to files.
        """
        if self._files is None:
            return
        for number, (master, stretch) in enumerate(zip(self.tensors, self.stretches, strict=True)):
            if not stretch.offloaded:
                continue
            if number not in self._files:
                self._files.add_state(number, master)
            elif self._optimizer.state.get(master):
                for _ in self._in_memory(number, fill=True):
                    pass  # The iterator writes the state to the file when it is advanced.

    def masters_with_parts(self) -> list[Master]:
        """Return every master together with its parts."""
        masters = []
        for master, stretch in zip(self.tensors, self.stretches, strict=True):
            each = self._groups[stretch.piece]
            members = [
                part
                for index in each.layout.order
                for shard in each.layout.shards(index)
                if shard.owner == (self._rank if each.ranks is None else each.ranks.rank)
                for part in _within(each, index, shard.start, shard.numel, shard.offset, stretch)
            ]
            masters.append(Master(master, tuple(members)))
        return masters

    def reduced(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the range of ``shards`` that belongs to each master. ``shards`` has one tensor for each group."""
        return [shards[stretch.piece][stretch.part] for stretch in self.stretches]

    # The step.

    def begin_step(self) -> None:
        """Start to read the masters that are updated first."""
        if self._files is not None:
            self._files.begin()

    def rounds(self) -> Iterator[list[int]]:
        """Yield, for each round, the numbers of the masters that are updated together.

        The masters of a round are in memory during the round.
        """
        alone = [number for number, stretch in enumerate(self.stretches) if self._is_alone(stretch)]
        together = sorted(set(range(len(self.tensors))).difference(alone, self._borrowed))
        if together:
            yield together
        for number in self._borrow(self._borrowed):
            yield [number]
        for number in alone if self._files is None else self._files.walk():
            yield [number]

    def take_gradient(self, number: int, reduced: torch.Tensor, factor: torch.Tensor | float | None) -> None:
        """Set the gradient of a master to the ``reduced`` range times ``factor``. ``reduced`` may be modified."""
        master = self.tensors[number]
        if reduced.dtype is master.dtype and reduced.device == master.device:
            gradient = reduced
        else:
            gradient = self._gradient_buffer(number, master).copy_(reduced)
        if isinstance(factor, torch.Tensor):
            factor = factor.to(gradient.device)
        master.grad = gradient if factor is None else gradient.mul_(factor)

    def give_values(self, number: int) -> None:
        """Write the values of an updated master to the model."""
        stretch = self.stretches[number]
        self.tensors[number].grad = None
        self._parameters.write(stretch.piece, self.tensors[number], stretch.part)

    def take_over(self, index: int, part: slice) -> None:
        """Copy a changed range of shard ``index`` to its masters."""
        for number, stretch in enumerate(self.stretches):
            begin, end = max(part.start, stretch.part.start), min(part.stop, stretch.part.stop)
            if stretch.piece != index or begin >= end or number in self._borrowed:
                continue
            for master in self._in_memory(number):
                own = master[begin - stretch.part.start : end - stretch.part.start]
                self._parameters.read(index, own, slice(begin, end))

    def take_all_over(self) -> None:
        """Set all masters from the model's parameters."""
        for index, each in enumerate(self._groups):
            self.take_over(index, slice(0, each.layout.shard_numel))

    # Reading, saving and loading.

    def fragments(self, parameter: torch.nn.Parameter | None = None) -> Iterator[Fragment]:
        """Yield the fragments of all parameters, or only of ``parameter``.

        A fragment is in memory until the next fragment is requested. Changes to a fragment are kept.
        """
        for number, master in enumerate(self.masters_with_parts()):
            if parameter is None or any(part.parameter is parameter for part in master.parts):
                for _ in self._in_memory(number, fill=True):
                    yield from fragments_of(self._optimizer.state, [master])

    def stored(self) -> Iterator[Stored]:
        """Yield the fragments for a checkpoint. Their tensors are read on demand, in any order."""
        for number, master in enumerate(self.masters_with_parts()):
            if number in self._borrowed:
                for each in fragments_of(self._optimizer.state, [master]):
                    part = next(part for part in master.parts if part.name == each.name)
                    read = partial(self._look, number, slice(part.offset, part.offset + part.numel))
                    yield stored(each)._replace(master=Elements(master.tensor.dtype, read))
                continue
            if self._files is None or number not in self._files:
                yield from map(stored, fragments_of(self._optimizer.state, [master]))
                continue
            files, state_dtypes = self._files, self._files.kept(number)
            scalars = scalars_of(self._optimizer.state.get(master.tensor, {}), master)
            for part in master.parts:
                span = slice(part.offset, part.offset + part.numel)
                yield Stored(
                    *part[:5],
                    master=Elements(master.tensor.dtype, partial(files.show, number, MASTER, span)),
                    state={
                        name: Elements(dtype, partial(files.show, number, name, span))
                        for name, dtype in state_dtypes.items()
                    },
                    scalars=scalars,
                    whole={},
                )

    def load(self, source: Source, states: bool) -> None:
        """Fill the masters from a checkpoint. With ``states``, fill their optimizer state too."""
        for number, master in enumerate(self.masters_with_parts()):
            for _ in self._in_memory(number, fill=True):
                load(self._optimizer, [master], source, states)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with copies of the state tensors that are on NVMe."""
        packed: dict[str, Any] = self._optimizer.state_dict()
        if self._files is not None:
            numbers = {id(each): number for number, each in enumerate(self._listed())}
            for number in self._files.walk():
                master = self.tensors[number]
                packed["state"][numbers[id(master)]] = {
                    name: value.clone() if isinstance(value, torch.Tensor) else value
                    for name, value in self._optimizer.state[master].items()
                }
        return packed

    def _listed(self) -> Iterator[torch.Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _in_memory(self, number: int, fill: bool = False) -> Iterator[torch.Tensor]:
        """Yield the master once, while it is in memory.

        A master whose file is not filled yet is skipped, unless ``fill`` is set.
        """
        if number in self._borrowed:
            for _ in self._borrow([number]):
                yield self.tensors[number]
                self.give_values(number)
        elif self._files is None or number not in self._files:
            yield self.tensors[number]
        elif fill or not self._files.pending(number):
            for _ in self._files.walk([number]):
                yield self.tensors[number]

    @torch.no_grad()
    def _borrow(self, numbers: Sequence[int]) -> Iterator[int]:
        """Yield each of these masters in turn, filled from its shard until the next master is requested."""
        for place, number in enumerate(numbers):
            master, stretch = self.tensors[number], self.stretches[number]
            values = torch.empty(stretch.numel, dtype=master.dtype, device=master.device)
            self._parameters.read(stretch.piece, values, stretch.part)
            for following in numbers[place + 1 : place + 2]:
                after = self.stretches[following]
                self._parameters.begin_to_read(after.piece, after.part)
            master.data = values
            yield number
            master.data = absent(stretch.numel, master.dtype, master.device)

    def _look(self, number: int, part: slice) -> torch.Tensor:
        """Return a range of a master that is not in memory."""
        stretch, master = self.stretches[number], self.tensors[number]
        begin = stretch.part.start
        values = torch.empty(part.stop - part.start, dtype=master.dtype)
        self._parameters.read(stretch.piece, values, slice(begin + part.start, begin + part.stop))
        return values

    def _borrows(self, index: int) -> bool:
        """Return whether the master of shard ``index`` uses the shard's values on NVMe and has no own storage."""
        parameters = self._parameters
        dtype = parameters.own[index].dtype
        as_wide = torch.promote_types(dtype, self._dtype) is dtype
        divisible = not isinstance(self._optimizer, Lamb | Muon)
        return self._placement is None and as_wide and divisible and parameters.are_filed(index)

    def _cut(self, index: int, numel: int, total: int) -> list[Stretch]:
        placement = self._placement
        if self._borrows(index):
            stretches = cut(index, numel, stretch_numel(total, numel))
            return [each._replace(offloaded=False) for each in stretches]
        if placement is None:
            return [whole(index, numel)]
        if not placement.divisible:
            return [whole(index, numel, offloaded=True)]
        limit = stretch_numel(total, placement.limit)
        chunks = cut(index, numel, limit, placement.policy.ratio, self._parameters.starts(index))
        return list(chunks) or [whole(index, 0)]

    def _master(self, number: int, stretch: Stretch) -> torch.Tensor:
        placement, parameters = self._placement, self._parameters
        part = stretch.part
        if self._borrows(stretch.piece):
            self._borrowed.append(number)
            device = self._groups[stretch.piece].parameters[0].device
            return absent(stretch.numel, parameters.own[stretch.piece].dtype, device).requires_grad_()
        on_host = parameters.own[stretch.piece].device.type == "cpu"
        if placement is None or not stretch.offloaded:
            return parameters.master(stretch.piece, self._dtype, part)
        if on_host and parameters.is_master(stretch.piece, self._dtype):
            return parameters.master(stretch.piece, self._dtype, part)
        dtype = torch.promote_types(parameters.own[stretch.piece].dtype, self._dtype)
        if self._files is not None:
            fill = partial(parameters.read, stretch.piece, part=part)
            return self._files.add(number, stretch.numel, dtype, fill)
        master = torch.empty(stretch.numel, dtype=dtype, device="cpu", pin_memory=placement.pinned)
        parameters.read(stretch.piece, master, part)
        return master.requires_grad_()

    def _is_alone(self, stretch: Stretch) -> bool:
        return self._placement is not None and self._placement.divisible and stretch.offloaded

    def _gradient_buffer(self, number: int, master: torch.Tensor) -> torch.Tensor:
        if self._files is not None and number in self._files:
            return self._files.gradient(number, master.dtype)
        if self._placement is None or not self._is_alone(self.stretches[number]):
            return torch.empty_like(master, requires_grad=False)
        if self._staging is None or self._staging.numel() < master.numel():
            size = max(stretch.numel for stretch in self.stretches if stretch.offloaded)
            self._staging = torch.empty(
                size, dtype=master.dtype, device="cpu", pin_memory=self._placement.pinned
            )
        return self._staging[: master.numel()]


def _within(
    each: ParameterGroup, index: int, start: int, numel: int, offset: int, stretch: Stretch
) -> Iterator[Part]:
    """Yield the range of parameter ``index`` that is in a chunk.

    The parameter's part begins at element ``offset`` of the shard of this rank.
    """
    begin = max(offset, stretch.part.start)
    end = min(offset + numel, stretch.part.stop)
    if end > begin or (numel == 0 and stretch.part.start <= offset <= stretch.part.stop):
        yield Part(
            each.names[index],
            each.parameters[index],
            each.number,
            start + begin - offset,
            max(end - begin, 0),
            begin - stretch.part.start,
        )
