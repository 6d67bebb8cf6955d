"""Predicts the messages of each ZeRO stage, per step and purpose.

The rules of stages 0 to 2 are in ``flat_stages``, and the rules of stage 3 are in ``stage3``. The first two
micro-batches of stage 3 send more than later micro-batches. For this reason :func:`expected_in_step` has the number of
the step as an argument. The bytes are defined in schema.py: ``payload_bytes`` is S of nccl-tests, and ``wire_bytes``
is the modelled number of bytes that each rank sends on average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, get_args

from commprof.requested.auto_values import decide
from commprof.requested.communication import sign_optimizers, torus
from commprof.requested.communication.delayed_sums import late_sums
from commprof.requested.communication.measured_costs import costs_of
from commprof.requested.communication.torus import Sizes
from commprof.requested.config_keys import count, section
from commprof.requested.configuration import (
    Configuration,
    autocast_dtype,
    read_configuration,
    zero_section,
)
from commprof.requested.errors import RequestedError, UnsupportedError
from commprof.requested.expectation import Expectation, row, summed
from commprof.requested.experts.layers import ExpertLayer, expected_tokens, in_autocast, token_bytes
from commprof.requested.experts.rank_groups import RankGroups
from commprof.requested.explanation import describe, requested_gradient_op
from commprof.requested.parameters import Parameter, check_parameters, item_bytes, trained_groups
from commprof.requested.support import optimizer_type, refuse_unsupported, refuse_with_experts
from commprof.requested.zero.flat_stages import FLAG_BYTES, NORM_BYTES, Runtime, flat_expectations
from commprof.requested.zero.gather_configuration import MODULE, read_gather_configuration
from commprof.requested.zero.gathering import ReleasedBy
from commprof.requested.zero.reductions import REDUCTIONS
from commprof.requested.zero.stage3 import Construction, Training, stage3_expectations
from commprof.requested.zero.unpartitioned import unpartitioned
from commprof.schema import Op, Purpose

__all__ = [
    "Expectation",
    "Parameter",
    "Runtime",
    "describe",
    "expected",
    "expected_in_step",
    "micro_steps",
    "requested_gradient_op",
    "steady_step",
]

STEADY: Final = 2  # the first micro-batch that sends the same messages as all later micro-batches
RATIO_ITEM_BYTES: Final = 8  # fp64


def expected(  # noqa: PLR0913 - what a run depends on
    config: Mapping[str, Any],
    parameters: Sequence[Parameter],
    world_size: int,
    gradient_order: Sequence[str] | None = None,
    backend: str = "gloo",
    runtime: Runtime = "zero_runtime",
    *,
    iteration: int | None = None,
    zero_init: bool | Construction = False,
    released_by: ReleasedBy = "",
    host_ranks: int | None = None,
    grid: Sizes | None = None,
    costs: object = None,
    expert_layers: Sequence[ExpertLayer] = (),
) -> list[Expectation]:
    """Return the messages that ``config`` should send for a model with ``parameters`` on ``world_size`` ranks.

    Args:
        config: The config file as DeepSpeed reads it.
        parameters: All parameters of the model. The parameters of an optimizer group are in the order of the group.
        world_size: The number of ranks that train on different data.
        gradient_order: The names of parameters in the order in which gradients arrived in a micro-batch. A parameter
            that is not named got no gradient. None means that the reverse of the parameter order is assumed.
        backend: The backend of the process group. gloo has no native reduce_scatter.
        runtime: The runtime whose rules apply. DeepSpeed ignores the keys that only zero_runtime has, and the keys that
            configure how stages 1 and 2 gather parameters.
        iteration: The number of the micro-batch since training started, from 0, that the rows with ``"micro_step"``
            describe. Only at stage 3 do the first two micro-batches differ from later ones. None means a later one.
        zero_init: At stage 3, whether the model was constructed within ``deepspeed.zero.Init``, which saves one
            broadcast of the model. A Construction describes this per parameter.
        released_by: The reason why no parameter is gathered when the micro-batch begins. At stage 3 the micro-batch
            then also gathers the persistent parameters. ``skip`` means that the step before was skipped because a
            gradient overflowed. ``program`` means that the program released the parameters.
        host_ranks: The number of ranks per host, for hierarchical compression and ``communication.topology``, or None
            if it is not known.
        grid: The sizes of the axes of the rank grid in a run, outermost first, if the config derives them from the
            hosts.
        costs: The costs that a run published from the files of ``communication.calibration``. None reads the files.
        expert_layers: The layers of experts with the tokens of each rank. Tokens are assumed to be spread evenly.

    Raises:
        UnsupportedError: the config requests a feature that the rules do not cover. The error names the key.
        RequestedError: the config, the parameters or the order cannot be used as they are.
    """
    configuration = read_configuration(config)
    if runtime == "zero_runtime":
        config = decide(config, parameters, world_size, backend).config
        configuration = read_configuration(config)
    refuse_unsupported(config, configuration.stage, world_size, is_own=runtime == "zero_runtime")
    if runtime not in get_args(Runtime):
        raise RequestedError(f"runtime is {runtime!r}; expected one of {', '.join(get_args(Runtime))}")
    if runtime == "deepspeed":
        configuration = configuration.as_deepspeed_reads()
    if world_size < 1:
        raise RequestedError(f"the world size is {world_size}; expected 1 or more")
    check_parameters(parameters)
    has_experts = bool(expert_layers) or any(each.ep_size is not None for each in parameters)
    if has_experts:
        refuse_with_experts(config, configuration, is_own=runtime == "zero_runtime")
        ranks = RankGroups(world_size, configuration.data_before_experts)
        ranks.check([*(each.ep_size for each in parameters), *(each.ep_size for each in expert_layers)])
    # A warm-up sends uncompressed gradients, so the rows depend on the step.
    configuration = _without_idle_compression(configuration, config, world_size, iteration, host_ranks)
    not_partitioned: frozenset[str] = frozenset()
    if configuration.partitions and runtime == "zero_runtime":
        not_partitioned = unpartitioned(zero_section(config), parameters)
    if configuration.stage == 3:
        _refuse_reductions_of_shards(configuration)
        training = Training(
            parameters,
            world_size,
            gradient_order,
            micro_steps(config, world_size),
            STEADY if iteration is None else iteration,
            zero_init,
            runtime == "zero_runtime" and configuration.reduce_scatter_on(backend) == "all_to_all",
            not_partitioned,
            released_by,
        )
        gathering = read_gather_configuration(zero_section(config))
        if runtime != "zero_runtime":
            gathering = replace(gathering, unit=MODULE)
        rows = stage3_expectations(configuration, gathering, training)
    else:
        rows = flat_expectations(
            configuration, parameters, world_size, gradient_order, backend, runtime, not_partitioned
        )
    if has_experts:
        element_bytes = token_bytes(parameters, configuration.model_dtype, autocast_dtype(config))
        tokens = expected_tokens(expert_layers, parameters, element_bytes, ranks)
        return [*rows, *(tokens if autocast_dtype(config) is None else in_autocast(tokens))]
    # DeepSpeed ignores the keys that are read below. Each key changes the rows that the previous key produced.
    if runtime != "zero_runtime":
        return rows
    if configuration.partitions and optimizer_type(config) == "lamb":
        rows.append(_trust_ratios(parameters, world_size))
    if optimizer_type(config) in sign_optimizers.NAMES:
        rows = _as_signs(rows, configuration, config, parameters, world_size, iteration)
    rows = late_sums(
        rows, count(section(config, "communication"), "bounded_delay", 0, least=0) or 0, world_size
    )
    # The topology is applied last, because it divides the messages of all other rules among the axes of the grid.
    sizes = torus.sizes_of(config, world_size, host_ranks, grid)
    own = configuration.model_dtype or (parameters[0].dtype if parameters else "float32")
    items = {
        Purpose.GRADIENT_REDUCE: item_bytes(configuration.communication_dtype),
        Purpose.PARAMETER_GATHER: item_bytes(own),
    }
    exchanges = configuration.reduce_scatter_on(backend) == "all_to_all"
    measured = costs_of(config, sizes, host_ranks, costs)
    return torus.composed(rows, sizes, items, exchanges=exchanges, costs=measured)


def expected_in_step(
    config: Mapping[str, Any],
    parameters: Sequence[Parameter],
    world_size: int,
    step: int,
    gradient_order: Sequence[str] | None = None,
    backend: str = "gloo",
    runtime: Runtime = "zero_runtime",
    *,
    zero_init: bool | Construction = False,
    host_ranks: int | None = None,
    grid: Sizes | None = None,
    expert_layers: Sequence[ExpertLayer] = (),
) -> list[Expectation]:
    """Return all messages of optimizer step number ``step``, summed over its micro-batches per purpose and operations.

    Args:
        step: The number of the step since training started, from 0. A negative number means the start of the training.

    The other arguments and the errors are those of :func:`expected`. The rows have ``when`` ``"step"``, or ``"init"``
    for the start of the training.
    """
    passes = micro_steps(config, world_size)
    rows: list[Expectation] = []
    sent: list[Expectation] = []
    first = step * passes
    for iteration in range(first, first + passes) if step >= 0 else (0,):
        # From the third micro-batch of a step on, each micro-batch sends the same as the one before. The first three
        # micro-batches of a training are the exception.
        if iteration - 1 <= first or iteration - 1 < STEADY:
            sent = expected(
                config,
                parameters,
                world_size,
                gradient_order,
                backend,
                runtime,
                iteration=iteration,
                zero_init=zero_init,
                host_ranks=host_ranks,
                grid=grid,
                expert_layers=expert_layers,
            )
        if step < 0:
            return [each for each in sent if each.when == "init"]
        ends = iteration + 1 == first + passes
        rows += [each for each in sent if each.when == "micro_step" or (each.when == "step" and ends)]
    return summed(rows, "step")


def steady_step(config: Mapping[str, Any]) -> int:
    """Return the number of the first step that sends the same messages as all later steps.

    Raises:
        RequestedError: the config cannot be read.
    """
    compression = read_configuration(config).compression
    settled = sign_optimizers.steady_step(config) if optimizer_type(config) in sign_optimizers.NAMES else 0
    return max(STEADY, settled, 0 if compression is None else compression.steady_step)


def step_that_counts(config: Mapping[str, Any], step: int, skipped: int) -> int:
    """Return the step number that the rules use for step ``step`` of a run with ``skipped`` skipped steps before it.

    A 1-bit optimizer does not count skipped steps. The warm-up of a gradient compression counts all steps.
    """
    return max(0, step - skipped) if optimizer_type(config) in sign_optimizers.NAMES else step


def up_to_overflow(rows: Sequence[Expectation], config: Mapping[str, Any], step: int) -> list[Expectation]:
    """Return the messages of a step at stage 0 that is skipped because a gradient overflowed.

    Args:
        rows: The messages of the full step.
        config: The config that the messages belong to.
        step: The number of the step from :func:`step_that_counts`.

    Raises:
        RequestedError: the config cannot be read.
    """
    gone = set()
    if optimizer_type(config) in sign_optimizers.NAMES and kind_of_step(config, step) != "whole":
        gone.add(Purpose.GRADIENT_REDUCE)
    # Without a 16-bit type in the config, the norm is computed after the overflow check, so it is not sent.
    if read_configuration(config).model_dtype is None:
        gone.add(Purpose.GRADIENT_NORM)
    return [each for each in rows if each.purpose not in gone]


def kind_of_step(config: Mapping[str, Any], step: int) -> str:
    """Return a name for the steps that send the same messages as step number ``step``.

    The name is empty if all steps from the third step on send the same messages.

    Raises:
        RequestedError: the config cannot be read.
    """
    if optimizer_type(config) in sign_optimizers.NAMES:
        return sign_optimizers.kind_of_step(config, step)
    compression = read_configuration(config).compression
    if compression is None or not compression.steady_step:
        return ""
    if step < compression.warmup_steps:
        return "warming"
    return "compressed" if step >= compression.steady_step else f"topk of step {step}"


def _as_signs(
    rows: Sequence[Expectation],
    configuration: Configuration,
    config: Mapping[str, Any],
    parameters: Sequence[Parameter],
    world_size: int,
    iteration: int | None,
) -> list[Expectation]:
    """Return ``rows`` as a 1-bit optimizer sends them in the step of micro-batch ``iteration``."""
    step = steady_step(config) if iteration is None else iteration // micro_steps(config, world_size)
    kind = sign_optimizers.kind_of_step(config, step)
    if kind == "whole":
        return list(rows)
    messages = [each for each in rows if each.purpose != Purpose.GRADIENT_REDUCE]
    if kind == "signs":
        messages += sign_optimizers.sign_messages(parameters, world_size)
    if not trained_groups(parameters) or world_size == 1:
        return messages
    if configuration.model_dtype is not None:
        note = "gradients differ between the ranks, so the ranks must agree on the norm"
        messages.append(row("step", Purpose.GRADIENT_NORM, Op.ALL_REDUCE, [NORM_BYTES], world_size, note))
    elif autocast_dtype(config) == "float16":
        note = "gradients differ between the ranks, so the ranks must agree on whether a gradient overflowed"
        messages.append(row("step", Purpose.OVERFLOW_CHECK, Op.ALL_REDUCE, [FLAG_BYTES], world_size, note))
    return messages


def _without_idle_compression(
    configuration: Configuration,
    config: Mapping[str, Any],
    world_size: int,
    iteration: int | None,
    host_ranks: int | None,
) -> Configuration:
    """Return ``configuration``, without compression if micro-batch ``iteration`` is sent uncompressed."""
    compression = configuration.compression
    if compression is None:
        return configuration
    if configuration.stage == 3:
        raise UnsupportedError(
            "gradient_compression", compression.algorithm, "the runtime refuses it at stage 3"
        )
    if compression.clips_before:
        configuration = replace(configuration, gradient_clipping=0.0)
    step = compression.steady_step
    if iteration is not None:
        step = iteration // micro_steps(config, world_size)
    warming = step < compression.warmup_steps
    if warming or world_size == 1:
        return replace(configuration, compression=None)
    compression = compression.in_step(step)._replace(host_ranks=host_ranks or 0)
    compression.refuse_unknown_hosts(world_size)
    if compression.hierarchical and compression.host_ranks == world_size:
        return replace(configuration, compression=None)
    return replace(configuration, compression=compression)


def _trust_ratios(parameters: Sequence[Parameter], world_size: int) -> Expectation:
    """Return the message by which zero_runtime's Lamb computes the trust ratios of full parameters.

    Lamb scales the step of each full parameter, whose shards are on several ranks.
    """
    trained = sum(len(group) for group in trained_groups(parameters))
    note = "Lamb compares the norm of each parameter with that of its step: two numbers each"
    return row(
        "step", Purpose.GRADIENT_NORM, Op.ALL_REDUCE, [2 * trained * RATIO_ITEM_BYTES], world_size, note
    )


def _refuse_reductions_of_shards(configuration: Configuration) -> None:
    name = configuration.gradient_reduction
    if name != "auto" and 3 not in REDUCTIONS[name].stages:
        raise UnsupportedError(
            "zero_optimization.gradient_reduction",
            configuration.gradient_reduction,
            "at stage 3 every rank owns a shard of every parameter, and the runtime refuses it",
        )


def micro_steps(config: Mapping[str, Any], world_size: int) -> int:
    """Return the number of micro-batches in a step, by which expectations for ``"micro_step"`` are multiplied.

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
