"""The instructions of pipeline schedules, as data."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple


class Action(StrEnum):
    """The kind of an instruction, applied to one micro-batch."""

    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"  # only gradients of the inputs, which the previous stage waits for
    BACKWARD_WEIGHT = "backward_weight"  # gradients of the parameters, which no other stage waits for
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
        action: what to do.
        micro_batch: number within the step, from 0.
        chunk: number among the rank's chunks of the model, from 0; interleaved schedules have several.
    """

    action: Action
    micro_batch: int
    chunk: int = 0


class Place(NamedTuple):
    """A chunk of the model on a rank. Activations pass through the chunks in the order of ``chunk``, then ``rank``."""

    rank: int
    chunk: int = 0

    def before(self, ranks: int) -> Place | None:
        """The chunk whose outputs are this one's inputs; None for the first."""
        if self.rank:
            return Place(self.rank - 1, self.chunk)
        return Place(ranks - 1, self.chunk - 1) if self.chunk else None

    def after(self, ranks: int, chunks: int) -> Place | None:
        """The chunk that receives this one's outputs; None for the last."""
        if self.rank < ranks - 1:
            return Place(self.rank + 1, self.chunk)
        return Place(0, self.chunk + 1) if self.chunk < chunks - 1 else None
