"""Determines the number of activations of a run from its records. Rules for shared models cannot predict this number.

The number never depends on a single message. The majority of the messages of a module determines its number of rows,
and the majority of micro-batches determines the messages between stages. The rules then predict every message, so a
missing message or a wrong size is detected. If most modules have a different length in a step, all modules must have
this length.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final, NamedTuple

from commprof.ledger.records.issued import StepKey
from commprof.ledger.requests.training_records import COUNT, Records, counted
from commprof.requested.parallel.activation_shapes import ALL_MODULES, Exchanged, Shapes
from commprof.requested.parallel.axes import MODEL, SEQUENCE, Axes
from commprof.requested.parallel.shared_modules import ModuleMessage
from commprof.schema import Op, Phase, Purpose, format_ranks

_LOSS_BYTES: Final = 4  # bytes per row of the loss
_SENT: Final = ("attempt", "step", "group_ranks", "group_rank", "phase", "module", "op", "payload_bytes")


class _Kind(NamedTuple):
    """The key of messages that are comparable between steps."""

    group_ranks: str
    phase: str
    module: str
    op: str


@dataclass(frozen=True)
class Observed:
    """The activations that the records show.

    Attributes:
        shapes: The shapes of a usual step.
        scales: The factor of the number of rows for each step in which most modules have an unusual number of rows.
        notes: Remarks for the report.
    """

    shapes: Shapes = field(default_factory=Shapes)
    scales: Mapping[StepKey, Fraction] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def observe(run: Records, axes: Axes, messages: Sequence[ModuleMessage], micro_batches: int) -> Observed:
    """Determine the activations of the modules along the model axis and the sequence axis from the records.

    Args:
        run: The run whose records are read.
        axes: The axes of the ranks.
        messages: The messages that modules send according to the rules.
        micro_batches: The number of micro-batches of a step.
    """
    along = {axis: {format_ranks(list(line)) for line in axes.lines(axis)} for axis in (MODEL, SEQUENCE)}
    groups = along[MODEL] | along[SEQUENCE]
    of_first = [
        row
        for row in counted(run, Purpose.ACTIVATION, None, _SENT)
        if row["group_ranks"] in groups and row["group_rank"] == 0
    ]
    if not of_first:
        return Observed()
    steps = _by_step(of_first)
    cut = {kind: sizes for kind, sizes in _sizes(of_first).items() if kind.group_ranks in along[MODEL]}
    rows = _rows(cut, messages)
    known = {each.module for each in messages}
    unknown = {kind: sizes for kind, sizes in cut.items() if kind.module not in known}
    usual = _usual_counts(steps)
    losses = [name for name, kinds in _modules(unknown).items() if _is_loss(kinds)]
    rows |= {name: _loss_rows(unknown, name) for name in losses}
    times = _calls(usual, messages, micro_batches)
    shapes = Shapes(
        rows=rows,
        calls=times,
        losses=losses,
        others=_others(steps, {each for each in _modules(unknown) if each not in losses}, micro_batches),
        exchanged=_exchanged(steps, along[SEQUENCE] - along[MODEL], micro_batches),
    )
    notes = [
        f"{module} sends its {op} {count} times in each micro-batch, as the run shows it"
        for (module, op), count in times.items()
        if count > 1
    ]
    return Observed(shapes, _scales(steps), tuple(notes))


def _kind(row: Mapping[str, Any]) -> _Kind:
    # A forward pass that is repeated in the backward pass has the phase backward.
    phase = Phase.BACKWARD if row["phase"] == Phase.BACKWARD else Phase.FORWARD
    return _Kind(row["group_ranks"], str(phase), row["module"] or "", row["op"])


Steps = dict[StepKey, dict[_Kind, Counter[int]]]


def _by_step(rows: Iterable[Mapping[str, Any]]) -> Steps:
    steps: Steps = defaultdict(lambda: defaultdict(Counter))
    for row in rows:
        steps[StepKey(row["attempt"], row["step"])][_kind(row)][row["payload_bytes"]] += row[COUNT]
    return steps


def _sizes(rows: Iterable[Mapping[str, Any]]) -> dict[_Kind, Counter[int]]:
    sizes: dict[_Kind, Counter[int]] = defaultdict(Counter)
    for row in rows:
        sizes[_kind(row)][row["payload_bytes"]] += row[COUNT]
    return sizes


def _modules(kinds: Mapping[_Kind, Counter[int]]) -> dict[str, list[tuple[_Kind, Counter[int]]]]:
    modules: dict[str, list[tuple[_Kind, Counter[int]]]] = defaultdict(list)
    for kind, sizes in kinds.items():
        modules[kind.module].append((kind, sizes))
    return modules


def _rows(sent: Mapping[_Kind, Counter[int]], messages: Sequence[ModuleMessage]) -> dict[str, int]:
    """Return the most common number of rows, under ``ALL_MODULES``, and the number of each module that differs.

    The number of a module is the most common number of its messages. If the number under ``ALL_MODULES`` is equally
    common in these messages, the module is left out.
    """
    row_counts: dict[str, Counter[int]] = defaultdict(Counter)
    for kind, sizes in sent.items():
        for each in messages:
            if each.module == kind.module and str(each.op) == kind.op and each.row_bytes:
                for size, count in sizes.items():
                    rows, rest = divmod(size - each.fixed_bytes, each.row_bytes)
                    if rows > 0 and not rest:
                        row_counts[each.module][rows] += count
    everywhere: Counter[int] = sum(row_counts.values(), Counter())
    if not everywhere:
        return {}
    common = _most_common(everywhere)
    of_modules = {ALL_MODULES: common}
    for module, own in row_counts.items():
        best = _most_common(own)
        if own[common] < own[best]:
            of_modules[module] = best
    return of_modules


def _most_common(counts: Counter[Any]) -> Any:
    """Return the value with the highest count. If counts are equal, the first value in text order is returned."""
    return min(counts, key=lambda value: (-counts[value], str(value)))


def _usual_counts(steps: Steps) -> dict[tuple[str, str, str], int]:
    """Return the most common number of messages per step for each (group, module, op) that most steps contain."""
    count_frequencies: dict[tuple[str, str, str], Counter[int]] = defaultdict(Counter)
    present: Counter[tuple[str, str, str]] = Counter()
    for kinds in steps.values():
        here: Counter[tuple[str, str, str]] = Counter()
        for kind, sizes in kinds.items():
            here[kind.group_ranks, kind.module, kind.op] += sum(sizes.values())
        for key, count in here.items():
            count_frequencies[key][count] += 1
            present[key] += 1
    return {
        key: _most_common(counts)
        for key, counts in count_frequencies.items()
        if 2 * present[key] > len(steps)
    }


def _calls(
    usual: Mapping[tuple[str, str, str], int], messages: Sequence[ModuleMessage], micro_batches: int
) -> dict[tuple[str, str], int]:
    """Return how often the messages of a module and operation are sent in a micro-batch, if this is not once."""
    wanted = Counter((each.module, str(each.op)) for each in messages)
    calls: dict[tuple[str, str], int] = {}
    for key, number in wanted.items():
        sent = [count for (_, module, op), count in usual.items() if (module, op) == key]
        times = round(max(sent, default=0) / (number * micro_batches))
        if times != 1:
            calls[key] = times
    # Only a module whose input needs no gradient may send nothing.
    gradients = {(each.module, str(each.op)) for each in messages if not each.forward}
    return {key: times for key, times in calls.items() if times or key in gradients}


def _is_loss(kinds: Sequence[tuple[_Kind, Counter[int]]]) -> bool:
    """Return whether a module without parameters sends messages of a cross entropy: one number per row, then two."""
    sizes: Counter[int] = Counter()
    for kind, own in kinds:
        if kind.op != Op.ALL_REDUCE or kind.phase != Phase.FORWARD:
            return False
        sizes.update(own)
    smallest = min(sizes)
    return sizes.get(2 * smallest, 0) > 0 and smallest % _LOSS_BYTES == 0


def _loss_rows(sent: Mapping[_Kind, Counter[int]], module: str) -> int:
    rows: Counter[int] = Counter()
    for kind, sizes in sent.items():
        if kind.module == module:
            for size, count in sizes.items():
                if 2 * size in sizes:
                    rows[size // _LOSS_BYTES] += count
    most_common: int = _most_common(rows)
    return most_common


def _others(steps: Steps, modules: Iterable[str], micro_batches: int) -> dict[str, list[tuple[str, int]]]:
    """Return the messages per micro-batch of modules without a rule: the messages that they send in most steps."""
    messages = {}
    for module in sorted(modules):
        seen: Counter[tuple[tuple[str, int, int], ...]] = Counter()
        for kinds in steps.values():
            first = min((kind.group_ranks for kind in kinds if kind.module == module), default=None)
            sent = [
                (kind.op, size, count)
                for kind, sizes in kinds.items()
                if kind.module == module and kind.group_ranks == first
                for size, count in sizes.items()
            ]
            seen[tuple(sorted(sent))] += 1
        messages[module] = [
            (op, size) for op, size, count in _most_common(seen) for _ in range(count // micro_batches)
        ]
    return messages


def _exchanged(steps: Steps, groups: set[str], micro_batches: int) -> dict[str, Exchanged]:
    """Return the messages of each attention in a micro-batch.

    An attention sends four messages, or a multiple, in the forward pass, and the same messages in the backward pass.
    """
    seen: dict[str, Counter[tuple[int, ...]]] = defaultdict(Counter)
    twice: dict[str, Counter[int]] = defaultdict(Counter)
    for kinds in steps.values():
        for kind, sizes in kinds.items():
            if kind.group_ranks in groups and kind.op == Op.ALL_TO_ALL and kind.phase == Phase.FORWARD:
                back = kinds.get(kind._replace(phase=str(Phase.BACKWARD)), Counter())
                seen[kind.module][_of_a_micro_batch(sizes, micro_batches)] += 1
                twice[kind.module][max(1, round(sum(back.values()) / sum(sizes.values())))] += 1
    exchanged = {}
    for module, sent in seen.items():
        forward = _most_common(sent)
        exchanged[module] = Exchanged(forward, forward * _most_common(twice[module]))
    return exchanged


def _of_a_micro_batch(sizes: Counter[int], micro_batches: int) -> tuple[int, ...]:
    return tuple(size for size in sorted(sizes) for _ in range(round(sizes[size] / micro_batches)))


def _scales(steps: Steps) -> dict[StepKey, Fraction]:
    """Return the factor of the sizes for each step with unusual sizes.

    In such a step, more than half of all kinds of messages, and at least two, differ from their usual mean size by the
    same factor.
    """
    means = {
        key: {
            kind: Fraction(sum(size * n for size, n in sizes.items()), sum(sizes.values()))
            for kind, sizes in kinds.items()
        }
        for key, kinds in steps.items()
    }
    usual: dict[_Kind, Counter[Fraction]] = defaultdict(Counter)
    for kinds in means.values():
        for kind, mean in kinds.items():
            usual[kind][mean] += 1
    common = {kind: _most_common(counts) for kind, counts in usual.items()}
    scales = {}
    for key, kinds in means.items():
        ratios = Counter(mean / common[kind] for kind, mean in kinds.items() if common[kind])
        if not ratios:
            continue
        best = _most_common(ratios)
        if best != 1 and ratios[best] > max(1, len(kinds) // 2):
            scales[key] = best
    return scales
