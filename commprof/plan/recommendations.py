"""Recommend one of several settings, and give the reason in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from commprof.analysis.api import format_bytes
from commprof.plan.predictions import Prediction
from commprof.requested.configuration import read_configuration
from commprof.requested.parallel import axis_rules
from commprof.requested.parallel.axes import DATA

_EQUAL_TIMES: Final = 1.01  # times up to this multiple of the shortest time count as equal
_REASONS: Final = {
    "only one": "it is the only setting",
    "only one fits": "it is the only setting that fits",
    "time": "its {timed} the least time",
    "time and bytes": "its {timed} the least time; among settings within 1 % of it, bytes and then memory decide",
    "between hosts": "its hosts send the fewest bytes to other hosts",
    "per rank": "its ranks send the fewest bytes{hosts}",
    "memory": "it needs the least memory, and sends the same bytes as the next setting",
    "nothing": "it is the first of several settings with equal bytes and equal memory",
}


class Candidate(NamedTuple):
    """A setting that can be recommended.

    Attributes:
        name: The name of the setting in the sentence.
        on_device: The bytes that a rank needs on its device.
        rank_bytes: The bytes that a rank sends per step.
        host_bytes: The bytes that a host sends to other hosts per step.
        samples: The samples of a step over all ranks, or None if the config sets no batch size.
        complete: Whether the messages could be predicted.
        counted: Whether ``on_device`` includes activations.
        time_ns: The time of a step (the middle of its bounds) or of its messages. None if it is not known.
    """

    name: str
    on_device: int
    rank_bytes: int
    host_bytes: int
    samples: int | None
    complete: bool
    counted: bool
    time_ns: float | None = None


class Recommendation(NamedTuple):
    """The setting to use.

    Attributes:
        chosen: The position among the candidates, or None if no complete candidate fits.
        fitting: The number of complete candidates that fit into the memory of a device.
        decided_by: ``only one``, ``only one fits``, ``time``, ``time and bytes`` (several take equally long),
            ``between hosts``, ``per rank``, ``memory`` or ``nothing`` (several are equal). Empty if no candidate
            is chosen.
        per_sample: Whether values per sample were compared, because steps have different numbers of samples.
    """

    chosen: int | None
    fitting: int
    decided_by: str
    per_sample: bool


def samples_of(prediction: Prediction) -> int | None:
    """Return the samples of a step over all ranks, or None if the config does not determine them."""
    configuration = read_configuration(prediction.config)
    if configuration.train_batch_size is not None:
        return configuration.train_batch_size
    if configuration.micro_batch_size is None:
        return None
    steps = axis_rules.micro_batches(prediction.config, prediction.axes)
    return configuration.micro_batch_size * steps * prediction.axes.size(DATA)


def recommend(candidates: Sequence[Candidate], capacity: int | None) -> Recommendation:
    """Return the best candidate that fits into ``capacity``, the bytes of a device. With None, all candidates fit.

    The time of a step decides if it is known for all candidates. If it is not, or if the times differ by at most
    1 %, the bytes between hosts decide. Bytes per rank, memory on the device, and the given order follow in this
    sequence.
    """
    complete = [number for number, each in enumerate(candidates) if each.complete]
    fitting = [number for number in complete if capacity is None or candidates[number].on_device <= capacity]
    samples = {candidates[number].samples for number in fitting}
    per_sample = len(samples) > 1 and None not in samples
    if not fitting:
        return Recommendation(None, 0, "", False)

    def divisor(number: int) -> int:
        return (candidates[number].samples or 1) if per_sample else 1

    def cost(number: int) -> tuple[float, float, int]:
        each = candidates[number]
        return each.host_bytes / divisor(number), each.rank_bytes / divisor(number), each.on_device

    times = [(candidates[number].time_ns, number) for number in fitting]
    timed = {number: time / divisor(number) for time, number in times if time is not None}
    fast = fitting
    if len(timed) == len(fitting):
        fast = [number for number in fitting if timed[number] <= _EQUAL_TIMES * min(timed.values())]
    best, *others = sorted(fast, key=cost)
    if len(fitting) == 1:
        reason = "only one fits" if len(complete) > 1 else "only one"
    elif len(fast) < len(fitting):
        reason = "time and bytes" if others else "time"
    else:
        nearest = cost(others[0])
        first = next((place for place in range(3) if cost(best)[place] != nearest[place]), None)
        reason = "nothing" if first is None else ("between hosts", "per rank", "memory")[first]
    return Recommendation(best, len(fitting), reason, per_sample)


def advice(candidates: Sequence[Candidate], capacity: int | None, of_steps: bool) -> tuple[int | None, str]:
    """Return the position of the recommended setting, or None, and a sentence with the reason.

    Args:
        candidates: The settings, at least one.
        capacity: The memory of a device in bytes, or None if it is not known.
        of_steps: Whether the times are those of whole steps, and not only those of messages.
    """
    chosen = recommend(candidates, capacity)
    complete = [each for each in candidates if each.complete]
    if not complete:
        return None, "No recommendation: the messages of no setting can be predicted."
    if chosen.chosen is None:
        least = min(complete, key=lambda each: each.on_device)
        return None, (
            f"No setting fits in {format_bytes(capacity or 0)}{_before(least)}: {least.name} needs the least, "
            f"{format_bytes(least.on_device)} per rank."
        )
    best = candidates[chosen.chosen]
    fits = (
        f"of the {len(candidates)} settings, {chosen.fitting} fit{'s' * (chosen.fitting == 1)} in {format_bytes(capacity)}"
        if capacity is not None
        else "whether a setting fits is not known without --device-memory"
    )
    compared = " for each sample" if chosen.per_sample else ""
    has_hosts = any(each.host_bytes for each in complete)
    reason = _REASONS[chosen.decided_by].format(
        timed="step takes" if of_steps else "messages take",
        hosts=", and the bytes to other hosts equal those of the next setting" if has_hosts else "",
    )
    to_hosts = f"{format_bytes(best.host_bytes)} per host to other hosts and " if has_hosts else ""
    return chosen.chosen, (
        f"Use {best.name}: {reason}{compared}. It sends {to_hosts}{format_bytes(best.rank_bytes)} per rank in a step, and "
        f"holds {format_bytes(best.on_device)} on each device{_before(best)}; {fits}."
    )


def _before(candidate: Candidate) -> str:
    return "" if candidate.counted else ", before activations"
