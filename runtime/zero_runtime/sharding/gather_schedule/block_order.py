"""Planning of prefetch and release from the recorded order of blocks (stage 3). Pure: numbers in, numbers out.

A *visit* begins when a module uses a parameter of another block than the module before. The first iteration records the
visits of its forward and backward pass. Later ones follow that order: at each visit the next blocks are gathered ahead, and
a block that is used again soon is kept.

The backward pass needs memory for gradients that the forward pass does not need. So a forward pass before it gathers up to
twice as much ahead, as far as that memory reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from zero_runtime.sharding.gather_schedule.module_order import Limits, Reach


class Decision(NamedTuple):
    """What to do at a visit.

    Attributes:
        ahead: blocks to gather after the visited one, in the order of their use.
        released: idle blocks to release before that.
    """

    ahead: Sequence[int]
    released: Sequence[int]


class BlockOrder:
    """The order of visits, and what it decides.

    Args:
        limits: how far ahead, how long, and how much at once, in elements.
        numels: elements of each block.
        trained: those of them that get gradients.
    """

    def __init__(self, limits: Limits, numels: Sequence[int], trained: Sequence[int]) -> None:
        self._limits = limits
        self._numels = numels
        self._trained = trained
        self._largest = max(numels, default=0)
        self._visits: list[int] = []
        self._turn = 0  # visits of the recorded forward pass; 0 without a recorded backward pass
        self._position = -1  # of the current visit
        self._reach: Reach | None = None  # of the recorded visits; None after they have changed
        self._needs: list[int] | None = None  # of the recorded backward pass
        self._decided: dict[tuple[int, bool], tuple[tuple[int, ...], Decision]] = {}

    @property
    def current(self) -> int | None:
        """The block of the current visit; None before the first one of an iteration."""
        return self._visits[self._position] if self._position >= 0 else None

    @property
    def position(self) -> int:
        """Number of visits of this iteration."""
        return self._position + 1

    @property
    def expected(self) -> int | None:
        """The block of the next visit; None where the order is being recorded."""
        return self._visits[self.position] if self.position < len(self._visits) else None

    def begin(self) -> None:
        """Begin an iteration."""
        self._position = -1

    def turn(self) -> None:
        """Begin the backward pass of an iteration."""
        if self.expected is None:
            self._turn = self.position
            self._changed()

    def forget(self) -> None:
        """Record from here on: the rest of the recorded order no longer holds."""
        del self._visits[self.position :]
        self._turn = 0 if self._turn > self.position else self._turn
        self._changed()

    def visit(self, block: int) -> None:
        """Begin a visit of ``block``, which is the expected one unless the order is being recorded."""
        if self.expected is None:
            self._visits.append(block)
            self._changed()
        self._position += 1

    def decide(self, idle: tuple[int, ...], differentiates: bool) -> Decision:
        """What to gather ahead and to release at the current visit.

        Args:
            idle: gathered blocks that no module uses.
            differentiates: whether a backward pass runs, or follows this forward pass.
        """
        place = self._position, differentiates
        known = self._decided.get(place)
        if known is None or known[0] != idle:
            known = self._decided[place] = idle, self._decision(idle, differentiates)
        return known[1]

    def _decision(self, idle: tuple[int, ...], differentiates: bool) -> Decision:
        end = len(self._visits) if differentiates or not self._turn else max(self._turn, self.position)
        window = self._largest
        if differentiates and self._position < self._turn:
            window = max(window, min(2 * window, self._room()))
        ahead = self._ahead(self._position, end, window)
        needed = {self._visits[self._position], *ahead}
        room = self._limits.max_live - self._sum([*needed])
        released = []
        distances = [(self._distance(block, end), block) for block in idle if block not in needed]
        # The block that is used again first is kept first.
        for distance, block in sorted(distances, key=lambda each: (each[0] is None, each)):
            if (
                distance is not None
                and distance < self._limits.reuse_distance
                and self._numels[block] <= room
            ):
                room -= self._numels[block]
            else:
                released.append(block)
        return Decision(ahead, released)

    def _room(self) -> int:
        """Elements that a forward visit may gather ahead, so that it needs no more memory than the backward pass.

        It is compared with the backward visits until that of the same block. During these the forward pass has left at least
        as much.
        """
        current, backward = self._visits[self._position], self._visits[self._turn :]
        end = backward.index(current) + 1 if current in backward else len(backward)
        # A message, and the parameters that are copied from it.
        return max(self._backward_needs()[:end], default=0) - 2 * self._numels[current]

    def _backward_needs(self) -> list[int]:
        """Elements at each backward visit: its block, what is gathered ahead, what the block before sends and receives."""
        if self._needs is None:
            end = len(self._visits)
            self._needs = [
                2 * (self._trained[before] + self._numels[block])
                + self._sum(self._ahead(position, end, self._largest))
                for position, (before, block) in enumerate(pairwise(self._visits), 1)
                if position >= self._turn
            ]
        return self._needs

    def _ahead(self, position: int, end: int, window: int) -> list[int]:
        """The blocks of the visits after ``position`` and before ``end``, of ``window`` elements, but at least one."""
        if not self._limits.prefetch:
            return []
        current, window = self._visits[position], min(self._limits.prefetch, window)
        ahead: list[int] = []
        for block in islice(self._visits, position + 1, end):
            if block == current or block in ahead:
                continue
            numel = self._sum([*ahead, block])
            if (ahead and numel > window) or self._numels[current] + numel > self._limits.max_live:
                break
            ahead.append(block)
        return ahead

    def _sum(self, blocks: Sequence[int]) -> int:
        return sum(self._numels[each] for each in blocks)

    def _distance(self, block: int, end: int) -> int | None:
        """Elements of the visits from the current one to the next of ``block``; None if it has none before ``end``."""
        if self.expected is None:
            return None
        if self._reach is None:
            self._reach = Reach([[each] for each in self._visits], self._numels)
        return self._reach.distance(block, self._position, end)

    def _changed(self) -> None:
        self._reach = self._needs = None
        self._decided.clear()
