"""The program of a step of ``fully_shard`` (FSDP 2) whose parameters stay gathered between forward and backward. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from commprof.errors import UsageError
from commprof.prediction.changes import Changed
from commprof.prediction.program import Event, Message, Program, Step
from commprof.schema import Phase, Purpose

KEY: Final = "fsdp.reshard_after_forward"


def with_resharding(program: Program, steps: Sequence[Step], setting: Mapping[str, Any]) -> Changed:
    """Return ``program`` with the value of :data:`KEY` in ``setting`` for all units.

    False: no parameters are gathered in the backward pass. True: as recorded, if they were gathered there.

    Raises:
        UsageError: the value is something else, or what the run does not show.
    """
    value = setting[KEY]
    if not isinstance(value, bool):
        raise UsageError(f"{KEY} is {value!r}; expected true or false for all units")
    again = gathered_again(program)
    if value:
        if not again:
            raise UsageError(
                f"{KEY}=true cannot be predicted from this run, which gathers no parameters in its backward pass: where it "
                "would gather them is not known; record a run with true, and predict false from it"
            )
        return Changed(program, list(steps))
    return _without(program, steps, set(again))


def gathered_again(program: Program) -> list[int]:
    """The numbers of the messages that gather parameters in a backward pass."""
    return [
        number
        for number, message in enumerate(program.messages)
        if message.purpose == Purpose.PARAMETER_GATHER and message.phase == Phase.BACKWARD
    ]


def kept_bytes(program: Program) -> int:
    """What a rank holds more between the passes if nothing is gathered again: the other ranks' shards."""
    sizes = [program.messages[number] for number in gathered_again(program)]
    return round(sum(each.payload_bytes * (1.0 - 1.0 / each.group_size) for each in sizes))


def _without(program: Program, steps: Sequence[Step], gone: set[int]) -> Changed:
    """``program`` without the messages ``gone``; what was computed before their events is computed before the next one."""
    forward = Counter(_kind(each) for number, each in enumerate(program.messages) if number not in gone)
    missing = Counter(_kind(program.messages[number]) for number in gone) - forward
    if missing:
        (op, size, _), count = missing.most_common(1)[0]
        raise UsageError(
            f"{KEY}=false cannot be predicted: {count} {op} of {size:,} bytes in the backward pass have none of that size "
            "in the forward pass, so the parameters are not gathered there"
        )
    kept = [number for number in range(len(program.messages)) if number not in gone]
    renumbered = {number: place for place, number in enumerate(kept)}
    stays = np.array([event.message not in gone for event in program.events])
    events = tuple(
        Event(event.kind, renumbered[event.message])
        for event, here in zip(program.events, stays, strict=True)
        if here
    )
    # Each span goes to the next event that stays; what follows the last one, to the end of the step.
    target = np.concatenate([np.cumsum(stays) - stays, [stays.sum()]])
    changed = []
    for step in steps:
        spans = np.zeros((len(events) + 1, step.spans.shape[1]))
        np.add.at(spans, target, step.spans)
        changed.append(step._replace(spans=spans, calls=step.calls[kept]))
    return Changed(Program(tuple(program.messages[number] for number in kept), events), changed)


def _kind(message: Message) -> tuple[str, int, Any]:
    return message.op, message.payload_bytes, message.groups
