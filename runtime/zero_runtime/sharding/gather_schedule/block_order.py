"""Planning of prefetch and release from the recorded order of blocks (stage 3). Pure: numbers in, numbers out.

A *visit* begins when a module uses a parameter of another block than the module before. The first iteration records the
visits of its forward and backward pass. Later ones follow that order: at each visit the next blocks are gathered ahead, and
a block that is used again soon is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
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
    """

    def __init__(self, limits: Limits, numels: Sequence[int]) -> None:
        self._limits = limits
        self._numels = numels
        self._window = min(limits.prefetch, max(numels, default=0))
        self._visits: list[int] = []
        self._turn = 0  # visits of the recorded forward pass; 0 without a recorded backward pass
        self._position = -1  # of the current visit
        self._reach: Reach | None = None  # of the recorded visits; None after they have changed
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
        ahead = self._ahead(end)
        needed = {self._visits[self._position], *ahead}
        room = self._limits.max_live - sum(self._numels[block] for block in needed)
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

    def _ahead(self, end: int) -> list[int]:
        """The blocks of the next visits, together no larger than the largest block, but at least one within the limits."""
        if not self._limits.prefetch:
            return []
        current = self._visits[self._position]
        ahead: list[int] = []
        numel = 0
        for block in islice(self._visits, self.position, end):
            size = self._numels[block]
            if block == current or block in ahead:
                continue
            if (ahead and numel + size > self._window) or self._numels[
                current
            ] + numel + size > self._limits.max_live:
                break
            ahead.append(block)
            numel += size
        return ahead

    def _distance(self, block: int, end: int) -> int | None:
        """Elements of the visits from the current one to the next of ``block``; None if it has none before ``end``."""
        if self.expected is None:
            return None
        if self._reach is None:
            self._reach = Reach([[each] for each in self._visits], self._numels)
        return self._reach.distance(block, self._position, end)

    def _changed(self) -> None:
        self._reach = None
        self._decided.clear()
