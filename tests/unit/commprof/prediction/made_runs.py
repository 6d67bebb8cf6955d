"""Hand-made recorded runs in which the computation of every rank and the duration of messages are known."""

from __future__ import annotations

import numpy as np

from commprof.ledger.requests.request import Request
from commprof.prediction.program import Event, Message, Program, Step
from commprof.prediction.recorded import Recorded
from commprof.prediction.schedule import play
from commprof.prediction.sent import sent_by
from commprof.requested.parameters import Parameter

MS = 1e6
LAYERS = 8
WIDTH = 100  # Each layer has 10,000 elements, which are 40,000 bytes.
PARAMETERS = [
    Parameter(f"layer{number}.weight", WIDTH * WIDTH, shape=f"{WIDTH}x{WIDTH}", forward_index=number)
    for number in range(LAYERS)
]
BYTES = 4 * WIDTH * WIDTH * LAYERS


def recorded(messages, spans, durations, *, steps=8, jitter=0.0, slowdown=1.0, seed=0):
    """Return a run of ``steps`` steps on 2 ranks.

    Args:
        messages: Tuples of (message, events before the wait or None for an immediate wait), in order.
            Blocking messages are waited for immediately.
        spans: The ms that each rank computes before each event and after the last event, with shape (events +
            1, 2).
        durations: A function from a message to its duration in ms.
        jitter: The relative standard deviation of compute and message times.
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
        # Computation that overlapped with messages took longer in the run, and a recorder sees these longer
        # times.
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


def config(**zero):
    keys = {"stage": 2, "reduce_bucket_size": 2 * WIDTH * WIDTH, **zero}
    return {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": keys}


def request(given, runtime="zero_runtime"):
    return Request(config=given, parameters=PARAMETERS, world_size=2, backend="gloo", runtime=runtime)


def sent(given, world=2, runtime="zero_runtime"):
    return sent_by(request(given, runtime), given, world)


def run(before, durations=lambda each: 1 + each.payload_bytes / 1e5, **changes):
    """Return a run with the steps of ``before``.

    The forward pass takes 30 ms. The backward pass takes 60 ms, 7.5 ms for each of 8 gradients. The optimizer
    takes 4 ms.
    """
    messages = [each for of_micro in before.gradients for each, _ in of_micro]
    counts = [count for of_micro in before.gradients for _, count in of_micro]
    at_end = list(before.at_end.get("gradient_norm", []))
    gathers = list(before.at_end.get("parameter_gather", []))
    spans, done = [], 0.0
    for count in counts:
        reached = 30 + 7.5 * count
        spans += [[reached - done] * 2, [0, 0]]
        done = reached
    spans += (
        [[0, 0], [0, 0]] * len(at_end) + [[4, 4], [0, 0]] + [[0, 0], [0, 0]] * (len(gathers) - 1) + [[1, 1]]
    )
    return recorded([*messages, *at_end, *gathers], spans, durations, **changes)
