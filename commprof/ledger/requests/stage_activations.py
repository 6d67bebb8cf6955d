"""Determines the messages between the stages of a pipeline from the records.

All micro-batches must send forward the same tensors as the majority of micro-batches. Each floating-point tensor causes
a gradient in the other direction. A header with the shapes is sent before the first activation and after a change of
shapes. If shapes may always change, a header is sent before each micro-batch, and gradients must have the sizes of the
activations of their step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from commprof.ledger.records.issued import StepKey
from commprof.ledger.requests.training_records import COUNT, Records, counted
from commprof.requested.expectation import Expectation
from commprof.requested.parallel.activation_shapes import Crossing, Shapes
from commprof.requested.parallel.axes import PIPE, Axes
from commprof.requested.parallel.stage_messages import crossing_tensors
from commprof.schema import Op, Phase, Purpose

HEADER_BYTES: Final = 1024  # 256 int32
_HEADER_DTYPE: Final = "int32"
_SENT: Final = ("attempt", "step", "micro_step", "phase", "rank", "peer", "dtype", "payload_bytes")
_FLOATING: Final = ("float", "bfloat", "complex")

Tensor = tuple[str, int]  # element type, bytes
Pair = tuple[int, int]  # sending stage, receiving stage


@dataclass(frozen=True)
class Crossings:
    """The messages between the stages in each step.

    Attributes:
        axes: The axes of the ranks.
        micro_batches: The number of micro-batches of a step.
        usual: The tensors that most micro-batches send.
        forms: The tensors that a micro-batch sends, by step. Other steps send the tensors of ``usual``.
        headers: The bytes of each header with shapes in a step.
        changing: The tensors of all micro-batches together, for steps whose micro-batches differ.
    """

    axes: Axes
    micro_batches: int
    usual: Mapping[Pair, Crossing] = field(default_factory=dict)
    forms: Mapping[StepKey, Mapping[Pair, Crossing]] = field(default_factory=dict)
    headers: Mapping[StepKey, tuple[int, ...]] = field(default_factory=dict)
    changing: Mapping[StepKey, Mapping[Pair, Crossing]] = field(default_factory=dict)

    @property
    def wraps(self) -> bool:
        """Whether the last stage sends to the first stage, which then has a second part of the model."""
        last = self.axes.size(PIPE) - 1
        return last > 1 and any((last, 0) in forms for forms in (self.usual, *self.changing.values()))

    def expected(self, key: StepKey) -> list[Expectation]:
        """Return the expected messages of all stages together in step ``key``."""
        of_step = self.changing.get(key)
        forms = of_step if of_step is not None else self.forms.get(key, self.usual)
        expected = crossing_tensors(
            self.axes, Shapes(crossings=forms), 1 if of_step is not None else self.micro_batches
        )
        headers = self.headers.get(key, ())
        if not expected or not headers:
            return expected
        sent = expected[0]
        total = sent.payload_bytes + sum(headers)
        return [
            sent._replace(
                count=sent.count + len(headers),
                payload_bytes=total,
                least_bytes=total,
                wire_bytes=float(total),
            )
        ]


class _MicroBatch(NamedTuple):
    key: StepKey
    number: int
    pair: Pair


def observe(run: Records, axes: Axes, micro_batches: int) -> Crossings:
    """Determine the messages between the stages of the first replica in training steps from the records."""
    if axes.size(PIPE) == 1:
        return Crossings(axes, micro_batches)
    sent = _sent(run, axes.lines(PIPE)[0])
    if not sent:
        return Crossings(axes, micro_batches)
    headed = [batch for batch, tensors in sent.items() if _has_header(tensors)]
    if 2 * len(headed) > len(sent):
        return Crossings(axes, micro_batches, changing=_crossings_by_step(sent))
    usual: dict[Pair, Crossing] = {}
    forms: dict[StepKey, dict[Pair, Crossing]] = defaultdict(dict)
    headers: dict[StepKey, list[int]] = defaultdict(list)
    for pair in sorted({batch.pair for batch in sent}):
        own = {batch: tensors for batch, tensors in sent.items() if batch.pair == pair}
        usual[pair] = _crossing(_form(own.values()))
        before: tuple[int, Counter[Tensor]] | None = None
        for segment in _segments(own):
            form = _form(tensors for batch, tensors in own.items() if batch.key in segment)
            for key in segment:
                forms[key][pair] = _crossing(form)
            # Shapes are sent again only if they changed, or if the processes are new.
            first = segment[0]
            if before != (first.attempt, form):
                headed_batches = [
                    own[batch] for batch in own if batch.key == first and _has_header(own[batch])
                ]
                headers[first] += _header_bytes(headed_batches[0] - form) if headed_batches else []
            before = first.attempt, form
    joined = {key: {**usual, **by_pair} for key, by_pair in forms.items()}
    return Crossings(axes, micro_batches, usual, joined, {key: tuple(each) for key, each in headers.items()})


def _sent(run: Records, line: tuple[int, ...]) -> dict[_MicroBatch, Counter[Tensor]]:
    """Return the tensors that each stage of ``line`` sent forward to the next stage, by micro-batch."""
    stage_of = {rank: stage for stage, rank in enumerate(line)}
    tensors_by_batch: dict[_MicroBatch, Counter[Tensor]] = defaultdict(Counter)
    for row in counted(run, Purpose.PIPELINE, Op.SEND, _SENT):
        pair = stage_of.get(row["rank"], -1), stage_of.get(row["peer"], -1)
        if row["phase"] == Phase.FORWARD and -1 not in pair and (pair[1] - pair[0]) % len(line) == 1:
            batch = _MicroBatch(StepKey(row["attempt"], row["step"]), row["micro_step"], pair)
            tensors_by_batch[batch][str(row["dtype"]), row["payload_bytes"]] += row[COUNT]
    return dict(tensors_by_batch)


def _has_header(tensors: Counter[Tensor]) -> bool:
    return (_HEADER_DTYPE, HEADER_BYTES) in tensors


def _form(batches: Iterable[Counter[Tensor]]) -> Counter[Tensor]:
    """Return the tensors that most of ``batches`` send, without headers."""
    seen = Counter(tuple(sorted(_without_header(each).items())) for each in batches)
    best = min(seen, key=lambda form: (-seen[form], len(form), form))
    return Counter(dict(best))


def _without_header(tensors: Counter[Tensor]) -> Counter[Tensor]:
    # A micro-batch has one header for each part of the model that the stage has.
    return Counter({tensor: n for tensor, n in tensors.items() if tensor != (_HEADER_DTYPE, HEADER_BYTES)})


def _crossing(form: Counter[Tensor]) -> Crossing:
    tensors = sorted(form.elements())
    return Crossing(
        tuple(size for _, size in tensors),
        tuple(size for dtype, size in tensors if dtype.startswith(_FLOATING)),
    )


def _header_bytes(extra: Counter[Tensor]) -> list[int]:
    """Return the sizes in bytes of the headers among the ``extra`` messages of a micro-batch.

    The sizes of messages that may follow the headers are included.
    """
    numbers = [size for dtype, size in extra.elements() if dtype == _HEADER_DTYPE]
    headers = [size for size in numbers if size == HEADER_BYTES]
    return [*headers, *(size for size in sorted(numbers) if size != HEADER_BYTES)][: 2 * len(headers)]


def _segments(sent: Mapping[_MicroBatch, Counter[Tensor]]) -> list[list[StepKey]]:
    """Return the steps between two headers, in order. The shapes are the same in all steps of a segment."""
    segments: list[list[StepKey]] = []
    for key in sorted({batch.key for batch in sent}):
        has_header = any(_has_header(tensors) for batch, tensors in sent.items() if batch.key == key)
        if has_header or not segments:
            segments.append([])
        segments[-1].append(key)
    return segments


def _crossings_by_step(sent: Mapping[_MicroBatch, Counter[Tensor]]) -> dict[StepKey, dict[Pair, Crossing]]:
    """Return the tensors of all micro-batches of each step, for a pipeline whose shapes may always change."""
    by_step: dict[StepKey, dict[Pair, Counter[Tensor]]] = defaultdict(lambda: defaultdict(Counter))
    for batch, tensors in sent.items():
        by_step[batch.key][batch.pair] += tensors
    return {
        key: {pair: _crossing(tensors) for pair, tensors in pairs.items()} for key, pairs in by_step.items()
    }
