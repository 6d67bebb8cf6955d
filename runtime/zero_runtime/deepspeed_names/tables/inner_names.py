"""Internal names of DeepSpeed that scripts use and this runtime refuses, since it works differently."""

from __future__ import annotations

from typing import Final

from zero_runtime.deepspeed_names.tables.names import Module, Name, names_from, refused, values

_HERE: Final = "zero_runtime.deepspeed_names"
CHECKPOINTS: Final = (
    "use engine.load_checkpoint or get_fp32_state_dict_from_zero_checkpoint to read checkpoints"
)
_UNIVERSAL: Final = (
    "every checkpoint of this runtime loads at any world size and stage. To convert checkpoints of "
    "DeepSpeed, use `python -m zero_runtime.checkpoint`"
)
_STAGE_3: Final = (
    "at stage 3, this runtime stores shards separately from the parameters. It replaces nothing inside "
    "modules"
)
_QUANTIZED: Final = (
    "set the keys zero_quantized_weights and zero_quantized_gradients, which quantize messages without this "
    "class"
)

# Internals of deepspeed.runtime.zero.partition_parameters and related modules.
PARAMETERS: Final[dict[str, Name]] = {
    **refused(
        _STAGE_3,
        "AllGatherCoalescedHandle", "AllGatherHandle", "InsertPostInitMethodToModuleSubClasses", "MultipleAllGatherHandles",
        "NoGatherCoalescedHandle", "NoGatherHandle", "get_allgather_dtype", "zero3_linear_wrap",
        "shutdown_init_context", "restore_init_context",
    ),
    **names_from("zero_runtime.sharding.sharded_construction", zero_wrapper_for_fp_tensor_constructor="typed_factory"),
    **names_from(
        "torch",
        **{
            f"_orig_torch_{name}": name
            for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")
        },
    ),
    **names_from(f"{_HERE}.devices.accelerator", "get_accelerator"),
    **refused(_QUANTIZED, "CUDAQuantizer"),
    **values(partitioned_param_data_shape=[0]),
}  # fmt: skip

_CONSTANTS: Final = {
    "OPTIMIZER_STATE_DICT": "optimizer_state_dict", "FP32_GROUPS": "fp32_groups", "FP32_FLAT_GROUPS": "fp32_flat_groups",
    "BASE_OPTIMIZER_STATE": "base_optimizer_state", "BASE_OPTIMIZER_STATE_STEP": "base_optimizer_state_step",
    "SINGLE_PARTITION_OF_FP32_GROUPS": "single_partition_of_fp32_groups", "PARAM_GROUPS": "param_groups",
    "GROUP_PADDINGS": "group_paddings", "PARTITION_COUNT": "partition_count", "ZERO_STAGE": "zero_stage",
    "CLIP_GRAD": "clip_grad", "FP32_WEIGHT_KEY": "fp32", "LOSS_SCALER": "loss_scaler", "PARAM": "param",
    "PARAM_SHAPES": "param_shapes", "BUFFER_NAMES": "buffer_names", "FROZEN_PARAM_SHAPES": "frozen_param_shapes",
    "FROZEN_PARAM_FRAGMENTS": "frozen_param_fragments", "MODEL_FILE_PREFIX": "mp_rank_",
    "ZERO_FILE_PREFIX": "zero_pp_rank_", "OPTIM_FILE_SUFFIX": "_optim_states.pt", "MODEL_FILE_SUFFIX": "_model_states.pt",
    "LAYER_FILE_PREFIX": "layer_", "BF16_ZERO_FILE_PREFIX": "bf16_zero_pp_rank_",
    "FP16_ZERO_FILE_PREFIX": "fp16_zero_pp_rank_", "DS_VERSION": "ds_version",
    "UNIVERSAL_CHECKPOINT_INFO": "universal_checkpoint_info",
    "UNIVERSAL_CHECKPOINT_VERSION_KEY": "universal_checkpoint_version", "CAT_DIM": "cat_dim",
    "CHECKPOINT_PARALLEL_DIMS": "checkpoint_parallel_dimensions", "CHECKPOINT_PP_DEGREE": "pp_degree",
    "CHECKPOINT_TP_DEGREE": "tp_degree", "AUTOEP_LAYERS_KEY": "ds_autoep_layers",
}  # fmt: skip

MODULES: Final[dict[str, Module]] = {
    "checkpoint": Module(
        refused(
            CHECKPOINTS,
            "DeepSpeedCheckpoint", "ZeROCheckpoint", "get_model_3d_descriptor", "model_3d_desc", "reshape_meg_2d_parallel",
            "merge_state", "get_layer_ckpt_name_for_rank", "get_model_ckpt_name_for_rank", "get_zero_ckpt_name_for_rank",
        )
        | refused(_UNIVERSAL, "enable_universal_checkpoint", "SubparamShape")
        | values(**_CONSTANTS)
    ),
    "checkpoint.utils": Module(
        names_from(f"{_HERE}.training.zero_checks", "clone_tensors_for_torch_save")
        | refused(
            CHECKPOINTS,
            "get_layer_ckpt_name_for_rank", "get_model_ckpt_name_for_rank", "get_zero_ckpt_name_for_rank",
        )
    ),
    "checkpoint.deepspeed_checkpoint": Module(refused(CHECKPOINTS, "DeepSpeedCheckpoint")),
    "checkpoint.ds_to_universal": Module(refused=_UNIVERSAL),
    "checkpoint.universal_checkpoint": Module(refused=_UNIVERSAL),
    "checkpoint.constants": Module(values(**_CONSTANTS)),
    "runtime.zero.parameter_offload": Module(
        refused(
            "deepspeed.initialize sets up stage 3",
            "DeepSpeedZeRoOffload", "ZeROOrderedDict", "ensure_zero_ordered_dict",
        )
    ),
    "runtime.zero.linear": Module(
        refused(
            "zero_optimization.memory_efficient_linear controls which tensors linear layers save for the "
            "backward pass",
            "LinearFunctionForZeroStage3", "LinearModuleForZeroStage3", "zero3_linear_wrap",
        )
    ),
    "runtime.torch_autocast": Module(
        refused(
            "the block torch_autocast in the configuration sets the dtypes",
            "get_comm_dtype",
            "has_comm_dtype",
        )
    ),
    "runtime.sparse_tensor": Module(
        refused("in this runtime, gradients of embeddings are dense", "SparseTensor")
    ),
    "runtime.activation_checkpointing.offload_activations": Module(
        refused="set activation_checkpointing.cpu_checkpointing, which keeps the inputs of checkpointed "
        "functions in host memory"
    ),
    "utils.pin_memory_tracker": Module(
        names_from(
            f"{_HERE}.devices.pin_memory_tracker",
            "pinned_memory_summary", "track_pinned_memory", _fmt_bytes="shown_bytes", _tracker="tracker",
            note="these count only the memory that the script reports. torch.cuda.host_memory_stats() counts "
            "all page-locked memory",
        )
    ),
}  # fmt: skip
