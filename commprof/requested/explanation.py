"""Explains in one sentence which gradient reduction a config requests and which one a runtime issues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from commprof.requested.communication.compression import Compression
from commprof.requested.configuration import Configuration, read_configuration
from commprof.requested.errors import RequestedError
from commprof.requested.parameters import item_bytes
from commprof.requested.zero.reductions import REDUCTIONS
from commprof.schema import Op, wire_bytes

_MANY: Final = 2**20  # elements, so many that the last block and rounding hardly matter


class ReductionShare(NamedTuple):
    """Bytes that each rank sends to reduce gradients, per byte of gradients.

    Attributes:
        requested: The bytes of the operation that the config requests.
        issued: The bytes of the operation that the runtime issues instead, or of the same operation.
        requested_op: The requested operation.
        issued_op: The issued operation.
    """

    requested: float
    issued: float
    requested_op: str
    issued_op: str


def requested_op(configuration: Configuration) -> Op:
    """Return the operation that the config requests for reducing gradients."""
    if not configuration.partitions:
        return Op.ALL_REDUCE
    if configuration.gradient_reduction != "auto":
        return REDUCTIONS[configuration.gradient_reduction].op
    return Op.REDUCE_SCATTER if configuration.reduce_scatter else Op.ALL_REDUCE


def requested_gradient_op(config: Mapping[str, Any] | None) -> str | None:
    """Return the operation that ``config`` requests for reducing gradients, even if another operation is issued.

    ``reduce_scatter: true``, which is the default, requests a reduce_scatter. ``reduce_scatter: false`` and stage 0
    request an all_reduce. A value of ``gradient_reduction`` requests the operation that it names. The result is None if
    there is no config, or if it cannot be read.
    """
    if config is None:
        return None
    try:
        return str(requested_op(read_configuration(config)))
    except RequestedError:
        return None


def describe(config: Mapping[str, Any] | None) -> str:
    """Return one sentence about the reduction that ``config`` requests and the one that a ZeRO runtime issues."""
    if config is None:
        return "no config was recorded, so what was requested is not known"
    try:
        return describe_configuration(read_configuration(config))
    except RequestedError as error:
        return str(error)


def describe_configuration(configuration: Configuration) -> str:
    """Return the sentence of :func:`describe` for a config that has been read."""
    if configuration.compression is not None:
        return _describe_compression(configuration.compression)
    if configuration.reduces_whole_in_buckets:
        return (
            "stage 0 partitions nothing; gradient_reduction: all_reduce with overlap_comm: true requests one all_reduce of "
            "each bucket of gradients, during the backward pass"
        )
    if configuration.stage == 0:
        return "stage 0 partitions nothing: one all_reduce of all gradients per step, whatever reduce_scatter says"
    if configuration.stage == 3 and configuration.gradient_reduction == "auto":
        return _describe_stage_3(configuration)
    if configuration.reduces_flat_groups:
        return (
            "bf16 at stage 1 with fp32 gradient accumulation reduces all gradients in one all_reduce; "
            "reduce_scatter, use_multi_rank_bucket_allreduce and reduce_bucket_size are ignored"
        )
    if configuration.gradient_reduction != "auto":
        name = configuration.gradient_reduction
        return f"gradient_reduction: {name} requests {_article(name)}; zero_runtime sends {REDUCTIONS[name].sent}"
    return _describe_deepspeed_keys(configuration)


def _describe_compression(compression: Compression) -> str:
    what_is_sent = {
        "topk": f"the largest {100 * compression.ratio:g} % of each bucket, and where they are,",
        "1bit": "the signs of each bucket, and their mean magnitudes,",
        "2bit": "the signs of each bucket, and which of two magnitudes each has,",
    }[compression.algorithm]
    begin = f", after {compression.warmup_steps} uncompressed steps" if compression.warmup_steps else ""
    if compression.ratio_steps:
        begin += f", and {100 * compression.first_ratio:g} % at first, which falls over {compression.ratio_steps} steps"
    return (
        f"gradient_compression: {compression.algorithm} requests compressed gradients; zero_runtime has all ranks gather "
        f"{what_is_sent} in one all_gather per bucket{begin}"
    )


def _describe_deepspeed_keys(configuration: Configuration) -> str:
    if not configuration.reduce_scatter:
        return "reduce_scatter: false requests an all_reduce; DeepSpeed 0.19 sends one all_reduce per bucket"
    if not configuration.buffers_are_contiguous:
        return (
            "reduce_scatter: true requests a reduce_scatter; contiguous_gradients: false overrides it and "
            "use_multi_rank_bucket_allreduce, and DeepSpeed 0.19 sends one all_reduce per bucket in its place"
        )
    value = "true" if configuration.use_multi_rank_bucket_allreduce else "false"
    return (
        f"reduce_scatter: true with use_multi_rank_bucket_allreduce: {value} requests a reduce_scatter; "
        f"DeepSpeed 0.19 sends {REDUCTIONS[configuration.reduction].sent} in its place"
    )


def _describe_stage_3(configuration: Configuration) -> str:
    if configuration.reduce_scatter:
        return (
            "reduce_scatter: true requests a reduce_scatter; at stage 3 DeepSpeed 0.19 sends one per bucket in "
            "each micro-batch"
        )
    asked = "reduce_scatter: false requests an all_reduce; at stage 3"
    if not configuration.contiguous_gradients:
        return f"{asked} contiguous_gradients: false overrides it, and DeepSpeed 0.19 sends one reduce_scatter per bucket"
    return (
        f"{asked} DeepSpeed 0.19 sends one per bucket in each micro-batch, but a reduce_scatter for a parameter larger "
        "than reduce_bucket_size"
    )


def reduction_share(
    config: Mapping[str, Any], world_size: int, backend: str = "gloo", runtime: str = "deepspeed"
) -> ReductionShare:
    """Return the bytes that each rank sends per byte of gradients, for the requested and for the issued operation.

    On 4 ranks, :func:`commprof.schema.wire_bytes` gives 0.75 for a reduce_scatter and 1.5 for an all_reduce. The shares
    ignore padding and parameters that are larger than a bucket.

    Args:
        config: The config file as DeepSpeed reads it.
        world_size: The number of ranks among which the gradients are reduced.
        backend: The backend of the group. gloo has no native reduce_scatter, and zero_runtime issues an all_to_all.
        runtime: ``"deepspeed"`` or ``"zero_runtime"``. DeepSpeed ignores zero_runtime's key ``gradient_reduction``.

    Raises:
        RequestedError: the config cannot be read.
    """
    configuration = read_configuration(config)
    if runtime == "deepspeed":
        configuration = replace(configuration, gradient_reduction="auto", compression=None)
    requested, issued = requested_op(configuration), REDUCTIONS[configuration.reduction].op
    compression = configuration.compression
    if compression is not None:
        payload = compression.payload_bytes(_MANY, item_bytes(configuration.communication_dtype))
        gathered = wire_bytes(Op.ALL_GATHER, world_size * payload, world_size)
        share = gathered / (_MANY * item_bytes(configuration.communication_dtype))
        return ReductionShare(wire_bytes(requested, 1, world_size), share, str(requested), str(Op.ALL_GATHER))
    if runtime != "deepspeed" and issued == Op.REDUCE_SCATTER:
        exchanges = configuration.reduce_scatter_on(backend) == "all_to_all"
        issued = Op.ALL_TO_ALL if exchanges else issued
    return ReductionShare(
        wire_bytes(requested, 1, world_size), wire_bytes(issued, 1, world_size), str(requested), str(issued)
    )


def _article(reduction: str) -> str:
    op = str(REDUCTIONS[reduction].op)
    return f"an {op}" if op.startswith("a") else f"a {op}"
