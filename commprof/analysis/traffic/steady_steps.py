"""Recurring and one-off traffic of training steps: the rule behind all figures per step.

The rule uses the warm steps: those that ended, without the first of each attempt if there are others. The traffic of one
operation, purpose and group

* in each warm step is steady: its value is the most frequent one, and what single steps sent beyond it is one-off. Without a
  majority it varies, and its value is the mean;
* in every k-th warm step counts as a k-th part in each;
* in at least half of them is irregular: its value is the mean over all;
* in fewer of them is one-off, and so is what only the first step sent. One-off traffic is in no mean.
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
        warm: the warm steps.
        per_step: what a step sends; ``every``: k if every k-th step sends it, null if it is irregular.
        one_offs: what one ``attempt`` and ``step`` sent beyond that.
        weights: for each row of ``per_step`` the steps behind it. The sum over them of weight times what the step sent is
            what a step sends, in any measure.
    """

    warm: list[Step]
    per_step: list[dict[str, Any]]
    one_offs: list[dict[str, Any]]
    weights: list[dict[Step, float]]


def warm_steps(ended_steps: Sequence[Step]) -> list[Step]:
    """The steps without the first of each attempt, if there are others."""
    first: dict[int, int] = {}
    for attempt, step in ended_steps:
        first[attempt] = min(step, first.get(attempt, step))
    return sorted({each for each in ended_steps if each[1] > first[each[0]]} or set(ended_steps))


def steady(
    rows: Sequence[Row], key: Sequence[str], ended_steps: Sequence[Step], means: Sequence[str] = ()
) -> Steady:
    """The recurring and the one-off part of ``rows``.

    Args:
        rows: ``attempt``, ``step``, the key and the measures of operations; several of one key and step are summed.
        key: the columns that identify an operation.
        ended_steps: attempt and step of the steps that ended.
        means: measures beside :data:`COUNTED`, such as times: their means over the steps that count.
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
    """The recurring and the one-off part of ``traffic`` in training steps.

    Args:
        traffic: rows of :func:`commprof.analysis.api.traffic` by attempt, step, group_size and :data:`TRAFFIC_KEY` at
            least, with None for null.
        times: attempt, step and duration_ns of the training steps; None if the step did not end.
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
    # Asked once for all steps, not once for each: a run has thousands.
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
    """The bytes ``name`` of a step beyond the recurring ones; None if one of them is not known."""
    usual = 0.0 if value is None else value[name]
    if sent is None or sent != sent or usual is None:
        return None
    return sent - usual * (every or 0)


def _counts(sent: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(sent[name] for name in COUNTED[:2])


def _most(present: Sequence[Step], by_step: Mapping[Step, Mapping[str, Any]]) -> tuple[Any, ...] | None:
    """The amount that more than half of the steps send; None if there is none."""
    amount, times = Counter(_counts(by_step[step]) for step in present).most_common(1)[0]
    return amount if 2 * times > len(present) else None


def _of_most(present: Sequence[Step], by_step: Mapping[Step, Mapping[str, Any]]) -> Sequence[Step]:
    """The steps that send the most frequent amount; all steps without a majority."""
    most = _most(present, by_step)
    return present if most is None else [step for step in present if _counts(by_step[step]) == most]


def _mean(weights: Mapping[Step, float], by_step: Mapping[Step, Mapping[str, Any]]) -> dict[str, Any]:
    """What one step sends on average. The weights are equal, so a sum is divided once: integers stay exact."""
    divisor = round(1 / next(iter(weights.values())))
    means: dict[str, Any] = {}
    for name in by_step[next(iter(weights))]:
        known = [by_step[step][name] for step in weights if by_step[step][name] is not None]
        total = sum(known) / divisor if known else None
        means[name] = None if total != total else total
    return means


def _period(present: Sequence[Step], warm: Sequence[Step]) -> int | None:
    """k if every k-th warm step is among ``present``, at least two; else None."""
    among = set(present)
    places = [number for number, step in enumerate(warm) if step in among]
    if len(places) < 2:
        return None
    k = places[1] - places[0]
    regular = all(after - before == k for before, after in pairwise(places))
    return k if k > 1 and regular and places[0] < k and len(warm) - places[-1] <= k else None


def when(rows: Sequence[Row]) -> str:
    """``step 0``, ``steps 0, 3`` or ``steps 0-2``: of all attempts."""
    steps = sorted({int(row["step"]) for row in rows})
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return f"step{'' if len(steps) == 1 else 's'} {text}"
