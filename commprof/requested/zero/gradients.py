"""Predicts the messages of one reduction of all gradients, from the order in which gradients arrive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Final, NamedTuple

from commprof.requested.configuration import Configuration
from commprof.requested.parameters import Parameter, in_gradient_order, in_model_order
from commprof.requested.zero.bucket_rules import arrived_for_buckets, buckets_within, owned_slices, runs_past
from commprof.requested.zero.partition import Layout
from commprof.requested.zero.reductions import REDUCTIONS, Message, Terms
from commprof.schema import Op

WHOLE_MODEL_BUCKET: Final = (
    500_000_000  # elements; DeepSpeed's constant for messages that ignore reduce_bucket_size
)


class GradientMessages(NamedTuple):
    """The messages of one reduction of all gradients.

    Attributes:
        messages: The messages in the order of issue.
        exact: False if the split into messages depends on an unknown order of gradients.
        notes: Remarks for the report.
        arrived: For each message, how many gradients have arrived when it is sent. It is empty if all have arrived.
    """

    messages: list[Message]
    exact: bool = True
    notes: tuple[str, ...] = ()
    arrived: tuple[int, ...] = ()


def replicated_gradients(configuration: Configuration, parameters: Sequence[Parameter]) -> GradientMessages:
    """Return the messages of stage 0, which sends all gradients in model order and the gradients of experts last.

    Each element type has its own messages. A parameter without a gradient sends zeros, so that all ranks send the same.
    """
    by_group: dict[int | None, dict[str, list[int]]] = {None: {}}
    for parameter in in_model_order(parameters):
        if parameter.requires_grad:
            by_dtype = by_group.setdefault(parameter.ep_size, {})
            by_dtype.setdefault(configuration.model_dtype or parameter.dtype, []).append(parameter.numel)
    return GradientMessages(
        [
            message
            for ep_size, by_dtype in by_group.items()
            for sizes in by_dtype.values()
            for message in _split_messages(sizes, ep_size)
        ]
    )


def whole_gradients_in_buckets(
    configuration: Configuration, parameters: Sequence[Parameter], gradient_order: Sequence[str] | None
) -> GradientMessages:
    """Return the messages of stage 0 with buckets, which contain the gradients in reverse model order.

    This order does not depend on the order in which gradients arrive. A parameter without a gradient sends zeros after
    the backward pass, so that all ranks send the same. Each element type fills its own buckets.

    Args:
        configuration: The settings of the config.
        parameters: All parameters of the model.
        gradient_order: The names of parameters in the order in which gradients arrived. None means reverse model order.
    """
    trained = [each for each in in_model_order(parameters)[::-1] if each.requires_grad and each.numel]
    of_type = {
        kind: buckets_within(
            [each for each in trained if (configuration.model_dtype or each.dtype) == kind],
            configuration.reduce_bucket_size,
        )
        for kind in dict.fromkeys(configuration.model_dtype or each.dtype for each in trained)
    }
    position = {each.name: number for number, each in enumerate(trained)}
    # A bucket is full when the next gradient of its type follows. The last bucket of each type is sent at the end.
    full = [
        (position[following[0].name], bucket)
        for buckets in of_type.values()
        for bucket, following in pairwise(buckets)
    ]
    sent = [bucket for _, bucket in sorted(full, key=itemgetter(0))]
    sent += [buckets[-1] for buckets in of_type.values()]
    order = gradient_order or [each.name for each in trained]
    arrivals = {name: number for number, name in enumerate(dict.fromkeys(order), 1)}
    ready = [max(arrivals.get(each.name, len(trained)) for each in bucket) for bucket in sent]
    messages = [Message(Op.ALL_REDUCE, sum(each.numel for each in bucket)) for bucket in sent]
    return GradientMessages(messages, arrived=tuple(accumulate(ready, max)))


def flat_group_gradients(layout: Layout) -> GradientMessages:
    """Return the messages that reduce the flat gradients of all groups with padding, the groups of experts last."""
    messages: list[Message] = []
    for ep_size in dict.fromkeys((None, *(group.ep_size for group in layout.groups))):
        groups = [group for group in layout.groups if group.ep_size == ep_size]
        sent = _split_messages((group.numel for group in groups), ep_size)
        padding = sum(group.numel - group.data_numel for group in groups)
        messages += [*sent[:-1], *(each._replace(padding=padding) for each in sent[-1:])]
    return GradientMessages(messages)


def _split_messages(sizes: Iterable[int], ep_size: int | None) -> list[Message]:
    return [Message(Op.ALL_REDUCE, numel, ep_size=ep_size) for numel in runs_past(sizes, WHOLE_MODEL_BUCKET)]


def chunked_gradients(
    configuration: Configuration,
    groups: Sequence[Sequence[Parameter]],
    layout: Layout,
    gradient_order: Sequence[str] | None,
    backend: str,
) -> GradientMessages:
    """Return the messages of stages 1 and 2 with ``reduce_scatter``: one message for each chunk.

    The messages are the same for any order of gradients. A parameter without a gradient sends zeros. An all_to_all
    leaves out the padding at the end of the last chunk. The arguments are those of :func:`bucketed_gradients`.
    """
    exchanges = configuration.reduce_scatter_on(backend) == "all_to_all"
    messages: list[Message] = []
    first_chunks: list[int] = []
    for group in layout.groups:
        first_chunks.append(len(messages))
        chunks = -(-group.end // (group.chunk_numel or 1))
        full_chunk = Message(
            Op.ALL_TO_ALL if exchanges else Op.REDUCE_SCATTER, group.chunk_numel, group.row_numel
        )
        messages += [full_chunk] * chunks
        if exchanges and chunks:
            messages[-1] = full_chunk._replace(numel=group.end - (chunks - 1) * group.chunk_numel)
        sent = sum(each.numel for each in messages[first_chunks[-1] :])
        messages[-1:] = [each._replace(padding=sent - group.data_numel) for each in messages[-1:]]
    arrived, _, _ = _bucket_order(configuration, groups, gradient_order)
    counts = [len(arrived)] * len(messages)
    if configuration.reduces_in_backward_order:
        counts = _arrived_for_chunks(arrived, layout, first_chunks, len(messages))
    return GradientMessages(messages, arrived=tuple(counts))


def _arrived_for_chunks(
    arrived: Sequence[Parameter], layout: Layout, first_chunks: Sequence[int], chunks: int
) -> list[int]:
    """Return how many gradients have arrived when each chunk is sent.

    Chunks are sent from the last chunk to the first. ``first_chunks`` contains the number of the first chunk of each
    group.
    """
    fills = [0] * chunks  # for each chunk, the number of the gradient that fills it
    for position, parameter in enumerate(arrived, 1):
        number, start = layout.places[parameter.name]
        width = layout.groups[number].chunk_numel
        end = start + max(1, parameter.numel) - 1
        for chunk in range(start // width, end // width + 1):
            if first_chunks[number] + chunk < chunks:
                fills[first_chunks[number] + chunk] = position
    counts = list(accumulate((each or len(arrived) for each in reversed(fills)), max))
    return counts[::-1]


def bucketed_gradients(
    configuration: Configuration,
    groups: Sequence[Sequence[Parameter]],
    layout: Layout,
    gradient_order: Sequence[str] | None,
    backend: str = "gloo",
    left_out: Set[str] = frozenset(),
) -> GradientMessages:
    """Return the messages of stages 1 and 2 with buckets, which are reduced as the config requests.

    Args:
        configuration: The settings of the config.
        groups: The trained parameters of each optimizer group, in the order of the group.
        layout: The flat buffers with the owners of their elements.
        gradient_order: The names of parameters in the order in which gradients arrived, or None if it was not observed.
        backend: The backend of the process group.
        left_out: The names of parameters whose gradients are in other buckets and are left out here.
    """
    capacity = configuration.reduce_bucket_size
    # A compressed bucket is sent as one message, as an all_reduce is.
    reduction = "all_reduce" if configuration.compression else configuration.reduction
    arrived, exact, notes = _bucket_order(configuration, groups, gradient_order)
    arrived = [each for each in arrived if each.name not in left_out]
    contents = buckets_within(arrived, capacity)
    buckets = [owned_slices(bucket, layout) for bucket in contents]
    terms = Terms(
        capacity,
        ranks=layout.ranks,
        exchanges=configuration.reduce_scatter_on(backend) == "all_to_all",
    )
    reduce = REDUCTIONS[reduction].messages
    messages = [reduce(shards, terms) for shards in buckets]
    counts = arrived_for_buckets(contents, configuration.reduces_in_backward_order)
    return GradientMessages(
        [message for each in messages for message in each],
        exact,
        notes,
        tuple(number for number, each in zip(counts, messages, strict=True) for _ in each),
    )


def _bucket_order(
    configuration: Configuration,
    groups: Sequence[Sequence[Parameter]],
    gradient_order: Sequence[str] | None,
) -> tuple[list[Parameter], bool, tuple[str, ...]]:
    """Return the parameters in the order in which their gradients enter buckets, whether it is certain, and notes."""
    trained = [parameter for group in groups for parameter in group]
    if gradient_order is None:
        if not configuration.reduces_in_backward_order:
            return trained, True, ()
        fits_one_bucket = sum(parameter.numel for parameter in trained) <= configuration.reduce_bucket_size
        note = (
            "the split into buckets is that of gradients in reverse parameter order; a run may show another"
        )
        return in_model_order(trained)[::-1], fits_one_bucket, () if fits_one_bucket else (note,)
    arrived, missing = in_gradient_order(trained, gradient_order)
    note = f"parameters that got no gradient are left out: {', '.join(missing)}"
    if not configuration.reduces_in_backward_order:
        left_out = set(missing)
        arrived = [parameter for parameter in trained if parameter.name not in left_out]
    return arrived, True, (note,) if missing else ()
