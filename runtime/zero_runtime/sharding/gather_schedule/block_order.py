"""Planning of prefetch and release from the recorded order of blocks (stage 3).

The module is pure: it computes numbers from numbers.

A *visit* begins when a module uses a parameter of a different block than the module before. The first iteration
records the visits of its forward and backward pass. Later iterations follow this order. At each visit the next
blocks are gathered ahead, and a block that is used again soon is kept.

The backward pass needs memory for gradients, which the forward pass does not need. Therefore a forward pass
before a backward pass gathers up to twice as much ahead, within the memory that the backward pass needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from zero_runtime.sharding.gather_schedule.module_order import Limits, Reach


class Decision(NamedTuple):
    """The actions at a visit.

    Attributes:
        ahead: The blocks to gather after the visited block, in the order of their use.
        released: The idle blocks to release before the gather.
    """

    ahead: Sequence[int]
    released: Sequence[int]


class BlockOrder:
    """The order of visits, and the decisions that follow from it.

    Args:
        limits: How far ahead blocks are gathered, how long they are kept, and how much is gathered at once; in
            elements.
        numels: The number of elements of each block.
        trained: The number of elements of each block that get gradients.
    """

    def __init__(self, limits: Limits, numels: Sequence[int], trained: Sequence[int]) -> None:
        self._limits = limits
        self._numels = numels
        self._trained = trained
        self._largest = max(numels, default=0)
        self._visits: list[int] = []
        self._turn = 0  # number of visits of the recorded forward pass; 0 without a recorded backward pass
        self._position = -1  # number of the current visit
        self._reach: Reach | None = None  # reach of the recorded visits; None after the visits have changed
        self._needs: list[int] | None = None  # elements that the recorded backward pass needs
        self._decided: dict[tuple[int, bool], tuple[tuple[int, ...], Decision]] = {}

    @property
    def current(self) -> int | None:
        """The block of the current visit; None before the first one of an iteration."""
        return self._visits[self._position] if self._position >= 0 else None

    @property
    def position(self) -> int:
        """The number of visits of this iteration so far."""
        return self._position + 1

    @property
    def expected(self) -> int | None:
        """The block of the next visit; None while the order is being recorded."""
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
        """Discard the rest of the recorded order, and record from here on."""
        del self._visits[self.position :]
        self._turn = 0 if self._turn > self.position else self._turn
        self._changed()

    def visit(self, block: int) -> None:
        """Begin a visit of ``block``, which is the expected block unless the order is being recorded."""
        if self.expected is None:
            self._visits.append(block)
            self._changed()
        self._position += 1

    def decide(self, idle: tuple[int, ...], differentiates: bool) -> Decision:
        """Return the blocks to gather ahead and the blocks to release at the current visit.

        Args:
            idle: The gathered blocks that no module uses.
            differentiates: Whether a backward pass runs, or follows this forward pass.
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
        """Return the number of elements that a forward visit may gather ahead.

        With these elements, the visit needs no more memory than the backward pass.

        The visit is compared with the backward visits up to that of the same block. During these backward
        visits, the data that the forward pass has left in memory is at least as large as at this visit.
        """
        current, backward = self._visits[self._position], self._visits[self._turn :]
        end = backward.index(current) + 1 if current in backward else len(backward)
        # The visited block needs memory for a message, and for the parameters that are copied from the message.
        return max(self._backward_needs()[:end], default=0) - 2 * self._numels[current]

    def _backward_needs(self) -> list[int]:
        """Return the elements that are needed at each backward visit.

        They are the elements of the block, of the blocks that are gathered ahead, and of the data that the
        previous block sends and receives.
        """
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
        """Return the blocks of the visits after ``position`` and before ``end``, up to ``window`` elements.

        The result has at least one block, if the limits permit it.
        """
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
        """Return the elements of the visits from the current visit to the next visit of ``block``.

        The result is None if ``block`` has no visit before ``end``.
        """
        if self.expected is None:
            return None
        if self._reach is None:
            self._reach = Reach([[each] for each in self._visits], self._numels)
        return self._reach.distance(block, self._position, end)

    def _changed(self) -> None:
        self._reach = self._needs = None
        self._decided.clear()
