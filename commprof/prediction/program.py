"""Describe a training step as each rank runs it: compute, issued messages, and waits for messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from commprof.schema import Op

Floats = npt.NDArray[np.float64]
Groups = tuple[tuple[int, ...], ...]
# The operations in which a backend adds up elements. gloo needs longer for elements of 16 bits.
SUMMING: Final = frozenset({str(Op.ALL_REDUCE), str(Op.REDUCE), str(Op.REDUCE_SCATTER)})


class Message(NamedTuple):
    """A collective of a step.

    Attributes:
        op: A value of schema.Op.
        payload_bytes: The payload, S of nccl-tests.
        purpose: A value of schema.Purpose.
        groups: The ranks of each group that issues the message. Every rank is in one of the groups.
        blocks: Whether the call returns with the result, so that a wait follows immediately.
        bucket: The number of the gradient bucket in the step, or None for other messages.
        micro_step: The number of the micro-batch within the step.
        phase: A value of schema.Phase.
        module: The layer of experts that sends the message, or None for other messages.
        sizes: The payload bytes by step and group if they differ, as for tokens of experts. ``payload_bytes`` is then
            their median.
        dtype: The type of the elements that the backend sums. Empty for other operations, or if it is not known.
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
        """The number of ranks of each group."""
        return len(self.groups[0])

    def in_step(self, step: int, group: int) -> Message:
        """Return the message with the size that group number ``group`` sends in replayed step number ``step``."""
        return self._replace(payload_bytes=self.sizes[step][group], sizes=()) if self.sizes else self

    def with_sizes(self, sizes: Sequence[Sequence[int]]) -> Message:
        """Return the message with the payload bytes of each step and group in ``sizes``."""
        every = sorted(size for of_step in sizes for size in of_step)
        listed = tuple(map(tuple, sizes)) if every[0] != every[-1] else ()
        return self._replace(payload_bytes=every[len(every) // 2], sizes=listed)


class Event(NamedTuple):
    """An event of a program: a rank issues message number ``message``, or waits for this message."""

    kind: Literal["issue", "wait"]
    message: int


class Program(NamedTuple):
    """The messages and events of a step, in the order in which each rank runs them."""

    messages: tuple[Message, ...]
    events: tuple[Event, ...]


class Step(NamedTuple):
    """The compute of one step.

    Attributes:
        spans: The compute of each rank before each event and after the last event, in ns: (events + 1, ranks).
        calls: The time of the call that issues each message, without waiting, in ns: (messages, ranks).
        follows: Whether the step begins when the previous step in the list ends.
    """

    spans: Floats
    calls: Floats
    follows: bool
