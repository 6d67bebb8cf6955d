"""Lists the methods and functions of DeepSpeed 0.14 to 0.19 that issue collectives, each with its purpose.

The list was read from the sources of the releases 0.14.0 to 0.19.8. It was run with 0.19.8 only. A function
that another module imports by name is listed with the module that imports it. If calls are nested, the
innermost purpose applies, except when the program accesses whole parameters.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from commprof.schema import Purpose

Version = tuple[int, int]

FIRST_VERSION: Final[Version] = (0, 14)
LAST_VERSION: Final[Version] = (0, 19)


class Method(NamedTuple):
    """A method or function of DeepSpeed whose collectives have one purpose."""

    module: str
    path: str  # Class.method or function
    purpose: Purpose
    since: str = "0.14.0"  # the first release that has the method, among the releases that were read
    until: str = ""  # the first release that no longer has the method


_ENGINE: Final = "deepspeed.runtime.engine"
_STAGE_1_2: Final = "deepspeed.runtime.zero.stage_1_and_2"
_STAGE_3: Final = "deepspeed.runtime.zero.stage3"
_PARAMETERS: Final = "deepspeed.runtime.zero.partition_parameters"
_COORDINATOR: Final = "deepspeed.runtime.zero.partitioned_param_coordinator"
_BF16: Final = "deepspeed.runtime.bf16_optimizer"
_FUSED: Final = "deepspeed.runtime.fp16.fused_optimizer"
_UNFUSED: Final = "deepspeed.runtime.fp16.unfused_optimizer"
_PIPE: Final = "deepspeed.runtime.pipe.engine"
_PIPE_MODULE: Final = "deepspeed.runtime.pipe.module"

_12: Final = "DeepSpeedZeroOptimizer"
_3: Final = "DeepSpeedZeroOptimizer_Stage3"
_FETCHER: Final = "PartitionedParameterCoordinator"

# The formatter is off so that each method stays on one line.
# fmt: off
METHODS: Final[tuple[Method, ...]] = (
    Method(_ENGINE, "DeepSpeedEngine._broadcast_model", Purpose.PARAMETER_BROADCAST),
    Method(_ENGINE, "DeepSpeedEngine.sparse_allreduce", Purpose.GRADIENT_REDUCE),
    Method(_ENGINE, "DeepSpeedEngine.clip_fp32_gradients", Purpose.GRADIENT_NORM),
    Method(_ENGINE, "DeepSpeedEngine._commit_decoupled_checkpoint", Purpose.CHECKPOINT, "0.17.6"),
    Method(_STAGE_1_2, f"{_12}.gradient_reduction_w_predivide", Purpose.GRADIENT_REDUCE),
    Method(_STAGE_1_2, f"{_12}.allreduce_bucket", Purpose.GRADIENT_REDUCE),
    Method(_STAGE_1_2, f"{_12}.complete_grad_norm_calculation_for_cpu_offload", Purpose.GRADIENT_NORM),
    Method(_STAGE_1_2, f"{_12}.get_grad_norm_direct", Purpose.GRADIENT_NORM),
    Method(_STAGE_1_2, f"{_12}._average_expert_grad_norms", Purpose.GRADIENT_NORM),
    Method(_STAGE_1_2, f"{_12}.has_overflow", Purpose.OVERFLOW_CHECK),
    Method(_STAGE_1_2, "all_gather_dp_groups", Purpose.PARAMETER_GATHER),
    Method(_STAGE_1_2, f"{_12}._muon_all_gather_partitions", Purpose.OTHER, "0.19.8"),
    Method(_STAGE_1_2, f"{_12}.sequential_execution", Purpose.OTHER),
    Method(_STAGE_3, f"{_3}._{_3}__avg_scatter_contiguous_grads", Purpose.GRADIENT_REDUCE),
    Method(_STAGE_3, f"{_3}._{_3}__avg_scatter_grads", Purpose.GRADIENT_REDUCE),
    Method(_STAGE_3, f"{_3}.allreduce_bucket", Purpose.GRADIENT_REDUCE),
    Method(_STAGE_3, f"{_3}.complete_grad_norm_calculation_for_cpu_offload", Purpose.GRADIENT_NORM),
    Method(_STAGE_3, f"{_3}.get_grad_norm_direct", Purpose.GRADIENT_NORM),
    Method(_STAGE_3, f"{_3}.has_overflow", Purpose.OVERFLOW_CHECK),
    Method(_STAGE_3, f"{_3}._fp32_state_allgather", Purpose.PARAMETER_ACCESS),
    Method(_STAGE_3, f"{_3}._partitioned_buffers_all_gather", Purpose.OTHER, "0.19.0"),
    Method(_STAGE_3, f"{_3}._setup_for_real_optimizer", Purpose.OTHER),
    Method(_STAGE_3, f"{_3}._create_fp16_partitions_with_defragmentation", Purpose.OTHER),
    Method(_STAGE_3, f"{_3}.sequential_execution", Purpose.OTHER),
    Method(_PARAMETERS, "_dist_allgather_fn", Purpose.PARAMETER_GATHER),
    Method(_PARAMETERS, "Init._zero_init_param", Purpose.PARAMETER_BROADCAST),
    Method(_PARAMETERS, "Init._allgather_param", Purpose.PARAMETER_GATHER),
    Method(_PARAMETERS, "Init._allgather_params", Purpose.PARAMETER_GATHER, until="0.19.0"),
    Method(_PARAMETERS, "Init._allgather_params_coalesced", Purpose.PARAMETER_GATHER),
    Method(_PARAMETERS, "Init._allgather_params_sequential", Purpose.PARAMETER_GATHER, "0.19.0"),
    Method(_PARAMETERS, "Init._reduce_scatter_gradient", Purpose.GRADIENT_REDUCE),
    Method(_PARAMETERS, "GatheredParameters.__enter__", Purpose.PARAMETER_ACCESS),
    Method(_PARAMETERS, "GatheredParameters.__exit__", Purpose.PARAMETER_ACCESS),
    Method(_PARAMETERS, "assert_ints_same_as_other_ranks", Purpose.TRACE_CHECK),
    Method(_COORDINATOR, f"{_FETCHER}._{_FETCHER}__all_gather_params_", Purpose.PARAMETER_GATHER),
    Method(_COORDINATOR, "assert_ints_same_as_other_ranks", Purpose.TRACE_CHECK),
    Method("deepspeed.runtime.zero.utils", "get_lst_from_rank0", Purpose.TRACE_CHECK),
    Method("deepspeed.runtime.zero.utils", "assert_lst_len_same_as_other_ranks", Purpose.TRACE_CHECK, "0.17.6"),
    Method("deepspeed.runtime.utils", "CheckOverflow.check_using_norm", Purpose.OVERFLOW_CHECK),
    Method("deepspeed.runtime.utils", "CheckOverflow.has_overflow", Purpose.OVERFLOW_CHECK),
    Method("deepspeed.runtime.utils", "PartitionedTensor.full", Purpose.ACTIVATION),
    Method(_BF16, "all_gather_dp_groups", Purpose.PARAMETER_GATHER),
    Method(_BF16, "get_global_norm_of_tensors", Purpose.GRADIENT_NORM),
    Method(_BF16, "get_norm_with_moe_layers", Purpose.GRADIENT_NORM, "0.14.5"),
    Method(_FUSED, "get_flattened_grad_norm", Purpose.GRADIENT_NORM, "0.14.5"),
    Method(_FUSED, "get_norm_with_moe_layers", Purpose.GRADIENT_NORM, "0.14.5"),
    Method(_FUSED, "get_weight_norm", Purpose.GRADIENT_NORM),
    Method(_UNFUSED, "get_weight_norm", Purpose.GRADIENT_NORM),
    Method("deepspeed.utils.mixed_precision_linkage", "get_full_hp_param", Purpose.PARAMETER_ACCESS),
    Method("deepspeed.utils.mixed_precision_linkage", "get_full_hp_grad", Purpose.PARAMETER_ACCESS),
    Method("deepspeed.runtime.pipe.p2p", "send", Purpose.PIPELINE),
    Method("deepspeed.runtime.pipe.p2p", "recv", Purpose.PIPELINE),
    Method(_PIPE, "PipelineEngine.__init__", Purpose.OTHER),
    Method(_PIPE, "PipelineEngine._exec_reduce_tied_grads", Purpose.GRADIENT_REDUCE),
    Method(_PIPE, "PipelineEngine._reduce_outputs", Purpose.METRIC),
    Method(_PIPE, "PipelineEngine._bcast_pipe_scalar", Purpose.METRIC),
    Method(_PIPE, "PipelineEngine._aggregate_total_loss", Purpose.METRIC),
    Method(_PIPE_MODULE, "PipelineModule.allreduce_tied_weight_gradients", Purpose.GRADIENT_REDUCE),
    Method(_PIPE_MODULE, "PipelineModule._synchronize_tied_weights", Purpose.PARAMETER_BROADCAST),
    Method("deepspeed.moe.sharded_moe", "_AllToAll.forward", Purpose.ACTIVATION),
    Method("deepspeed.sequence.layer", "single_all_to_all", Purpose.ACTIVATION),
)
# fmt: on
