"""What each ZeRO stage should send, per step and purpose.

:func:`expected` follows one training step: the broadcasts at the start, the gradients bucket by bucket, the overflow
check, the norm, and the gathering of the updated parameters. Stage 3 has rules of its own, in ``stage3``; its first two
micro-batches send more than later ones, so :func:`expected_in_step` says what a step by its number sends.
Bytes are schema.py's: ``payload_bytes`` is the S of nccl-tests, ``wire_bytes`` the model of what each rank sends on
average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, get_args

from commprof.requested.configuration import Configuration, read_configuration, zero_section
from commprof.requested.errors import RequestedError, UnsupportedError
from commprof.requested.expectation import Expectation, When, row, summed
from commprof.requested.explanation import (
    describe,
    describe_configuration,
    requested_gradient_op,
    requested_op,
)
from commprof.requested.fetch_configuration import read_fetch_configuration
from commprof.requested.gradients import (
    GradientMessages,
    bucketed_gradients,
    flat_group_gradients,
    replicated_gradients,
)
from commprof.requested.parameters import Parameter, check_parameters, item_bytes, trained_groups
from commprof.requested.partition import Layout, lay_out
from commprof.requested.stage3 import Training, stage3_expectations
from commprof.requested.support import refuse_unsupported
from commprof.schema import Op, Purpose

__all__ = [
    "Expectation",
    "Parameter",
    "describe",
    "expected",
    "expected_in_step",
    "micro_steps",
    "requested_gradient_op",
]

Runtime = Literal["zero_runtime", "deepspeed"]

FLAG_BYTES: Final = 1  # one uint8
NORM_BYTES: Final = 4  # one fp32
STEADY: Final = 2  # the first micro-batch that sends what all later ones do


def expected(
    config: Mapping[str, Any],
    parameters: Sequence[Parameter],
    world_size: int,
    gradient_order: Sequence[str] | None = None,
    backend: str = "gloo",
    runtime: Runtime = "zero_runtime",
    *,
    iteration: int | None = None,
    zero_init: bool = False,
) -> list[Expectation]:
    """What ``config`` should send for a model with ``parameters`` on ``world_size`` ranks.

    Args:
        config: the config file as DeepSpeed reads it.
        parameters: all parameters of the model, those of each optimizer group in the order of the group.
        world_size: ranks that train on different data.
        gradient_order: names of the parameters in the order in which their gradients arrived in a micro-batch. A
            parameter that is not in it got no gradient. Where it is missing, the reverse of the parameter order is assumed.
        backend: backend of the group; gloo has no reduce_scatter of its own.
        runtime: whose rules say what is issued. DeepSpeed does not know zero_runtime's two keys, and ignores those that
            say how parameters are gathered.
        iteration: number of the micro-batch since training started, from 0, that the rows of ``"micro_step"`` are for.
            Only at stage 3 do the first two differ from later ones, of which None is any.
        zero_init: whether the model was made within ``deepspeed.zero.Init`` (stage 3), which broadcasts it once less.

    Raises:
        UnsupportedError: the config asks for a feature whose rules are not stated here; it names the key.
        RequestedError: the config, the parameters or the order cannot be used as they are.
    """
    configuration = read_configuration(config)
    refuse_unsupported(config, configuration.stage, world_size)
    if runtime not in get_args(Runtime):
        raise RequestedError(f"runtime is {runtime!r}; expected one of {', '.join(get_args(Runtime))}")
    if runtime == "deepspeed":
        configuration = replace(configuration, gradient_reduction="auto")
    if world_size < 1:
        raise RequestedError(f"the world size is {world_size}; expected 1 or more")
    check_parameters(parameters)
    if configuration.stage == 3:
        _refuse_runtimes_own_keys(configuration)
        training = Training(
            parameters,
            world_size,
            gradient_order,
            micro_steps(config, world_size),
            STEADY if iteration is None else iteration,
            zero_init,
        )
        fetching = read_fetch_configuration(zero_section(config))
        return stage3_expectations(configuration, fetching, training)
    return _expected_of_flat_stages(configuration, parameters, world_size, gradient_order, backend, runtime)


def expected_in_step(
    config: Mapping[str, Any],
    parameters: Sequence[Parameter],
    world_size: int,
    step: int,
    gradient_order: Sequence[str] | None = None,
    backend: str = "gloo",
    runtime: Runtime = "zero_runtime",
    *,
    zero_init: bool = False,
) -> list[Expectation]:
    """All that optimizer step number ``step`` sends, its micro-batches added up, one row per purpose and operations.

    Args:
        step: number of the step since training started, from 0; negative for what comes before it.

    The other arguments and the errors are those of :func:`expected`. Rows have ``when`` ``"step"``, or ``"init"``.
    """
    passes = micro_steps(config, world_size)
    rows: list[Expectation] = []
    for iteration in range(step * passes, (step + 1) * passes) if step >= 0 else (0,):
        sent = expected(
            config,
            parameters,
            world_size,
            gradient_order,
            backend,
            runtime,
            iteration=iteration,
            zero_init=zero_init,
        )
        if step < 0:
            return [each for each in sent if each.when == "init"]
        ends = iteration + 1 == (step + 1) * passes
        rows += [each for each in sent if each.when == "micro_step" or (each.when == "step" and ends)]
    return summed(rows, "step")


def _refuse_runtimes_own_keys(configuration: Configuration) -> None:
    if configuration.gradient_reduction != "auto":
        raise UnsupportedError(
            "zero_optimization.gradient_reduction",
            configuration.gradient_reduction,
            "zero_runtime, whose key this is, has no stage 3",
        )


def _expected_of_flat_stages(
    configuration: Configuration,
    parameters: Sequence[Parameter],
    world_size: int,
    gradient_order: Sequence[str] | None,
    backend: str,
    runtime: Runtime,
) -> list[Expectation]:
    groups = trained_groups(parameters) if configuration.partitions else []
    layout = lay_out(
        groups,
        world_size,
        configuration.model_dtype,
        round_robin=configuration.round_robin_gradients,
        align_parameters=configuration.parameter_alignment,
    )
    rows: list[Expectation | None] = [_parameter_broadcast(configuration, parameters, world_size)]
    if not configuration.partitions:
        gradients = replicated_gradients(configuration, parameters)
        rows += [
            _gradient_reduce(configuration, gradients, world_size),
            _clipping_norm(configuration, parameters, world_size),
        ]
    elif configuration.reduces_flat_groups:
        gradients = flat_group_gradients(layout)
        rows += [
            _gradient_reduce(configuration, gradients, world_size),
            _parameter_gather(configuration, layout, world_size, runtime),
        ]
    else:
        gradients = bucketed_gradients(configuration, groups, layout, world_size, gradient_order, backend)
        rows += [
            _gradient_reduce(configuration, gradients, world_size),
            _overflow_check(configuration, layout, world_size),
            _partition_norms(configuration, layout, world_size),
            _parameter_gather(configuration, layout, world_size, runtime),
        ]
    return [each for each in rows if each is not None and each.count]


def micro_steps(config: Mapping[str, Any], world_size: int) -> int:
    """Micro-batches in one optimizer step: how often an expectation for ``"micro_step"`` counts in a step.

    Raises:
        RequestedError: the batch sizes do not multiply.
    """
    configuration = read_configuration(config)
    if not configuration.managed_accumulation:
        return 1
    if configuration.accumulation_steps is not None:
        return configuration.accumulation_steps
    total, micro = configuration.train_batch_size, configuration.micro_batch_size
    if total is None or micro is None:
        return 1
    if total % (micro * world_size):
        raise RequestedError(
            f"train_batch_size {total} is not a multiple of train_micro_batch_size_per_gpu {micro} "
            f"x {world_size} ranks; change one of them, or give gradient_accumulation_steps"
        )
    return total // (micro * world_size)


def _parameter_broadcast(
    configuration: Configuration, parameters: Sequence[Parameter], world_size: int
) -> Expectation:
    payloads = [
        parameter.numel * item_bytes(configuration.model_dtype or parameter.dtype) for parameter in parameters
    ]
    return row("init", Purpose.PARAMETER_BROADCAST, Op.BROADCAST, payloads, world_size)


def _gradient_reduce(
    configuration: Configuration, gradients: GradientMessages, world_size: int
) -> Expectation | None:
    if not gradients.messages:
        return None
    op = gradients.messages[0].op
    size = item_bytes(configuration.communication_dtype)
    payloads = [message.numel * size for message in gradients.messages]
    note = "; ".join([describe_configuration(configuration), *gradients.notes])
    when: When = "micro_step" if configuration.reduces_every_micro_step else "step"
    return row(when, Purpose.GRADIENT_REDUCE, op, payloads, world_size, note)._replace(
        requested_op=str(requested_op(configuration)),
        intended_op=str(Op.REDUCE_SCATTER) if op == Op.ALL_TO_ALL else None,
        exact=gradients.exact,
    )


def _clipping_norm(
    configuration: Configuration, parameters: Sequence[Parameter], world_size: int
) -> Expectation | None:
    trains = any(parameter.requires_grad for parameter in parameters)
    if configuration.gradient_clipping == 0 or configuration.model_dtype is not None or not trains:
        return None
    note = "gradients are equal on all ranks already; clipping sends their norm all the same"
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
            payloads += [group.piece_numel * size] * world_size
        else:
            payloads += [
                part * world_size * size for part in _gathered_parts(group.piece_numel, split, world_size)
            ]
    gathered = row("step", Purpose.PARAMETER_GATHER, issued, payloads, world_size, note)
    return gathered._replace(requested_op=str(asked))


def _gathered_parts(piece_numel: int, bucket_size: int | None, world_size: int) -> list[int]:
    """How much of each piece one message gathers: even numbers of elements, ``bucket_size`` at most over all ranks."""
    if bucket_size is None:
        return [piece_numel]
    width = max(2, bucket_size // world_size // 2 * 2)
    return [min(width, piece_numel - begin) for begin in range(0, piece_numel, width)]


def _ignored_gather_keys(configuration: Configuration) -> str:
    if configuration.gather_by_broadcast:
        return "DeepSpeed 0.19 ignores allgather_partitions and disable_allgather"
    return (
        "" if configuration.allgather_bucket_size is None else "DeepSpeed 0.19 ignores allgather_bucket_size"
    )
