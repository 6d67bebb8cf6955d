"""The configuration block ``zero_optimization``, typed and with all defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from zero_runtime.configuration.blocks.offload_block import OptimizerOffload, read_optimizer_offload
from zero_runtime.configuration.blocks.sharding_block import PREFIX, ShardingConfig, read_sharding
from zero_runtime.errors import ConfigError
from zero_runtime.gradient_reduction.reduction import REDUCTIONS
from zero_runtime.gradient_reduction.stages import EACH, Stage, stage
from zero_runtime.optimizer_step.partitioned_types import PartitionedTypes

# The keys whose values are sizes that may be auto, and the defaults of these keys.
REDUCE_SIZE: Final = "reduce_bucket_size"
GATHER_SIZE: Final = "allgather_bucket_size"
PREFETCH_SIZE: Final = "stage3_prefetch_bucket_size"
DEFAULT_SIZES: Final = {REDUCE_SIZE: 500_000_000, GATHER_SIZE: None, PREFETCH_SIZE: 50_000_000}
# The bucket size of unsharded gradients; neither this runtime nor DeepSpeed has a key for it.
WHOLE_BUCKET_NUMEL: Final = 500_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """The block ``zero_optimization`` with resolved values. Sizes are numbers of elements.

    ``gradient_reduction`` is one of the four names, never auto. ``explicit_reduction`` is True if the
    configuration names the reduction. ``allgather_bucket_size`` is None unless the configuration sets it.
    ``sharding`` has an effect if the stage shards parameters. ``ignore_unused_parameters`` has an effect if the
    optimizer is offloaded at stages 1 and 2. ``quantized_gradients`` and ``quantized_weights`` apply to stages
    1 and 2.

    ``gradient_accumulation_reduce`` is each, boundary or auto. The start of a training replaces auto
    (:mod:`zero_runtime.startup.open_values`). ``gradient_accumulation_limit`` is in bytes. ``open_sizes`` are
    the keys of the sizes that are auto and have an effect at this stage. Until these sizes are determined, they
    have default values.
    """

    stage: Stage
    contiguous_gradients: bool
    reduce_scatter: bool
    use_multi_rank_bucket_allreduce: bool
    gradient_reduction: str
    explicit_reduction: bool
    reduce_scatter_impl: str | None
    reduce_bucket_size: int
    gradient_accumulation_reduce: str
    gradient_accumulation_limit: int | None
    allgather_partitions: bool
    allgather_bucket_size: int | None
    overlap_comm: bool
    compute_grad_norm: bool
    overlap_parameter_gather: bool
    round_robin_gradients: bool
    parameter_alignment: bool
    load_from_fp32_weights: bool
    ignore_unused_parameters: bool
    offload_optimizer: OptimizerOffload | None
    sharding: ShardingConfig
    partitioned_types: PartitionedTypes
    quantized_gradients: bool
    quantized_weights: bool
    open_sizes: tuple[str, ...] = ()

    @property
    def reduces_whole_in_buckets(self) -> bool:
        """Whether stage 0 sends its gradients in buckets during the backward pass, which DeepSpeed never does."""
        return self.explicit_reduction and self.overlap_comm and not self.stage.shards_optimizer


def read_zero(values: Mapping[str, Any], disable_allgather: bool) -> ZeroConfig:
    """Return the resolved settings in the checked ``values``. Raises ConfigError if the stage does not support them."""
    values, unset = _without_auto(values)
    offload = read_optimizer_offload(values)
    row = stage(values["stage"], bool(values["overlap_comm"]), values["gradient_accumulation_reduce"])
    if offload is not None and row.shards_optimizer and not row.shards_parameters:
        # As in DeepSpeed, gradients are offloaded through one buffer.
        values = {**values, "contiguous_gradients": True}
    # The reduction is the value of the key, or the reduction that DeepSpeed's three keys select. Quantized gradients
    # require reduce_scatter.
    wanted = values["gradient_reduction"]
    reduction = automatic_reduction(row, values) if wanted == "auto" else wanted
    flat = row.shards_optimizer and not row.shards_parameters
    if flat and values["zero_quantized_gradients"]:
        if wanted not in ("auto", "reduce_scatter"):
            raise ConfigError(
                f"zero_optimization.zero_quantized_gradients is true, and gradient_reduction is {wanted}; quantized "
                "gradients go to the ranks that own them: expected auto or reduce_scatter"
            )
        wanted = reduction = "reduce_scatter"
    # There are two errors, because the reason why a stage does not have the reduction depends on the stage.
    if reduction not in row.reductions and row.shards_parameters:
        raise ConfigError(
            f"zero_optimization.gradient_reduction is {reduction}, but at stage 3 every rank owns a shard of every "
            f"parameter; expected auto or {' or '.join(row.reductions)}, or stage 1 or 2"
        )
    if reduction not in row.reductions:
        raise ConfigError(
            f"zero_optimization.gradient_reduction is {reduction}, but at stage {row.number} every rank keeps all "
            f"gradients, so there are no owners; expected auto or {' or '.join(row.reductions)}, or stage 1 or 2"
        )
    # Shards are aligned to 2 elements, so an odd message size is refused.
    gather = values["allgather_bucket_size"] or None
    if flat and gather is not None and gather % 2:
        raise ConfigError(
            f"zero_optimization.allgather_bucket_size is {gather}; expected an even number of elements, since shards "
            "are aligned to 2 elements"
        )
    # A bucket size has no effect if all gradients are sent at once.
    in_buckets = row.shards_optimizer or (wanted != "auto" and bool(values["overlap_comm"]))
    # Settings without effect at this stage get neutral values: bucket size, offload, sharding.
    return ZeroConfig(
        stage=row,
        contiguous_gradients=values["contiguous_gradients"],
        reduce_scatter=values["reduce_scatter"],
        use_multi_rank_bucket_allreduce=values["use_multi_rank_bucket_allreduce"],
        gradient_reduction=reduction,
        explicit_reduction=wanted != "auto",
        reduce_scatter_impl=None
        if values["reduce_scatter_impl"] == "auto"
        else values["reduce_scatter_impl"],
        reduce_bucket_size=values["reduce_bucket_size"] if in_buckets else WHOLE_BUCKET_NUMEL,
        gradient_accumulation_reduce=values["gradient_accumulation_reduce"] if row.shards_gradients else EACH,
        gradient_accumulation_limit=values["gradient_accumulation_limit"],
        allgather_partitions=values["allgather_partitions"] and not disable_allgather,
        allgather_bucket_size=gather,
        overlap_comm=automatic_overlap(row, reduction)
        if values["overlap_comm"] is None
        else values["overlap_comm"],
        compute_grad_norm=values["compute_grad_norm"] or row.shards_parameters,
        overlap_parameter_gather=values["overlap_parameter_gather"],
        round_robin_gradients=values["round_robin_gradients"],
        parameter_alignment=values["parameter_alignment"],
        load_from_fp32_weights=values["load_from_fp32_weights"],
        ignore_unused_parameters=values["ignore_unused_parameters"],
        offload_optimizer=offload if row.shards_optimizer else None,
        sharding=read_sharding(values)
        if row.shards_parameters
        else ShardingConfig(sub_group_size=max(1, values["sub_group_size"])),
        partitioned_types=_partitioned_types(values),
        quantized_gradients=flat and values["zero_quantized_gradients"],
        quantized_weights=flat and values["zero_quantized_weights"],
        open_sizes=tuple(
            name for name in unset if _acts(name, row, values["allgather_partitions"], in_buckets)
        ),
    )


def _without_auto(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Return ``values`` with each size that is ``auto`` replaced by its default, and the names of these sizes."""
    names = {name: name for name in (REDUCE_SIZE, GATHER_SIZE, PREFETCH_SIZE)}
    names[PREFETCH_SIZE.removeprefix(PREFIX)] = PREFETCH_SIZE
    unset = [name for name in names if values[name] == "auto"]
    defaults = {name: DEFAULT_SIZES[names[name]] for name in unset}
    return {**values, **defaults}, list(dict.fromkeys(names[name] for name in unset))


def _acts(size: str, row: Stage, gathers: bool, in_buckets: bool) -> bool:
    """Return whether the key ``size`` has an effect.

    Args:
        size: The key.
        row: The stage.
        gathers: Whether parameters are gathered, not broadcast (``allgather_partitions``).
        in_buckets: Whether gradients are sent in buckets.
    """
    if size == PREFETCH_SIZE:
        return row.shards_parameters
    if size == GATHER_SIZE:
        return row.shards_optimizer and not row.shards_parameters and gathers
    return in_buckets


def automatic_reduction(row: Stage, values: Mapping[str, Any]) -> str:
    """Return the gradient reduction that DeepSpeed's keys select.

    Without contiguous gradients, the other two keys are ignored at stages 0 to 2 and the reduction is all_reduce. At
    stage 3, ``reduce_scatter: false`` has an effect only with contiguous gradients. Without them, the reduction is
    reduce_scatter.
    """
    if row.shards_parameters:
        needs_all_reduce = values["contiguous_gradients"] and not values["reduce_scatter"]
        return "all_reduce" if needs_all_reduce else "reduce_scatter"
    if not row.shards_optimizer or not values["contiguous_gradients"]:
        return "all_reduce"
    return next(
        name
        for name, reduction in REDUCTIONS.items()
        if reduction.deepspeed_keys is not None
        and all(bool(values[key]) is value for key, value in reduction.deepspeed_keys.items())
    )


def automatic_overlap(row: Stage, reduction: str) -> bool:
    """Return the default of ``overlap_comm``.

    The default is that of DeepSpeed, except that it is true for the reduction that DeepSpeed does not have.
    """
    return row.shards_parameters or (row.shards_gradients and reduction == "reduce_scatter")


def _partitioned_types(values: Mapping[str, Any]) -> PartitionedTypes:
    allowed, never_partitioned = values["zero_allowed_param_types"], values["zero_force_param_types"]
    both = sorted(set(allowed or ()).intersection(never_partitioned or ()))
    if both:
        raise ConfigError(
            f"{', '.join(both)} is in zero_optimization.zero_allowed_param_types, which are partitioned, and in "
            "zero_force_param_types, which never are; keep it in one"
        )
    return PartitionedTypes(allowed=allowed, whole=never_partitioned or ())
