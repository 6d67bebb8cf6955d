"""Distinguish recurring and one-off traffic of training steps. All values per step follow this rule.

The rule uses the warm steps: the steps that ended, without the first step of each attempt if there are
others. The rule applies to the traffic of one operation, purpose and group:

* Traffic in each warm step is steady. Its value is the most frequent one, and what single steps sent beyond
  this value is one-off. Without a majority the traffic varies, and its value is the mean.
* Traffic in every k-th warm step counts as a k-th part in each step.
* Other traffic in at least half of the warm steps is irregular. Its value is the mean over all warm steps.
* Traffic in fewer warm steps is one-off, and traffic that only the first step sent is also one-off. One-off
  traffic is in no mean.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import nan
from typing import Any, Final, NamedTuple, TypeAlias

from commprof.analysis.columns.byte_columns import BETWEEN_HOSTS, PADDING

COUNTED: Final = ("collectives", "payload_bytes", "wire_bytes")
EXECUTED: Final = "executed_wire_bytes"
PARTLY_KNOWN: Final = (EXECUTED, BETWEEN_HOSTS)  # a sum is known only if all its terms are
BESIDE: Final = (*PARTLY_KNOWN, PADDING)  # bytes that may not be known
TRAFFIC_KEY: Final = ("purpose", "op", "intended_op", "group_desc", "group_ranks")
_TRAFFIC_MEANS: Final = ("records", "host_ns", *BESIDE)

Step: TypeAlias = tuple[int, int]  # attempt and step
Row: TypeAlias = Mapping[str, Any]


class Steady(NamedTuple):
    """Rows with the columns of the key and the measures.

    Attributes:
        warm: The warm steps.
        per_step: The traffic that a step sends. The column ``every`` is k if every k-th step sends the
            traffic, and null if it is irregular.
        one_offs: The traffic that one ``attempt`` and ``step`` sent in addition to ``per_step``.
        weights: For each row of ``per_step``, the weight of each step that contributes to the row. The value
            of the row is the sum of weight times the traffic of the step, in any measure.
    """

    warm: list[Step]
    per_step: list[dict[str, Any]]
    one_offs: list[dict[str, Any]]
    weights: list[dict[Step, float]]


def warm_steps(ended_steps: Sequence[Step]) -> list[Step]:
    """Return the steps without the first step of each attempt, or all steps if there are no others."""
    first: dict[int, int] = {}
    for attempt, step in ended_steps:
        first[attempt] = min(step, first.get(attempt, step))
    return sorted({each for each in ended_steps if each[1] > first[each[0]]} or set(ended_steps))


def steady(
    rows: Sequence[Row], key: Sequence[str], ended_steps: Sequence[Step], means: Sequence[str] = ()
) -> Steady:
    """Return the recurring and the one-off part of ``rows``.

    Args:
        rows: The ``attempt``, ``step``, key and measures of operations. Rows with the same key and step are
            summed.
        key: The columns that identify an operation.
        ended_steps: The attempt and step of the steps that ended.
        means: The measures in addition to :data:`COUNTED`, such as times. Their means are over the steps that
            count.
    """
    warm = warm_steps(ended_steps)
    sums: dict[tuple[Any, ...], dict[Step, dict[str, float | None]]] = defaultdict(dict)
    known = set(ended_steps)
    for row in rows:
        step = int(row["attempt"]), int(row["step"])
        if step not in known:
            continue
        into = sums[tuple(row[name] for name in key)].setdefault(step, dict.fromkeys((*COUNTED, *means)))
        for name in into:
            if row[name] is not None and row[name] == row[name]:
                into[name] = (into[name] or 0) + row[name]
            elif name in PARTLY_KNOWN:
                into[name] = nan
    answer = Steady(warm, [], [], [])
    for values, by_step in sums.items():
        _judge(dict(zip(key, values, strict=True)), by_step, answer)
    return answer


def steady_traffic(traffic: Sequence[Row], times: Sequence[Row]) -> Steady:
    """Return the recurring and the one-off part of ``traffic`` in training steps.

    Args:
        traffic: Rows of :func:`commprof.analysis.api.traffic` by at least attempt, step, group_size and
            :data:`TRAFFIC_KEY`, with None for null.
        times: The attempt, step and duration_ns of the training steps. duration_ns is None if the step did
            not end.
    """
    ended_steps = sorted((row["attempt"], row["step"]) for row in times if row["duration_ns"] is not None)
    inside = [row for row in traffic if row["step"] >= 0]
    return steady(inside, (*TRAFFIC_KEY, "group_size"), ended_steps, _TRAFFIC_MEANS)


def _judge(named: dict[str, Any], by_step: Mapping[Step, Mapping[str, Any]], answer: Steady) -> None:
    warm = answer.warm
    present = [step for step in warm if step in by_step]
    value: dict[str, Any] | None = None
    every = 1 if len(present) == len(warm) else _period(present, warm)
    weights: dict[Step, float] = {}
    if every is not None:
        chosen = _of_most(present, by_step)
        weights = dict.fromkeys(chosen, 1 / (len(chosen) * every))
    elif 2 * len(present) >= len(warm):
        weights = dict.fromkeys(present, 1 / len(warm))
    if weights:
        value = _mean(weights, by_step)
        answer.per_step.append({**named, **value, "every": every})
        answer.weights.append(weights)
    expected = {name: (value[name] or 0) * (every or 0) for name in COUNTED} if value is not None else None
    # Computed once for all steps and not once for each step, because a run has thousands of steps.
    majority = bool(every) and _most(present, by_step) is not None
    in_warm = set(warm)
    for step, sent in sorted(by_step.items()):
        if expected is None or (every and (majority or step not in in_warm)):
            beyond = {
                name: (sent[name] or 0) - (0 if expected is None else expected[name]) for name in COUNTED
            }
            for name in BESIDE:
                if name in sent:
                    beyond[name] = _beyond(name, sent[name], value, every)
            if beyond["collectives"] > 0 or beyond["payload_bytes"] > 0:
                answer.one_offs.append({**named, "attempt": step[0], "step": step[1], **beyond})


def _beyond(
    name: str, sent: float | None, value: Mapping[str, Any] | None, every: int | None
) -> float | None:
    """Return the bytes ``name`` of a step in addition to the recurring bytes.

    The result is None if the bytes of the step or the recurring bytes are not known.
    """
    usual = 0.0 if value is None else value[name]
    if sent is None or sent != sent or usual is None:
        return None
    return sent - usual * (every or 0)


def _counts(sent: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(sent[name] for name in COUNTED[:2])


def _most(present: Sequence[Step], by_step: Mapping[Step, Mapping[str, Any]]) -> tuple[Any, ...] | None:
    """Return the amount that more than half of the steps send, or None if there is none."""
    amount, times = Counter(_counts(by_step[step]) for step in present).most_common(1)[0]
    return amount if 2 * times > len(present) else None


def _of_most(present: Sequence[Step], by_step: Mapping[Step, Mapping[str, Any]]) -> Sequence[Step]:
    """Return the steps that send the most frequent amount, or all steps if no amount has a majority."""
    most = _most(present, by_step)
    return present if most is None else [step for step in present if _counts(by_step[step]) == most]


def _mean(weights: Mapping[Step, float], by_step: Mapping[Step, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what one step sends on average.

    The weights are equal, so a sum is divided only once and integers stay exact.
    """
    divisor = round(1 / next(iter(weights.values())))
    means: dict[str, Any] = {}
    for name in by_step[next(iter(weights))]:
        known = [by_step[step][name] for step in weights if by_step[step][name] is not None]
        total = sum(known) / divisor if known else None
        means[name] = None if total != total else total
    return means


def _period(present: Sequence[Step], warm: Sequence[Step]) -> int | None:
    """Return k if exactly every k-th warm step is in ``present`` and there are at least two, or else None."""
    among = set(present)
    places = [number for number, step in enumerate(warm) if step in among]
    if len(places) < 2:
        return None
    k = places[1] - places[0]
    regular = all(after - before == k for before, after in pairwise(places))
    return k if k > 1 and regular and places[0] < k and len(warm) - places[-1] <= k else None


def when(rows: Sequence[Row]) -> str:
    """Return the steps of ``rows`` as text, such as ``step 0``, ``steps 0, 3`` or ``steps 0-2``, over all attempts."""
    steps = sorted({int(row["step"]) for row in rows})
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return f"step{'' if len(steps) == 1 else 's'} {text}"
