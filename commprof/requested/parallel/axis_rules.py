"""Predicts the messages of pipeline, sequence and tensor parallelism, from the rules of each axis.

The ranks along data and sequence have the same parameters, so ZeRO's rules apply along these two axes. The axes add the
following messages:

* model: the parameters of the full model once at the start, and activations in each micro-batch; the norm and the
  overflow flag are sent a second time, along pipe and model together;
* sequence: the all_to_alls of attention; gradients have a separate communication type;
* pipe: activations and their gradients between neighbors, and the sums of gradients of shared weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from commprof.requested.config_keys import DTYPES, count, dtype, flag, section
from commprof.requested.configuration import Configuration, read_configuration, zero_section
from commprof.requested.errors import RequestedError, UnsupportedError
from commprof.requested.expectation import Expectation, row, summed
from commprof.requested.parallel.activation_shapes import Shapes
from commprof.requested.parallel.axes import DATA, MODEL, PIPE, SEQUENCE, Axes, Line, tensor_ranks
from commprof.requested.parallel.shared_modules import (
    expected_activations,
    expected_exchanges,
    loss_messages,
    module_messages,
)
from commprof.requested.parallel.stage_messages import (
    crossing_tensors,
    model_lines,
    opened_channels,
    tied_weights,
)
from commprof.requested.parameters import Parameter, item_bytes, trained_groups
from commprof.requested.zero.flat_stages import FLAG_BYTES, NORM_BYTES, Runtime
from commprof.requested.zero.gathering import ReleasedBy
from commprof.requested.zero.stage3 import Construction, sharded_agreements
from commprof.requested.zero.zero_stages import expected, steady_step
from commprof.schema import Op, Purpose

_OF_AXES: Final = (
    "tp_size",
    "tensor_parallel",
    "sequence_parallel_size",
    "data_parallel_size",
    "pipeline",
    "pipeline_parallel",
    "seq_parallel_communication_data_type",
)
_BATCH: Final = ("train_batch_size", "gradient_accumulation_steps")
INPUT_CHECK_BYTES: Final = 16  # two int64
_UNKNOWN_BUFFERS: Final = (
    "the buffers of the model, which are sent too, and the element type in which it was built"
)


def expected_on_axes(
    config: Mapping[str, Any],
    parameters: Sequence[Parameter],
    axes: Axes,
    shapes: Shapes,
    gradient_order: Sequence[str] | None = None,
    backend: str = "gloo",
    runtime: Runtime = "zero_runtime",
    *,
    iteration: int | None = None,
    zero_init: bool | Construction = False,
    released_by: ReleasedBy = "",
) -> list[Expectation]:
    """Return the messages that ``config`` should send on ranks along ``axes``. Each row names the groups that send it.

    Args:
        config: The config file as the runtime reads it.
        parameters: The parameters of all stages, each with the shard of one rank.
        axes: The axes of all ranks.
        shapes: The known sizes of activations. Messages without known sizes are left out.
        gradient_order: The same as for :func:`commprof.requested.zero.zero_stages.expected`. It is ignored if there are
            several stages.

    The other arguments and the errors are those of :func:`commprof.requested.zero.zero_stages.expected`.
    """
    if any(each.ep_size is not None for each in parameters):
        reason = "the model has experts, which are covered with data parallelism alone"
        raise UnsupportedError("topology", str(axes), reason)
    plain = without_axes(config, axes)
    rows: list[Expectation] = []
    stages = axes.size(PIPE)
    for each in parameters:
        if max(each.stage_numbers) >= stages:
            raise RequestedError(
                f"parameter {each.name!r} is in stages {each.stages!r}, and there are {stages} stages; expected 0 to "
                f"{stages - 1}"
            )
    # ZeRO treats each pipeline stage as a separate data-parallel job, with the parameters of its layers.
    for stage in range(stages):
        own = [each for each in parameters if stage in each.stage_numbers]
        lines = axes.lines(DATA, SEQUENCE, **({PIPE: stage} if PIPE in axes.names else {}))
        # The recorded order is the order of one rank, which has only the parameters of one stage.
        order = gradient_order if stages == 1 else None
        sent = expected(
            plain,
            own,
            len(lines[0]),
            order,
            backend,
            runtime,
            iteration=iteration,
            zero_init=zero_init,
            released_by=released_by,
        )
        rows += [on_lines(each, lines) for each in sent]
        rows += _along_model(config, own, axes, shapes, stage)
    rows += _of_one_model(plain, parameters, axes)
    rows += expected_exchanges(shapes, axes.lines(SEQUENCE), micro_batches(config, axes))
    if stages > 1:
        configuration = read_configuration(plain)
        wide = configuration.accumulation_dtype if configuration.reduces_flat_groups else None
        rows += [
            opened_channels(axes, shapes.wraps),
            *crossing_tensors(axes, shapes, micro_batches(config, axes)),
        ]
        rows += tied_weights(axes, parameters, configuration.model_dtype, wide)
    return rows


def expected_in_step_on_axes(
    config: Mapping[str, Any],
    parameters: Sequence[Parameter],
    axes: Axes,
    shapes: Shapes,
    backend: str = "gloo",
) -> list[Expectation]:
    """Return the messages of a step at which all steps send the same, in one row per purpose, operations and groups.

    The arguments and the errors are those of :func:`expected_on_axes`.
    """
    passes = micro_batches(config, axes)
    first = steady_step(config) * passes
    rows: list[Expectation] = []
    for iteration in range(first, first + passes):
        sent = expected_on_axes(config, parameters, axes, shapes, backend=backend, iteration=iteration)
        rows += [each for each in sent if each.when == "micro_step"]
    return summed([*rows, *(each for each in sent if each.when == "step")], "step")


def without_axes(config: Mapping[str, Any], axes: Axes) -> dict[str, Any]:
    """Return ``config`` without the keys of other axes, as it applies to the ranks along data and sequence.

    Raises:
        RequestedError: the batch sizes do not multiply.
    """
    plain = {name: value for name, value in config.items() if name not in (*_OF_AXES, *_BATCH)}
    plain["gradient_accumulation_steps"] = micro_batches(config, axes)
    if axes.size(SEQUENCE) > 1:
        wide = dtype(config, "seq_parallel_communication_data_type")
        # In an engine's effective config, communication_data_type already contains the value that the engine uses.
        if wide is not None or "topology" not in config:
            plain["communication_data_type"] = wide or DTYPES["fp32"]
    return plain


def micro_batches(config: Mapping[str, Any], axes: Axes) -> int:
    """Return the number of micro-batches of a step. Ranks that share a model or a sequence have the same samples.

    With ``autotp_size`` the batch size may count each sample once for each rank that shares a tensor, as in DeepSpeed.

    Raises:
        RequestedError: the batch sizes do not multiply.
    """
    configuration = read_configuration(config)
    pipeline = section(config, "pipeline_parallel")
    named = pipeline.get("micro_batches") if flag(pipeline, "pipeline_parallel.enabled", True) else None
    steps = count({"micro_batches": named}, "pipeline_parallel.micro_batches", None, least=1)
    if not configuration.managed_accumulation:
        return 1
    if steps is not None or configuration.accumulation_steps is not None:
        return steps or configuration.accumulation_steps or 1
    total, micro = configuration.train_batch_size, configuration.micro_batch_size
    if total is None or micro is None:
        return 1
    samples = micro * axes.size(DATA)
    if "tp_size" not in config and tensor_ranks(config) > 1 and total != samples:
        samples *= tensor_ranks(config)
    if total % samples:
        raise RequestedError(
            f"train_batch_size {total} is not a multiple of train_micro_batch_size_per_gpu {micro} x {axes.size(DATA)} "
            "replicas; change one of them, or give gradient_accumulation_steps"
        )
    return total // samples


def on_lines(expectation: Expectation, lines: Sequence[Line]) -> Expectation:
    """Return ``expectation``, which describes one group, with all ``lines`` as its groups.

    If it has a ``group_size``, each line is divided into groups of this size.
    """
    size = expectation.group_size or len(lines[0])
    groups = tuple(line[first : first + size] for line in lines for first in range(0, len(line), size))
    return expectation._replace(groups=groups, group_size=None)


def _along_model(
    config: Mapping[str, Any], own: Sequence[Parameter], axes: Axes, shapes: Shapes, stage: int
) -> list[Expectation]:
    """Return the messages that the model axis adds in one stage."""
    if axes.size(MODEL) == 1:
        return []
    lines = axes.lines(MODEL, **({PIPE: stage} if PIPE in axes.names else {}))
    kind = read_configuration(without_axes(config, axes)).model_dtype
    shares = flag(section(config, "tensor_parallel"), "tensor_parallel.sequence_parallel", False)
    last = stage == axes.size(PIPE) - 1
    messages = [*module_messages(own, kind, shares), *(loss_messages(shapes.losses) if last else ())]
    if not last:
        shapes = replace(shapes, others={})
    rows = expected_activations(messages, shapes, lines, micro_batches(config, axes))
    if tensor_ranks(config) > 1:
        payloads = [each.whole_numel * item_bytes(kind or each.dtype) for each in own]
        sent = row("init", Purpose.PARAMETER_BROADCAST, Op.BROADCAST, payloads, len(lines[0]))
        note = "all parameters of the model, before they are partitioned"
        rows.append(
            sent._replace(groups=lines, exact=False, bytes_exact=False, note=note, estimate=_UNKNOWN_BUFFERS)
        )
    return rows


def _of_one_model(
    config: Mapping[str, Any], parameters: Sequence[Parameter], axes: Axes
) -> list[Expectation]:
    """Return the messages by which the ranks of one model agree on norms and overflow flags at the end of a step."""
    lines = model_lines(axes)
    groups = trained_groups(parameters)
    if len(lines[0]) == 1 or not groups:
        return []
    configuration = read_configuration(config)
    if configuration.stage == 3:
        shared = axes.size(DATA) * axes.size(SEQUENCE)
        norms, flags = sharded_agreements(configuration, zero_section(config), groups, shared)
    else:
        norms, flags = _agreements(configuration, len(groups))
    rows = [
        row("step", Purpose.OVERFLOW_CHECK, Op.ALL_REDUCE, flags, len(lines[0])),
        row("step", Purpose.GRADIENT_NORM, Op.ALL_REDUCE, norms, len(lines[0])),
    ]
    if configuration.reduces_flat_groups and norms:
        # With only data and sequence ranks, each rank has all flat gradients and no norm is sent. With further ranks,
        # the norms are also summed along data and sequence.
        over = axes.lines(DATA, SEQUENCE)
        sent = row("step", Purpose.GRADIENT_NORM, Op.ALL_REDUCE, norms, len(over[0]))
        rows.append(sent._replace(groups=over))
        return [each if each.groups else each._replace(groups=lines) for each in rows if each.count]
    return [each._replace(groups=lines) for each in rows if each.count]


def _agreements(configuration: Configuration, groups: int) -> tuple[list[int], list[int]]:
    """Return the bytes of each norm and each overflow flag that the ranks of one model agree on, at stages 0 to 2."""
    if not configuration.partitions:
        checks_nothing = configuration.model_dtype is None and configuration.gradient_clipping == 0
        return [] if checks_nothing else [NORM_BYTES], []
    checks = configuration.check_overflow and not configuration.reduces_flat_groups
    return [NORM_BYTES] * (groups if configuration.compute_grad_norm else 0), [FLAG_BYTES] * checks


def input_check(axes: Axes) -> Expectation | None:
    """Return the message that compares the first inputs of ranks that share tensors, or None if there is none."""
    if axes.size(MODEL) == 1 or axes.size(PIPE) > 1:
        return None
    lines = axes.lines(MODEL)
    note = "ranks that share tensors compare the first inputs that they are given"
    check = row("step", Purpose.TRACE_CHECK, Op.ALL_REDUCE, [INPUT_CHECK_BYTES], len(lines[0]), note)
    return check._replace(groups=lines)
