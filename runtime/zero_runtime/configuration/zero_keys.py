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
_AUTO: Final = "; auto: the smallest number of elements that reaches 90 % of the bandwidth"
_OFFLOAD: Final = "offload"
_ZENFLOW: Final = "ZenFlow"
ANY_LAYOUT: Final = "every checkpoint loads at any world size and stage"

ZENFLOW: Final[Table] = {
    "topk_ratio": later(number(0.0), 0.1, "share of the gradients that is updated at once", _ZENFLOW),
    "select_strategy": later(text, "auto", "when the share of topk_ratio is selected again", _ZENFLOW),
    "select_interval": later(anything, "auto", "steps between two choices", _ZENFLOW),
    "update_interval": later(anything, "auto", "steps between two updates of the rest", _ZENFLOW),
    "overlap_step": later(boolean, False, "update the rest during training", _ZENFLOW),
    "offload": later(boolean, False, "keep gradients in host memory", _ZENFLOW),
    "auto_ratio": later(number(0.0), 0.99, "threshold of the automatic interval", _ZENFLOW),
    "full_warm_up_rounds": later(_SIZE, 0, "steps before the share is chosen", _ZENFLOW),
    "pt_reserved_cores_perc": later(
        number(0.0), 0.5, "share of the cores that is reserved for torch", _ZENFLOW
    ),
    "steps_per_epoch": later(optional(_SIZE), None, "steps of an epoch", _ZENFLOW),
}

LEAF_MODULE: Final[Table] = {
    "classes": stage_3(string_or_strings, (), "classes of modules that are gathered as one"),
    "names": stage_3(string_or_strings, (), "names of modules that are gathered as one"),
    "name_suffixes": stage_3(string_or_strings, (), "name suffixes of modules that are gathered as one"),
}

ZERO: Final[Table] = {
    "stage": used(
        integer(0),
        0,
        "what is sharded. 0: nothing; 1: optimizer state; 2: also gradients; 3: also parameters",
    ),
    "contiguous_gradients": used(
        boolean, True, "copy gradients into one buffer; false overrides the next two keys"
    ),
    "reduce_scatter": used(
        boolean,
        True,
        "stages 1 and 2: reduce gradients to their owners as set by the next key; stage 3: use reduce_scatter",
    ),
    "use_multi_rank_bucket_allreduce": used(
        boolean,
        True,
        "stages 1 and 2: one all_reduce over the shards of all owners, instead of one reduce for each owner",
    ),
    "gradient_reduction": used(
        choice("auto", *REDUCTIONS),
        "auto",
        "how gradients are reduced; auto follows the three keys above. Not a key of DeepSpeed",
    ),
    "reduce_scatter_impl": used(
        choice("auto", "native", "all_to_all"),
        "auto",
        "how a reduce_scatter is implemented; auto is all_to_all and a local sum on gloo. Not a key of DeepSpeed",
    ),
    "reduce_bucket_size": used(
        either("auto", integer(1)),
        500_000_000,
        "elements of a gradient bucket; at stage 0 only with gradient_reduction all_reduce and overlap_comm true"
        + _AUTO,
    ),
    "gradient_accumulation_reduce": used(
        choice(EACH, BOUNDARY, "auto"),
        EACH,
        "stages 2 and 3: when gradients are reduced. each: in each micro-batch; boundary: once per step, in the last "
        "micro-batch, so each rank keeps whole gradients until then; auto: boundary if whole gradients fit in memory. "
        "Not a key of DeepSpeed",
    ),
    "gradient_accumulation_limit": used(
        optional(integer(0)),
        None,
        "bytes of whole gradients that gradient_accumulation_reduce auto may keep; null: half of the free memory, "
        "less the states of the engine. Not a key of DeepSpeed",
    ),
    "allgather_partitions": used(boolean, True, "stages 1 and 2: false broadcasts each rank's shard instead"),
    "allgather_bucket_size": used(
        optional(either("auto", integer(0))),
        None,
        "stages 1 and 2: elements of a message that gathers parameters; null or 0: one message for all"
        + _AUTO,
    ),
    "overlap_comm": used(
        optional(boolean),
        None,
        "reduce gradients during the backward pass; null means true at stage 3, and at stage 2 with gradient_reduction "
        "reduce_scatter; at stage 0, only with gradient_reduction all_reduce",
    ),
    "compute_grad_norm": used(
        boolean, True, "stages 1 and 2: compute the norm of gradients even if they are not clipped"
    ),
    "overlap_parameter_gather": used(
        boolean,
        False,
        "stages 1 and 2: gather updated parameters during the next forward pass. Not a key of DeepSpeed",
    ),
    "round_robin_gradients": used(boolean, False, "stages 1 and 2: assign parameters to the ranks in turn"),
    "parameter_alignment": used(boolean, False, "stages 1 and 2: pad each parameter to 16 bytes"),
    "load_from_fp32_weights": used(boolean, True, "load master weights from a checkpoint's fp32 copy"),
    "elastic_checkpoint": inert(boolean, False, "write checkpoints without padding", ANY_LAYOUT),
    "ignore_unused_parameters": used(
        boolean,
        True,
        "treat a missing gradient as zeros; false makes it an error at stages 1 and 2 with offload_optimizer",
    ),
    "offload_param": stage_3(
        optional(inside(OFFLOAD_PARAM)), None, "shards of parameters in host memory or in files"
    ),
    "offload_params": stage_3(
        optional(mapping), None, "another spelling of offload_param; a notice reports it"
    ),
    "offload_optimizer": used(
        optional(inside(OFFLOAD_OPTIMIZER)), None, "optimizer state in host memory or in files"
    ),
    "cpu_offload": used(optional(boolean), None, "old form of offload_optimizer.device cpu"),
    "cpu_offload_param": stage_3(optional(boolean), None, "old form of offload_param.device cpu"),
    "cpu_offload_use_pin_memory": inert(
        optional(boolean), None, "use page-locked host memory", "it has no effect in DeepSpeed either"
    ),
    "zenflow": later(optional(inside(ZENFLOW)), None, "update the most important gradients first", _ZENFLOW),
    "sub_group_size": used(
        integer(0),
        1_000_000_000,
        "elements that the optimizer updates together; at stages 1 and 2, only with an offloaded optimizer",
    ),
    **{
        prefix + name: stage_3(check, default, meaning if prefix else f"another name of stage3_{name}")
        for name, check, default, meaning in (
            (
                "prefetch_bucket_size",
                either("auto", _SIZE),
                50_000_000,
                "elements that are prefetched; 0 disables prefetching" + _AUTO,
            ),
            (
                "param_persistence_threshold",
                _SIZE,
                100_000,
                "parameters of at most this many elements persist (are not released)",
            ),
            (
                "model_persistence_threshold",
                _SIZE,
                2**63 - 1,
                "total number of elements that may stay gathered",
            ),
            (
                "max_live_parameters",
                _SIZE,
                1_000_000_000,
                "no parameter is prefetched beyond this many gathered elements",
            ),
            (
                "max_reuse_distance",
                _SIZE,
                1_000_000_000,
                "do not release a parameter that is used again within this many elements",
            ),
            ("gather_16bit_weights_on_model_save", boolean, False, "save_16bit_model may gather the model"),
            (
                "module_granularity_threshold",
                integer(-(2**63)),
                0,
                "modules of at most this many elements per layer are gathered as one; 0: no modules",
            ),
            (
                "use_all_reduce_for_fetch_params",
                boolean,
                False,
                "gather by an all_reduce of a buffer of zeros",
            ),
            ("allgather_sequential", boolean, False, "gather each parameter in a separate all_gather"),
        )
        for prefix in ("stage3_", "")
    },
    "stage3_gather_unit": stage_3(
        choice("module", "block", "auto"),
        "module",
        "what one message gathers: a module's own parameters, as in DeepSpeed, or those of a block such as a layer; auto "
        "chooses by the model. Not a key of DeepSpeed",
    ),
    "stage3_gather_fp16_weights_on_model_save": stage_3(
        boolean, False, "old name of stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_hpz_partition_size": stage_3(
        _SIZE,
        1,
        "number of ranks in the second, smaller group, which gathers parameters for the backward pass",
    ),
    "zero_quantized_weights": used(boolean, False, "stages 1 to 3: gather parameters in 8 bits"),
    "zero_quantized_nontrainable_weights": stage_3(boolean, False, "gather frozen parameters in 8 bits"),
    "zero_quantized_gradients": used(boolean, False, "stages 1 to 3: reduce gradients in 4 bits"),
    "memory_efficient_linear": stage_3(
        boolean, True, "linear layers keep no gathered weight for the backward pass"
    ),
    "log_trace_cache_warnings": stage_3(boolean, False, "warn if modules run in another order than recorded"),
    "enable_sanity_checks": stage_3(boolean, False, "the ranks compare the contents of each gradient bucket"),
    "leaf_module": stage_3(optional(inside(LEAF_MODULE)), None, "modules that are gathered as one"),
    "pipeline_loading_checkpoint": inert(
        boolean, False, "load a checkpoint rank by rank", "each rank reads only what it needs"
    ),
    "override_module_apply": inert(
        boolean,
        True,
        "module.apply gathers parameters",
        "exception: inside zero.Init, false stops module.apply from gathering parameters",
    ),
    "save_muon_momentum_buffer_in_memory": inert(
        boolean, False, "keep Muon's momentum off NVMe", "Muon's state is never in files"
    ),
    "legacy_stage1": refused(
        "the old ZeRO stage 1 no longer exists, in DeepSpeed either; use stage 1",
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
        "only parameters of modules of these classes are partitioned; see docs/stage3.md. Not a key of DeepSpeed",
    ),
    "zero_force_param_types": used(
        optional(strings),
        None,
        "parameters of modules of these classes are never partitioned. Not a key of DeepSpeed",
    ),
    "hierarchical_compress": used(
        boolean, False, "the same as gradient_compression.hierarchical_compress. Not a key of DeepSpeed"
    ),
}
