"""Planning of prefetch and release from the recorded order of modules (stage 3).

The module is pure: it computes numbers from numbers.

An iteration is one forward pass with the backward passes after it. The first iteration records the modules. Its
parameters are gathered when a module is entered and released when the module is left. From the second iteration
on, the recorded order is a :class:`Trace`. Parameters are prefetched in the order of the trace, and kept if
they are needed soon. An iteration that departs from the trace continues without a trace, and the next iteration
is recorded again.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol


class Limits(NamedTuple):
    """How far ahead parameters are prefetched and how long they are kept, in elements."""

    prefetch: int
    reuse_distance: int
    max_live: int


class Use(NamedTuple):
    """One parameter of the trace, and the position of the module that uses it."""

    parameter: int
    position: int


class Modules(Protocol):
    """A function that returns the parameters of modules, by number."""

    def __call__(self, module: int, deep: bool | None = None) -> Sequence[int]:
        """Return the parameters that are gathered with ``module``.

        If ``deep`` is not None, return the parameters of ``module`` itself, with or without those of its
        submodules.
        """


class Reach:
    """The distance to the next use of each parameter, in elements that other modules use before."""

    def __init__(self, used: Sequence[Sequence[int]], numels: Mapping[int, int] | Sequence[int]) -> None:
        self._before = [0, *accumulate(sum(numels[p] for p in each) for each in used)]
        self._positions: dict[int, list[int]] = {}
        for position, each in enumerate(used):
            for parameter in each:
                self._positions.setdefault(parameter, []).append(position)

    def distance(self, parameter: int, position: int, end: int | None = None) -> int | None:
        """Return the number of elements that are used from ``position`` until ``parameter`` is used.

        The result is None if ``parameter`` is not used before ``end``.
        """
        positions = self._positions.get(parameter, [])
        index = bisect_left(positions, position)
        if index == len(positions) or (end is not None and positions[index] >= end):
            return None
        return self._before[positions[index]] - self._before[position]


class Trace:
    """A recorded order of modules.

    Args:
        modules: The module numbers in the order in which modules were entered, in forward and backward passes.
        parameters_of: A function that returns the parameters of a module.
        numels: The number of elements of each parameter.
    """

    def __init__(
        self,
        modules: Sequence[int],
        parameters_of: Modules,
        numels: Mapping[int, int],
    ) -> None:
        self.modules = tuple(modules)
        self.uses = tuple(Use(p, at) for at, module in enumerate(self.modules) for p in parameters_of(module))
        self._parameters_of = parameters_of
        self._numels = numels
        self._reaches: dict[bool, Reach] = {}

    def distance(self, parameter: int, position: int, deep: bool = False) -> int | None:
        """Return the elements that modules from ``position`` on use before one uses ``parameter``; None if none does.

        Only a module's own parameters are counted, or, if ``deep``, also those of its submodules.
        """
        reach = self._reaches.get(deep)
        if reach is None:
            reach = Reach([self._parameters_of(module, deep) for module in self.modules], self._numels)
            self._reaches[deep] = reach
        return reach.distance(parameter, position)


class Mode(enum.Enum):
    """How an iteration treats the order of modules."""

    WITHOUT = "without"
    RECORDING = "recording"
    FOLLOWING = "following"


class Planner:
    """Decides for each module which parameters to prefetch and which to release.

    Args:
        limits: How far ahead parameters are prefetched, and how long they are kept.
        numels: The number of elements of each parameter, by number. Parameters may be added later.

    Attributes:
        mode: how the current iteration treats the order of modules.
        live: The number of elements that were gathered and not released in this iteration.
    """

    def __init__(self, limits: Limits, numels: Mapping[int, int]) -> None:
        self.limits = limits
        self.mode = Mode.WITHOUT
        self.live = 0
        self._numels = numels
        self._recorded: list[int] = []
        self._trace: Trace | None = None
        self._position = 0  # position of the next module
        self._queue: deque[Use] = deque()  # uses that have been neither gathered nor passed over
        self._decided: dict[tuple[int, int], list[int]] = {}  # parameters to release, by module and position
        # For each parameter, the last position for which it has been gathered.
        self._gathered_for: dict[int, int] = {}

    @property
    def position(self) -> int:
        """The number of modules that have been entered in this iteration."""
        return self._position

    def begin(self, parameters_of: Modules) -> list[list[int]]:
        """Begin an iteration.

        Returns:
            Lists that must be equal on every rank before the iteration continues; empty while a trace is
            followed.
        """
        compared: list[list[int]] = []
        if self.mode is Mode.RECORDING:
            self._trace = Trace(self._recorded, parameters_of, self._numels)
            uses = self._trace.uses
            compared = [
                list(self._trace.modules),
                [use.parameter for use in uses],
                [use.position for use in uses],
            ]
            self.mode = Mode.FOLLOWING
        elif self.mode is Mode.WITHOUT:
            compared = [[]]
            self.mode = Mode.RECORDING
        self._recorded = []
        self._queue = deque(self._trace.uses if self._trace is not None else ())
        self._gathered_for = {}
        self._position = 0
        self.live = 0
        return compared

    def enter(self, module: int) -> bool:
        """Enter a module that is about to run, forward or backward.

        Return whether the module departs from the trace.
        """
        if self._trace is not None:
            modules = self._trace.modules
            if self._position >= len(modules) or modules[self._position] != module:
                self.forget()
                return True
        if self.mode is Mode.RECORDING:
            self._recorded.append(module)
        return False

    def ahead(self, parameters: Collection[int], released: Callable[[int], bool]) -> list[int] | None:
        """Return the parameters to prefetch after those of the entered module, and advance to the next module.

        Args:
            parameters: The parameters of the entered module.
            released: A function that returns whether a parameter is neither gathered nor being gathered.

        Returns:
            Parameters in the order of their next use; None if the trace does not list ``parameters`` here.
        """
        chosen: list[int] | None = []
        if self._trace is not None:
            if self._pass_over(parameters):
                chosen = self._choose(released)
            else:
                self.forget()
                chosen = None
        self._position += 1
        return chosen

    def coming(self) -> Iterator[int]:
        """Return the parameters of future uses in the order of the trace. Some may already be gathered."""
        return (use.parameter for use in self._queue)

    def next_time(self) -> Iterator[int]:
        """Return the parameters in the order in which the next iteration uses them; empty if the order is not known."""
        return iter(()) if self._trace is None else (use.parameter for use in self._trace.uses)

    def releasable(
        self,
        module: int,
        parameters: Sequence[int],
        persistent: Callable[[int], bool],
        leaf: bool = False,
    ) -> Sequence[int]:
        """Return the parameters that may be released after a module has run; all its parameters if there is no trace.

        When a leaf module is released, the parameters of other modules include those of their submodules. A
        decision for a module at a position of the trace is final, also for later traces. Both rules are
        DeepSpeed's.
        """
        trace = self._trace
        if trace is None:
            return parameters
        place = module, self._position
        decided = self._decided.get(place)
        if decided is None:
            decided = [p for p in parameters if not persistent(p) and not self._needed_soon(trace, p, leaf)]
            self._decided[place] = decided
        return decided

    def forget(self) -> None:
        """Stop to follow the trace for the rest of the iteration. The next iteration is recorded."""
        self.mode = Mode.WITHOUT
        self._trace = None
        self._recorded = []
        self._queue.clear()
        self._gathered_for = {}

    def _pass_over(self, parameters: Collection[int]) -> bool:
        """Remove the parameters that the current module has gathered itself from the queue.

        The result is whether the removed parameters are exactly those of the module.

        The result is whether the queue contained exactly these parameters.
        """
        own = {p for p in parameters if self._gathered_for.get(p, -1) < self._position}
        taken: set[int] = set()
        while self._queue and len(taken) < len(own):
            parameter, position = self._queue.popleft()
            self._gathered_for[parameter] = position
            taken.add(parameter)
        return taken == own

    def _choose(self, released: Callable[[int], bool]) -> list[int]:
        # The limit is checked before a parameter is added, so that the last parameter may exceed the limit.
        room = min(self.limits.max_live - self.live, self.limits.prefetch)
        chosen: dict[int, None] = {}
        numel = 0
        while self._queue and numel < room:
            parameter, position = self._queue.popleft()
            self._gathered_for[parameter] = max(self._gathered_for.get(parameter, -1), position)
            if parameter not in chosen and released(parameter):
                chosen[parameter] = None
                numel += self._numels[parameter]
        return list(chosen)

    def _needed_soon(self, trace: Trace, parameter: int, deep: bool) -> bool:
        # If a later use was skipped because the parameter was already gathered, the parameter is not gathered again for
        # this use. Therefore it must be kept.
        if self._gathered_for.get(parameter, -1) > self._position:
            return True
        distance = trace.distance(parameter, self._position, deep)
        return distance is not None and distance < self.limits.reuse_distance
