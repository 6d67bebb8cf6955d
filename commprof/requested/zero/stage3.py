"""Builds the expectations of stage 3 per purpose from the messages of :mod:`commprof.requested.zero.sharded`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Final, NamedTuple

from commprof.requested.configuration import Configuration
from commprof.requested.expectation import Expectation, When, row
from commprof.requested.explanation import describe_configuration, requested_op
from commprof.requested.parameters import Parameter, in_model_order, item_bytes, trained_groups
from commprof.requested.zero.gather_configuration import GatherConfiguration, read_gather_configuration
from commprof.requested.zero.gathering import PROGRAM, Gathers, ReleasedBy, gathers_of, persistent_parameters
from commprof.requested.zero.parameter_blocks import Block, block_gathers, block_messages, gathered_blocks
from commprof.requested.zero.sharded import (
    Sent,
    bucket_checks,
    gather_messages,
    gradient_buckets,
    order_checks,
    padded_bytes,
    padding_of,
    reduced_blocks,
    reduced_gradients,
    sub_groups,
    unpartitioned_gradients,
    used_parameters,
)
from commprof.schema import Op, Purpose

FLAG_BYTES: Final = 1  # one uint8
NORM_BYTES: Final = 8  # one float64
OFFLOADED_NORM_BYTES: Final = 4  # one fp32
NOTHING: Final = -1  # a threshold below the size of any parameter


class Construction(NamedTuple):
    """Describes which parameters of a sharded model were constructed within ``zero.Init``, and which outside of it.

    Attributes:
        sharded: The bytes of each parameter that ``zero.Init`` sharded. This includes parameters that the model no
            longer has.
        unsharded: The bytes of each parameter that was not yet sharded when the engine of the model was constructed.
    """

    sharded: tuple[int, ...]
    unsharded: tuple[int, ...]


class Training(NamedTuple):
    """The training that stage 3 runs, and the micro-batch to predict.

    Attributes:
        parameters: All parameters of the model.
        world_size: The number of ranks among which each parameter is partitioned.
        gradient_order: The names of parameters in the order in which gradients arrived, or None if it is not known.
        micro_steps: The number of micro-batches in a step.
        iteration: The number of the micro-batch since training started, from 0.
        zero_init: Whether the model was constructed within ``deepspeed.zero.Init``, or which of its parameters were.
        exchanges: Whether a reduce_scatter is issued as an all_to_all and a local sum, as zero_runtime does on gloo.
        unpartitioned: The names of parameters that are not partitioned. They are gathered at the start and after each
            step, and their gradients are summed on every rank.
        released_by: The reason why no parameter is gathered when the micro-batch begins. It is empty if the persistent
            parameters are gathered.
    """

    parameters: Sequence[Parameter]
    world_size: int
    gradient_order: Sequence[str] | None
    micro_steps: int
    iteration: int
    zero_init: bool | Construction
    exchanges: bool = False
    unpartitioned: Set[str] = frozenset()
    released_by: ReleasedBy = ""


def stage3_expectations(
    configuration: Configuration, gathering: GatherConfiguration, training: Training
) -> list[Expectation]:
    """Return all messages of stage 3 at the start, in one micro-batch and at the end of a step.

    The three barriers at the start move no bytes and are left out.
    """
    return [
        *_start(configuration, training),
        *_micro_step(configuration, gathering, training),
        *_step_end(configuration, gathering, training),
    ]


def _rows(when: When, purpose: Purpose, sent: Iterable[Sent | None], world_size: int) -> list[Expectation]:
    rows = []
    for each in sent:
        if each is not None and each.payloads:
            ranks = each.group_size or world_size
            line = row(when, purpose, each.op, each.payloads, ranks, "; ".join(each.notes))
            least = line.least_bytes if each.least_bytes is None else each.least_bytes
            rows.append(
                line._replace(
                    exact=each.exact,
                    bytes_exact=each.bytes_exact,
                    least_bytes=least,
                    group_size=each.group_size,
                    payloads=each.rows or line.payloads,
                    arrived=each.arrived,
                    padding_bytes=each.padding_bytes,
                )
            )
    return rows


def _start(configuration: Configuration, training: Training) -> list[Expectation]:
    world, dtype = training.world_size, configuration.model_dtype
    listed = in_model_order(training.parameters)
    once = [parameter.numel * item_bytes(dtype or parameter.dtype) for parameter in listed]
    construction = training.zero_init
    if not isinstance(construction, Construction):
        construction = Construction(tuple(once), ()) if construction else Construction((), tuple(once))
    broadcast = Sent(
        Op.BROADCAST,
        construction.sharded + construction.unsharded * 2,
        notes=("once as the model, once more as parameters of stage 3",) if construction.unsharded else (),
    )
    hooked = Sent(
        Op.ALL_GATHER,
        tuple(padded_bytes(parameter, world, dtype) for parameter in listed if parameter.requires_grad),
        notes=("each trained parameter once, to attach the hook that sees its gradient",),
        padding_bytes=padding_of((each for each in listed if each.requires_grad), world, dtype),
    )
    unpartitioned = Sent(
        Op.ALL_GATHER,
        tuple(
            padded_bytes(parameter, world, dtype)
            for parameter in listed
            if parameter.name in training.unpartitioned
        ),
        notes=("parameters that are not partitioned",),
        padding_bytes=padding_of(
            (each for each in listed if each.name in training.unpartitioned), world, dtype
        ),
    )
    return [
        *_rows("init", Purpose.PARAMETER_BROADCAST, [broadcast], world),
        *_rows("init", Purpose.PARAMETER_GATHER, [hooked, unpartitioned if world > 1 else None], world),
    ]


def _micro_step(
    configuration: Configuration, gathering: GatherConfiguration, training: Training
) -> list[Expectation]:
    world = training.world_size
    blocks = gathered_blocks(training.parameters, gathering, training.unpartitioned)
    # The first step needs no gathers for secondary copies, because attaching the hooks already gathered all parameters.
    new_step = training.iteration % training.micro_steps == 0 and training.iteration >= training.micro_steps
    gathers = _gathers(gathering, training, blocks)
    by_program = training.released_by == PROGRAM
    gathered_since = _persistent(gathering, training) if by_program else frozenset()
    sent = gather_messages(
        gathers, configuration, gathering, world, first_of_step=new_step, gathered_since=gathered_since
    )
    gathered = _rows("micro_step", Purpose.PARAMETER_GATHER, sent, world)
    gradients, check = _gradients(configuration, gathering, training, blocks)
    checks = [None if blocks else order_checks(gathers, training.iteration), check]
    when: When = "micro_step" if configuration.reduces_every_micro_step else "step"
    reduced = _rows(when, Purpose.GRADIENT_REDUCE, gradients, world)
    requested_gather = str(Op.ALL_REDUCE if gathering.gathers_by_all_reduce else Op.ALL_GATHER)
    return [
        *_rows("micro_step", Purpose.TRACE_CHECK, checks, world),
        *(
            each._replace(
                requested_op=requested_gather,
                intended_op=str(Op.ALL_GATHER) if each.issued_op == Op.ALL_REDUCE else None,
            )
            for each in gathered
        ),
        *(
            each._replace(
                requested_op=str(requested_op(configuration)),
                intended_op=str(Op.REDUCE_SCATTER) if each.issued_op == Op.ALL_TO_ALL else None,
            )
            for each in reduced
        ),
    ]


def _gathers(gathering: GatherConfiguration, training: Training, blocks: Sequence[Block]) -> Gathers:
    used = used_parameters(training.parameters, training.gradient_order)
    if blocks:
        return block_gathers(
            training.parameters,
            used,
            blocks,
            gathering,
            training.iteration,
            training.unpartitioned,
            all_released=bool(training.released_by),
        )
    return gathers_of(
        used,
        gathering,
        _persistent(gathering, training) & {p.name for p in used},
        training.micro_steps,
        training.iteration,
        training.unpartitioned,
        all_released=bool(training.released_by),
    )


def _persistent(gathering: GatherConfiguration, training: Training) -> Set[str]:
    listed = in_model_order(training.parameters)
    return {each.name for each in persistent_parameters(listed, gathering, training.unpartitioned)}


def _gradients(
    configuration: Configuration, gathering: GatherConfiguration, training: Training, blocks: Sequence[Block]
) -> tuple[list[Sent], Sent | None]:
    """Return the messages that reduce gradients, and the messages that compare the buckets, or None without a check."""
    world, order, unpartitioned = training.world_size, training.gradient_order, training.unpartitioned
    trained = [parameter for group in trained_groups(training.parameters) for parameter in group]
    buckets, exact, notes = gradient_buckets(configuration, gathering, trained, order, unpartitioned)
    texts = (describe_configuration(configuration), *notes)
    if blocks:
        messages = block_messages(blocks, trained, order, configuration.model_dtype)
        sent = reduced_blocks(configuration, messages, world, exchanges=training.exchanges, notes=texts[:1])
    else:
        sent = reduced_gradients(
            configuration,
            buckets,
            world,
            exact=exact,
            notes=texts,
            exchanges=training.exchanges,
            quantises=gathering.quantises_gradients and world > 1,
        )
    summed, is_certain, _ = gradient_buckets(
        configuration, gathering, trained, order, {each.name for each in trained} - unpartitioned
    )
    sent += unpartitioned_gradients(configuration, summed, exact=is_certain, notes=texts)
    return sent, bucket_checks(buckets, exact) if gathering.sanity_checks else None


def sharded_agreements(
    configuration: Configuration,
    zero: Mapping[str, Any],
    groups: Sequence[Sequence[Parameter]],
    world_size: int,
) -> tuple[list[int], list[int]]:
    """Return the bytes of each norm and of each overflow flag that ranks agree on at the end of a step.

    Args:
        configuration: The settings of the config.
        zero: The section ``zero_optimization`` of the config.
        groups: The trained parameters of each optimizer group.
        world_size: The number of ranks among which each parameter is partitioned.
    """
    norms = sub_groups(groups, read_gather_configuration(zero).sub_group_size, world_size)
    norm_bytes = NORM_BYTES if configuration.offload_device == "none" else OFFLOADED_NORM_BYTES
    checks = configuration.model_dtype == "float16" and bool(groups)
    return [norm_bytes] * norms, [FLAG_BYTES] * checks


def _step_end(
    configuration: Configuration, gathering: GatherConfiguration, training: Training
) -> list[Expectation]:
    world = training.world_size
    groups = trained_groups(training.parameters)
    flag = Sent(
        Op.ALL_REDUCE,
        (FLAG_BYTES,) if configuration.model_dtype == "float16" and groups else (),
        notes=("a step whose gradients overflow ends here, without norm and without gathering",),
    )
    offloads = configuration.offload_device != "none"
    norm_bytes = OFFLOADED_NORM_BYTES if offloads else NORM_BYTES
    norms = sub_groups(groups, gathering.sub_group_size, world)
    norm = Sent(
        Op.ALL_REDUCE,
        (norm_bytes,) * norms,
        notes=() if configuration.gradient_clipping else ("sent although clipping is off",),
    )
    listed = in_model_order(training.parameters)
    if gathered_blocks(listed, gathering, training.unpartitioned):
        gathering = replace(gathering, persistence_threshold=NOTHING)
    persistent = persistent_parameters(listed, gathering, training.unpartitioned) if world > 1 else []
    regathered = Sent(
        Op.ALL_GATHER,
        tuple(padded_bytes(parameter, world, configuration.model_dtype) for parameter in persistent),
        notes=(
            "parameters of at most stage3_param_persistence_threshold elements stay gathered: after a step each "
            "is gathered in a message of its own",
        ),
        padding_bytes=padding_of(persistent, world, configuration.model_dtype),
    )
    return [
        *_rows("step", Purpose.OVERFLOW_CHECK, [flag], world),
        *_rows("step", Purpose.GRADIENT_NORM, [norm], world),
        *_rows("step", Purpose.PARAMETER_GATHER, [regathered], world),
    ]
