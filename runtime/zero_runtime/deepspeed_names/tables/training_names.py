"""DeepSpeed's names below ``deepspeed.runtime``, as far as scripts import them, and ``deepspeed.checkpoint``."""

from __future__ import annotations

from typing import Final

from zero_runtime.deepspeed_names.tables.inner_names import PARAMETERS
from zero_runtime.deepspeed_names.tables.names import Module, Name, live, names_from, refused, values
from zero_runtime.deepspeed_names.tables.top_names import PIPE, TENSOR_PARALLEL

_HERE: Final = "zero_runtime.deepspeed_names"
_STAGES: Final = (
    "use the class for `isinstance` checks of the engine's optimizer. deepspeed.initialize creates the "
    "instance"
)
MICS: Final = (
    "MiCS partitions parameters within groups of ranks, while this runtime partitions them over all ranks. "
    "With zero_hpz_partition_size, ranks keep a second shard within each host, which avoids the same messages"
)
_DATA: Final = "curriculum learning, random-LTD and data analysis are not in this version"
_ONEBIT: Final = (
    "the 1-bit optimizers have been removed from DeepSpeed. To use the 1-bit optimizers of zero_runtime, set "
    "optimizer.type to OneBitAdam, OneBitLamb or ZeroOneAdam"
)

_ENGINE: Final[dict[str, Name]] = {
    **names_from("zero_runtime.training.engine", DeepSpeedEngine="Engine"),
    **values(MEMORY_OPT_ALLREDUCE_SIZE=500_000_000),
    **refused(
        "this is an internal function with which DeepSpeed's engine writes metadata",
        "_checkpoint_parallel_metadata",
        "_eigenvalue_summary_events",
    ),
    **refused(
        "the key wall_clock_breakdown measures times, and engine.get_wall_clock_timers() returns them",
        "EngineTimers",
    ),
}
_INIT: Final = names_from(
    f"{_HERE}.training.init_context",
    "Init",
    note="if neither a config nor dtype is given, parameters keep the dtype in which the script creates them",
)
_GATHERED: Final = names_from(
    "zero_runtime.zero",
    "GatheredParameters",
    note="it may be nested, and the optimizer continues from changed values",
)
_PARAMETERS: Final[dict[str, Name]] = {
    **_INIT,
    **_GATHERED,
    **names_from(
        "zero_runtime.zero", "ZeroParamStatus", "register_external_parameter", "unregister_external_parameter"
    ),
    **names_from(f"{_HERE}.configs.config_object", "ZeroParamType"),
}
_TILES: Final = names_from(
    f"{_HERE}.training.tiling", "TiledLinear", "TiledLinearReturnBias", "split_tensor_along_last_dim"
)
_UNWRAP: Final = names_from(f"{_HERE}.training.zero_checks", "unwrap_model_for_generation")
_MEMORY_2: Final = names_from(
    "zero_runtime.memory_estimates",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
)
_MEMORY_3: Final = names_from(
    "zero_runtime.memory_estimates",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
)
_MICS_NAMES: Final = refused(MICS, "MiCS_Init", "MiCS_Offload", "MiCS_Optimizer")
_OPTIMIZERS: Final = names_from(
    "zero_runtime.optimizer_step.interface",
    DeepSpeedOptimizer="WrappedOptimizer",
    ZeROOptimizer="WrappedOptimizer",
    note=_STAGES,
)
_OFFLOAD_ENUMS: Final = names_from(
    f"{_HERE}.configs.config_object", "OffloadDeviceEnum", "OffloadStateTypeEnum"
)

_OFFLOAD_CONFIGS: Final = names_from(
    f"{_HERE}.configs.block_configurations",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
)

_SCHEDULES: Final[dict[str, Name]] = {
    **names_from(
        "zero_runtime.schedules", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"
    ),
    **names_from(
        f"{_HERE}.configs.schedule_arguments",
        "add_tuning_arguments",
        "get_config_from_args",
        "get_lr_from_config",
    ),
    **values(
        LR_SCHEDULE="lr_schedule",
        LR_RANGE_TEST="LRRangeTest",
        ONE_CYCLE="OneCycle",
        WARMUP_LR="WarmupLR",
        WARMUP_DECAY_LR="WarmupDecayLR",
        WARMUP_COSINE_LR="WarmupCosineLR",
        VALID_LR_SCHEDULES=["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"],
        LR_RANGE_TEST_MIN_LR="lr_range_test_min_lr",
        LR_RANGE_TEST_STEP_RATE="lr_range_test_step_rate",
        LR_RANGE_TEST_STEP_SIZE="lr_range_test_step_size",
        LR_RANGE_TEST_STAIRCASE="lr_range_test_staircase",
        CYCLE_MIN_LR="cycle_min_lr",
        CYCLE_MAX_LR="cycle_max_lr",
        CYCLE_FIRST_STEP_SIZE="cycle_first_step_size",
        CYCLE_SECOND_STEP_SIZE="cycle_second_step_size",
        CYCLE_FIRST_STAIR_COUNT="cycle_first_stair_count",
        CYCLE_SECOND_STAIR_COUNT="cycle_second_stair_count",
        CYCLE_MIN_MOM="cycle_min_mom",
        CYCLE_MAX_MOM="cycle_max_mom",
        DECAY_LR_RATE="decay_lr_rate",
        DECAY_MOM_RATE="decay_mom_rate",
        DECAY_STEP_SIZE="decay_step_size",
        WARMUP_MIN_LR="warmup_min_lr",
        WARMUP_MAX_LR="warmup_max_lr",
        WARMUP_NUM_STEPS="warmup_num_steps",
        WARMUP_TYPE="warmup_type",
        WARMUP_MIN_RATIO="warmup_min_ratio",
        COS_MIN_RATIO="cos_min_ratio",
        WARMUP_LOG_RATE="log",
        WARMUP_LINEAR_RATE="linear",
        TOTAL_NUM_STEPS="total_num_steps",
    ),
}

_NUMERICS: Final[dict[str, Name]] = {
    **names_from("zero_runtime.startup.memory_status", "see_memory_usage", "memory_status"),
    **names_from(
        f"{_HERE}.training.numerics",
        "DummyOptim", "call_to_str", "clip_grad_norm_", "clip_tensors_by_global_norm", "copy_to_device",
        "count_used_parameters_in_backward", "empty_cache",
        "ensure_directory_exists", "get_inactive_params",
        "is_model_parallel_parameter", "get_global_norm", "get_global_norm_of_tensors", "get_grad_norm",
        "get_only_unique_item", "get_weight_norm",
        "has_inf_or_nan", "move_to_device", "noop_context", "noop_decorator", "partition_balanced",
        "partition_uniform", "prefix_sum_inc", "required_torch_version", "set_random_seed",
    ),
    **names_from(f"{_HERE}.training.partitioned_tensor", "PartitionedTensor"),
    **refused("the engine checks for overflows, as the configuration requests", "CheckOverflow"),
}  # fmt: skip

_WORDS: Final = values(
    TRAIN_BATCH_SIZE="train_batch_size",
    TRAIN_MICRO_BATCH_SIZE_PER_GPU="train_micro_batch_size_per_gpu",
    GRADIENT_ACCUMULATION_STEPS="gradient_accumulation_steps",
    GRADIENT_CLIPPING="gradient_clipping",
    STEPS_PER_PRINT="steps_per_print",
    ROUTE_TRAIN="train",
    ROUTE_EVAL="eval",
    ROUTE_PREDICT="predict",
    ROUTE_ENCODE="encode",
)
_CONFIG: Final[dict[str, Name]] = {
    **_WORDS,
    **names_from(f"{_HERE}.configs.config_object", "DeepSpeedConfig", "ValidationMode", "ZeroStageEnum"),
    **names_from("zero_runtime.errors", DeepSpeedConfigError="ConfigError"),
    **values(
        ADAM_OPTIMIZER="adam",
        ADAMW_OPTIMIZER="adamw",
        ADAGRAD_OPTIMIZER="adagrad",
        LAMB_OPTIMIZER="lamb",
        LION_OPTIMIZER="lion",
        MUON_OPTIMIZER="muon",
        DEEPSPEED_OPTIMIZERS=["adagrad", "adam", "adamw", "lamb", "lion", "muon"],
    ),
}
_ZERO_CONFIG: Final[dict[str, Name]] = {
    **names_from(f"{_HERE}.configs.config_object", "ZeroStageEnum", "OffloadDeviceEnum"),
    **names_from(
        f"{_HERE}.configs.block_configurations",
        "DeepSpeedZeroConfig",
        "get_zero_config",
        note="its values are checked in the same way as the whole configuration",
    ),
    **_OFFLOAD_CONFIGS,
}

_ZERO: Final[dict[str, Name]] = {
    **{name: row for name, row in _PARAMETERS.items() if name != "unregister_external_parameter"},
    **{name: row for name, row in _TILES.items() if name.startswith("Tiled")},
    **_UNWRAP,
    **_MEMORY_2,
    **_MEMORY_3,
    **_MICS_NAMES,
}
_CHECKPOINTING: Final = names_from(
    "zero_runtime.activation_checkpointing",
    "CheckpointFunction", "CudaRNGStatesTracker",
    "checkpoint", "configure", "get_cuda_rng_tracker", "is_configured",
    "model_parallel_cuda_manual_seed", "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint", "partition_activations_in_checkpoint", "reset",
    "set_num_layers",
) | live(
    "zero_runtime.activation_checkpointing.process_settings",
    PARTITION_ACTIVATIONS="partitions_activations",
    CPU_CHECKPOINT="moves_to_host",
    CONTIGUOUS_CHECKPOINTING="uses_buffers",
    SYNCHRONIZE="synchronizes",
    PROFILE_TIME="measures_times",
)  # fmt: skip
_TOPOLOGY: Final = names_from(
    f"{_HERE}.ranks.rank_topology",
    "ProcessTopology",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    _prime_factors="prime_factors",
)

MODULES: Final[dict[str, Module]] = {
    "runtime": Module(_OPTIMIZERS),
    "runtime.engine": Module(_ENGINE),
    "runtime.base_optimizer": Module(
        _OPTIMIZERS
    ),
    "runtime.bf16_optimizer": Module(
        names_from("zero_runtime.optimizer_step.interface", BF16_Optimizer="WrappedOptimizer", note=_STAGES)
    ),
    "runtime.fp16": Module(),
    "runtime.fp16.fused_optimizer": Module(
        names_from("zero_runtime.optimizer_step.replicated_step", FP16_Optimizer="ReplicatedOptimizer", note=_STAGES)
    ),
    "runtime.fp16.unfused_optimizer": Module(
        names_from("zero_runtime.optimizer_step.replicated_step", FP16_UnfusedOptimizer="ReplicatedOptimizer", note=_STAGES)
    ),
    "runtime.fp16.loss_scaler": Module(
        names_from(
            f"{_HERE}.training.loss_scaler",
            "CONSECUTIVE_HYSTERESIS", "DELAYED_SHIFT", "DynamicLossScaler", "INITIAL_LOSS_SCALE", "LossScaler",
            "LossScalerBase",
            "MIN_LOSS_SCALE", "SCALE_WINDOW", "to_python_float", CreateLossScaler="make_loss_scaler",
        )
    ),
    "runtime.fp16.onebit": Module(refused=_ONEBIT),
    "runtime.zero": Module(_ZERO),
    "runtime.zero.partition_parameters": Module(_PARAMETERS | PARAMETERS),
    "runtime.zero.stage3": Module(
        _MEMORY_3
        | _UNWRAP
        | names_from("zero_runtime.optimizer_step.sharded_step",
            DeepSpeedZeroOptimizer_Stage3="ShardedOptimizer", note=_STAGES)
    ),
    "runtime.zero.stage_1_and_2": Module(
        _MEMORY_2
        | names_from("zero_runtime.optimizer_step.sharded_step", DeepSpeedZeroOptimizer="ShardedOptimizer", note=_STAGES)
    ),
    "runtime.zero.tiling": Module(_TILES),
    "runtime.zero.config": Module(_ZERO_CONFIG),
    "runtime.zero.offload_config": Module(_OFFLOAD_ENUMS | _OFFLOAD_CONFIGS),
    "runtime.zero.offload_states": Module(names_from("zero_runtime.training.moved_states", "get_state_devices")),
    "runtime.zero.leaf_module_config": Module(
        names_from(
            f"{_HERE}.configs.block_configurations",
            "DEFAULT_LEAF_MODULE_CLASSES", "DEFAULT_LEAF_MODULE_NAMES", "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
            "DeepSpeedZeroLeafModuleConfig",
        )
    ),
    "runtime.precision_config": Module(
        names_from(
            f"{_HERE}.configs.block_configurations",
            "DeepSpeedBF16Config", "DeepSpeedFP16Config", "get_bfloat16_config", "get_float16_config",
        )
    ),
    "runtime.zero.mics": Module(_MICS_NAMES),
    "runtime.zero.utils": Module(
        names_from(f"{_HERE}.training.zero_checks",
            "ZERO_SUPPORTED_OPTIMIZERS", "is_zero_param", "is_zero_supported_optimizer")
        | names_from(f"{_HERE}.training.zero_checks", "assert_ints_same_as_other_ranks", "get_lst_from_rank0")
        | names_from("zero_runtime.errors", ZeRORuntimeException="ZeroRuntimeError")
    ),
    "runtime.lr_schedules": Module(_SCHEDULES),
    "runtime.utils": Module(_NUMERICS),
    "runtime.config": Module(_CONFIG),
    "runtime.constants": Module({name: row for name, row in _CONFIG.items() if name in _WORDS or name == "ValidationMode"}),
    "runtime.config_utils": Module(
        names_from(
            f"{_HERE}.configs.config_model", "DeepSpeedConfigModel", note="it needs the package pydantic"
        )
        | refused("zero_runtime.config checks the configuration", "DeepSpeedConfigObject")
    ),
    "runtime.dataloader": Module(
        names_from("zero_runtime.training.data_loading", "RepeatingLoader", DeepSpeedDataLoader="RankLoader")
    ),
    "runtime.activation_checkpointing": Module(),
    "runtime.activation_checkpointing.checkpointing": Module(_CHECKPOINTING),
    "runtime.pipe": Module(PIPE | _TOPOLOGY),
    "runtime.pipe.module": Module(PIPE | names_from("zero_runtime.errors", PipelineError="UsageError")),
    "runtime.pipe.engine": Module(
        names_from("zero_runtime.pipeline.pipeline_engine", "PipelineEngine")
        | names_from("zero_runtime.errors", PipelineError="UsageError")
    ),
    "runtime.pipe.topology": Module(_TOPOLOGY),
    "runtime.pipe.schedule": Module(names_from(
        f"{_HERE}.configs.pipe_schedule",
        "BackwardPass", "BufferOpInstruction", "DataParallelSchedule", "ForwardPass", "InferenceSchedule", "LoadMicroBatch",
        "OptimizerStep", "PipeInstruction", "PipeSchedule", "RecvActivation", "RecvGrad", "ReduceGrads", "ReduceTiedGrads",
        "SendActivation", "SendGrad", "TrainSchedule",
    )),
    "runtime.pipe.p2p": Module(
        refused="pipeline stages exchange their tensors without this module. For other messages use "
        "torch.distributed"
    ),
    "runtime.hybrid_engine": Module(refused("the hybrid engine is not in this version", "DeepSpeedHybridEngine")),
    "runtime.data_pipeline": Module(refused=_DATA),
    "runtime.progressive_layer_drop": Module(refused=_DATA),
    "runtime.eigenvalue": Module(refused=_DATA),
    "runtime.quantize": Module(refused="quantization during training is not in this version"),
    "runtime.weight_quantizer": Module(refused="quantization is not in this version"),
    "runtime.sequence_parallel": Module(
        refused="use sequence_parallel_size in the configuration and "
        "deepspeed.sequence.layer.DistributedAttention to share sequences between ranks. Adapters for the "
        "models of transformers are not in this version"
    ),
    "runtime.tensor_parallel": Module(refused=TENSOR_PARALLEL),
    "runtime.domino": Module(
        refused="Domino's order of messages is not in this version. For tensor parallelism, "
        f"{TENSOR_PARALLEL}"
    ),
    "runtime.compiler": Module(
        names_from(f"{_HERE}.devices.compiling", "disable", "enable", "is_compile_supported", "is_compiling")
    ),
    "runtime.comm": Module(refused="zero_optimization.gradient_reduction sets how gradients are reduced"),
    "runtime.swap_tensor": Module(
        values(MIN_SWAPPABLE_BYTES=1024 * 1024)
        | refused(
            "use offload_optimizer and offload_param in the configuration for offload", "SwapBufferPool"
        )
    ),
    "runtime.state_dict_factory": Module(
        refused="this runtime does not read Megatron's checkpoints. Load a state dict of the model instead"
    ),
    "runtime.checkpoint_engine": Module(
        refused="this runtime has only one checkpoint format, which docs/checkpoints.md describes"
    ),
    "runtime.zenflow": Module(refused="ZenFlow is not in this version"),
    "runtime.superoffload": Module(refused="SuperOffload is not in this version"),
}  # fmt: skip
