"""A training step as every rank runs it: compute, messages that are issued, and waits for them. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Groups = tuple[tuple[int, ...], ...]


class Message(NamedTuple):
    """A collective of a step.

    Attributes:
        op: a value of schema.Op.
        payload_bytes: S of nccl-tests.
        purpose: a value of schema.Purpose.
        groups: ranks of each group that issues it; every rank is in one of them.
        blocks: the call returns with the result, so a wait follows at once.
        bucket: number of its gradient bucket in the step; None for other messages.
        micro_step: micro-batch within the step.
        phase: a value of schema.Phase.
    """

    op: str
    payload_bytes: int
    purpose: str
    groups: Groups
    blocks: bool
    bucket: int | None = None
    micro_step: int = 0
    phase: str = ""

    @property
    def group_size(self) -> int:
        """Ranks of each group."""
        return len(self.groups[0])


class Event(NamedTuple):
    """A rank issues message number ``message`` of the program, or waits for it."""

    kind: Literal["issue", "wait"]
    message: int


class Program(NamedTuple):
    """The messages and events of a step, in the order in which each rank runs them."""

    messages: tuple[Message, ...]
    events: tuple[Event, ...]


class Step(NamedTuple):
    """The compute of one step.

    Attributes:
        spans: ns that each rank computes before each event, and after the last: (events + 1, ranks).
        calls: ns that the call that issues each message takes, without waiting: (messages, ranks).
        follows: whether it begins where the step before it in the list ended.
    """

    spans: Floats
    calls: Floats
    follows: bool
