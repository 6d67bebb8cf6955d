"""The table of the keys of ``zero_optimization``: DeepSpeed 0.19.8's and this runtime's own."""

from __future__ import annotations

from typing import Final

from zero_runtime.configuration.blocks.offload_block import OFFLOAD_OPTIMIZER
from zero_runtime.configuration.blocks.offload_param_block import OFFLOAD_PARAM
from zero_runtime.configuration.reading.checks import (
    anything,
    boolean,
    choice,
    either,
    integer,
    mapping,
    number,
    optional,
    string_or_strings,
    strings,
    text,
)
from zero_runtime.configuration.reading.key_table import (
    Table,
    inert,
    inside,
    later,
    refused,
    stage_3,
    used,
)
from zero_runtime.gradient_reduction.reduction import REDUCTIONS
from zero_runtime.gradient_reduction.stages import BOUNDARY, EACH

_SIZE: Final = integer(0)
_AUTO: Final = ". With auto, it is the size of the smallest message that reaches 90 % of the full bandwidth"
_OFFLOAD: Final = "offload"
_ZENFLOW: Final = "ZenFlow"
ANY_LAYOUT: Final = "every checkpoint loads at any world size and stage"

ZENFLOW: Final[Table] = {
    "topk_ratio": later(number(0.0), 0.1, "the share of the gradients that is updated immediately", _ZENFLOW),
    "select_strategy": later(
        text, "auto", "the rule that decides when the share of topk_ratio is selected again", _ZENFLOW
    ),
    "select_interval": later(anything, "auto", "the number of steps between two selections", _ZENFLOW),
    "update_interval": later(
        anything, "auto", "the number of steps between two updates of the remaining gradients", _ZENFLOW
    ),
    "overlap_step": later(boolean, False, "update the remaining gradients during training", _ZENFLOW),
    "offload": later(boolean, False, "keep gradients in host memory", _ZENFLOW),
    "auto_ratio": later(number(0.0), 0.99, "the threshold for the automatic interval", _ZENFLOW),
    "full_warm_up_rounds": later(
        _SIZE, 0, "the number of steps before the share is selected for the first time", _ZENFLOW
    ),
    "pt_reserved_cores_perc": later(
        number(0.0), 0.5, "the share of the CPU cores that is reserved for torch", _ZENFLOW
    ),
    "steps_per_epoch": later(optional(_SIZE), None, "the number of steps in an epoch", _ZENFLOW),
}

LEAF_MODULE: Final[Table] = {
    "classes": stage_3(
        string_or_strings, (), "classes of modules that are gathered together with their submodules"
    ),
    "names": stage_3(
        string_or_strings, (), "names of modules that are gathered together with their submodules"
    ),
    "name_suffixes": stage_3(
        string_or_strings,
        (),
        "suffixes of the names of modules that are gathered together with their submodules",
    ),
}

ZERO: Final[Table] = {
    "stage": used(
        integer(0),
        0,
        "what is sharded. Stage 0 shards nothing. Stage 1 shards the optimizer state, stage 2 also the "
        "gradients, and stage 3 also the parameters",
    ),
    "contiguous_gradients": used(
        boolean,
        True,
        "copy gradients into one buffer. If false, the next two keys have no effect: gradients are then "
        "reduced with all_reduce at stages 0 to 2, and with reduce_scatter at stage 3",
    ),
    "reduce_scatter": used(
        boolean,
        True,
        "at stages 1 and 2, reduce gradients to their owners in the way that the next key selects. At "
        "stage 3, reduce gradients with reduce_scatter",
    ),
    "use_multi_rank_bucket_allreduce": used(
        boolean,
        True,
        "stages 1 and 2: use one all_reduce for the shards of all owners, instead of one reduce for each "
        "owner",
    ),
    "gradient_reduction": used(
        choice("auto", *REDUCTIONS),
        "auto",
        "how gradients are reduced. With auto, the three keys above decide. Not a key of DeepSpeed",
    ),
    "reduce_scatter_impl": used(
        choice("auto", "native", "all_to_all"),
        "auto",
        "how a reduce_scatter is implemented. On gloo, auto uses an all_to_all and a local sum. Not a key "
        "of DeepSpeed",
    ),
    "reduce_bucket_size": used(
        either("auto", integer(1)),
        500_000_000,
        "the number of elements in a gradient bucket. At stage 0, this key has an effect only if "
        "gradient_reduction is all_reduce and overlap_comm is true" + _AUTO,
    ),
    "gradient_accumulation_reduce": used(
        choice(EACH, BOUNDARY, "auto"),
        EACH,
        "stages 2 and 3: when gradients are reduced. With `each`, they are reduced in every micro-batch. "
        "With `boundary`, they are reduced once per step, in the last micro-batch. Each rank then keeps "
        "whole gradients until the last micro-batch. The value `auto` means `boundary` if whole gradients "
        "fit in memory, and `each` otherwise. Not a key of DeepSpeed",
    ),
    "gradient_accumulation_limit": used(
        optional(integer(0)),
        None,
        "the largest number of bytes of whole gradients that a rank may keep if "
        "gradient_accumulation_reduce is auto. With null, whole gradients and the states of the "
        "engine may together take half of the free memory. Not a key of DeepSpeed",
    ),
    "allgather_partitions": used(
        boolean,
        True,
        "stages 1 and 2: gather the updated parameters with an all_gather. If false, each rank broadcasts "
        "its shard instead",
    ),
    "allgather_bucket_size": used(
        optional(either("auto", integer(0))),
        None,
        "stages 1 and 2: the number of elements in a message that gathers parameters. With null or 0, one "
        "message gathers all parameters" + _AUTO,
    ),
    "overlap_comm": used(
        optional(boolean),
        None,
        "reduce gradients during the backward pass. The default, null, means true at stage 3, and also at "
        "stage 2 if gradient_reduction is reduce_scatter. At stage 0, this key has an effect only if "
        "gradient_reduction is all_reduce",
    ),
    "compute_grad_norm": used(
        boolean, True, "stages 1 and 2: compute the norm of the gradients even if gradients are not clipped"
    ),
    "overlap_parameter_gather": used(
        boolean,
        False,
        "stages 1 and 2: gather the updated parameters during the next forward pass. Not a key of DeepSpeed",
    ),
    "round_robin_gradients": used(boolean, False, "stages 1 and 2: assign parameters to the ranks in turn"),
    "parameter_alignment": used(
        boolean, False, "stages 1 and 2: pad each parameter to a multiple of 16 bytes"
    ),
    "load_from_fp32_weights": used(
        boolean, True, "load the master weights from the fp32 copy in a checkpoint"
    ),
    "elastic_checkpoint": inert(boolean, False, "write checkpoints without padding", ANY_LAYOUT),
    "ignore_unused_parameters": used(
        boolean,
        True,
        "treat a missing gradient as zeros. If false, a missing gradient is an error at stages 1 and 2 "
        "with offload_optimizer",
    ),
    "offload_param": stage_3(
        optional(inside(OFFLOAD_PARAM)), None, "store the shards of parameters in host memory or in files"
    ),
    "offload_params": stage_3(
        optional(mapping), None, "another spelling of offload_param. A notice reports its use"
    ),
    "offload_optimizer": used(
        optional(inside(OFFLOAD_OPTIMIZER)), None, "store the optimizer state in host memory or in files"
    ),
    "cpu_offload": used(optional(boolean), None, "the old form of offload_optimizer with device cpu"),
    "cpu_offload_param": stage_3(optional(boolean), None, "the old form of offload_param with device cpu"),
    "cpu_offload_use_pin_memory": inert(
        optional(boolean), None, "use page-locked host memory", "it has no effect in DeepSpeed either"
    ),
    "zenflow": later(optional(inside(ZENFLOW)), None, "update the most important gradients first", _ZENFLOW),
    "sub_group_size": used(
        integer(0),
        1_000_000_000,
        "the number of elements that the optimizer updates together. At stages 1 and 2, this key has an "
        "effect only with an offloaded optimizer",
    ),
    **{
        prefix + name: stage_3(check, default, meaning if prefix else f"another name for stage3_{name}")
        for name, check, default, meaning in (
            (
                "prefetch_bucket_size",
                either("auto", _SIZE),
                50_000_000,
                "the number of elements to prefetch at once. The value 0 disables prefetching" + _AUTO,
            ),
            (
                "param_persistence_threshold",
                _SIZE,
                100_000,
                "parameters with at most this many elements persist, which means that they are not released",
            ),
            (
                "model_persistence_threshold",
                _SIZE,
                2**63 - 1,
                "the largest total number of elements that may persist",
            ),
            (
                "max_live_parameters",
                _SIZE,
                1_000_000_000,
                "no parameter is prefetched while this many elements are gathered",
            ),
            (
                "max_reuse_distance",
                _SIZE,
                1_000_000_000,
                "a parameter is not released if it is used again within this many elements",
            ),
            (
                "gather_16bit_weights_on_model_save",
                boolean,
                False,
                "allow save_16bit_model to gather the model",
            ),
            (
                "module_granularity_threshold",
                integer(-(2**63)),
                0,
                "a module is gathered together with its submodules if the number of its elements, divided by "
                "the number of modules with parameters in it, is at most this value. The value 0 disables "
                "this",
            ),
            (
                "use_all_reduce_for_fetch_params",
                boolean,
                False,
                "gather several parameters with one all_reduce. The buffer of each rank contains its "
                "shards, and zeros elsewhere",
            ),
            ("allgather_sequential", boolean, False, "gather each parameter with a separate all_gather"),
        )
        for prefix in ("stage3_", "")
    },
    "stage3_gather_unit": stage_3(
        choice("module", "block", "auto"),
        "module",
        "what one message gathers. With `module`, it gathers the parameters of a module without its "
        "submodules, as in DeepSpeed. With `block`, it gathers all parameters of a block, such as a layer. "
        "With `auto`, the model determines the value. Not a key of DeepSpeed",
    ),
    "stage3_gather_fp16_weights_on_model_save": stage_3(
        boolean, False, "the old name of stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_hpz_partition_size": stage_3(
        _SIZE,
        1,
        "the number of ranks in a second, smaller group of ranks. If parameters are gathered again before "
        "the next step, for example for the backward pass, they are gathered within this group",
    ),
    "zero_quantized_weights": used(boolean, False, "stages 1 to 3: gather parameters in 8 bits"),
    "zero_quantized_nontrainable_weights": stage_3(boolean, False, "gather frozen parameters in 8 bits"),
    "zero_quantized_gradients": used(boolean, False, "stages 1 to 3: reduce gradients in 4 bits"),
    "memory_efficient_linear": stage_3(
        boolean, True, "linear layers do not keep the gathered weight for the backward pass"
    ),
    "log_trace_cache_warnings": stage_3(
        boolean, False, "warn if the modules run in a different order than the recorded one"
    ),
    "enable_sanity_checks": stage_3(boolean, False, "the ranks compare the contents of each gradient bucket"),
    "leaf_module": stage_3(
        optional(inside(LEAF_MODULE)), None, "modules that are gathered together with their submodules"
    ),
    "pipeline_loading_checkpoint": inert(
        boolean, False, "load a checkpoint on one rank after another", "each rank reads only what it needs"
    ),
    "override_module_apply": inert(
        boolean,
        True,
        "module.apply gathers the parameters of each module while it calls its function with this module",
        "it has an effect only inside zero.Init, where false stops module.apply from gathering parameters",
    ),
    "save_muon_momentum_buffer_in_memory": inert(
        boolean, False, "keep Muon's momentum in memory, not on NVMe", "Muon's state is never in files"
    ),
    "legacy_stage1": refused(
        "the old ZeRO stage 1 no longer exists, neither in DeepSpeed nor in zero_runtime; use stage 1",
        "an old ZeRO stage 1",
    ),
    "mics_shard_size": refused(
        "MiCS has been removed from DeepSpeed; use stage 1, 2 or 3 without it", "MiCS"
    ),
    "mics_hierarchical_params_gather": refused(
        "MiCS has been removed from DeepSpeed; remove the key", "MiCS"
    ),
    "zeropp_loco_param": refused("LoCo has been removed from DeepSpeed; remove the key", "LoCo"),
    "zero_allowed_param_types": used(
        optional(strings),
        None,
        "partition only the parameters of modules of these classes. See docs/stage3.md. Not a key of "
        "DeepSpeed",
    ),
    "zero_force_param_types": used(
        optional(strings),
        None,
        "never partition the parameters of modules of these classes. Not a key of DeepSpeed",
    ),
    "hierarchical_compress": used(
        boolean, False, "the same as gradient_compression.hierarchical_compress. Not a key of DeepSpeed"
    ),
}
