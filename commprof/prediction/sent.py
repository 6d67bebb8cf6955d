"""Predict the messages of a config in a step, and when gradients arrive, by the rules of ``commprof.requested``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from commprof.errors import CommprofError, UsageError
from commprof.ledger.requests.request import Request
from commprof.prediction.program import SUMMING, Groups, Message
from commprof.requested.auto_values import whole_gradient_bytes
from commprof.requested.configuration import Configuration, read_configuration, zero_section
from commprof.requested.expectation import Expectation
from commprof.requested.parameters import Parameter, in_model_order, trained_groups
from commprof.requested.wrappers.ddp import Ddp
from commprof.requested.zero import zero_stages
from commprof.requested.zero.flat_stages import NORM_BYTES
from commprof.requested.zero.gather_configuration import read_gather_configuration
from commprof.requested.zero.module_calls import ModuleCalls, module_calls
from commprof.schema import Op, Phase, Purpose

# The number of buckets that zero_runtime has in flight at once (zero_runtime/gradient_reduction/reduction_overlap.py).
DEPTH: Final = 2
AT_END: Final = (str(Purpose.OVERFLOW_CHECK), str(Purpose.GRADIENT_NORM), str(Purpose.PARAMETER_GATHER))
GRADIENTS: Final = str(Purpose.GRADIENT_REDUCE)


class Sent(NamedTuple):
    """The messages that a config sends in a step, in the order of issue.

    Attributes:
        gradients: The gradient messages of each micro-batch. Each has the number of gradients that have arrived when
            it is sent.
        at_end: The messages after the last gradients, by purpose.
        arriving: The parameters in the order in which their gradients arrive.
        overlaps: Whether gradient messages do not block.
        waits_before: With overlap, whether a message is issued only when fewer than ``depth`` buckets are in flight.
            Otherwise the program waits for the oldest message right after the issue of the next one, which has a
            buffer of its own.
        depth: The number of buckets in flight at once. With None, all buckets of a backward pass may be in flight.
        calls: The calls of the modules in each micro-batch at stage 3, where modules gather parameters. None at
            other stages.
        others: The purposes of messages whose place in a step is not known.
        added_bytes: The bytes of whole gradients that a step adds up without sending them. They are those of the
            micro-batches that send no gradients.
        hooked_calls: The number of calls of modules in a step that run hooks of DeepSpeed's stage 3.
    """

    gradients: list[list[tuple[Message, int]]]
    at_end: dict[str, list[Message]]
    arriving: list[Parameter]
    overlaps: bool
    waits_before: bool = False
    depth: int | None = DEPTH
    calls: ModuleCalls | None = None
    others: frozenset[str] = frozenset()
    added_bytes: int = 0
    hooked_calls: int = 0


def sent_by(request: Request, config: Mapping[str, Any], world: int) -> Sent:
    """Return the messages that ``config`` sends in a steady step of ``world`` ranks with the model of ``request``.

    Raises:
        UsageError: The rules do not predict these messages.
    """
    try:
        configuration = _configuration(request, config)
        order = _gradient_order(request, config)
        if configuration.accumulation_reduce == "auto":
            raise UsageError(
                "gradient_accumulation_reduce auto depends on free memory; give each or boundary"
            )
        micro_steps = zero_stages.micro_steps(config, world)
        rows = zero_stages.expected(
            config,
            request.parameters,
            world,
            order,
            request.backend,
            request.runtime,
            iteration=zero_stages.steady_step(config) * micro_steps,
            host_ranks=request.host_ranks,
        )
    except CommprofError as problem:
        raise UsageError(f"what this setting sends is not known: {problem}") from None
    overlaps = _overlaps(configuration, config, request.runtime)
    arriving = _arriving(configuration, request.parameters, order)
    gradients: list[list[tuple[Message, int]]] = [[] for _ in range(micro_steps)]
    at_end: dict[str, list[Message]] = defaultdict(list)
    others: set[str] = set()
    sharded = configuration.stage == 3
    for row in rows:
        if row.when == "init":
            continue
        if row.when == "micro_step" and row.purpose == Purpose.PARAMETER_GATHER:
            continue  # the module calls below contain these gathers
        if not row.bytes_exact or row.estimate:
            raise UsageError(
                f"the messages of {row.purpose} of this setting are known only approximately: "
                f"{row.note or row.estimate}"
            )
        groups = row.groups or groups_of(world, row.group_size)
        payloads = [sum(each) for each in row.payloads]
        if row.purpose == GRADIENTS:
            for micro in range(micro_steps) if row.when == "micro_step" else [micro_steps - 1]:
                like = Message(
                    row.issued_op, 0, GRADIENTS, groups, not overlaps, None, micro, str(Phase.BACKWARD)
                )
                if row.issued_op in SUMMING:
                    like = like._replace(dtype=configuration.communication_dtype)
                gradients[micro] += _gradient_messages(row, payloads, like, len(arriving))
        elif row.when == "step" and row.purpose in AT_END:
            at_end[row.purpose] += [
                Message(
                    row.issued_op,
                    size,
                    row.purpose,
                    groups,
                    # Several parameter gathers are in flight at once at stage 3.
                    not (sharded and row.purpose == Purpose.PARAMETER_GATHER),
                    None,
                    micro_steps - 1,
                    str(Phase.OPTIMIZER),
                    dtype=_agreed_dtype(row, size),
                )
                for size in payloads
            ]
        else:
            others.add(row.purpose)
    # Chunks are filled, and sent, from the last one to the first.
    if configuration.reduces_chunks:
        gradients = [each[::-1] for each in gradients]
    calls = _calls_of_modules(request, config, world, order, micro_steps) if sharded else None
    hooked = len(calls.calls) * micro_steps if calls is not None and request.runtime == "deepspeed" else 0
    gradients = [_numbered(sorted(each, key=lambda pair: pair[1])) for each in gradients]
    return Sent(
        gradients,
        dict(at_end),
        arriving,
        overlaps,
        configuration.reduces_chunks,
        None if configuration.reduces_whole_in_buckets else DEPTH,
        calls=calls,
        others=frozenset(others),
        added_bytes=whole_gradient_bytes(config, request.parameters) * sum(not each for each in gradients),
        hooked_calls=hooked,
    )


def _agreed_dtype(row: Expectation, size: int) -> str:
    """Return the element type of a summed message at the end of a step, or an empty text for other messages.

    Overflow flags are bytes. Gradient norms are one fp32 number, or fp64 numbers.
    """
    if row.issued_op not in SUMMING:
        return ""
    if row.purpose == Purpose.OVERFLOW_CHECK:
        return "uint8"
    return "float32" if size == NORM_BYTES else "float64"


def _calls_of_modules(
    request: Request, config: Mapping[str, Any], world: int, order: Sequence[str] | None, micro_steps: int
) -> ModuleCalls:
    iteration = zero_stages.steady_step(config) * micro_steps
    try:
        return module_calls(config, request.parameters, world, order, micro_steps, iteration, request.runtime)
    except CommprofError as problem:
        raise UsageError(f"what this setting sends is not known: {problem}") from None


def sent_by_ddp(rules: Ddp, changes: Mapping[str, Any], world: int) -> Sent:
    """Return the messages of DistributedDataParallel in a step with one backward pass, with ``changes`` of arguments.

    Raises:
        UsageError: The rules do not predict these messages.
    """
    if rules.unpredicted or rules.order is None:
        reason = "; ".join(rules.unpredicted.values()) or "the order of gradients was not recorded"
        raise UsageError(f"what DistributedDataParallel sends with this setting is not known: {reason}")
    wrapper = replace(rules.wrapper, arguments={**rules.wrapper.arguments, **changes})
    by_name = {each.name: each for each in wrapper.trained}
    arriving = [
        Parameter(name, by_name[name].numel, shape="x".join(map(str, by_name[name].extents)))
        for name in rules.order
    ]
    gradients = [
        (
            Message(
                str(Op.ALL_REDUCE),
                size,
                GRADIENTS,
                groups_of(world, None),
                False,
                number,
                0,
                str(Phase.BACKWARD),
                dtype=dtype,
            ),
            count,
        )
        for number, (size, count, dtype) in enumerate(replace(rules, wrapper=wrapper).steady_messages())
    ]
    return Sent([gradients], {}, arriving, overlaps=True, depth=None)


def _configuration(request: Request, config: Mapping[str, Any]) -> Configuration:
    configuration = read_configuration(config)
    return configuration.as_deepspeed_reads() if request.runtime == "deepspeed" else configuration


def _gradient_order(request: Request, config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the order in which gradients are reduced with ``config``, or None if the run did not record an order.

    Buckets that are reduced in the backward pass are filled in the order in which gradients arrive. Other buckets are
    filled in the order of the optimizer's parameters. A linear layer of stage 3 computes the gradient of its weight
    first, and a linear layer of torch computes the gradient of its bias first.
    """
    steps = sorted(request.orders)
    recorded = request.orders[steps[-1]][0] if steps and request.orders[steps[-1]] else None
    before, after = (_Order.of(request, each) for each in (request.config, config))
    if recorded is None or before == after:
        return recorded
    names = set(recorded)
    trained = [each for group in trained_groups(request.parameters) for each in group if each.name in names]
    if not after.as_they_arrive:
        return tuple(each.name for each in trained)
    if before.as_they_arrive:
        by_name = {each.name: each for each in trained}
        arriving = [by_name[name] for name in recorded if name in by_name]
    else:
        arriving = in_model_order(trained)[::-1]
    return tuple(each.name for each in _with_linear_layers(arriving, after.weight_first))


class _Order(NamedTuple):
    """The two properties that determine the order in which gradients are reduced."""

    as_they_arrive: bool
    weight_first: bool  # the gradient of a linear layer's weight arrives before that of its bias

    @classmethod
    def of(cls, request: Request, config: Mapping[str, Any]) -> _Order:
        configuration = _configuration(request, config)
        sharded = configuration.stage == 3
        weight_first = sharded and read_gather_configuration(zero_section(config)).weight_before_bias
        return cls(sharded or configuration.reduces_in_backward_order, weight_first)


def _with_linear_layers(arriving: Sequence[Parameter], weight_first: bool) -> list[Parameter]:
    """Return ``arriving`` with adjacent weights and biases of linear layers in the order of ``weight_first``."""
    order = list(arriving)
    for place in range(1, len(order)):
        one, two = order[place - 1 : place + 1]
        weight, bias = (one, two) if two.name.endswith("bias") else (two, one)
        if _are_of_a_linear_layer(weight, bias):
            order[place - 1 : place + 1] = [weight, bias] if weight_first else [bias, weight]
    return order


def _are_of_a_linear_layer(weight: Parameter, bias: Parameter) -> bool:
    kinds = weight.name.rpartition(".")[2], bias.name.rpartition(".")[2]
    same = weight.module == bias.module and kinds == ("weight", "bias")
    return same and 0 < bias.numel < weight.numel and weight.numel % bias.numel == 0


def groups_of(world: int, size: int | None = None) -> Groups:
    """Return the ranks in groups of ``size``, in order. Without a size, all ranks are in one group."""
    width = size or world
    return tuple(tuple(range(first, first + width)) for first in range(0, world, width))


def _gradient_messages(
    row: Expectation, payloads: Sequence[int], like: Message, gradients: int
) -> list[tuple[Message, int]]:
    arrived = row.arrived or (gradients,) * len(payloads)
    return [(like._replace(payload_bytes=size), count) for size, count in zip(payloads, arrived, strict=True)]


def _numbered(messages: Sequence[tuple[Message, int]]) -> list[tuple[Message, int]]:
    """Return ``messages`` with bucket numbers.

    Messages of the same flush get the same number, because they are issued together and waited for together.
    """
    counts = list(dict.fromkeys(count for _, count in messages))
    several = len(counts) < len(messages) and any(each.op == Op.REDUCE for each, _ in messages)
    return [
        (each._replace(bucket=counts.index(count) if several else number), count)
        for number, (each, count) in enumerate(messages)
    ]


def _overlaps(configuration: Configuration, config: Mapping[str, Any], runtime: str) -> bool:
    """Return whether gradient messages overlap the backward pass on a CPU.

    This is only possible with zero_runtime, because DeepSpeed needs streams for overlap.
    """
    if runtime != "deepspeed" and configuration.reduces_whole_in_buckets:
        return True
    if runtime == "deepspeed" or not configuration.partitions or configuration.reduces_flat_groups:
        return False
    zero = config.get("zero_optimization")
    explicit = zero.get("overlap_comm") if isinstance(zero, Mapping) else None
    # The default of zero_runtime is that of DeepSpeed, and true for the reduction that DeepSpeed does not have.
    if explicit is None:
        return configuration.stage == 3 or configuration.reduction == "reduce_scatter"
    return bool(explicit)


def _arriving(
    configuration: Configuration, parameters: Sequence[Parameter], order: Sequence[str] | None
) -> list[Parameter]:
    trained = [each for group in trained_groups(parameters) for each in group]
    if order is None:
        return in_model_order(trained)[::-1]
    by_name = {each.name: each for each in trained}
    return [by_name[name] for name in order if name in by_name]
