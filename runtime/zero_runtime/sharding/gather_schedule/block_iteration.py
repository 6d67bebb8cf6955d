"""Gathering and releasing of blocks of parameters while a model runs forward and backward (stage 3).

A block is gathered by one message when one of its modules begins, unless it has been gathered ahead. It is
released when a module of another block begins. Therefore the head of a model stays gathered from its forward to
its backward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from zero_runtime.comm import DataParallelGroup
from zero_runtime.sharding.gather_schedule.block_order import BlockOrder
from zero_runtime.sharding.gather_schedule.gather_units import Unit
from zero_runtime.sharding.gather_schedule.iteration import Iteration
from zero_runtime.sharding.gather_schedule.module_order import Limits
from zero_runtime.sharding.gather_schedule.order_agreement import END
from zero_runtime.sharding.parameter_gathering import Gatherer
from zero_runtime.sharding.shards import Shard, Status


class Block(NamedTuple):
    """Parameters that are gathered together.

    Attributes:
        name: The name of the block.
        shards: The shards of its parameters.
    """

    name: str
    shards: Sequence[Shard]

    @property
    def busy(self) -> bool:
        """Whether a module uses one of the block's parameters."""
        return any(each.active for each in self.shards)

    @property
    def available(self) -> bool:
        """Whether all parameters of the block are gathered."""
        return all(each.available for each in self.shards)

    @property
    def missing(self) -> list[Shard]:
        """The shards of the block's released parameters."""
        return [each for each in self.shards if each.status is Status.NOT_AVAILABLE]


class BlockIteration(Iteration):
    """An :class:`Iteration` that gathers whole blocks, and follows the order of blocks.

    Args:
        group, gatherer, limits, report_trace: See :class:`Iteration`.
    """

    def __init__(
        self, group: DataParallelGroup, gatherer: Gatherer, limits: Limits, report_trace: bool
    ) -> None:
        super().__init__(group, gatherer, limits, report_trace)
        self._limits = limits
        self._gathered: dict[int, None] = {}  # blocks that are gathered or being gathered
        self._ahead: set[int] = set()  # blocks that are gathered ahead of their use
        self._differentiates = False  # whether a backward pass follows, or runs
        self._turned = False  # whether the backward pass runs
        self._stand_ins: list[Shard] = []  # released parameters that have their shape but no memory
        self.divide([])

    def divide(self, blocks: Sequence[Block]) -> None:
        """Gather ``blocks`` from now on. The order is recorded again."""
        self._blocks = blocks
        self._block_of = {shard.number: index for index, block in enumerate(blocks) for shard in block.shards}
        numels = [[each.numel for each in block.shards] for block in blocks]
        trained = [[each.numel for each in block.shards if each.parameter.requires_grad] for block in blocks]
        self._order = BlockOrder(self._limits, [*map(sum, numels)], [*map(sum, trained)])

    def begin(self, units: Sequence[Unit]) -> None:
        """Begin the forward pass of the whole model."""
        self.drain()
        self._leave_unseen()
        self._order.begin()
        self._agreement.begin(self._order.expected is None)
        self._differentiates = torch.is_grad_enabled()
        self._turned = False

    def anticipate(self) -> None:
        """Do nothing, because shards are in memory."""

    def read(self, unit: Unit, shard: Shard) -> None:
        """Gather the block of a parameter that a module reads in its forward pass.

        The block is kept until the forward pass of the module has ended.
        """
        if shard.persistent and shard.available:
            return
        self._borrow(unit, shard)
        self._use([shard])

    def before_backward(self, unit: Unit) -> None:
        """Gather the parameters for the backward pass of a module.

        This method is called when the gradient of an output is ready.
        """
        if not self._turned:
            self._turned = self._differentiates = True
            self._order.turn()
        super().before_backward(unit)

    def before_gradient(self, shard: Shard) -> None:
        """Let a released parameter take a gradient.

        The accumulation of a gradient reads no values of the parameter, but a hook of the program may read
        them.
        """
        if len(shard.parameter._backward_hooks or ()) > 1:  # one of the hooks calls this method
            super().before_gradient(shard)
        elif not shard.available:
            shard.stand_in()
            self._stand_ins.append(shard)

    def finish_backward(self) -> None:
        """Release all blocks. Call this method after each backward pass."""
        super().finish_backward()
        self._release([index for index in self._gathered if not self._blocks[index].busy])
        self._end_stand_ins()

    def _end_stand_ins(self) -> None:
        for shard in self._stand_ins:
            if shard.status is Status.NOT_AVAILABLE:
                shard.release()
        self._stand_ins.clear()

    def stop(self) -> None:
        """Release all parameters, whether they are in use or not."""
        super().stop()
        self._end_stand_ins()
        self._gathered.clear()

    def restart(self) -> None:
        """Release all parameters, and forget the order of blocks."""
        self.stop()
        self._order.begin()
        self._order.forget()
        self._ends.clear()

    def drain(self) -> None:
        """Wait for the blocks that were gathered ahead and not used, and release them."""
        self._release(list(self._ahead))

    def _enter(self, unit: Unit, use: int) -> None:
        if use == unit.backward and not unit.reads_backward:
            return
        shards = unit.shards()
        for shard in shards:
            if shard.number not in self.shards:  # of another model, named by register_external_parameter
                self.add(shard)
            shard.active.add(use)
        self._use(shards)

    def _leave(self, unit: Unit, use: int) -> None:
        for shard in unit.shards():
            shard.active.discard(use)

    def _use(self, shards: Sequence[Shard]) -> None:
        """Gather the blocks of ``shards``, which a module uses.

        Shards that are in no block are gathered too.
        """
        for index in dict.fromkeys(self._block_of.get(shard.number) for shard in shards):
            if index is not None:
                self._visit(index)
        alone = [shard for shard in shards if shard.number not in self._block_of and not shard.available]
        if alone:
            self._gatherer.start(alone)
            for shard in alone:
                shard.wait()

    def _visit(self, index: int) -> None:
        order = self._order
        if index == order.current:
            self._gather(index)
            return
        if order.expected == index:
            self._agreement.follow(self._blocks[index].name)
        else:
            self._depart(index)
        order.visit(index)
        idle = tuple(each for each in self._gathered if each != index and not self._blocks[each].busy)
        decision = order.decide(idle, self._differentiates)
        self._release(decision.released)
        if self._turned:
            # The backward pass has less memory, because the gradients of two blocks are in flight.
            self._gather(index)
        else:
            # The next message can begin as soon as this message has ended, before its parameters have been copied.
            self._start_block(index)
        for each in decision.ahead:
            self._start_block(each)
            self._ahead.add(each)
        self._gather(index)

    def _depart(self, index: int) -> None:
        """Record the visit of block ``index``. If another block was expected, forget the rest of the order."""
        self._agreement.depart(self._blocks[index].name)
        if self._order.expected is not None:
            self._warn(f"block {self._blocks[index].name}")
            self.drain()
            self._order.forget()
            self._ends = {position for position in self._ends if position <= self._order.position}

    def _end_pass(self) -> None:
        position = self._order.position
        if position in self._ends:
            self._agreement.follow(END)
        else:
            self._agreement.depart(END, keeps_order=self._order.expected is not None)
            self._ends.add(position)

    def _gather(self, index: int) -> None:
        """Gather a block that is used now, and wait for the gather."""
        self._ahead.discard(index)
        block = self._blocks[index]
        if block.available:  # true for all modules of a block except the first
            self._gathered[index] = None
            return
        self._start_block(index)
        for shard in block.shards:
            shard.wait()

    def _start_block(self, index: int) -> None:
        missing = self._blocks[index].missing
        if missing:
            self._gatherer.start(missing)
        self._gathered[index] = None

    def _release(self, indices: Collection[int]) -> None:
        for index in indices:
            self._ahead.discard(index)
            for shard in self._blocks[index].shards:
                shard.wait()
                if shard.number not in self._returned:
                    self.release(shard)
            if not self._blocks[index].busy:
                self._gathered.pop(index, None)
