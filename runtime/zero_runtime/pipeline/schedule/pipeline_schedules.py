"""Pipeline schedules, as pure functions that return the instructions of a rank.

Their arguments are the numbers of stages and micro-batches. A schedule is a tuple of steps, and a step is a
tuple of instructions.

=====================  ============================================  ======================================  ==============
schedule               idle share of a rank (F = B)                  live activations of rank r of P         source
=====================  ============================================  ======================================  ==============
``gpipe``              (P-1) / (M+P-1)                               M                                       GPipe
``one_f_one_b``        (P-1) / (M+P-1)                               min(P-r, M)                             PipeDream-flush
``interleaved``        (P-1) / (VM+P-1)                              at most (V-1)P + 2(P-r-1) + 1 chunks    Megatron-LM
``zero_bubble``        (P-1)(F+B-W) / (M(F+B+W) + (P-1)(F+B-W))      min(P-r, M), and their weights' inputs  ZB-H1
=====================  ============================================  ======================================  ==============

P is the number of stages, M the number of micro-batches and V the number of chunks of each rank. F is the
time of a forward pass, B the time of a backward pass (with ``zero_bubble``, only of the inputs), and W the
time of the gradients of the weights. Sources: Huang et al. 2019; Narayanan et al. 2021; Qi et al. 2023, "Zero
Bubble Pipeline Parallelism", section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from zero_runtime.errors import ConfigError
from zero_runtime.pipeline.schedule.instructions import Action, Instruction
from zero_runtime.pipeline.schedule.message_order import meeting

Step = tuple[Instruction, ...]
Schedule = tuple[Step, ...]


def one_f_one_b(stages: int, micro_batches: int, stage: int) -> Schedule:
    """Return the schedule 1F1B (one forward, one backward), with the same instructions as DeepSpeed's TrainSchedule.

    All stages run in lockstep. At time t, stage s runs the forward pass of micro-batch (t - s) / 2 if this
    number is an integer. Otherwise it runs the backward pass of micro-batch (t - (2P - 1 - s)) / 2. At every
    time, one of two neighbors sends first and the other one receives first, so blocking messages cannot
    deadlock.
    """
    _check(stages, micro_batches, stage)

    def valid(number: int) -> bool:
        return 0 <= number < micro_batches

    return tuple(
        tuple(_lockstep(time, stage, stages, valid)) for time in range(2 * (micro_batches + stages - 1))
    )


def _lockstep(time: int, stage: int, stages: int, valid: Callable[[int], bool]) -> Iterator[Instruction]:
    turn = 2 * stages - 1 - stage
    if (time - stage) % 2 == 0:
        now, last = (time - stage) // 2, (time - 1 - turn) // 2
        if stage and valid(last):
            yield Instruction(Action.SEND_GRADIENT, last)
        if stage and valid(now):
            yield Instruction(Action.RECEIVE_ACTIVATION, now)
        if valid(now):
            yield from _forward(now, stage, stages)
        return
    now, last = (time - turn) // 2, (time - 1 - stage) // 2
    if stage < stages - 1 and valid(now):
        yield Instruction(Action.RECEIVE_GRADIENT, now)
    if stage < stages - 1 and valid(last):
        yield Instruction(Action.SEND_ACTIVATION, last)
    if valid(now):
        yield Instruction(Action.BACKWARD, now)


def inference(stages: int, micro_batches: int, stage: int) -> Schedule:
    """Return a schedule of forward passes only.

    As in DeepSpeed, even stages send before they receive, and odd stages receive before they send.
    """
    _check(stages, micro_batches, stage)
    return tuple(
        tuple(_inference_step(time - stage, stage, stages, micro_batches))
        for time in range(micro_batches + stages)
    )


def _inference_step(now: int, stage: int, stages: int, micro_batches: int) -> Iterator[Instruction]:
    send = [Instruction(Action.SEND_ACTIVATION, now - 1)] if 1 <= now <= micro_batches else []
    receive = [Instruction(Action.RECEIVE_ACTIVATION, now)] if 0 <= now < micro_batches else []
    send, receive = send if stage < stages - 1 else [], receive if stage else []
    yield from (*send, *receive) if stage % 2 == 0 else (*receive, *send)
    if 0 <= now < micro_batches:
        yield from _forward(now, stage, stages)


def _forward(micro_batch: int, stage: int, stages: int) -> Iterator[Instruction]:
    if not stage or stage == stages - 1:
        yield Instruction(Action.LOAD, micro_batch)
    yield Instruction(Action.FORWARD, micro_batch)


def gpipe(stages: int, micro_batches: int, stage: int) -> Schedule:
    """Return the schedule GPipe: all forward passes, then all backward passes in the same order."""
    _check(stages, micro_batches, stage)
    order = [
        Instruction(action, number)
        for action in (Action.FORWARD, Action.BACKWARD)
        for number in range(micro_batches)
    ]
    return _communicating(order, stages, stage)


def zero_bubble(stages: int, micro_batches: int, stage: int) -> Schedule:
    """Return the schedule ZB-H1, a 1F1B that computes weight gradients later, when a rank would be idle.

    The peak of activations is that of 1F1B. Stage s delays its weight gradients by s micro-batches, so that
    every stage has work left for the end of the step.
    """
    _check(stages, micro_batches, stage)
    return _zero_bubble(stages, micro_batches)[stage]


@lru_cache(maxsize=8)
def _zero_bubble(stages: int, micro_batches: int) -> tuple[Schedule, ...]:
    return meeting([list(_with_late_weights(stages, micro_batches, stage)) for stage in range(stages)])


def _with_late_weights(stages: int, micro_batches: int, stage: int) -> Iterator[Instruction]:
    warmup = min(stages - 1 - stage, micro_batches)
    yield from (Instruction(Action.FORWARD, number) for number in range(warmup))
    weights = iter(range(micro_batches))
    for number in range(micro_batches):
        if warmup + number < micro_batches:
            yield Instruction(Action.FORWARD, warmup + number)
        yield Instruction(Action.BACKWARD_INPUT, number)
        if number >= stage:
            yield Instruction(Action.BACKWARD_WEIGHT, next(weights))
    yield from (Instruction(Action.BACKWARD_WEIGHT, number) for number in weights)


def interleaved(stages: int, micro_batches: int, stage: int, chunks: int = 2) -> Schedule:
    """Return the schedule 1F1B with ``chunks`` chunks of the model on each rank.

    The chunks are assigned to the ranks in turn: rank r has the chunks r, r + P, r + 2P, ...

    Raises:
        ConfigError: The number of micro-batches is not a multiple of the number of ranks.
    """
    _check(stages, micro_batches, stage)
    if chunks < 1 or micro_batches % stages:
        raise ConfigError(
            f"an interleaved schedule of {micro_batches} micro-batches and {chunks} chunks on {stages} ranks: expected a "
            "multiple of the ranks as micro-batches, and at least 1 chunk"
        )
    return _interleaved(stages, micro_batches, chunks)[stage]


@lru_cache(maxsize=8)
def _interleaved(stages: int, micro_batches: int, chunks: int) -> tuple[Schedule, ...]:
    return meeting([_in_turn(stages, micro_batches, stage, chunks) for stage in range(stages)], chunks)


def _in_turn(stages: int, micro_batches: int, stage: int, chunks: int) -> list[Instruction]:
    total = micro_batches * chunks
    warmup = min(total, 2 * (stages - 1 - stage) + (chunks - 1) * stages)

    def nth(action: Action, number: int) -> Instruction:
        chunk = number % (stages * chunks) // stages
        micro_batch = number // (stages * chunks) * stages + number % stages
        return Instruction(action, micro_batch, chunk if action is Action.FORWARD else chunks - 1 - chunk)

    order = [nth(Action.FORWARD, number) for number in range(warmup)]
    for number in range(total - warmup):
        order += [nth(Action.FORWARD, warmup + number), nth(Action.BACKWARD, number)]
    return order + [nth(Action.BACKWARD, number) for number in range(total - warmup, total)]


def interleaved_inference(stages: int, micro_batches: int, stage: int, chunks: int) -> Schedule:
    """Return a schedule of forward passes only, with ``chunks`` chunks on each rank.

    At most as many micro-batches as there are ranks pass through a chunk before the next chunk runs.
    """
    _check(stages, micro_batches, stage)
    return _interleaved_inference(stages, micro_batches, chunks)[stage]


@lru_cache(maxsize=8)
def _interleaved_inference(stages: int, micro_batches: int, chunks: int) -> tuple[Schedule, ...]:
    order = [
        Instruction(Action.FORWARD, number, chunk)
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for number in range(first, min(first + stages, micro_batches))
    ]
    return meeting([order] * stages, chunks)


def _communicating(order: Iterable[Instruction], stages: int, rank: int) -> Schedule:
    """Add messages to computations. Each input is received directly before its computation.

    Each output is sent directly after its computation.
    """
    return tuple(tuple(_with_messages(each, stages, rank)) for each in order)


def _with_messages(computation: Instruction, stages: int, rank: int) -> Iterator[Instruction]:
    action, number, _ = computation
    if action is Action.FORWARD:
        if rank:
            yield Instruction(Action.RECEIVE_ACTIVATION, number)
        yield from _forward(number, rank, stages)
        if rank < stages - 1:
            yield Instruction(Action.SEND_ACTIVATION, number)
        return
    if rank < stages - 1:
        yield Instruction(Action.RECEIVE_GRADIENT, number)
    yield computation
    if rank:
        yield Instruction(Action.SEND_GRADIENT, number)


def idle_fraction(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Return the idle share of a rank's step, if all stages take equal time: (P-1) / (VM+P-1)."""
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def zero_bubble_idle_fraction(
    stages: int, micro_batches: int, forward: float, backward: float, weight: float
) -> float:
    """Return the idle share with ZB-H1: (P-1)(F+B-W) / (M(F+B+W) + (P-1)(F+B-W)).

    All times have the same unit.
    """
    idle = (stages - 1) * (forward + backward - weight)
    return idle / (micro_batches * (forward + backward + weight) + idle)


def live_activations(stages: int, micro_batches: int, stage: int) -> int:
    """Return the largest number of micro-batches whose activations a stage stores under 1F1B: min(P - s, M)."""
    return min(stages - stage, micro_batches)


def _check(stages: int, micro_batches: int, stage: int) -> None:
    if stages < 1 or micro_batches < 1 or not 0 <= stage < stages:
        raise ConfigError(
            f"there is no schedule of stage {stage} of {stages} with {micro_batches} micro-batches; expected at least 1 "
            "of each, and stages counted from 0"
        )
