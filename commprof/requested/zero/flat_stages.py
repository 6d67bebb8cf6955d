"""The expectations of stages 0 to 2, per purpose, where each optimizer group is one flat buffer.

The model is broadcast at the start, the gradients are reduced bucket by bucket, an overflow check and the norm follow,
and the updated parameters are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Final, Literal

from commprof.requested.communication.compressed_sums import compressed_sums
from commprof.requested.communication.compression import GRADIENT_BITS, WEIGHT_BITS, quantised_bytes
from commprof.requested.configuration import Configuration
from commprof.requested.expectation import Expectation, When, row
from commprof.requested.explanation import describe_configuration, requested_op
from commprof.requested.parameters import Parameter, item_bytes, trained_groups
from commprof.requested.zero.gradients import (
    GradientMessages,
    bucketed_gradients,
    chunked_gradients,
    flat_group_gradients,
    replicated_gradients,
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
    """All that stages 0 to 2 send at the start, in one micro-batch and at the end of a step.

    Args:
        configuration: what the config says.
        parameters: all parameters of the model.
        world_size: ranks that train on different data.
        gradient_order: names in the order in which gradients arrived; None where it was not observed.
        backend: backend of the group.
        runtime: whose rules say what is issued.
        unpartitioned: names of parameters that are not partitioned. Their gradients are summed on every rank, in
            buckets of their own, and the other gradients have no chunks.
    """
    groups = trained_groups(parameters) if configuration.partitions else []
    layout = lay_out(
        groups,
        world_size,
        configuration.model_dtype,
        round_robin=configuration.round_robin_gradients,
        align_parameters=configuration.parameter_alignment,
        bucket_size=configuration.reduce_bucket_size
        if configuration.reduces_chunks and not unpartitioned
        else None,
    )
    rows: list[Expectation | None] = [_parameter_broadcast(configuration, parameters, world_size)]
    # Three cases: stage 0 without shards, one message for each flat buffer, and buckets or chunks.
    if not configuration.partitions:
        gradients = replicated_gradients(configuration, parameters)
        rows += [
            *_gradient_reduce(configuration, gradients, world_size, backend),
            _clipping_norm(configuration, parameters, world_size),
        ]
    elif configuration.reduces_flat_groups:
        gradients = flat_group_gradients(layout)
        rows += [
            *_gradient_reduce(configuration, gradients, world_size, backend),
            _parameter_gather(configuration, layout, world_size, runtime),
        ]
    else:
        if configuration.reduces_chunks and not unpartitioned:
            gradients = chunked_gradients(configuration, groups, layout, gradient_order, backend)
        else:
            gradients = bucketed_gradients(
                configuration, groups, layout, gradient_order, backend, unpartitioned
            )
        rows += [
            *_gradient_reduce(configuration, gradients, world_size, backend),
            *_unpartitioned_gradients(
                configuration, groups, layout, gradient_order, world_size, backend, unpartitioned
            ),
            _overflow_check(configuration, layout, world_size),
            _partition_norms(configuration, layout, world_size),
            _parameter_gather(configuration, layout, world_size, runtime),
        ]
    return [each for each in rows if each is not None and each.count]


def _parameter_broadcast(
    configuration: Configuration, parameters: Sequence[Parameter], world_size: int
) -> Expectation:
    payloads = [
        parameter.numel * item_bytes(configuration.model_dtype or parameter.dtype) for parameter in parameters
    ]
    return row("init", Purpose.PARAMETER_BROADCAST, Op.BROADCAST, payloads, world_size)


def _unpartitioned_gradients(
    configuration: Configuration,
    groups: Sequence[Sequence[Parameter]],
    layout: Layout,
    gradient_order: Sequence[str] | None,
    world_size: int,
    backend: str,
    unpartitioned: Set[str],
) -> list[Expectation]:
    """Messages that sum the gradients of parameters that are not partitioned."""
    others = {each.name for group in groups for each in group} - unpartitioned
    summed = replace(configuration, gradient_reduction="all_reduce")
    gradients = bucketed_gradients(summed, groups, layout, gradient_order, backend, others)
    return _gradient_reduce(summed, gradients, world_size, backend) if unpartitioned else []


def _gradient_reduce(
    configuration: Configuration, gradients: GradientMessages, world_size: int, backend: str
) -> list[Expectation]:
    # A list of rows that differ in length never goes along the axes of a grid, so it gets a row of its own.
    lists = [each for each in gradients.messages if each.op == Op.REDUCE_SCATTER and each.rows]
    if lists and len(lists) < len(gradients.messages):
        alike = [each for each in gradients.messages if not each.rows]
        batches = (gradients._replace(messages=each, arrived=()) for each in (alike, lists))
        return [row for each in batches for row in _gradient_reduce(configuration, each, world_size, backend)]
    if not gradients.messages:
        return []
    op = gradients.messages[0].op
    size = item_bytes(configuration.communication_dtype)
    payloads = [message.numel * size for message in gradients.messages]
    note = "; ".join([describe_configuration(configuration), *gradients.notes])
    when: When = "micro_step" if configuration.reduces_every_micro_step else "step"
    if configuration.quantises_gradients and world_size > 1:
        # An all_to_all of codes and scales; rows are padded to the same length.
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
    # Nearly all chunks are alike, and there may be millions: each kind is computed once.
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


def _overflow_check(configuration: Configuration, layout: Layout, world_size: int) -> Expectation | None:
    if not configuration.check_overflow or not layout.groups:
        return None
    note = "a step whose gradients overflow ends here, without norm and without gathering"
    return row("step", Purpose.OVERFLOW_CHECK, Op.ALL_REDUCE, [FLAG_BYTES], world_size, note)


def _partition_norms(configuration: Configuration, layout: Layout, world_size: int) -> Expectation | None:
    if not configuration.compute_grad_norm:
        return None
    note = (
        ""
        if configuration.gradient_clipping
        else "sent although clipping is off; compute_grad_norm: false drops it"
    )
    payloads = [NORM_BYTES for _ in layout.groups]
    return row("step", Purpose.GRADIENT_NORM, Op.ALL_REDUCE, payloads, world_size, note)


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
    """How much of each rank's row of a chunk one message gathers: even numbers, ``bucket_size`` at most over all ranks."""
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
