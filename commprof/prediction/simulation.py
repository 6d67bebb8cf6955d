"""Runs the steps of a program one after the other, with times of messages that were not measured in the same step. Pure."""

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
# The times that a message may take, for each step and group; of a message of one size alone, for one of each.
_Samples = list[list[Sample]]


class Simulated(NamedTuple):
    """The steps of a program, simulated.

    Attributes:
        timelines: of each step.
        step_ns: of each step: mean over ranks.
        exposed_ns: by purpose: mean over ranks, median over steps.
        exposed_by_message: ns of each message: mean over ranks, median over steps.
    """

    timelines: list[Timeline]
    step_ns: Floats
    exposed_ns: dict[str, float]
    exposed_by_message: Floats

    @property
    def median_ns(self) -> float:
        """The median step."""
        return float(np.median(self.step_ns))


def simulate(
    program: Program, steps: Sequence[Step], durations: Durations | None, slowdown: float = 1.0
) -> Simulated:
    """Run ``steps`` in order; without ``durations`` messages take no time.

    Raises:
        UsageError: how long a message takes is not known.
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
    """A time for each message in a step, (messages, ranks): those measured at about the same point of the run.

    So what changes slowly over a run, and how the messages of one step depend on each other, stays as it was.
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
    """``timelines`` with the figures of a step."""
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
    """Run the recorded program with message times of other steps than the one that is run.

    Each half of the steps has the times of the other half, so no time of a message is used in its own step. Messages whose
    ends nobody waited for have those of the ``calibration``.
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
    """The recorded compute as if nothing had been in flight meanwhile.

    What overlapped with a message took ``slowdown`` times as long; how much of it did is what a replay shows.
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
    """The critical path of the step whose time is the median: ns by purpose, or compute, and rank."""
    order = np.argsort(simulated.step_ns, kind="stable")
    median = int(order[len(order) // 2])
    path = critical_path(program, steps[median], simulated.timelines[median])
    return {key: float(ns) for key, ns in path.most_common()}
