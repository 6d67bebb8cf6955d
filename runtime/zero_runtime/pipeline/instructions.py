"""What a stage of a pipeline does in a step, as rows of data."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple


class Action(StrEnum):
    """What an instruction does with one micro-batch."""

    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"  # gradients of the inputs alone, which the stage before waits for
    BACKWARD_WEIGHT = "backward_weight"  # gradients of the parameters, which nobody waits for
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
        action: what is done.
        micro_batch: with which one of the step, from 0.
        chunk: in which of the rank's parts of the model, from 0; there are several where stages are interleaved.
    """

    action: Action
    micro_batch: int
    chunk: int = 0


class Place(NamedTuple):
    """A part of the model: the chunk of a rank. Parts are passed in the order of ``chunk``, then ``rank``."""

    rank: int
    chunk: int = 0

    def before(self, ranks: int) -> Place | None:
        """The part whose outputs are this one's inputs; None for the first."""
        if self.rank:
            return Place(self.rank - 1, self.chunk)
        return Place(ranks - 1, self.chunk - 1) if self.chunk else None

    def after(self, ranks: int, chunks: int) -> Place | None:
        """The part that gets this one's outputs; None for the last."""
        if self.rank < ranks - 1:
            return Place(self.rank + 1, self.chunk)
        return Place(0, self.chunk + 1) if self.chunk < chunks - 1 else None
