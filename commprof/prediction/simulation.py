"""Simulate the steps of a program one after the other, with message times that were measured in other steps. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from commprof.calibration.results import Calibration
from commprof.prediction.durations import Durations, Sample, message_times
from commprof.prediction.program import Floats, Groups, Program, Step
from commprof.prediction.recorded import Recorded
from commprof.prediction.schedule import Timeline, critical_path, play

_FOLDS: Final = 2
# The times that a message may take, by step and group. The lists have only one step and one group if the message has
# the same size in all steps and groups.
_Samples = list[list[Sample]]


class Simulated(NamedTuple):
    """The simulated steps of a program. All times are in ns.

    Attributes:
        timelines: The timeline of each step.
        step_ns: The time of each step, as a mean over ranks.
        exposed_ns: The exposed time of a step by purpose, as the median over steps of the mean over ranks.
        exposed_by_message: The exposed time of each message, as the median over steps of the mean over ranks.
    """

    timelines: list[Timeline]
    step_ns: Floats
    exposed_ns: dict[str, float]
    exposed_by_message: Floats

    @property
    def median_ns(self) -> float:
        """The median step time in ns."""
        return float(np.median(self.step_ns))


def simulate(
    program: Program, steps: Sequence[Step], durations: Durations | None, slowdown: float = 1.0
) -> Simulated:
    """Simulate ``steps`` in order. Without ``durations``, messages take no time.

    Raises:
        UsageError: The time of a message is not known.
    """
    ranks = steps[0].spans.shape[1]
    samples = None if durations is None else _samples(program, durations)
    timelines: list[Timeline] = []
    begins: Floats = np.zeros(ranks)
    busy: dict[Groups, Floats] = {}
    for number, step in enumerate(steps):
        if not step.follows:
            begins, busy = np.zeros(ranks), {}
        times = np.zeros((len(program.messages), ranks))
        if samples is not None:
            times = drawn(program, samples, number, len(steps), ranks)
        timelines.append(play(program, step, times, begins, busy, slowdown))
        begins = timelines[-1].ends
    return summed(program, timelines)


def _samples(program: Program, durations: Durations) -> list[_Samples]:
    return [
        [
            [durations.of(message.in_step(step, group)) for group in range(len(message.sizes[step]))]
            for step in range(len(message.sizes))
        ]
        if message.sizes
        else [[durations.of(message)]]
        for message in program.messages
    ]


def drawn(program: Program, samples: Sequence[_Samples], step: int, steps: int, ranks: int) -> Floats:
    """Return a time in ns for each message of a step: (messages, ranks).

    The times were measured at about the same point of the run. So slow changes over a run, and the dependence between
    messages of the same step, are preserved.
    """
    used: Counter[int] = Counter()
    times = np.empty((len(program.messages), ranks))
    for number, (message, of_message) in enumerate(zip(program.messages, samples, strict=True)):
        of_step = of_message[step % len(of_message)]
        for place, group in enumerate(message.groups):
            sample = of_step[place % len(of_step)]
            count = len(sample.times)
            each = max(1, count // max(1, steps))
            row = sample.times[min(count - 1, step * count // steps + used[id(sample)] % each)]
            times[number, list(group)] = row[np.arange(len(group)) % len(row)]
        used.update({id(sample) for sample in of_step})
    return times


def summed(program: Program, timelines: list[Timeline]) -> Simulated:
    """Return ``timelines`` with the step times and the exposed times that follow from them."""
    exposed = np.array([each.exposed.mean(axis=1) for each in timelines])  # (steps, messages)
    purposes = [message.purpose for message in program.messages]
    by_purpose = {
        purpose: float(np.median(exposed[:, [each == purpose for each in purposes]].sum(axis=1)))
        for purpose in dict.fromkeys(purposes)
    }
    return Simulated(
        timelines,
        np.array([(each.ends - each.begins).mean() for each in timelines]),
        by_purpose,
        np.median(exposed, axis=0) if len(purposes) else np.zeros(0),
    )


def replayed(
    recorded: Recorded, steps: Sequence[Step], slowdown: float, calibration: Calibration | None = None
) -> Simulated:
    """Simulate the recorded program, in each step with message times that were measured in other steps.

    Each half of the steps uses the times of the other half, so that no message time is used in its own step. Messages
    whose end no rank waited for take their times from ``calibration``.
    """
    count = len(recorded.steps)
    timelines: dict[int, Timeline] = {}
    for fold in range(_FOLDS):
        others = [number for number in range(count) if number % _FOLDS != fold]
        durations = Durations(message_times(recorded, others), calibration)
        of_fold = simulate(recorded.program, steps, durations, slowdown)
        timelines |= {
            number: each for number, each in enumerate(of_fold.timelines) if number % _FOLDS == fold
        }
    return summed(recorded.program, [timelines[number] for number in range(count)])


def quiet_steps(recorded: Recorded, slowdown: float, calibration: Calibration | None = None) -> list[Step]:
    """Return the recorded compute without the slowdown by messages in flight.

    Compute that overlaps a message takes ``slowdown`` times as long. A replay shows how much of the compute overlaps.
    """
    if slowdown == 1.0:
        return recorded.steps
    played = simulate(recorded.program, recorded.steps, Durations(message_times(recorded), calibration))
    return [
        step._replace(spans=step.spans - timeline.overlapped * (1.0 - 1.0 / slowdown))
        for step, timeline in zip(recorded.steps, played.timelines, strict=True)
    ]


def on_critical_path(
    program: Program, steps: Sequence[Step], simulated: Simulated
) -> dict[tuple[str, int], float]:
    """Return the critical path of the step with the median time: ns by purpose (or ``compute``) and rank."""
    order = np.argsort(simulated.step_ns, kind="stable")
    median = int(order[len(order) // 2])
    path = critical_path(program, steps[median], simulated.timelines[median])
    return {key: float(ns) for key, ns in path.most_common()}
