"""The keys that decide when stage 3 gathers parameters, with DeepSpeed 0.19's defaults.

The prefix ``stage3_`` of a key is optional.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from commprof.requested.config_keys import count, flag, section, wrong
from commprof.requested.errors import UnsupportedError

UNLIMITED: Final = 2**63 - 1
MODULE: Final = "module"


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherConfiguration:
    """The settings of a config for gathering parameters at stage 3. All limits are in elements.

    Attributes:
        prefetch_bucket_size: The number of elements that are prefetched at a time. 0 turns prefetching off.
        persistence_threshold: The largest size of a parameter that stays gathered between steps.
        model_persistence_threshold: The limit for all parameters together that stay gathered.
        max_live_parameters: The number of gathered elements at which prefetching stops.
        max_reuse_distance: The distance within which the next use of a parameter keeps the parameter gathered.
        sub_group_size: The number of elements of a rank's shard that are optimized at a time. One norm is sent for each
            sub-group.
        secondary_size: The number of ranks that together keep a secondary copy of all parameters. Within a step, these
            ranks gather from this copy repeatedly. 1 means that there is no secondary copy.
        sequential: Whether each parameter is gathered in its own message.
        gathers_by_all_reduce: Whether several parameters are gathered by an all_reduce of a buffer of zeros.
        sanity_checks: Whether the ranks compare the parameter ids of each gradient bucket.
        leaf_names: The names of modules that are gathered as one unit with their descendants. The config can also
            select leaf modules by class. These classes are not read, because a parameter list lacks the class of a
            module.
        leaf_suffixes: The suffixes of names of such modules.
        weight_before_bias: Whether the gradient of a linear layer's weight arrives before the gradient of its bias.
        quantises: Whether all parameters are gathered in 8 bits.
        quantises_frozen: Whether parameters that are not trained are gathered in 8 bits.
        quantises_gradients: Whether gradients are reduced in 4 bits.
        unit: The unit that one message gathers: ``module``, ``block``, or ``auto`` if the model decides. The key exists
            only in zero_runtime.
    """

    prefetch_bucket_size: int
    persistence_threshold: int
    model_persistence_threshold: int
    max_live_parameters: int
    max_reuse_distance: int
    sub_group_size: int
    secondary_size: int
    sequential: bool
    gathers_by_all_reduce: bool
    sanity_checks: bool
    leaf_names: tuple[str, ...]
    leaf_suffixes: tuple[str, ...]
    weight_before_bias: bool
    quantises: bool = False
    quantises_frozen: bool = False
    quantises_gradients: bool = False
    unit: str = MODULE

    def is_leaf(self, module: str) -> bool:
        """Return whether the module of this name is gathered as one unit with its descendants."""
        return module in self.leaf_names or any(module.endswith(suffix) for suffix in self.leaf_suffixes)


def read_gather_configuration(zero: Mapping[str, Any]) -> GatherConfiguration:
    """Return the settings in ``zero_optimization`` that only stage 3 has.

    Raises:
        RequestedError: a key has a value of the wrong type or outside its range.
    """
    sequential = flag(zero, _key(zero, "allgather_sequential"), False)
    prefetch = _limit(zero, "prefetch_bucket_size", 50_000_000)
    leaf = section(zero, "leaf_module")
    read = GatherConfiguration(
        prefetch_bucket_size=1 if sequential else prefetch,
        persistence_threshold=_limit(zero, "param_persistence_threshold", 100_000),
        model_persistence_threshold=_limit(zero, "model_persistence_threshold", UNLIMITED),
        max_live_parameters=_limit(zero, "max_live_parameters", 1_000_000_000),
        max_reuse_distance=_limit(zero, "max_reuse_distance", 1_000_000_000),
        sub_group_size=max(1, _limit(zero, "sub_group_size", 1_000_000_000)),
        secondary_size=count(zero, "zero_optimization.zero_hpz_partition_size", 1, least=0) or 1,
        sequential=sequential,
        gathers_by_all_reduce=flag(zero, _key(zero, "use_all_reduce_for_fetch_params"), False),
        sanity_checks=flag(zero, "zero_optimization.enable_sanity_checks", False),
        leaf_names=_names(leaf, "names"),
        leaf_suffixes=_names(leaf, "name_suffixes"),
        weight_before_bias=flag(zero, "zero_optimization.memory_efficient_linear", True),
        quantises=flag(zero, "zero_optimization.zero_quantized_weights", False),
        quantises_frozen=flag(zero, "zero_optimization.zero_quantized_nontrainable_weights", False),
        quantises_gradients=flag(zero, "zero_optimization.zero_quantized_gradients", False),
    )
    return replace(read, unit=_unit(zero, read))


def _unit(zero: Mapping[str, Any], read: GatherConfiguration) -> str:
    """Return the unit that one message gathers. ``auto`` becomes ``module`` if another key works only with modules."""
    unit = zero.get("stage3_gather_unit", MODULE)
    if unit not in (MODULE, "block", "auto"):
        raise wrong("zero_optimization.stage3_gather_unit", unit, "module, block or auto")
    offload = section(zero, "offload_param").get("device") not in (None, "none")
    all_reduces = not flag(zero, "zero_optimization.reduce_scatter", True) and flag(
        zero, "zero_optimization.contiguous_gradients", True
    )
    reduction = zero.get("gradient_reduction", "auto")
    granularity = count(zero, _key(zero, "module_granularity_threshold"), 0, least=-(2**63)) or 0
    by_module = {
        "stage3_allgather_sequential": read.sequential,
        "stage3_use_all_reduce_for_fetch_params": read.gathers_by_all_reduce,
        "stage3_module_granularity_threshold": granularity > 0,
        "leaf_module": any(section(zero, "leaf_module").values()),
        "zero_hpz_partition_size": read.secondary_size > 1,
        "quantization": read.quantises or read.quantises_frozen or read.quantises_gradients,
        "enable_sanity_checks": read.sanity_checks,
        "offload_param": offload or flag(zero, "zero_optimization.cpu_offload_param", None),
        "an all_reduce of gradients": reduction == "all_reduce" or (reduction == "auto" and all_reduces),
    }
    reasons = [name for name, is_set in by_module.items() if is_set]
    if unit == MODULE or not reasons:
        return str(unit)
    if unit == "auto":
        return MODULE
    raise UnsupportedError(
        "zero_optimization.stage3_gather_unit", unit, f"the runtime refuses it with {', '.join(reasons)}"
    )


def _key(zero: Mapping[str, Any], name: str) -> str:
    prefixed = f"stage3_{name}"
    return f"zero_optimization.{prefixed if prefixed in zero else name}"


def _limit(zero: Mapping[str, Any], name: str, default: int) -> int:
    value = count(zero, _key(zero, name), default, least=0)
    return default if value is None else value


def _names(leaf: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = leaf.get(key) or ()
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise wrong(f"zero_optimization.leaf_module.{key}", value, "a list of names")
    return tuple(str(name) for name in value)
