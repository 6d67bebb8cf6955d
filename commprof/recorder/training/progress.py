"""Infers steps and micro-batches of a training loop from its forward, backward and optimizer calls. Pure."""

from __future__ import annotations

from collections.abc import Set


class Progress:
    """Steps and micro-batches of a loop of forward passes, backward passes and optimizer steps.

    A step ends when the optimizers have stepped, and the passes of the next begin with the next pass of training. A
    further micro-batch begins with a forward pass that follows a backward pass while no optimizer has stepped.

    Args:
        step: where it is already; -1 before the first step.
    """

    def __init__(self, step: int = -1) -> None:
        self.step = step
        self.micro_step = 0
        self._due = True  # the next pass begins a step
        self._backwards = 0  # since the last forward pass, with no optimizer step after it
        self._cycle = OptimizerCycle()
        self._idle: set[int] = set()  # optimizers that stepped while nothing else happened

    @property
    def is_between_steps(self) -> bool:
        """Whether a step has ended, and no pass of the next has begun."""
        return self.step >= 0 and self._due

    def begin_forward(self) -> bool:
        """A forward pass in training mode begins. True when with it a step or a micro-batch does."""
        if self.begin_pass():
            return True
        if not self._backwards:
            return False
        self._backwards = 0
        self.micro_step += 1
        return True

    def begin_pass(self) -> bool:
        """A pass begins, forward or backward. True when with it a step does."""
        self._idle.clear()
        if not self._due:
            return False
        self._due = False
        self._backwards = self.micro_step = 0
        self.step += 1
        return True

    def end_backward(self) -> None:
        """A backward pass has ended."""
        self._backwards += 1

    def end_optimizer(self, optimizer: int, all_optimizers: Set[int] = frozenset()) -> bool:
        """An optimizer has stepped. True when with that a step begins, since the program shows no passes.

        Args:
            optimizer: what stands for it.
            all_optimizers: the optimizers of the program.
        """
        self._backwards = 0
        if not self._due:
            self._due = self._cycle.ends_with(optimizer, all_optimizers)
            return False
        # Some programs let a new optimizer step once, with no gradients, to make its state: that is no training step.
        if optimizer not in self._idle:
            self._idle.add(optimizer)
            return False
        self.begin_pass()
        self._due = True
        self._idle.add(optimizer)
        return True


class OptimizerCycle:
    """Which optimizer's step ends an iteration, where a program has several: learned from the rounds that they make.

    A round begins when an optimizer steps that has stepped in this one, or the first one of the round before. It ends when
    those have stepped that step between two steps of the one that began it; in the first round, all that there are.
    The first step of an optimizer that did not exist in the first round ends an iteration too: a second training begins.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._round: set[int] = set()
        self._members: set[int] | None = None
        self._ended = False  # in this round
        self._existed: set[int] = set()  # in the first round
        self._last: dict[int, int] = {}  # when each optimizer stepped last, in steps of any
        self._time = 0

    def ends_with(self, optimizer: int, all_optimizers: Set[int] = frozenset()) -> bool:
        """Whether the step that ``optimizer`` has just made ends an iteration.

        At most once in a round, apart from the first steps of later optimizers.

        Args:
            all_optimizers: the optimizers of the program; used in the first round only.
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
