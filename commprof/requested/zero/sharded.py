"""The messages of stage 3, which partitions each parameter separately and gathers it when a module needs it.

Each parameter is padded to a multiple of the number of ranks, and rank r keeps the r-th shard. Source: reference
measurements of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Final, NamedTuple

from commprof.requested.communication.compression import GRADIENT_BITS, WEIGHT_BITS, quantised_bytes
from commprof.requested.configuration import Configuration
from commprof.requested.parameters import Parameter, in_gradient_order, in_model_order, item_bytes
from commprof.requested.zero.bucket_rules import Bucket, arrived_for_buckets, buckets_within
from commprof.requested.zero.gather_configuration import GatherConfiguration
from commprof.requested.zero.gathering import Gathers
from commprof.requested.zero.partition import padded
from commprof.schema import Op

ID_BYTES: Final = 8  # one int64
MODULE_ORDER_NOTE: Final = (
    "modules are assumed to run once each in the order of the parameter list; a run may show another order"
)
ONCE_NOTE: Final = "each parameter is gathered once; in how many messages depends on the order of the modules"
GRADIENT_ORDER_NOTE: Final = (
    "the split into buckets is that of gradients in reverse parameter order; a run may show another"
)


class Sent(NamedTuple):
    """Messages of one operation.

    Attributes:
        op: The operation that is issued.
        payloads: The bytes of each message.
        exact: False if the number of messages depends on an order that was not given.
        notes: Remarks for the report.
        bytes_exact: False if the sum of the payloads depends on such an order too.
        least_bytes: The lower bound of the sum of the payloads for any order, or None if the sum is exact.
        group_size: The same as in an Expectation.
        rows: For each message, the bytes of every rank's row, if the rows may differ.
        arrived, padding_bytes: The same as in an Expectation.
    """

    op: Op
    payloads: tuple[int, ...]
    exact: bool = True
    notes: tuple[str, ...] = ()
    bytes_exact: bool = True
    least_bytes: int | None = None
    group_size: int | None = None
    rows: tuple[tuple[int, ...], ...] = ()
    arrived: tuple[int, ...] = ()
    padding_bytes: int | None = 0


def padded_bytes(parameter: Parameter, world_size: int, dtype: str | None) -> int:
    """Return the bytes of a parameter, or of its gradient, with padding. ``dtype`` None means the parameter's type."""
    return padded(parameter.numel, world_size) * item_bytes(dtype or parameter.dtype)


def padding_of(parameters: Iterable[Parameter], world_size: int, dtype: str | None) -> int:
    """Return the padding bytes that :func:`padded_bytes` includes for all ``parameters`` together."""
    return sum(
        padded_bytes(each, world_size, dtype) - each.numel * item_bytes(dtype or each.dtype)
        for each in parameters
    )


def used_parameters(parameters: Sequence[Parameter], gradient_order: Sequence[str] | None) -> list[Parameter]:
    """Return the parameters of modules that run, in model order.

    The result excludes trained parameters without a gradient, because their modules did not run.
    """
    listed = in_model_order(parameters)
    if gradient_order is None:
        return listed
    arrived = set(gradient_order)
    return [p for p in listed if not p.requires_grad or p.name in arrived]


def gather_messages(
    gathers: Gathers,
    configuration: Configuration,
    gathering: GatherConfiguration,
    world_size: int,
    *,
    first_of_step: bool = True,
    gathered_since: Set[str] = frozenset(),
) -> list[Sent]:
    """Return the messages that gather parameters for the modules of one micro-batch, by operation and group.

    With ``zero_hpz_partition_size`` each small group of ranks keeps a secondary copy of all parameters that were
    gathered since the last step. ``first_of_step`` means that these copies do not exist yet. Exceptions are frozen
    parameters, which no step changes, and the parameters in ``gathered_since``. Parameters with and without a copy are
    never in the same message.
    """
    split = gathering.secondary_size if 1 < gathering.secondary_size < world_size else None
    copied: set[str] | None = None
    if split and first_of_step:
        copied = {
            each.name for gather in gathers.gathers for each in gather.parameters if not each.requires_grad
        } | gathered_since
    payloads: dict[tuple[Op, int | None], list[int]] = {}
    padding: dict[tuple[Op, int | None], int] = {}
    for gather in gathers.gathers if world_size > 1 else ():  # a single rank gathers nothing
        for near, parameters in _by_copy(gather.parameters, copied, split):
            for op, each in _messages(
                parameters, configuration, gathering, world_size, may_quantise=not near
            ):
                payloads.setdefault((op, split if near else None), []).append(each)
                key = op, split if near else None
            of_these = padding_of(parameters, world_size, configuration.model_dtype)
            padding[key] = padding.get(key, 0) + of_these
    once = gathers.each_once and not gathering.gathers_by_all_reduce
    notes = () if gathers.exact else (ONCE_NOTE if once else MODULE_ORDER_NOTE,)
    certain = gathers.exact or once
    # If an all_reduce replaces some all_gathers, or if there is a second group, the sum of each row is uncertain.
    several = gathering.gathers_by_all_reduce or len({group for _, group in payloads}) > 1
    several |= gathering.quantises or gathering.quantises_frozen
    least = None if certain else 0 if several else _each_once(gathers, configuration, world_size)
    return [
        Sent(
            op,
            tuple(each),
            gathers.exact,
            notes,
            certain,
            least,
            group,
            padding_bytes=None if gathering.quantises or gathering.quantises_frozen else padding[op, group],
        )
        for (op, group), each in payloads.items()
    ]


def _by_copy(
    parameters: Sequence[Parameter], copied: set[str] | None, split: int | None
) -> list[tuple[bool, list[Parameter]]]:
    """Divide ``parameters`` into parameters that a small group has a copy of (True) and all others (False).

    ``copied`` contains the names of parameters with a copy, and None means that all have one. Without ``split`` there
    are no copies.
    """
    if split is None:
        return [(False, list(parameters))]
    near = [each for each in parameters if copied is None or each.name in copied]
    far = [each for each in parameters if copied is not None and each.name not in copied]
    if copied is not None:
        copied |= {each.name for each in far}
    return [(is_near, each) for is_near, each in ((False, far), (True, near)) if each]


def _messages(
    parameters: Sequence[Parameter],
    configuration: Configuration,
    gathering: GatherConfiguration,
    world_size: int,
    *,
    may_quantise: bool = True,
) -> list[tuple[Op, int]]:
    """Return the operation and bytes of each message that gathers ``parameters``.

    There is one message for each element type, or with ``sequential`` one for each parameter. Quantized parameters are
    gathered in separate messages.
    """
    rows: dict[tuple[str, bool], list[int]] = {}
    for parameter in parameters:
        dtype = configuration.model_dtype or parameter.dtype
        small = gathering.quantises or (gathering.quantises_frozen and not parameter.requires_grad)
        row = padded(parameter.numel, world_size) // world_size
        rows.setdefault((dtype, small and may_quantise), []).append(row)
    several = gathering.gathers_by_all_reduce and len(parameters) > 1 and not gathering.sequential
    op = Op.ALL_REDUCE if several else Op.ALL_GATHER
    messages = []
    for (dtype, small), each in rows.items():
        for row in each if gathering.sequential else [sum(each)]:
            size = quantised_bytes(row, WEIGHT_BITS) if small else row * item_bytes(dtype)
            messages.append((op, world_size * size))
    return messages


def _each_once(gathers: Gathers, configuration: Configuration, world_size: int) -> int:
    gathered = {parameter.name: parameter for gather in gathers.gathers for parameter in gather.parameters}
    return sum(padded_bytes(each, world_size, configuration.model_dtype) for each in gathered.values())


def order_checks(gathers: Gathers, iteration: int) -> Sent | None:
    """Return the broadcasts by which the ranks compare the order of modules, before and after recording the order.

    Each list is sent as two broadcasts, the length and the contents. The first micro-batch sends an empty list. The
    second micro-batch sends the modules, the parameters that they use, and the last use of each parameter. Later
    micro-batches send none.
    """
    if iteration > 1:
        return None
    lists = [0] if iteration == 0 else [gathers.modules, gathers.uses, gathers.uses]
    payloads = [size for length in lists for size in (ID_BYTES, length * ID_BYTES)]
    if iteration == 0:
        return Sent(Op.BROADCAST, tuple(payloads), True, ("the order of modules is recorded from here",))
    note = (
        "all ranks must have recorded the same order; modules without parameters are not in a parameter list"
    )
    return Sent(Op.BROADCAST, tuple(payloads), False, (note,), False, len(lists) * ID_BYTES)


def bucket_checks(buckets: Sequence[Bucket], exact: bool) -> Sent:
    """Return the two broadcasts per gradient bucket by which the ranks compare the parameters of the bucket."""
    payloads = [size for bucket in buckets for size in (ID_BYTES, len(bucket) * ID_BYTES)]
    return Sent(Op.BROADCAST, tuple(payloads), exact, ("enable_sanity_checks: true requests them",))


def gradient_buckets(
    configuration: Configuration,
    gathering: GatherConfiguration,
    trained: Sequence[Parameter],
    gradient_order: Sequence[str] | None,
    left_out: Set[str] = frozenset(),
) -> tuple[list[Bucket], bool, tuple[str, ...]]:
    """Return the gradient buckets of a micro-batch, whether they are certain, and notes about them.

    The parameters named in ``left_out`` are in no bucket of the result.
    """
    capacity = configuration.reduce_bucket_size
    if gradient_order is not None:
        arrived, missing = in_gradient_order(trained, gradient_order)
        note = f"parameters that got no gradient are left out: {', '.join(missing)}"
        together = [each for each in arrived if each.name not in left_out]
        return buckets_within(together, capacity), True, (note,) if missing else ()
    assumed = _assumed_order(trained, gathering.weight_before_bias)
    buckets = buckets_within([each for each in assumed if each.name not in left_out], capacity)
    exact = len(buckets) < 2
    return buckets, exact, () if exact else (GRADIENT_ORDER_NOTE,)


def _assumed_order(trained: Sequence[Parameter], weight_before_bias: bool) -> list[Parameter]:
    """Return the assumed order of gradients, which is the reverse model order.

    DeepSpeed's own linear layer produces the gradient of its weight before the gradient of its bias.
    """
    order = in_model_order(trained)[::-1]
    if not weight_before_bias:
        return order
    for place in range(1, len(order)):
        bias, weight = order[place - 1 : place + 1]
        if _are_of_a_linear_layer(weight, bias):
            order[place - 1 : place + 1] = [weight, bias]
    return order


def _are_of_a_linear_layer(weight: Parameter, bias: Parameter) -> bool:
    layer, _, kind = weight.name.rpartition(".")
    same = kind == "weight" and bias.name == (f"{layer}.bias" if layer else "bias")
    return same and 0 < bias.numel < weight.numel and weight.numel % bias.numel == 0


def reduced_gradients(
    configuration: Configuration,
    buckets: Sequence[Bucket],
    world_size: int,
    *,
    exact: bool,
    notes: Iterable[str] = (),
    exchanges: bool = False,
    quantises: bool = False,
) -> list[Sent]:
    """Return the messages that reduce the gradients of one micro-batch, by operation.

    A reduce_scatter sends each gradient with its padding. An all_to_all that replaces it (``exchanges``) sends no
    padding. ``reduce_scatter: false`` is honored only for a bucket that fits into the contiguous buffer.
    zero_runtime's key ``gradient_reduction`` is always honored. Quantized gradients always use an all_to_all of their
    codes and scales.
    """
    dtype = configuration.communication_dtype
    payloads: dict[Op, list[int]] = {Op.REDUCE_SCATTER: [], Op.ALL_TO_ALL: [], Op.ALL_REDUCE: []}
    rows: dict[Op, list[tuple[int, ...]]] = {Op.ALL_TO_ALL: []}
    arrived: dict[Op, list[int]] = {op: [] for op in payloads}
    padding = 0
    for bucket, count in zip(buckets, arrived_for_buckets(buckets, in_backward_order=True), strict=True):
        numel = sum(parameter.numel for parameter in bucket)
        if quantises:
            row = sum(padded(parameter.numel, world_size) for parameter in bucket) // world_size
            payloads[Op.ALL_TO_ALL].append(world_size * quantised_bytes(row, GRADIENT_BITS))
        elif _goes_in_an_all_reduce(numel, configuration):
            payloads[Op.ALL_REDUCE].append(numel * item_bytes(dtype))
        elif exchanges:
            payloads[Op.ALL_TO_ALL].append(numel * item_bytes(dtype))
            rows[Op.ALL_TO_ALL].append(_row_bytes(bucket, world_size, item_bytes(dtype)))
        else:
            padded_sum = sum(padded_bytes(parameter, world_size, dtype) for parameter in bucket)
            payloads[Op.REDUCE_SCATTER].append(padded_sum)
            padding += padding_of(bucket, world_size, dtype)
        for op, counts in arrived.items():
            if len(counts) < len(payloads[op]):
                counts.append(count)
    return [
        Sent(
            op,
            tuple(each),
            exact,
            tuple(notes),
            rows=tuple(rows.get(op, ())),
            arrived=tuple(arrived[op]),
            padding_bytes=None if quantises else padding if op == Op.REDUCE_SCATTER else 0,
        )
        for op, each in payloads.items()
        if each
    ]


def reduced_blocks(
    configuration: Configuration,
    messages: Sequence[tuple[Sequence[Parameter], int]],
    world_size: int,
    *,
    exchanges: bool,
    notes: tuple[str, ...],
) -> list[Sent]:
    """Return the messages that reduce gradients block by block. Every parameter is padded.

    Args:
        configuration: The settings of the config.
        messages: For each message, its parameters, and how many gradients have arrived when it is sent.
        world_size: The number of ranks that share each parameter.
        exchanges: Whether an all_to_all is issued instead of a reduce_scatter.
        notes: Remarks for the report.
    """
    dtype = configuration.communication_dtype
    payloads = [sum(padded_bytes(each, world_size, dtype) for each in members) for members, _ in messages]
    sent = Sent(
        Op.ALL_TO_ALL if exchanges else Op.REDUCE_SCATTER,
        tuple(payloads),
        notes=notes,
        rows=tuple((size // world_size,) * world_size for size in payloads) if exchanges else (),
        arrived=tuple(count for _, count in messages),
        padding_bytes=padding_of((each for members, _ in messages for each in members), world_size, dtype),
    )
    return [sent] if messages else []


def unpartitioned_gradients(
    configuration: Configuration, buckets: Sequence[Bucket], *, exact: bool, notes: Iterable[str] = ()
) -> list[Sent]:
    """Return the all_reduces of the gradients of unpartitioned parameters, which are summed on every rank."""
    size = item_bytes(configuration.communication_dtype)
    payloads = tuple(sum(each.numel for each in bucket) * size for bucket in buckets)
    return [Sent(Op.ALL_REDUCE, payloads, exact, tuple(notes))] if payloads else []


def _row_bytes(bucket: Bucket, world_size: int, size: int) -> tuple[int, ...]:
    """Return the bytes of each rank's part of the gradients of ``bucket``, without padding."""
    widths = [(each.numel, padded(each.numel, world_size) // world_size) for each in bucket]
    return tuple(
        size * sum(min(width, max(0, numel - rank * width)) for numel, width in widths)
        for rank in range(world_size)
    )


def _goes_in_an_all_reduce(numel: int, configuration: Configuration) -> bool:
    if configuration.gradient_reduction != "auto":
        return configuration.gradient_reduction == "all_reduce"
    fits = configuration.contiguous_gradients and numel <= configuration.reduce_bucket_size
    return fits and not configuration.reduce_scatter


def sub_groups(groups: Sequence[Sequence[Parameter]], size: int, world_size: int) -> int:
    """Return the number of sub-groups of each rank's shard, which are optimized one after another.

    A sub-group is closed once it has ``size`` elements, and at the end of an optimizer parameter group.
    """
    count = 0
    for group in groups:
        shard_numels = [-(-parameter.numel // world_size) for parameter in group]
        if sum(shard_numels) <= size:
            count += 1
            continue
        numel = 0
        for index, each in enumerate(shard_numels):
            numel += each
            if numel >= size or index == len(shard_numels) - 1:
                count += 1
                numel = 0
    return count
