"""A training step as every rank runs it: compute, messages that are issued, and waits for them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from commprof.schema import Op

Floats = npt.NDArray[np.float64]
Groups = tuple[tuple[int, ...], ...]
# Operations in which a backend adds up elements; gloo needs longer for those of 16 bits.
SUMMING: Final = frozenset({str(Op.ALL_REDUCE), str(Op.REDUCE), str(Op.REDUCE_SCATTER)})


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
        module: of experts that it is sent for; None for other messages.
        sizes: payload bytes by step and group, where they differ (tokens of experts); ``payload_bytes`` is their median.
        dtype: of the elements that the backend sums; empty for other operations, or where it is not known.
    """

    op: str
    payload_bytes: int
    purpose: str
    groups: Groups
    blocks: bool
    bucket: int | None = None
    micro_step: int = 0
    phase: str = ""
    module: str | None = None
    sizes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""

    @property
    def group_size(self) -> int:
        """Ranks of each group."""
        return len(self.groups[0])

    def in_step(self, step: int, group: int) -> Message:
        """The message as group number ``group`` sends it in step number ``step`` of those that are replayed."""
        return self._replace(payload_bytes=self.sizes[step][group], sizes=()) if self.sizes else self

    def with_sizes(self, sizes: Sequence[Sequence[int]]) -> Message:
        """The message with the payload bytes of each step and group."""
        every = sorted(size for of_step in sizes for size in of_step)
        listed = tuple(map(tuple, sizes)) if every[0] != every[-1] else ()
        return self._replace(payload_bytes=every[len(every) // 2], sizes=listed)


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
