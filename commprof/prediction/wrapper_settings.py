"""Predict other settings of torch's wrappers. Pure.

They are ``reshard_after_forward`` of ``fully_shard`` (FSDP 2), which decides whether parameters stay gathered between
the passes, and arguments that change no message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from commprof.errors import CommprofError, UsageError
from commprof.ledger.requests.wrapped_models import WrappedModels
from commprof.prediction.changes import Changed
from commprof.prediction.event_places import FORWARD, MOST_FORWARD, Assumed
from commprof.prediction.program import Event, Message, Program, Step
from commprof.requested.wrappers.fully_shard import FullyShard
from commprof.schema import Phase, Purpose

KEY: Final = "fsdp.reshard_after_forward"
DDP_KEYS: Final = ("ddp.bucket_cap_mb", "ddp.comm_hook")
HOOKS: Final = (None, "allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")
# The arguments of DistributedDataParallel that change no message of a steady step, with a description of their effect.
_WITHOUT_EFFECT: Final = {
    "ddp.gradient_as_bucket_view": "it saves a copy of the gradients, {bytes:,} bytes per rank, and the time to copy them, "
    "which is not predicted",
    "ddp.static_graph": "it avoids the search for unused parameters",
}
# The arguments that change computation or messages in a way that the run does not show.
_ONLY_RECORDED: Final = {
    "ddp.find_unused_parameters": "it searches the graph and sends which parameters were used",
    "ddp.broadcast_buffers": "it sends the buffers before each forward pass",
    "ddp.mixed_precision": "it changes what is computed",
    "fsdp.mixed_precision": "it changes what is computed",
    "fsdp.param_dtype": "it changes what is computed",
    "fsdp.reduce_dtype": "it converts gradients, and messages of that size were not measured",
    "fsdp.sharding_strategy": "it changes which parameters are sharded",
    "fsdp.limit_all_gathers": "it changes when gathers are issued",
}


def refuse_unpredictable(setting: Mapping[str, Any]) -> None:
    """Raise UsageError for a key of a wrapper whose effect only a run with this setting can show."""
    for key in setting:
        if key in _ONLY_RECORDED:
            raise UsageError(
                f"{key} is not predicted: {_ONLY_RECORDED[key]}; record a run with it, and compare both (commprof compare)"
            )


def without_effect(setting: Mapping[str, Any], wrapped: WrappedModels | None) -> list[str]:
    """Return sentences that say why the keys of ``setting`` change no message.

    The list is empty if a key may change messages.

    Raises:
        UsageError: A value is not true or false.
    """
    if not setting or any(key not in _WITHOUT_EFFECT for key in setting):
        return []
    if wrapped is None or [each.wrapper.kind for each in wrapped.rules] != ["ddp"]:
        raise UsageError(
            f"{', '.join(setting)} applies to a single DistributedDataParallel, which this run does not train"
        )
    arguments = wrapped.rules[0].wrapper.arguments
    if "ddp.static_graph" in setting and arguments.get("find_unused_parameters"):
        raise UsageError(
            "ddp.static_graph is not predicted for a run with find_unused_parameters, whose messages it changes; record a "
            "run with it"
        )
    num_bytes = sum(each.nbytes for each in wrapped.rules[0].wrapper.trained)
    sentences = []
    for key, value in setting.items():
        if not isinstance(value, bool):
            raise UsageError(f"{key} is {value!r}; expected true or false")
        sentences.append(f"{key} changes no message: {_WITHOUT_EFFECT[key].format(bytes=num_bytes)}")
    return sentences


def with_resharding(
    program: Program,
    steps: Sequence[Step],
    setting: Mapping[str, Any],
    wrapped: WrappedModels | None = None,
    assumed: Assumed = Assumed(),  # noqa: B008 - immutable
) -> Changed:
    """Return ``program`` with the value of :data:`KEY` in ``setting`` for all units.

    With false, no parameters are gathered in the backward pass. With true, the program remains unchanged if it already
    gathers parameters there. Otherwise each unit gathers its parameters before its backward pass, by the rules of the
    wrapper.

    Args:
        program: The recorded events.
        steps: The recorded compute.
        setting: The setting, which contains the key.
        wrapped: The wrapped models of the run.
        assumed: The assumed costs of gathering parameters.

    Raises:
        UsageError: The value is not true or false, or the run does not show the effect of this value.
    """
    value = setting[KEY]
    if not isinstance(value, bool):
        raise UsageError(f"{KEY} is {value!r}; expected true or false for all units")
    again = gathered_again(program)
    if not value:
        return _without(program, steps, set(again))
    return Changed(program, list(steps)) if again else _with(program, steps, wrapped, assumed)


def _with(
    program: Program, steps: Sequence[Step], wrapped: WrappedModels | None, assumed: Assumed
) -> Changed:
    """Return ``program`` with a gather before the backward pass of each unit."""
    inserted = _inserted(program, wrapped)
    messages = list(program.messages)
    events: list[Event] = []
    spans: list[list[tuple[int, float]]] = []  # recorded spans before each new event, with a fraction of each
    filled: dict[int, int] = {}  # maps a new span to the bytes that are filled in it
    is_backward = False
    for place, event in enumerate(program.events):
        message = program.messages[event.message]
        turns = not is_backward and message.phase == Phase.BACKWARD
        is_backward = message.phase == Phase.BACKWARD
        new = inserted.pop(event.message, []) if event.kind == "issue" else []
        # The first gathers of the backward pass are issued when the forward pass has ended. Later gathers are issued
        # at the beginning of the recorded span.
        part = ((MOST_FORWARD if assumed.evenly else FORWARD) if turns else 0.0) if new else 1.0
        spans.append([(place, part)])
        for each in new:
            messages.append(each)
            events += [Event("issue", len(messages) - 1), Event("wait", len(messages) - 1)]
            filled[len(events)] = each.payload_bytes
            spans += [[], [(place, 1.0 - part)] if each is new[-1] else []]
        events.append(event)
    spans.append([(len(program.events), 1.0)])
    order = list(dict.fromkeys(event.message for event in events))
    renumbered = {message: number for number, message in enumerate(order)}
    changed = []
    for step in steps:
        made = np.zeros((len(events) + 1, step.spans.shape[1]))
        for number, parts in enumerate(spans):
            for place, part in parts:
                made[number] += part * step.spans[place]
            made[number] += assumed.copy_ns * filled.get(number, 0)
        calls = np.array(
            [
                step.calls[each] if each < len(program.messages) else np.zeros(step.spans.shape[1])
                for each in order
            ]
        )
        changed.append(step._replace(spans=made, calls=calls))
    sentences = (
        "assumed: the backward pass begins after a third of the compute between the last forward and the first backward "
        "message (half at most)",
        f"assumed: filling gathered parameters costs {assumed.copy_ns:g} ns per byte in addition to their messages; "
        f"the interval contains 0 to {2 * assumed.copy_ns:g} ns",
    )
    return Changed(
        Program(
            tuple(messages[each] for each in order),
            tuple(Event(event.kind, renumbered[event.message]) for event in events),
        ),
        changed,
        sentences,
    )


def _inserted(program: Program, wrapped: WrappedModels | None) -> dict[int, list[Message]]:
    """Return the gathers that are issued before recorded messages of a backward pass, by the number of the message."""
    rules = [] if wrapped is None else wrapped.rules
    passes = "" if wrapped is None else "".join(wrapped.last_passes)
    if len(rules) != 1 or not isinstance(rules[0], FullyShard) or not passes:
        raise UsageError(
            f"{KEY}=true cannot be predicted: which passes a single model of fully_shard ran was not recorded; record a run "
            "with true, and predict false from it"
        )
    gathers = [each for each in program.messages if each.purpose == Purpose.PARAMETER_GATHER]
    if not all(each.blocks for each in gathers):
        raise UsageError(
            f"{KEY}=true cannot be predicted from gathers that do not block; record a run with true, and predict false "
            "from it"
        )
    before = rules[0]
    units = tuple(
        replace(
            each, arguments={**each.arguments, "reshard_after_forward": True, "after_forward_ranks": None}
        )
        for each in before.units
    )
    try:
        pairs = list(zip(before.by_pass(passes), replace(before, units=units).by_pass(passes), strict=True))
    except CommprofError as problem:
        raise UsageError(f"{KEY}=true cannot be predicted: {problem}") from None
    moved = (str(Purpose.PARAMETER_GATHER), str(Purpose.GRADIENT_REDUCE))
    listed = [number for number, each in enumerate(program.messages) if each.purpose in moved]
    sent = [row for (_, rows), _ in pairs for row in rows if row.purpose in moved]
    if Counter(program.messages[number].payload_bytes for number in listed) != Counter(
        row.payload_bytes for row in sent
    ):
        raise UsageError(
            f"{KEY}=true cannot be predicted: the run's messages are not those of its units; see commprof verify"
        )
    groups = gathers[0].groups if gathers else ()
    inserted: dict[int, list[Message]] = {}
    place = 0
    for (kind, old), (_, new) in pairs:
        if kind == "p" and len(new) > len(old):
            number = listed[min(place, len(listed) - 1)]
            micro = program.messages[number].micro_step
            inserted.setdefault(number, []).extend(
                Message(
                    row.issued_op,
                    row.payload_bytes,
                    row.purpose,
                    groups,
                    True,
                    None,
                    micro,
                    str(Phase.BACKWARD),
                )
                for row in new[len(old) :]
            )
        place += sum(row.purpose in moved for row in old)
    return inserted


def gathered_again(program: Program) -> list[int]:
    """Return the numbers of the messages that gather parameters in a backward pass."""
    return [
        number
        for number, message in enumerate(program.messages)
        if message.purpose == Purpose.PARAMETER_GATHER and message.phase == Phase.BACKWARD
    ]


def kept_bytes(program: Program) -> int:
    """Return the additional bytes of a rank between the passes if nothing is gathered again.

    They are the shards of the other ranks.
    """
    sizes = [program.messages[number] for number in gathered_again(program)]
    return round(sum(each.payload_bytes * (1.0 - 1.0 / each.group_size) for each in sizes))


def _without(program: Program, steps: Sequence[Step], gone: set[int]) -> Changed:
    """Return ``program`` without the messages ``gone``. Compute before a removed event moves before the next event."""
    forward = Counter(_kind(each) for number, each in enumerate(program.messages) if number not in gone)
    missing = Counter(_kind(program.messages[number]) for number in gone) - forward
    if missing:
        (op, size, _), count = missing.most_common(1)[0]
        raise UsageError(
            f"{KEY}=false cannot be predicted: {count} {op} of {size:,} bytes in the backward pass have no "
            "counterpart in the forward pass, so the forward pass does not gather these parameters"
        )
    remaining = [number for number in range(len(program.messages)) if number not in gone]
    renumbered = {number: place for place, number in enumerate(remaining)}
    stays = np.array([event.message not in gone for event in program.events])
    events = tuple(
        Event(event.kind, renumbered[event.message])
        for event, here in zip(program.events, stays, strict=True)
        if here
    )
    # Each span is added to the span before the next remaining event, or to the span at the end of the step.
    target = np.concatenate([np.cumsum(stays) - stays, [stays.sum()]])
    changed = []
    for step in steps:
        spans = np.zeros((len(events) + 1, step.spans.shape[1]))
        np.add.at(spans, target, step.spans)
        changed.append(step._replace(spans=spans, calls=step.calls[remaining]))
    return Changed(Program(tuple(program.messages[number] for number in remaining), events), changed)


def _kind(message: Message) -> tuple[str, int, Any]:
    return message.op, message.payload_bytes, message.groups
