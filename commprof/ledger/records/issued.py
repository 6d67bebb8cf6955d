"""The issued level: counts every collective once, from the records, in classes that the ledger compares."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from commprof.align.sequences.group_ids import numbered
from commprof.ledger.records.precount import COLUMNS as OF_PRECOUNT
from commprof.ledger.records.precount import Survey, by_last_step
from commprof.schema import wire_bytes

INIT_STEP: Final = -1


class Message(NamedTuple):
    """A set of collectives that the ledger treats as equal within a step.

    ``in_evaluation`` is true if the collective was issued in a forward pass after the optimizer ran, or before the
    first step. ``in_group_of_script`` is true if no runtime uses the group. ``outside`` is true between two steps.
    ``exchanged_bytes`` are the bytes that all ranks of an all_to_all with splits together send to other ranks.
    """

    purpose: str | None
    op: str
    group_ranks: str
    group_size: int
    backend: str | None
    payload_bytes: int
    call_site: str | None
    status: str
    executed_op: str | None
    in_evaluation: bool = False
    in_group_of_script: bool = False
    outside: bool = False
    exchanged_bytes: int | None = None

    @property
    def wire_bytes(self) -> float:
        """The mean number of bytes that a rank of the group sends.

        The value is computed from the splits if there are any, and otherwise by :func:`schema.wire_bytes`.
        """
        if self.exchanged_bytes is not None:
            return self.exchanged_bytes / self.group_size
        return wire_bytes(self.op, self.payload_bytes, self.group_size)


class StepKey(NamedTuple):
    """One training step of one attempt, with the time until the next step. Step -1 is before the first step."""

    attempt: int
    step: int


# Steps with the same messages share one value, which must not be changed.
Issued = dict[StepKey, dict[Message, int]]
Executed: TypeAlias = Callable[[pa.Table], pa.Array]

_OF_RECORD: Final = ("purpose", "op", "group_ranks", "group_size", "backend", "call_site", "status")
COLUMNS: Final = tuple(dict.fromkeys((*OF_PRECOUNT, *_OF_RECORD)))


def issued(tables: Iterable[pa.Table], survey: Survey, executed_ops: Executed | None = None) -> Issued:
    """Return the messages of each step with their counts, in order of step.

    Args:
        tables: The records, with at least the columns :data:`COLUMNS`.
        survey: The survey of the same records.
        executed_ops: A function that returns the executed operation of each record, null if not known. Default: no
            executed operation is known.
    """
    messages: dict[Message, int] = {}
    counts = [_of_part(part, survey, executed_ops, messages) for part in tables]
    if not counts:
        return {}
    sums = pa.concat_tables(counts).group_by(["attempt", "step", "message"]).aggregate([("count_all", "sum")])
    return dict(by_step(sums, list(messages)))


def _of_part(
    part: pa.Table, survey: Survey, executed_ops: Executed | None, messages: dict[Message, int]
) -> pa.Table:
    """Return how often each attempt and step of ``part`` sent each message.

    Messages are represented by their numbers in ``messages``, to which new messages are added.
    """
    part = by_last_step(part)
    rows = part.filter(pa.array(survey.counts(part)))
    columns = {name: rows[name] for name in _OF_RECORD}
    columns["payload_bytes"] = pa.array(survey.payload_bytes(rows))
    columns["executed_op"] = pa.nulls(len(rows), pa.string()) if executed_ops is None else executed_ops(rows)
    columns["in_evaluation"] = pa.array(survey.in_evaluation(rows))
    columns["in_group_of_script"] = pa.array(survey.in_group_of_script(rows))
    columns["exchanged_bytes"] = survey.exchanged_bytes(rows)
    columns["outside"] = (
        rows["after_step"].is_valid()
        if "after_step" in rows.column_names
        else pa.repeat(pa.scalar(False), len(rows))
    )
    described = pa.table(columns).select(list(Message._fields))
    codes, first = numbered(described)
    distinct = [Message(*row.values()) for row in described.take(pa.array(first)).to_pylist()]
    number = np.array([messages.setdefault(message, len(messages)) for message in distinct], np.int64)
    counted = rows.select(["attempt", "step"]).append_column("message", pa.array(number[codes]))
    return counted.group_by(["attempt", "step", "message"]).aggregate([([], "count_all")])


def by_step(sums: pa.Table, messages: list[Message]) -> Iterator[tuple[StepKey, dict[Message, int]]]:
    """Yield the messages of each step with their counts, in order of step.

    Args:
        sums: A table with the columns attempt, step, message (an index into ``messages``) and count_all_sum (how often
            the message was sent).
        messages: The distinct messages.
    """
    attempt, step, message, count = (
        sums[name].to_numpy().astype(np.int64) for name in ("attempt", "step", "message", "count_all_sum")
    )
    step = np.maximum(step, INIT_STEP)
    order = np.lexsort((message, step, attempt))
    attempt, step, message, count = attempt[order], step[order], message[order], count[order]
    begins = (np.diff(attempt, prepend=-1) != 0) | (np.diff(step, prepend=INIT_STEP - 1) != 0)
    known: dict[bytes, dict[Message, int]] = {}
    for begin, end in pairwise([*np.flatnonzero(begins).tolist(), len(order)]):
        own, times = message[begin:end], count[begin:end]
        key = own.tobytes() + times.tobytes()
        if key not in known:
            known[key] = _counted(own.tolist(), times.tolist(), messages)
        yield StepKey(int(attempt[begin]), int(step[begin])), known[key]


def _counted(numbers: list[int], times: list[int], messages: list[Message]) -> dict[Message, int]:
    counted: dict[Message, int] = defaultdict(int)
    for number, count in zip(numbers, times, strict=True):
        counted[messages[number]] += count
    return dict(counted)


def step_text(keys: Iterable[StepKey]) -> str:
    """Return the steps as ``init``, ``4`` or ``0-3,7``, and for the second attempt as ``0-3 (attempt 1)``."""
    texts = []
    by_attempt: dict[int, list[int]] = defaultdict(list)
    for key in sorted(set(keys)):
        by_attempt[key.attempt].append(key.step)
    for attempt, steps in by_attempt.items():
        ranges: list[list[int]] = []
        for step in steps:
            if ranges and step == ranges[-1][1] + 1 and ranges[-1][0] >= 0:
                ranges[-1][1] = step
            else:
                ranges.append([step, step])
        text = ",".join("init" if a < 0 else f"{a}-{b}" if a != b else str(a) for a, b in ranges)
        texts.append(f"{text} (attempt {attempt})" if attempt else text)
    return "; ".join(texts)


def step_list(keys: Iterable[StepKey]) -> str:
    """Return the steps as ``Step 4``, ``Steps 0-3,7`` or ``Before the first step``."""
    listed = set(keys)
    if listed == {StepKey(0, INIT_STEP)}:
        return "Before the first step"
    return f"{'Step' if len(listed) == 1 else 'Steps'} {step_text(listed)}"
