"""Infers steps and micro-batches of a training loop from its forward, backward and optimizer calls. Pure."""

from __future__ import annotations

from collections.abc import Set


class Progress:
    """The current step and micro-batch of a loop of forward passes, backward passes and optimizer steps.

    A step ends when the optimizers have stepped. The next step begins with the next training pass. A further
    micro-batch begins with a forward pass after a backward pass, if no optimizer has stepped in between.

    Args:
        step: The current step; -1 before the first step.
    """

    def __init__(self, step: int = -1) -> None:
        self.step = step
        self.micro_step = 0
        self._due = True  # the next pass begins a step
        # The number of backward passes since the last begin of a micro-batch or optimizer step.
        self._backwards = 0
        self._cycle = OptimizerCycle()
        self._idle: set[int] = set()  # optimizers that stepped while nothing else happened

    @property
    def is_between_steps(self) -> bool:
        """Whether a step has ended and no pass of the next step has begun."""
        return self.step >= 0 and self._due

    def begin_forward(self) -> bool:
        """Register a forward pass in training mode; return whether it begins a step or a micro-batch."""
        if self.begin_pass():
            return True
        if not self._backwards:
            return False
        self._backwards = 0
        self.micro_step += 1
        return True

    def begin_pass(self) -> bool:
        """Register the begin of a forward or backward pass; return whether it begins a step."""
        self._idle.clear()
        if not self._due:
            return False
        self._due = False
        self._backwards = self.micro_step = 0
        self.step += 1
        return True

    def end_backward(self) -> None:
        """Register the end of a backward pass."""
        self._backwards += 1

    def end_optimizer(self, optimizer: int, all_optimizers: Set[int] = frozenset()) -> bool:
        """Register the step of an optimizer.

        Args:
            optimizer: A number that identifies the optimizer.
            all_optimizers: The numbers of all optimizers of the program.

        Returns:
            True if the optimizer step itself begins a training step. This is the case if no passes are observed.
        """
        self._backwards = 0
        if not self._due:
            self._due = self._cycle.ends_with(optimizer, all_optimizers)
            return False
        # Some programs let a new optimizer step once without gradients, to create its state. This is no training step.
        if optimizer not in self._idle:
            self._idle.add(optimizer)
            return False
        self.begin_pass()
        self._due = True
        self._idle.add(optimizer)
        return True


class OptimizerCycle:
    """Learns which optimizer's step ends an iteration in a program with several optimizers.

    The steps of the optimizers form rounds. A new round begins when an optimizer steps that has already stepped in the
    current round. The members of the new round are the optimizers that stepped between the last two steps of the
    optimizer that began it. The round ends when all its members have stepped. The members of the first round are all
    optimizers of the program. The first step of an optimizer that did not exist in the first round also ends an
    iteration, because a second training begins.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._round: set[int] = set()
        self._members: set[int] | None = None
        self._ended = False  # whether an iteration has ended in the current round
        self._existed: set[int] = set()  # the optimizers that existed in the first round
        self._last: dict[int, int] = {}  # the last step of each optimizer, as a value of ``_time``
        self._time = 0

    def ends_with(self, optimizer: int, all_optimizers: Set[int] = frozenset()) -> bool:
        """Return whether the latest step of ``optimizer`` ends an iteration.

        This is true at most once per round, apart from the first steps of optimizers that were created later.

        Args:
            optimizer: The number of the optimizer that has just stepped.
            all_optimizers: The numbers of all optimizers of the program. They are used in the first round only.
        """
        self._existed |= all_optimizers
        is_later = self._ended and optimizer not in self._existed and optimizer not in self._last
        if self._first is None:
            self._first = optimizer
        elif optimizer == self._first or optimizer in self._round:
            before = self._last[optimizer]
            self._members = {each for each, time in self._last.items() if time >= before}
            self._first, self._round, self._ended = optimizer, set(), False
        self._round.add(optimizer)
        self._time += 1
        self._last[optimizer] = self._time
        if is_later:
            return True
        members = all_optimizers if self._members is None else self._members
        if self._ended or not members <= self._round:
            return False
        self._ended = True
        return True
