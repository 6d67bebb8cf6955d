"""Predicts the messages of stages 0 to 2 per purpose. At stages 1 and 2 each optimizer group is one flat buffer.

The model is broadcast at the start. In each step the gradients are reduced bucket by bucket, the overflow check and the
norm follow, and the updated parameters are gathered. The messages for parameters of experts are sent within their
expert-data groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from typing import Final, Literal

from commprof.requested.communication.compressed_sums import compressed_sums
from commprof.requested.communication.compression import GRADIENT_BITS, WEIGHT_BITS, quantised_bytes
from commprof.requested.configuration import Configuration
from commprof.requested.expectation import Expectation, When, row
from commprof.requested.experts.rank_groups import RankGroups
from commprof.requested.explanation import describe_configuration, requested_op
from commprof.requested.parameters import Parameter, item_bytes, trained_groups
from commprof.requested.zero.gradients import (
    GradientMessages,
    bucketed_gradients,
    chunked_gradients,
    flat_group_gradients,
    replicated_gradients,
    whole_gradients_in_buckets,
)
from commprof.requested.zero.partition import Layout, lay_out
from commprof.schema import Op, Purpose

Runtime = Literal["zero_runtime", "deepspeed"]

FLAG_BYTES: Final = 1  # one uint8
NORM_BYTES: Final = 4  # one fp32


def flat_expectations(
    configuration: Configuration,
    parameters: Sequence[Parameter],
    world_size: int,
    gradient_order: Sequence[str] | None,
    backend: str,
    runtime: Runtime,
    unpartitioned: Set[str] = frozenset(),
) -> list[Expectation]:
    """Return all messages of stages 0 to 2 at the start, in one micro-batch and at the end of a step.

    Args:
        configuration: The settings of the config.
        parameters: All parameters of the model.
        world_size: The number of ranks that train on different data.
        gradient_order: The names of parameters in the order in which gradients arrived, or None if it was not observed.
        backend: The backend of the process group.
        runtime: The runtime whose rules determine the issued operations.
        unpartitioned: The names of parameters that are not partitioned. Their gradients are summed on every rank, in
            separate buckets. If there are such parameters, the flat buffers are not divided into chunks.
    """
    groups = trained_groups(parameters) if configuration.partitions else []
    has_experts = any(each.ep_size is not None for each in parameters)
    in_chunks = configuration.reduces_chunks and not unpartitioned and not has_experts
    layout = lay_out(
        groups,
        world_size,
        configuration.model_dtype,
        round_robin=configuration.round_robin_gradients,
        align_parameters=configuration.parameter_alignment,
        bucket_size=configuration.reduce_bucket_size if in_chunks else None,
    )
    ranks = RankGroups(world_size, configuration.data_before_experts)
    rows: list[Expectation | None] = [*_parameter_broadcasts(configuration, parameters, ranks)]
    # There are three cases: stage 0 without shards, flat buffers that are reduced as a whole, and buckets or chunks.
    if not configuration.partitions:
        if configuration.reduces_whole_in_buckets:
            gradients = whole_gradients_in_buckets(configuration, parameters, gradient_order)
        else:
            gradients = replicated_gradients(configuration, parameters)
        rows += [
            *_gradient_reduce(configuration, gradients, ranks, backend),
            *_expert_checks(configuration, parameters, ranks, runtime),
            _clipping_norm(configuration, parameters, world_size),
        ]
    elif configuration.reduces_flat_groups:
        gradients = flat_group_gradients(layout)
        rows += [
            *_gradient_reduce(configuration, gradients, ranks, backend),
            *_expert_norms((group.ep_size for group in layout.groups), ranks),
            *_parameter_gathers(configuration, layout, ranks, runtime),
        ]
    else:
        if in_chunks:
            gradients = chunked_gradients(configuration, groups, layout, gradient_order, backend)
        else:
            gradients = bucketed_gradients(
                configuration, groups, layout, gradient_order, backend, unpartitioned
            )
        rows += [
            *_gradient_reduce(configuration, gradients, ranks, backend),
            *_unpartitioned_gradients(
                configuration, groups, layout, gradient_order, ranks, backend, unpartitioned
            ),
            _overflow_check(configuration, layout, world_size),
            *_partition_norms(configuration, layout, ranks),
            *_parameter_gathers(configuration, layout, ranks, runtime),
        ]
    return [each for each in rows if each is not None and each.count]


def _parameter_broadcasts(
    configuration: Configuration, parameters: Sequence[Parameter], ranks: RankGroups
) -> list[Expectation]:
    payloads: dict[int | None, list[int]] = {}
    for parameter in parameters:
        size = parameter.numel * item_bytes(configuration.model_dtype or parameter.dtype)
        payloads.setdefault(parameter.ep_size, []).append(size)
    return [
        _among(ranks, ep_size, "init", Purpose.PARAMETER_BROADCAST, Op.BROADCAST, sizes)
        for ep_size, sizes in payloads.items()
    ]


def _among(
    ranks: RankGroups,
    ep_size: int | None,
    when: When,
    purpose: Purpose,
    op: Op,
    payloads: Sequence[int],
    note: str = "",
) -> Expectation:
    """Return messages among the ranks with the same parameters: all ranks, or the expert-data groups of ``ep_size``."""
    return ranks.among_replicas(row(when, purpose, op, payloads, ranks.replicas(ep_size), note), ep_size)


def _unpartitioned_gradients(
    configuration: Configuration,
    groups: Sequence[Sequence[Parameter]],
    layout: Layout,
    gradient_order: Sequence[str] | None,
    ranks: RankGroups,
    backend: str,
    unpartitioned: Set[str],
) -> list[Expectation]:
    """Return the messages that sum the gradients of parameters that are not partitioned."""
    others = {each.name for group in groups for each in group} - unpartitioned
    summed = replace(configuration, gradient_reduction="all_reduce")
    gradients = bucketed_gradients(summed, groups, layout, gradient_order, backend, others)
    return _gradient_reduce(summed, gradients, ranks, backend) if unpartitioned else []


def _gradient_reduce(
    configuration: Configuration, gradients: GradientMessages, ranks: RankGroups, backend: str
) -> list[Expectation]:
    """Return the rows for ``gradients``, separately for dense parameters and for the experts of each ep_size."""
    arrived = gradients.arrived or (0,) * len(gradients.messages)
    sent = list(zip(gradients.messages, arrived, strict=True))
    rows = []
    for ep_size in dict.fromkeys(message.ep_size for message in gradients.messages):
        own = [(message, count) for message, count in sent if message.ep_size == ep_size]
        part = gradients._replace(
            messages=[message for message, _ in own],
            arrived=tuple(count for _, count in own) if gradients.arrived else (),
        )
        reduced = _reduced_among(configuration, part, ranks.replicas(ep_size), backend)
        rows += [ranks.among_replicas(each, ep_size) for each in reduced]
    return rows


def _reduced_among(
    configuration: Configuration, gradients: GradientMessages, world_size: int, backend: str
) -> list[Expectation]:
    # A message whose rows differ in length is never sent along the axes of a grid, so it gets a separate expectation.
    lists = [each for each in gradients.messages if each.op == Op.REDUCE_SCATTER and each.rows]
    if lists and len(lists) < len(gradients.messages):
        alike = [each for each in gradients.messages if not each.rows]
        batches = (gradients._replace(messages=each, arrived=()) for each in (alike, lists))
        return [row for each in batches for row in _reduced_among(configuration, each, world_size, backend)]
    op = gradients.messages[0].op
    size = item_bytes(configuration.communication_dtype)
    payloads = [message.numel * size for message in gradients.messages]
    note = "; ".join([describe_configuration(configuration), *gradients.notes])
    when: When = "micro_step" if configuration.reduces_every_micro_step else "step"
    if configuration.quantises_gradients and world_size > 1:
        # The all_to_all contains codes and scales. Its rows are padded to the same length.
        payloads = [
            world_size * quantised_bytes(each.row_numel, GRADIENT_BITS) for each in gradients.messages
        ]
        exchanged = row(when, Purpose.GRADIENT_REDUCE, Op.ALL_TO_ALL, payloads, world_size, note)
        asked = str(requested_op(configuration))
        return [
            exchanged._replace(requested_op=asked, intended_op=str(Op.REDUCE_SCATTER), padding_bytes=None)
        ]
    if configuration.compression is not None:
        numels = [each.numel for each in gradients.messages]
        sent = compressed_sums(configuration, configuration.compression, numels, world_size, backend)
        return [
            each._replace(
                when=when,
                note=note,
                padding_bytes=None,
                exact=gradients.exact,
                bytes_exact=gradients.exact and each.bytes_exact,
                least_bytes=each.least_bytes if gradients.exact else 0,
                most_bytes=each.most_bytes if gradients.exact else None,
            )
            for each in sent
        ]
    reduced = row(when, Purpose.GRADIENT_REDUCE, op, payloads, world_size, note)
    # There may be millions of chunks, and nearly all are equal. The row bytes of equal messages are computed only once.
    rows = {message: message.row_bytes(size, world_size) for message in set(gradients.messages)}
    return [
        reduced._replace(
            requested_op=str(requested_op(configuration)),
            intended_op=str(Op.REDUCE_SCATTER) if op == Op.ALL_TO_ALL else None,
            exact=gradients.exact,
            padding_bytes=sum(message.padding for message in gradients.messages) * size,
            payloads=tuple(rows[message] for message in gradients.messages),
            arrived=gradients.arrived,
        )
    ]


def _clipping_norm(
    configuration: Configuration, parameters: Sequence[Parameter], world_size: int
) -> Expectation | None:
    trains = any(parameter.requires_grad for parameter in parameters)
    if configuration.gradient_clipping == 0 or configuration.model_dtype is not None or not trains:
        return None
    note = "gradients are already equal on all ranks; clipping sends their norm nevertheless"
    return row("step", Purpose.GRADIENT_NORM, Op.ALL_REDUCE, [NORM_BYTES], world_size, note)


def _expert_checks(
    configuration: Configuration, parameters: Sequence[Parameter], ranks: RankGroups, runtime: Runtime
) -> list[Expectation]:
    """Return the overflow check and the norms of experts at stage 0 with 16-bit parameters.

    The ranks that share experts compare whether a gradient overflowed. zero_runtime, and DeepSpeed's optimizer class
    for its own Adam, also sum the norms of the experts' gradients. Source: DeepSpeed 0.19.8,
    ``CheckOverflow.has_overflow``, ``get_norm_with_moe_layers``.
    """
    sizes = dict.fromkeys(each.ep_size for each in parameters if each.ep_size and each.requires_grad)
    if not sizes or configuration.model_dtype is None:
        return []
    largest = max(size for size in sizes if size is not None)
    note = "the ranks that share the experts compare whether a gradient overflowed"
    check = row("step", Purpose.OVERFLOW_CHECK, Op.ALL_REDUCE, [FLAG_BYTES], largest, note)
    sums_norms = runtime == "zero_runtime" or configuration.fuses_adam
    norms = _expert_norms(sizes, ranks) if sums_norms else []
    return [check._replace(groups=ranks.of_experts(largest)), *norms]


def _expert_norms(ep_sizes: Iterable[int | None], ranks: RankGroups) -> list[Expectation]:
    """Return the messages that sum the norms of experts within each expert-parallel group, one for each ep_size."""
    return [
        row("step", Purpose.GRADIENT_NORM, Op.ALL_REDUCE, [NORM_BYTES], ep_size)._replace(
            groups=ranks.of_experts(ep_size)
        )
        for ep_size in dict.fromkeys(ep_sizes)
        if ep_size is not None and ep_size > 1
    ]


def _overflow_check(configuration: Configuration, layout: Layout, world_size: int) -> Expectation | None:
    if not configuration.check_overflow or not layout.groups:
        return None
    note = "a step whose gradients overflow ends here, without norm and without gathering"
    return row("step", Purpose.OVERFLOW_CHECK, Op.ALL_REDUCE, [FLAG_BYTES], world_size, note)


def _partition_norms(configuration: Configuration, layout: Layout, ranks: RankGroups) -> list[Expectation]:
    """Return the messages for the norms: one for each flat buffer, among all ranks.

    Each flat buffer of experts has a second message, among the ranks with the same experts.
    """
    if not configuration.compute_grad_norm:
        return []
    note = (
        ""
        if configuration.gradient_clipping
        else "sent although clipping is off; compute_grad_norm: false drops it"
    )
    payloads = [NORM_BYTES for _ in layout.groups]
    norms = [row("step", Purpose.GRADIENT_NORM, Op.ALL_REDUCE, payloads, ranks.world_size, note)]
    of_experts = "the norm of experts is averaged among the ranks that have the same ones"
    norms += [
        _among(ranks, each.ep_size, "step", Purpose.GRADIENT_NORM, Op.ALL_REDUCE, [NORM_BYTES], of_experts)
        for each in layout.groups
        if each.ep_size is not None
    ]
    return norms


def _parameter_gathers(
    configuration: Configuration, layout: Layout, ranks: RankGroups, runtime: Runtime
) -> list[Expectation]:
    rows = []
    for ep_size in dict.fromkeys(group.ep_size for group in layout.groups):
        own = replace(layout, groups=tuple(each for each in layout.groups if each.ep_size == ep_size))
        gathered = _parameter_gather(configuration, own, ranks.replicas(ep_size), runtime)
        rows += [] if gathered is None else [ranks.among_replicas(gathered, ep_size)]
    return rows


def _parameter_gather(
    configuration: Configuration, layout: Layout, world_size: int, runtime: Runtime
) -> Expectation | None:
    if world_size == 1:
        return None
    asked = Op.BROADCAST if configuration.gather_by_broadcast else Op.ALL_GATHER
    if runtime == "deepspeed":
        issued, split, note = Op.ALL_GATHER, None, _ignored_gather_keys(configuration)
    else:
        issued, split, note = asked, configuration.allgather_bucket_size, ""
    payloads = []
    for group in layout.groups:
        size = item_bytes(group.dtype)
        if issued == Op.BROADCAST:
            payloads += [group.row_numel * size] * world_size * group.chunks
        else:
            numels = _gathered_parts(group.row_numel, split, world_size)
            sizes = [
                quantised_bytes(numel, WEIGHT_BITS) if configuration.quantises_weights else numel * size
                for numel in numels
            ]
            payloads += [world_size * sent_bytes for sent_bytes in sizes] * group.chunks
    gathered = row("step", Purpose.PARAMETER_GATHER, issued, payloads, world_size, note)
    padding = sum((each.numel - each.data_numel) * item_bytes(each.dtype) for each in layout.groups)
    quantised = configuration.quantises_weights and issued == Op.ALL_GATHER
    return gathered._replace(requested_op=str(asked), padding_bytes=None if quantised else padding)


def _gathered_parts(row_numel: int, bucket_size: int | None, world_size: int) -> list[int]:
    """Return the number of elements of a rank's row that each gathering message of a chunk contains.

    A message gathers at most ``bucket_size`` elements over all ranks, but at least 2 elements from each rank. The
    number of elements per rank is even. The last message may be shorter.
    """
    if bucket_size is None:
        return [row_numel]
    width = max(2, bucket_size // world_size // 2 * 2)
    return [min(width, row_numel - begin) for begin in range(0, row_numel, width)]


def _ignored_gather_keys(configuration: Configuration) -> str:
    if configuration.gather_by_broadcast:
        return "DeepSpeed 0.19 ignores allgather_partitions and disable_allgather"
    return (
        "" if configuration.allgather_bucket_size is None else "DeepSpeed 0.19 ignores allgather_bucket_size"
    )
