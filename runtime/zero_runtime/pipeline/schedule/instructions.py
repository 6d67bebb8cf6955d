"""The instructions of pipeline schedules, represented as data."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple


class Action(StrEnum):
    """The kind of an instruction, applied to one micro-batch."""

    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"  # gradients of the inputs only; the previous stage waits for them
    BACKWARD_WEIGHT = "backward_weight"  # gradients of the parameters; no other stage waits for them
    SEND_ACTIVATION = "send_activation"
    RECEIVE_ACTIVATION = "receive_activation"
    SEND_GRADIENT = "send_gradient"
    RECEIVE_GRADIENT = "receive_gradient"


COMPUTATIONS: Final = frozenset(
    (Action.FORWARD, Action.BACKWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)
)
SENDS: Final = frozenset((Action.SEND_ACTIVATION, Action.SEND_GRADIENT))
RECEIVES: Final = frozenset((Action.RECEIVE_ACTIVATION, Action.RECEIVE_GRADIENT))


class Instruction(NamedTuple):
    """One action of one rank.

    Attributes:
        action: The kind of the instruction.
        micro_batch: The number of the micro-batch within the step, counted from 0.
        chunk: The number of the chunk among the rank's chunks of the model, counted from 0. Only interleaved
            schedules have several chunks.
    """

    action: Action
    micro_batch: int
    chunk: int = 0


class Place(NamedTuple):
    """A chunk of the model on a rank.

    Activations pass through the chunks in the order of ``chunk``, and then of ``rank``.
    """

    rank: int
    chunk: int = 0

    def before(self, ranks: int) -> Place | None:
        """Return the chunk whose outputs are the inputs of this chunk, or None for the first chunk."""
        if self.rank:
            return Place(self.rank - 1, self.chunk)
        return Place(ranks - 1, self.chunk - 1) if self.chunk else None

    def after(self, ranks: int, chunks: int) -> Place | None:
        """Return the chunk that receives the outputs of this chunk, or None for the last chunk."""
        if self.rank < ranks - 1:
            return Place(self.rank + 1, self.chunk)
        return Place(0, self.chunk + 1) if self.chunk < chunks - 1 else None
