"""A recorded run made by hand: what every rank computes and how long messages take are known."""

from __future__ import annotations

import numpy as np

from commprof.prediction.program import Event, Message, Program, Step
from commprof.prediction.recorded import Recorded
from commprof.prediction.schedule import play

MS = 1e6


def recorded(messages, spans, durations, *, steps=8, jitter=0.0, slowdown=1.0, seed=0):
    """A run of ``steps`` steps of 2 ranks.

    Args:
        messages: (message, events before the wait: None for at once) in order; blocking ones wait at once.
        spans: ms that each rank computes before each event, and after the last: (events + 1, 2).
        durations: message -> ms.
        jitter: relative standard deviation of compute and message times.
    """
    events = []
    for number, message in enumerate(messages):
        events.append(Event("issue", number))
        if message.blocks:
            events.append(Event("wait", number))
    events += [Event("wait", number) for number, each in enumerate(messages) if not each.blocks]
    program = Program(tuple(messages), tuple(events))
    random = np.random.default_rng(seed)
    base = np.array(spans, float) * MS
    begins, busy = np.zeros(2), {}
    made, arrivals, finishes, waits, took = [], [], [], [], []
    for _ in range(steps):
        noisy = base * np.maximum(0.2, 1 + jitter * random.standard_normal(base.shape))
        times = np.array([durations(each) for each in messages], float)[:, None] * MS
        times = np.repeat(
            times * np.maximum(0.2, 1 + jitter * random.standard_normal(times.shape)), 2, axis=1
        )
        step = Step(noisy, np.zeros((len(messages), 2)), follows=True)
        played = play(program, step, times, begins, busy, slowdown)
        # What overlapped took longer in the run, which is what a recorder sees.
        seen = noisy + played.overlapped * (1 - 1 / slowdown)
        made.append(step._replace(spans=seen))
        arrivals.append(played.issued)
        blocked = played.exposed > 0
        finishes.append(np.where(blocked, played.finishes, np.nan))
        reached = np.full((len(messages), 2), np.nan)
        for place, (kind, number) in enumerate(events):
            if kind == "wait":
                reached[number] = played.arrived[place]
        waits.append(reached)
        took.append((played.ends - played.begins).mean())
        begins = played.ends
    return Recorded(
        program,
        made,
        list(range(1, steps + 1)),
        np.array(took),
        {},
        2,
        np.array(arrivals),
        np.array(finishes),
        np.array(waits),
    )


def gradient(size, number, *, blocks=True, op="all_reduce"):
    return Message(op, size, "gradient_reduce", ((0, 1),), blocks, number, 0, "backward")


def gather(size):
    return Message("all_gather", size, "parameter_gather", ((0, 1),), True, None, 0, "optimizer")
