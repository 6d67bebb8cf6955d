"""Gathering and releasing sharded parameters while a model runs forward and backward (stage 3).

The hooks of :mod:`zero_runtime.sharding.residency` come here; :mod:`zero_runtime.sharding.trace` says what to gather
ahead and what to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from commprof import hooks
from zero_runtime import log
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import UsageError
from zero_runtime.sharding import access
from zero_runtime.sharding.gathering import Gatherer
from zero_runtime.sharding.pages import Pager
from zero_runtime.sharding.shards import Shard, Status, shards_of
from zero_runtime.sharding.trace import Limits, Planner
from zero_runtime.sharding.units import Unit, tensors_in, watch_outputs

_TRACE_CHECK: Final = hooks.tag("trace_check")


class Iteration:
    """A forward pass of a model with the backward passes after it, again and again.

    Args:
        group: the data-parallel ranks.
        gatherer: what sends the messages.
        limits: how far ahead parameters are gathered, and how long they are kept.
        report_trace: say on stderr when the recorded order of modules no longer holds.

    Attributes:
        shards: of the parameters, by number.
    """

    def __init__(
        self, group: DataParallelGroup, gatherer: Gatherer, limits: Limits, report_trace: bool
    ) -> None:
        self._group = group
        self._gatherer = gatherer
        self._report_trace = report_trace
        self.shards: dict[int, Shard] = {}
        self._numels: dict[int, int] = {}
        self._planner = Planner(limits, self._numels)
        self._inflight: dict[int, Shard] = {}  # gathered, or being gathered, ahead of their use
        self._backward: dict[int, Unit] = {}  # whose backward pass has begun and not ended
        self._unseen: dict[int, Unit] = {}  # whose outputs show no tensor to wait for
        self._returned: set[int] = set()  # by a module: who uses them how long cannot be seen
        self._strays: list[Shard] = []  # gathered for nothing but their gradient
        self.listener: Callable[[torch.nn.Module], None] | None = (
            None  # hears of backward passes that have ended
        )
        self.pager: Pager | None = None  # reads slices ahead that are in files

    def add(self, shard: Shard) -> None:
        """Count the parameter of ``shard`` among those of the model."""
        self.shards[shard.number] = shard
        self._numels[shard.number] = shard.numel

    def begin(self, units: Sequence[Unit]) -> None:
        """The forward pass of the whole model, which has ``units``, begins."""
        self.drain()
        self._leave_unseen()

        def parameters_of(module: int, deep: bool | None = None) -> list[int]:
            unit = units[module]
            return [shard.number for shard in (unit.shards() if deep is None else unit.find(deep))]

        for numbers in self._planner.begin(parameters_of):
            self._compare(numbers)
        self._read_ahead(self._planner.coming)

    def anticipate(self) -> None:
        """Begin to read what the next forward pass uses first, where that is in files."""
        self._read_ahead(self._planner.next_time)

    def _read_ahead(self, coming: Callable[[], Iterator[int]]) -> None:
        pager = self.pager
        if pager is not None and pager.in_files:
            shards = self.shards
            pager.refill(
                lambda: (
                    shards[number]
                    for number in coming()
                    if shards[number].pager is pager and shards[number].status is Status.NOT_AVAILABLE
                )
            )

    def before_forward(self, unit: Unit) -> None:
        """A module is about to run: gather for it."""
        access.running.append(unit)
        self._enter(unit, unit.forward)

    def after_forward(self, unit: Unit, output: Any) -> Any:
        """A module has run: release what it used, and wait for the gradients of its outputs.

        Returns:
            What it is to return instead; None for ``output``.
        """
        while access.running and access.running.pop() is not unit:
            pass  # of modules that an exception has left
        tensors = [output] if isinstance(output, torch.Tensor) else list(tensors_in(output))
        replaced = None
        if torch.is_grad_enabled():
            self._hand_over(unit, tensors)
            replaced = watch_outputs(unit, output, tensors)
            if not tensors and output is not None:
                self._unseen[unit.forward] = unit
                return None
        self._leave(unit, unit.forward)
        return replaced

    def _hand_over(self, unit: Unit, outputs: Sequence[torch.Tensor]) -> None:
        """Parameters that a module returns are used by the module that called it."""
        caller = access.running[-1] if access.running else None
        for shard in shards_of(outputs):
            if isinstance(caller, Unit):
                self._borrow(caller, shard)
                self._returned.add(shard.number)

    def read(self, unit: Unit, shard: Shard) -> None:
        """A module reads, in its forward pass, a parameter that is not whole: from now on one of those it uses."""
        self._borrow(unit, shard)
        self._gatherer.gather_each([shard])

    def _borrow(self, unit: Unit, shard: Shard) -> None:
        """``unit``, whose forward pass is running, uses a parameter that it does not own."""
        unit.add_external(shard.parameter)
        shard.active.add(unit.forward)
        self.add(shard)

    def before_backward(self, unit: Unit) -> None:
        """The gradient of an output is there: gather for the backward pass of the module."""
        self._backward.pop(unit.number, None)
        self._backward[unit.number] = unit
        self._enter(unit, unit.backward)

    def after_backward(self, unit: Unit) -> None:
        """The gradients of all inputs are there: the backward pass of the module has ended."""
        self._backward.pop(unit.number, None)
        if self.listener is not None:
            self.listener(unit.module)
        self._leave(unit, unit.backward)

    def finish_backward(self) -> None:
        """Release what the modules without differentiable inputs have left whole. Call it after each backward pass."""
        for unit in reversed(list(self._backward.values())):
            for shard in unit.shards():
                shard.active.discard(unit.backward)
                if not shard.persistent and shard.number not in self._returned:
                    self.release(shard)
        self._backward.clear()
        for shard in self._strays:
            self.release(shard)
        self._strays.clear()
        self._leave_unseen()

    def before_gradient(self, shard: Shard) -> None:
        """A gradient is about to be accumulated, which needs a whole parameter, also where its module is not running."""
        if not shard.available:
            self._gatherer.gather_each([shard])
            self._strays.append(shard)

    def _leave_unseen(self) -> None:
        for unit in self._unseen.values():
            self._leave(unit, unit.forward)
        self._unseen.clear()

    def stop(self) -> None:
        """Nobody uses any parameter any more: make slices of all of them."""
        self.drain()
        self._backward.clear()
        self._unseen.clear()
        self._strays.clear()
        for shard in self.shards.values():
            shard.active.clear()
            self.release(shard)

    def restart(self) -> None:
        """As :meth:`stop`, and forget the order of modules."""
        self.stop()
        self._planner.forget()

    # One module.

    def _enter(self, unit: Unit, use: int) -> None:
        """Gather what ``unit`` needs, wait for it, and begin to gather what comes next."""
        if self._planner.enter(unit.number):
            self._forget(unit)
        shards = unit.shards()
        self._start(shards)
        self._read_ahead(self._planner.coming)
        for shard in shards:
            if shard.number not in self.shards:  # of another model, named by register_external_parameter
                self.add(shard)
            shard.active.add(use)
            self._inflight.pop(shard.number, None)
            shard.wait()
        ahead = self._planner.ahead([shard.number for shard in shards], self._is_released)
        if ahead is None:
            self._forget(unit)
        elif ahead:
            self._start([self.shards[number] for number in ahead])
        self._read_ahead(self._planner.coming)

    def _leave(self, unit: Unit, use: int) -> None:
        """``unit`` has run: release what nobody needs soon."""
        shards = unit.shards()
        if not shards:
            return
        for shard in shards:
            shard.active.discard(use)
        releasable = self._planner.releasable(
            unit.number, [shard.number for shard in shards], self._is_persistent, unit.is_leaf
        )
        for shard in shards:
            if shard.number in releasable and shard.number not in self._returned:
                self.release(shard)

    def _is_released(self, number: int) -> bool:
        return self.shards[number].status is Status.NOT_AVAILABLE

    def _is_persistent(self, number: int) -> bool:
        return self.shards[number].persistent

    def _start(self, shards: Sequence[Shard]) -> None:
        missing = [shard for shard in shards if shard.status is Status.NOT_AVAILABLE]
        if missing:
            self._gatherer.start(missing)
            for shard in missing:
                self._planner.live += shard.numel
                self._inflight[shard.number] = shard

    def release(self, shard: Shard) -> None:
        """Make of a parameter its slices again, unless somebody uses it."""
        if shard.available and not shard.active:
            self._gatherer.keep_secondary(shard)
            shard.release()
            self._planner.live -= shard.numel

    def drain(self) -> None:
        """Wait for what is on its way, and release it unless somebody uses it."""
        for shard in self._inflight.values():
            shard.wait()
            self.release(shard)
        self._inflight.clear()

    def _forget(self, unit: Unit) -> None:
        self.drain()
        if self.pager is not None:
            self.pager.cancel()
        if self._report_trace and self._group.rank == 0:
            what = f"{type(unit.module).__name__} (module {unit.number})"
            log.warning(f"{what} does not run in the recorded order of modules; recording again")

    def _compare(self, numbers: Sequence[int]) -> None:
        """Make sure that rank 0 has the same ``numbers``. Raises UsageError."""
        for mine in ([len(numbers)], numbers):
            theirs = torch.tensor(mine, dtype=torch.int64, device=self._group.device)
            self._group.broadcast(theirs, 0, why=_TRACE_CHECK)
            if theirs.tolist() != list(mine):
                raise UsageError(
                    f"rank {self._group.rank} ran its modules in another order than rank 0 ({list(mine)[:8]}... against "
                    f"{theirs.tolist()[:8]}...); stage 3 needs one order on all ranks. Flag modules whose children run "
                    "in varying order with set_z3_leaf_modules"
                )
