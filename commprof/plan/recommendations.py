"""Which of several settings to use, and why, as one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commprof.plan.predictions import Prediction
from commprof.requested.configuration import read_configuration
from commprof.requested.parallel import grid
from commprof.requested.parallel.axes import DATA


class Candidate(NamedTuple):
    """A setting that can be recommended.

    Attributes:
        name: for the sentence.
        on_device: bytes that a rank holds on its device.
        rank_bytes: that a rank sends per step.
        host_bytes: that a host sends to other hosts per step.
        samples: of a step of all ranks; None where the config names no batch size.
        complete: whether its messages could be predicted.
        counted: whether ``on_device`` includes activations.
    """

    name: str
    on_device: int
    rank_bytes: int
    host_bytes: int
    samples: int | None
    complete: bool
    counted: bool


class Recommendation(NamedTuple):
    """The setting to use.

    Attributes:
        chosen: position among the candidates; None where none fits or none is complete.
        fitting: candidates whose memory is at most that of a device.
        decided_by: ``only one``, ``only one fits``, ``between hosts``, ``per rank``, ``memory``; ``nothing``: several are
            equal; empty where none is chosen.
        per_sample: whether bytes of a sample were compared, since steps have different numbers of samples.
    """

    chosen: int | None
    fitting: int
    decided_by: str
    per_sample: bool


def samples_of(prediction: Prediction) -> int | None:
    """Return the samples of a step of all ranks; None where the config does not determine them."""
    configuration = read_configuration(prediction.config)
    if configuration.train_batch_size is not None:
        return configuration.train_batch_size
    if configuration.micro_batch_size is None:
        return None
    steps = grid.micro_batches(prediction.config, prediction.axes)
    return configuration.micro_batch_size * steps * prediction.axes.size(DATA)


def recommend(candidates: Sequence[Candidate], capacity: int | None) -> Recommendation:
    """Return the candidate that fits ``capacity`` (bytes of a device; None: all fit) and sends the fewest bytes.

    Bytes between hosts decide, then bytes per rank, then memory on the device, then the order given.
    """
    complete = [number for number, each in enumerate(candidates) if each.complete]
    fitting = [number for number in complete if capacity is None or candidates[number].on_device <= capacity]
    samples = {candidates[number].samples for number in fitting}
    per_sample = len(samples) > 1 and None not in samples
    if not fitting:
        return Recommendation(None, 0, "", False)

    def cost(number: int) -> tuple[float, float, int]:
        each = candidates[number]
        divisor = (each.samples or 1) if per_sample else 1
        return each.host_bytes / divisor, each.rank_bytes / divisor, each.on_device

    best, *others = sorted(fitting, key=cost)
    if not others:
        reason = "only one fits" if len(complete) > 1 else "only one"
    else:
        nearest = cost(others[0])
        first = next((place for place in range(3) if cost(best)[place] != nearest[place]), None)
        reason = "nothing" if first is None else ("between hosts", "per rank", "memory")[first]
    return Recommendation(best, len(fitting), reason, per_sample)
