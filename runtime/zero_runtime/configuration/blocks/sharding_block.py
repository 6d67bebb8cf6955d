"""The keys of ``zero_optimization`` for sharded parameters (stage 3 only)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from zero_runtime.configuration.blocks.offload_param_block import read_slice_offload
from zero_runtime.errors import ConfigError
from zero_runtime.sharding.gather_schedule.gathered_blocks import AUTO, MODULE
from zero_runtime.sharding.gather_schedule.policy import ResidencyPolicy

# Keys that DeepSpeed accepts with and without the prefix, and their defaults. Sizes are numbers of elements.
PREFIXED: Final[Mapping[str, Any]] = {
    "prefetch_bucket_size": 50_000_000,
    "param_persistence_threshold": 100_000,
    "model_persistence_threshold": 2**63 - 1,
    "max_live_parameters": 1_000_000_000,
    "max_reuse_distance": 1_000_000_000,
    "gather_16bit_weights_on_model_save": False,
    "module_granularity_threshold": 0,
    "use_all_reduce_for_fetch_params": False,
    "allgather_sequential": False,
}
PREFIX: Final = "stage3_"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingConfig:
    """The settings of stage 3.

    Attributes:
        residency: The policy that determines when parameters are gathered and released.
        sub_group_size: The number of elements of a rank's shards that the optimizer updates together.
        memory_efficient_linear: Whether linear layers keep no gathered weight for the backward pass.
        enable_sanity_checks: Whether the ranks compare the contents of each gradient bucket.
        gather_16bit_weights_on_model_save: Whether ``save_16bit_model`` may gather the model.
        quantized_gradients: Whether gradients are sent in 4 bits.
    """

    residency: ResidencyPolicy = field(default_factory=ResidencyPolicy)
    sub_group_size: int = 1_000_000_000
    memory_efficient_linear: bool = True
    enable_sanity_checks: bool = False
    gather_16bit_weights_on_model_save: bool = False
    quantized_gradients: bool = False

    def effective(self) -> dict[str, Any]:
        """Return the settings by their configuration keys."""
        policy = self.residency
        named = {
            "prefetch_bucket_size": policy.prefetch,
            "param_persistence_threshold": policy.persistence,
            "model_persistence_threshold": policy.model_persistence,
            "max_live_parameters": policy.max_live,
            "max_reuse_distance": policy.reuse_distance,
            "gather_16bit_weights_on_model_save": self.gather_16bit_weights_on_model_save,
            "module_granularity_threshold": policy.granularity,
            "use_all_reduce_for_fetch_params": policy.by_all_reduce,
            "allgather_sequential": policy.sequential,
        }
        return {
            **{PREFIX + name: value for name, value in named.items()},
            "sub_group_size": self.sub_group_size,
            "memory_efficient_linear": self.memory_efficient_linear,
            "enable_sanity_checks": self.enable_sanity_checks,
            "zero_hpz_partition_size": policy.secondary_size,
            "zero_quantized_weights": policy.quantized,
            "zero_quantized_nontrainable_weights": policy.quantized_frozen,
            "zero_quantized_gradients": self.quantized_gradients,
            "log_trace_cache_warnings": policy.report_trace,
            "stage3_gather_unit": policy.unit,
            "offload_param": policy.offload.effective(),
            "leaf_module": {
                "classes": list(policy.leaf_classes),
                "names": list(policy.leaf_names),
                "name_suffixes": list(policy.leaf_suffixes),
            },
        }


def read_sharding(values: Mapping[str, Any]) -> ShardingConfig:
    """Return the settings of stage 3 in the checked values of ``zero_optimization``.

    Raises ConfigError if settings conflict.
    """
    named = {name: _either(values, name) for name in PREFIXED}
    _check_quantization(values, named["use_all_reduce_for_fetch_params"])
    leaves = values["leaf_module"] or {}
    residency = ResidencyPolicy(
        prefetch=named["prefetch_bucket_size"],
        reuse_distance=named["max_reuse_distance"],
        max_live=named["max_live_parameters"],
        persistence=named["param_persistence_threshold"],
        model_persistence=named["model_persistence_threshold"],
        sequential=named["allgather_sequential"],
        by_all_reduce=named["use_all_reduce_for_fetch_params"],
        secondary_size=values["zero_hpz_partition_size"],
        leaf_classes=tuple(leaves.get("classes") or ()),
        leaf_names=tuple(leaves.get("names") or ()),
        leaf_suffixes=tuple(leaves.get("name_suffixes") or ()),
        granularity=named["module_granularity_threshold"],
        report_trace=values["log_trace_cache_warnings"],
        unit=_unit(values, named),
        quantized=values["zero_quantized_weights"],
        quantized_frozen=values["zero_quantized_nontrainable_weights"],
        offload=read_slice_offload(values),
    )
    saves = named["gather_16bit_weights_on_model_save"] or values["stage3_gather_fp16_weights_on_model_save"]
    return ShardingConfig(
        residency=residency,
        sub_group_size=max(1, values["sub_group_size"]),
        memory_efficient_linear=values["memory_efficient_linear"],
        enable_sanity_checks=values["enable_sanity_checks"],
        gather_16bit_weights_on_model_save=saves,
        quantized_gradients=values["zero_quantized_gradients"],
    )


def _check_quantization(values: Mapping[str, Any], by_all_reduce: bool) -> None:
    for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if values[name] and by_all_reduce:
            raise ConfigError(
                f"zero_optimization.{name} is true, and stage3_use_all_reduce_for_fetch_params adds parameters up, which "
                "quantized ones cannot be; remove one of the two keys"
            )
    if values["zero_quantized_gradients"] and values["gradient_reduction"] == "all_reduce":
        raise ConfigError(
            "zero_optimization.zero_quantized_gradients is true, and gradient_reduction is all_reduce; quantized gradients "
            "go to the ranks that own them; remove one of the two keys"
        )


def _unit(values: Mapping[str, Any], named: Mapping[str, Any]) -> str:
    """Return the unit that one message gathers: a module, a block or auto.

    With auto, the unit is a module if a key is set that works only with modules. Raises ConfigError if the unit
    is a block and such a key is set.
    """
    unit: str = values["stage3_gather_unit"]
    if unit == MODULE:
        return unit
    all_reduces = values["contiguous_gradients"] and not values["reduce_scatter"]
    conflicts = {
        "stage3_allgather_sequential": named["allgather_sequential"],
        "stage3_use_all_reduce_for_fetch_params": named["use_all_reduce_for_fetch_params"],
        "stage3_module_granularity_threshold": named["module_granularity_threshold"] > 0,
        "leaf_module": bool(values["leaf_module"] and any(values["leaf_module"].values())),
        "zero_hpz_partition_size": values["zero_hpz_partition_size"] > 1,
        "zero_quantized_weights": values["zero_quantized_weights"],
        "zero_quantized_nontrainable_weights": values["zero_quantized_nontrainable_weights"],
        "zero_quantized_gradients": values["zero_quantized_gradients"],
        "enable_sanity_checks": values["enable_sanity_checks"],
        "offload_param": read_slice_offload(values).device != "none",
        "gradient_reduction all_reduce": values["gradient_reduction"] == "all_reduce",
        "reduce_scatter false": values["gradient_reduction"] == "auto" and all_reduces,
    }
    reasons = [name for name, conflict in conflicts.items() if conflict]
    if not reasons:
        return unit
    if unit == AUTO:
        return MODULE
    raise ConfigError(
        "zero_optimization.stage3_gather_unit is block, which gathers a block by one all_gather and reduces its gradients "
        f"by one reduce_scatter, and does not go together with {', '.join(reasons)}; remove one of the two, or use module"
    )


def _either(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of the key ``name``, which can be set with or without its prefix."""
    prefixed = values[PREFIX + name]
    return values[name] if prefixed == PREFIXED[name] else prefixed


def note_two_names(block: Mapping[str, Any], notices: list[str]) -> None:
    """Add a line to ``notices`` for each key of ``zero_optimization`` that is set with both names.

    DeepSpeed refuses such a configuration.

    Raises:
        ConfigError: The two values differ.
    """
    for name in PREFIXED:
        if name not in block or PREFIX + name not in block:
            continue
        plain, prefixed = block[name], block[PREFIX + name]
        if plain != prefixed:
            raise ConfigError(
                f"zero_optimization has {name} {plain!r} and {PREFIX}{name} {prefixed!r}, two names of one key; keep one"
            )
        notices.append(
            f"zero_optimization.{PREFIX}{name} is given together with {name}, another name of it, which DeepSpeed "
            "refuses; keep one"
        )
