"""Gathering and releasing of sharded parameters while a model runs forward and backward (stage 3).

The hooks of :mod:`zero_runtime.sharding.gather_schedule.residency` call this module.
:mod:`zero_runtime.sharding.gather_schedule.module_order` decides which parameters to prefetch and which to
keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from commprof import hooks
from zero_runtime import log
from zero_runtime.comm import DataParallelGroup
from zero_runtime.sharding.gather_schedule import outside_access
from zero_runtime.sharding.gather_schedule.gather_units import Unit, tensors_in, watch_outputs
from zero_runtime.sharding.gather_schedule.module_order import Limits, Mode, Planner
from zero_runtime.sharding.gather_schedule.order_agreement import END, OrderAgreement
from zero_runtime.sharding.parameter_gathering import Gatherer
from zero_runtime.sharding.placement.pages import Pager
from zero_runtime.sharding.shards import Shard, Status, shards_of

_TRACE_CHECK: Final = hooks.tag("trace_check")


class Iteration:
    """Gathers and releases parameters in each iteration.

    An iteration is a forward pass and the backward passes after it.

    Args:
        group: The data-parallel ranks.
        gatherer: The object that sends the messages.
        limits: How far ahead parameters are prefetched, and how long they are kept.
        report_trace: Whether to print a warning when modules run in a different order than recorded.

    Attributes:
        shards: The shards of the parameters, by number.
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
        self._inflight: dict[int, Shard] = {}  # shards whose gather has started and that are not used yet
        self._backward: dict[int, Unit] = {}  # units whose backward pass is running
        self._unseen: dict[int, Unit] = {}  # units whose outputs contain no tensor to watch
        self._returned: set[int] = set()  # parameters that a module returned; the end of their use is unknown
        self._strays: list[Shard] = []  # shards that are gathered only to accumulate their gradient
        self._agreement = OrderAgreement(group)
        self._ends: set[int] = set()  # positions in the recorded order where a backward pass ended
        # A function that is called with each module whose backward pass has ended.
        self.listener: Callable[[torch.nn.Module], None] | None = None
        self.pager: Pager | None = None  # pager that reads shards on NVMe ahead of their use

    def add(self, shard: Shard) -> None:
        """Add the parameter of ``shard`` to the parameters of the model."""
        self.shards[shard.number] = shard
        self._numels[shard.number] = shard.numel

    def begin(self, units: Sequence[Unit]) -> None:
        """Begin the forward pass of the whole model, which consists of ``units``."""
        self.drain()
        self._leave_unseen()

        def parameters_of(module: int, deep: bool | None = None) -> list[int]:
            unit = units[module]
            return [shard.number for shard in (unit.shards() if deep is None else unit.find(deep))]

        compared = self._planner.begin(parameters_of)
        is_recording = self._planner.mode is Mode.RECORDING
        self._agreement.begin(is_recording)
        if is_recording:
            self._ends.clear()
        # The first list contains modules, and the other lists contain parameters and positions.
        for number, numbers in enumerate(compared):
            self._compare(
                numbers, (lambda each: f"value {each}") if number else (lambda each: units[each].name)
            )
        self._read_ahead(self._planner.coming)

    def anticipate(self) -> None:
        """Start to read the shards on NVMe that the next forward pass uses first."""
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
        """Gather the parameters of a module that is about to run."""
        outside_access.running.append(unit)
        self._enter(unit, unit.forward)

    def after_forward(self, unit: Unit, output: Any) -> Any:
        """Release the parameters of a module that has run, and watch for the gradients of its outputs.

        Returns:
            A replacement of the module's output; None to keep ``output``.
        """
        while outside_access.running and outside_access.running.pop() is not unit:
            pass  # drop modules whose forward pass ended with an exception
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
        """Register the parameters that a module returns with the calling module, which uses them."""
        caller = outside_access.running[-1] if outside_access.running else None
        for shard in shards_of(outputs):
            if isinstance(caller, Unit):
                self._borrow(caller, shard)
                self._returned.add(shard.number)

    def read(self, unit: Unit, shard: Shard) -> None:
        """Gather a released parameter that a module reads in its forward pass.

        From now on it is gathered with the module's own parameters.
        """
        if shard.available:
            return
        self._borrow(unit, shard)
        self._gatherer.gather_each([shard])

    def _borrow(self, unit: Unit, shard: Shard) -> None:
        """Register a parameter with ``unit``, which uses the parameter without owning it.

        The forward pass of ``unit`` is running.
        """
        unit.add_external(shard.parameter)
        shard.active.add(unit.forward)
        self.add(shard)

    def before_backward(self, unit: Unit) -> None:
        """Gather the parameters for the backward pass of a module.

        This method is called when the gradient of an output is ready.
        """
        self._backward.pop(unit.number, None)
        self._backward[unit.number] = unit
        self._enter(unit, unit.backward)

    def after_backward(self, unit: Unit) -> None:
        """Release the parameters after the backward pass of a module.

        This method is called when the gradients of all inputs are ready.
        """
        self._backward.pop(unit.number, None)
        if self.listener is not None:
            self.listener(unit.module)
        self._leave(unit, unit.backward)

    def finish_backward(self) -> None:
        """Release the parameters of modules without differentiable inputs.

        Call this method after each backward pass.

        Raises:
            UsageError: Another rank has not reached the end of the pass.
        """
        self._end_pass()
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

    def _end_pass(self) -> None:
        position, follows = self._planner.position, self._planner.mode is Mode.FOLLOWING
        if follows and position in self._ends:
            self._agreement.follow(END)
        else:
            self._agreement.depart(END, keeps_order=follows)
            self._ends.add(position)

    def before_gradient(self, shard: Shard) -> None:
        """Gather a parameter whose gradient is about to be accumulated, even if its module is not running."""
        if not shard.available:
            self._gatherer.gather_each([shard])
            self._strays.append(shard)

    def _leave_unseen(self) -> None:
        for unit in self._unseen.values():
            self._leave(unit, unit.forward)
        self._unseen.clear()

    def stop(self) -> None:
        """Release all parameters, whether they are in use or not."""
        self.drain()
        self._backward.clear()
        self._unseen.clear()
        self._strays.clear()
        for shard in self.shards.values():
            shard.active.clear()
            self.release(shard)

    def restart(self) -> None:
        """Release all parameters, and forget the order of modules."""
        self.stop()
        self._planner.forget()

    # One module.

    def _enter(self, unit: Unit, use: int) -> None:
        """Gather the parameters of ``unit``, wait for them, and start to prefetch the next parameters."""
        shards = unit.shards()
        if self._planner.enter(unit.number):
            self._agreement.depart(unit.name)
            self._forget(unit)
        elif self._planner.mode is Mode.FOLLOWING:
            self._agreement.follow(unit.name)
        elif any(shard.status is Status.NOT_AVAILABLE for shard in shards):
            self._agreement.depart(unit.name)
        self._start(shards)
        self._read_ahead(self._planner.coming)
        for shard in shards:
            # This is a parameter of another model, from register_external_parameter.
            if shard.number not in self.shards:
                self.add(shard)
            shard.active.add(use)
            self._inflight.pop(shard.number, None)
            shard.wait()
        ahead = self._planner.ahead([shard.number for shard in shards], self._is_released)
        if ahead is None:
            self._agreement.depart(f"{unit.name} with other parameters")
            self._forget(unit)
        elif ahead:
            self._start([self.shards[number] for number in ahead])
        self._read_ahead(self._planner.coming)

    def _leave(self, unit: Unit, use: int) -> None:
        """Release the parameters of ``unit``, which has run, unless they are needed soon."""
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
        """Release a parameter, unless it is in use."""
        if shard.available and not shard.active:
            self._gatherer.keep_secondary(shard)
            shard.release()
            self._planner.live -= shard.numel

    def drain(self) -> None:
        """Wait for prefetched parameters, and release them unless they are in use."""
        for shard in self._inflight.values():
            shard.wait()
            self.release(shard)
        self._inflight.clear()

    def _forget(self, unit: Unit) -> None:
        self.drain()
        if self.pager is not None:
            self.pager.cancel()
        self._warn(f"{type(unit.module).__name__} (module {unit.number})")

    def _warn(self, what: str) -> None:
        """Warn that ``what`` does not run in the recorded order, if ``report_trace`` is set."""
        if self._report_trace and self._group.rank == 0:
            log.warning(f"{what} does not run in the recorded order of modules; recording again")

    def _compare(self, numbers: Sequence[int], names: Callable[[int], str]) -> None:
        """Check that rank 0 has the same ``numbers``; raise UsageError otherwise.

        ``names`` returns the name of a number for the error.
        """
        length = self._of_first([len(numbers)])[0]
        theirs = self._of_first(numbers if length == len(numbers) else [0] * length)
        if theirs != list(numbers):
            place = next(
                (at for at, (own, other) in enumerate(zip(numbers, theirs, strict=False)) if own != other),
                min(length, len(numbers)),
            )
            own, other = ([*map(names, each[: place + 1]), END][: place + 1] for each in (numbers, theirs))
            self._agreement.differ(own, other)

    def _of_first(self, numbers: Sequence[int]) -> list[int]:
        """Return the ``numbers`` of rank 0, which must have the same length as here."""
        shared = torch.tensor(numbers, dtype=torch.int64, device=self._group.device)
        self._group.broadcast(shared, 0, why=_TRACE_CHECK)
        theirs: list[int] = shared.tolist()
        return theirs
