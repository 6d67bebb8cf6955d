"""Compute when the messages of a step begin and end and how long ranks wait, in one pass over its events. Pure.

A message begins when the last rank of its group has issued it and the previous message of the same group has ended.
Messages of different groups that a rank has in flight at once share its link equally (max-min fairness of flows on one
link). A rank that waits for a message continues when the message has ended. While a message of a rank is in flight, the
compute of the rank takes ``slowdown`` times as long, because the backend uses the same processors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from commprof.prediction.program import Floats, Groups, Message, Program, Step

COMPUTE: Final = "compute"


class Timeline(NamedTuple):
    """The times of one step, in ns on one clock.

    Attributes:
        begins: The time at which each rank began the step.
        ends: The time at which each rank ended the step.
        issued, starts, finishes: The times at which each message was issued, began and ended on each rank:
            (messages, ranks).
        exposed: The time in ns for which each rank was blocked on each message: (messages, ranks).
        arrived: The time at which each rank reached each event: (events, ranks).
        overlapped: The part of each span in ns in which a message of the rank was in flight: (events + 1, ranks).
    """

    begins: Floats
    ends: Floats
    issued: Floats
    starts: Floats
    finishes: Floats
    exposed: Floats
    arrived: Floats
    overlapped: Floats


def play(
    program: Program,
    step: Step,
    durations: Floats,
    begins: Floats,
    busy_until: dict[Groups, Floats],
    slowdown: float = 1.0,
) -> Timeline:
    """Simulate one step, and return its times.

    Args:
        program: The messages and events of the step.
        step: The compute of the ranks between the events.
        durations: The time in ns from the beginning of each message until each rank has its result:
            (messages, ranks).
        begins: The time in ns at which each rank begins.
        busy_until: The time at which the last message of each list of groups ended on each rank. It is updated.
        slowdown: The factor by which compute takes longer while a message is in flight, at least 1.
    """
    ranks, count = len(begins), len(program.messages)
    issued, starts, finishes, exposed = (np.zeros((count, ranks)) for _ in range(4))
    arrived = np.zeros((len(program.events), ranks))
    overlapped = np.zeros((len(program.events) + 1, ranks))
    now = begins.copy()
    flying: list[int] = []
    for number, (kind, index) in enumerate(program.events):
        if flying:
            now, overlapped[number] = advance(
                now, step.spans[number], starts[flying], finishes[flying], slowdown
            )
        else:
            now = now + step.spans[number]
        arrived[number] = now
        if kind == "issue":
            groups = program.messages[index].groups
            issued[index] = now
            starts[index] = latest_of_groups(now, groups)
            if groups in busy_until:
                starts[index] = np.maximum(starts[index], busy_until[groups])
            finishes[index] = starts[index] + durations[index]
            beside = [each for each in flying if program.messages[each].groups != groups]
            for other in beside:
                _share_link(finishes, other, index, starts[index], durations[index])
            busy_until[groups] = finishes[index]
            flying.append(index)
            now = now + step.calls[index]
        else:
            ready = np.maximum(now, finishes[index])
            exposed[index] += ready - (issued[index] if program.messages[index].blocks else now)
            now = ready
            goes_on = (finishes[flying] > now).any(axis=1)
            flying = [each for each, on in zip(flying, goes_on, strict=True) if on and each != index]
    now, overlapped[-1] = advance(now, step.spans[-1], starts[flying], finishes[flying], slowdown)
    return Timeline(begins, now, issued, starts, finishes, exposed, arrived, overlapped)


def latest_of_groups(times: Floats, groups: Groups) -> Floats:
    """Return for each rank the latest of ``times`` in the group of the rank."""
    if len(groups) == 1 and len(groups[0]) == len(times):
        return np.full_like(times, times.max())
    latest = times.copy()
    for group in groups:
        members = list(group)
        latest[members] = times[members].max()
    return latest


def _share_link(finishes: Floats, other: int, index: int, start: Floats, duration: Floats) -> None:
    """Delay the ends of two messages that share a link, each by the time in which both are in flight."""
    shared = np.minimum(np.maximum(finishes[other] - start, 0.0), duration)
    finishes[other] += shared
    finishes[index] += shared


def advance(
    now: Floats, work: Floats, starts: Floats, finishes: Floats, slowdown: float
) -> tuple[Floats, Floats]:
    """Simulate that each rank computes ``work`` from ``now`` on, with messages in flight.

    Args:
        now: The time of each rank in ns.
        work: The compute of each rank in ns.
        starts, finishes: The begin and the end of the messages in flight: (messages, ranks).
        slowdown: The factor by which compute takes longer while a message is in flight.

    Returns:
        The time at which each rank has finished, and the time in ns for which a message was in flight meanwhile.

    >>> ends, beside = advance(np.array([0.0]), np.array([10.0]), np.array([[2.0]]), np.array([[8.0]]), 2.0)
    >>> float(ends[0]), float(beside[0])
    (13.0, 6.0)
    """
    if not len(starts):
        return now + work, np.zeros_like(now)
    # All messages are processed at once, because a bucketed backward pass has a hundred messages in flight.
    order = np.argsort(starts, axis=0, kind="stable")
    until = np.maximum(np.maximum.accumulate(np.take_along_axis(finishes, order, 0), axis=0), now)
    before = np.vstack([now[np.newaxis], until[:-1]])  # end of all messages that began earlier
    begin = np.maximum(np.take_along_axis(starts, order, 0), before)
    # The work done while a message is in flight and no message that began earlier is.
    slowed = (until - begin) / slowdown
    done = np.cumsum(begin - before + slowed, axis=0) - slowed  # work done when the message begins
    beside = slowdown * np.minimum(np.maximum(work - done, 0.0), slowed).sum(axis=0)
    return now + work + beside * (1.0 - 1.0 / slowdown), beside


def critical_path(program: Program, step: Step, timeline: Timeline) -> Counter[tuple[str, int]]:
    """Return the critical path of the step: ns by purpose (or ``compute``) and rank.

    The path is followed backward from the rank that ended last. A blocked rank waited for a message. The message waited
    for the rank that issued it last, or for the previous message of its group. The time of a message counts for the
    rank that waited for the message.
    """
    path: Counter[tuple[str, int]] = Counter()
    issue_places = {index: place for place, (kind, index) in enumerate(program.events) if kind == "issue"}
    rank, place, until = int(np.argmax(timeline.ends)), len(program.events), float(timeline.ends.max())
    while place > 0:
        kind, index = program.events[place - 1]
        arrived = float(timeline.arrived[place - 1, rank])
        message = program.messages[index]
        ready = float(timeline.finishes[index, rank])
        if kind != "wait" or ready <= arrived:
            path[COMPUTE, rank] += round(until - arrived)
            place, until = place - 1, arrived
            continue
        path[COMPUTE, rank] += round(until - ready)
        index, message, until = _through_queue(program.messages, timeline, index, rank, ready, path)
        rank = _last_to_issue(timeline, index, message, rank)
        place = issue_places[index]
        until = float(timeline.issued[index, rank])
        path[COMPUTE, rank] += round(until - float(timeline.arrived[place, rank]))
    path[COMPUTE, rank] += round(until - float(timeline.begins[rank]))
    return path


def _through_queue(
    messages: Sequence[Message],
    timeline: Timeline,
    index: int,
    rank: int,
    until: float,
    path: Counter[tuple[str, int]],
) -> tuple[int, Message, float]:
    """Follow the queue of a group from a message back to the first message that it waited for.

    Returns:
        The number of this first message, the message, and the time in ns at which it began.
    """
    while True:
        message, start = messages[index], float(timeline.starts[index, rank])
        path[message.purpose, rank] += round(until - start)
        last = _last_to_issue(timeline, index, message, rank)
        if start <= float(timeline.issued[index, last]):
            return index, message, start
        before = [
            number
            for number in range(index)
            if messages[number].groups == message.groups and float(timeline.finishes[number, rank]) == start
        ]
        if not before:  # it waited for a message of the previous step
            return index, message, start
        index, until = before[-1], start


def _last_to_issue(timeline: Timeline, index: int, message: Message, rank: int) -> int:
    group = next(each for each in message.groups if rank in each)
    return max(group, key=lambda member: float(timeline.issued[index, member]))
