"""DeepSpeed's names in ``deepspeed.utils`` and ``deepspeed.ops``."""

from __future__ import annotations

from typing import Final

from zero_runtime.deepspeed_names.devices.op_builders import BUILDERS
from zero_runtime.deepspeed_names.tables.names import Module, Name, Value, names_from, refused
from zero_runtime.deepspeed_names.tables.top_names import EXPERTS, KERNELS

_HERE: Final = "zero_runtime.deepspeed_names"

LOGGING: Final[dict[str, Name]] = names_from(
    f"{_HERE}.ranks.logging_names",
    "LoggerFactory", "get_current_level", "get_dist_msg", "get_log_level_from_string", "log_dist", "log_dist_once",
    "log_levels", "logger", "print_configuration", "print_dist", "print_json_dist", "set_log_level_from_string",
    "should_log_le", "warning_once",
)  # fmt: skip

TENSORS: Final[dict[str, Name]] = names_from(
    "zero_runtime.tensor_access",
    "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state",
    "safe_set_full_grad", "safe_set_full_optimizer_state", "safe_update_full_grad_vectorized",
) | names_from(
    "zero_runtime.tensor_access",
    "safe_set_full_fp32_param",
    note="the model has the new value at once. In DeepSpeed at stage 3, it has the value after the next step",
) | names_from(
    "zero_runtime.tensor_access",
    "safe_get_local_fp32_param", "safe_get_local_grad", "safe_get_local_optimizer_state", "safe_set_local_fp32_param",
    "safe_set_local_grad", "safe_set_local_optimizer_state",
    note="they also work at stages 1 and 2",
)  # fmt: skip

LEAVES: Final[dict[str, Name]] = names_from(
    "zero_runtime.zero",
    "get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "unset_z3_leaf_modules", "z3_leaf_module",
) | names_from(
    f"{_HERE}.training.zero_checks", "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix"
)  # fmt: skip

_OF_AXES: Final = tuple(
    f"get_{axis}_{what}"
    for axis in ("data_parallel", "tensor_model_parallel", "model_parallel")
    for what in ("group", "world_size", "rank")
)
_UNDERLINED: Final = tuple(
    f"get_{axis}_parallel_{what}"
    for axis in ("data", "sequence", "sequence_data")
    for what in ("group", "world_size", "rank")
)
GROUPS: Final[dict[str, Name]] = {
    **names_from(f"{_HERE}.ranks.group_names", "initialize", "mpu", "mesh_device", "expert_tensor_parallel_world_size"),
    **names_from(f"{_HERE}.ranks.group_names",
        *_OF_AXES,
        note="they refer to the training that was initialized last. A group of one rank is None"),
    **names_from(f"{_HERE}.ranks.group_names",
        **{f"_{name}": name for name in (*_UNDERLINED, "get_model_parallel_world_size")}),
    **names_from(
        f"{_HERE}.ranks.group_names",
        "get_tensor_model_parallel_src_rank",
        "set_tensor_model_parallel_world_size",
        "set_tensor_model_parallel_rank",
        _get_data_parallel_group_ranks="get_data_parallel_ranks",
        _clone_world_group="get_data_parallel_group",
    ),
    **names_from(
        f"{_HERE}.ranks.group_names",
        note="they always refer to a group of one rank, and this group is None",
        _get_expert_model_parallel_world_size="get_single_world_size",
        _get_zero_param_intra_parallel_group="get_single_group",
        _zero_param_parallel_is_initialized="no_secondary_group",
    ),
    **names_from(
        f"{_HERE}.ranks.expert_group_names",
        **{
            f"_{name}": name
            for axis in ("expert_parallel", "expert_data_parallel")
            for name in (f"get_{axis}_{what}" for what in ("group", "group_dict", "group_ranks", "world_size", "rank"))
        },
        **{f"_{name}": name for name in (
            "get_max_expert_parallel_group", "get_max_expert_size", "get_max_expert_size_name",
            "get_expert_broadcast_src_rank",
        )},
        note="they refer to the training that was initialized last",
    ),
    **refused(EXPERTS, "_get_expert_parallel_ranks", "_create_expert_and_data_parallel"),
}  # fmt: skip

TIMERS: Final[dict[str, Name]] = names_from(
    f"{_HERE}.devices.timers",
    "BACKWARD_GLOBAL_TIMER", "BACKWARD_INNER_GLOBAL_TIMER", "BACKWARD_INNER_MICRO_TIMER", "BACKWARD_MICRO_TIMER",
    "BACKWARD_REDUCE_GLOBAL_TIMER", "BACKWARD_REDUCE_MICRO_TIMER", "FORWARD_GLOBAL_TIMER", "FORWARD_MICRO_TIMER",
    "NoopTimer",
    "PSUTILS_INSTALLED", "STEP_GLOBAL_TIMER", "STEP_MICRO_TIMER", "SynchronizedWallClockTimer", "trim_mean",
) | names_from("zero_runtime.training.throughput", "TIME_EPSILON", "ThroughputTimer")  # fmt: skip

CONSOLIDATION: Final[dict[str, Name]] = (
    names_from(
        "zero_runtime.checkpoint.consolidation",
        "convert_zero_checkpoint_to_fp32_state_dict",
        "get_fp32_state_dict_from_zero_checkpoint",
        "load_state_dict_from_zero_checkpoint",
    )
    | names_from(
        f"{_HERE}.training.checkpoint_files",
        "get_checkpoint_files",
        "get_model_state_file",
        "get_optim_files",
        note="they work for checkpoints that DeepSpeed wrote. Checkpoints of this runtime have other files",
    )
    | refused(
        "checkpoints of zero_runtime consist of other files than those of DeepSpeed. Use "
        "get_fp32_state_dict_from_zero_checkpoint, which "
        "reads checkpoints of this runtime and of DeepSpeed",
        "convert_zero_checkpoint_to_state_dict",
        "parse_model_states",
        "parse_optim_states",
    )
)

_CONTEXT: Final = names_from(f"{_HERE}.devices.device_context", "OnDevice", "instrument_w_nvtx")
_PATHS: Final = names_from(f"{_HERE}.training.numerics", "recursive_getattr", "recursive_setattr")

UTILS: Final[dict[str, Name]] = {
    **{name: LOGGING[name] for name in ("log_dist", "log_dist_once", "logger", "set_log_level_from_string")},
    **TENSORS,
    **LEAVES,
    **_CONTEXT,
    **_PATHS,
    **names_from("zero_runtime.training.data_loading", "RepeatingLoader"),
    **{name: row for name, row in GROUPS.items() if not name.startswith("_")},
}

_ADAM: Final = names_from(
    f"{_HERE}.training.optimizer_names",
    "DeepSpeedCPUAdam",
    "FusedAdam",
    note="the class is torch's AdamW or Adam, with the fused kernel where possible",
)
_LION: Final = names_from(f"{_HERE}.training.optimizer_names", "DeepSpeedCPULion", "FusedLion")
_ADAGRAD: Final = names_from(f"{_HERE}.training.optimizer_names", "DeepSpeedCPUAdagrad")
_LAMB: Final = names_from(f"{_HERE}.training.optimizer_names", "FusedLamb")
_ZENFLOW: Final = refused(
    "ZenFlow is not in this version",
    "ZenFlowCPUAdam",
    "ZenFlowSelectiveAdamW",
    "ZenFlowSelectiveAdamW_stage3",
)

_BUILDERS: Final[dict[str, Name]] = {
    **{name: Value(builder) for name, builder in BUILDERS.items()},
    **names_from(f"{_HERE}.devices.op_builders", "ALL_OPS", "OpBuilder"),
}

MODULES: Final[dict[str, Module]] = {
    "utils": Module(UTILS),
    "utils.logging": Module(LOGGING),
    "utils.tensor_fragment": Module(
        TENSORS
        | refused(
            "use safe_get_* and safe_set_* to access the values of the optimizer",
            "fragment_address",
            "tensor_fragment",
        )
    ),
    "utils.z3_leaf_module": Module(LEAVES),
    "utils.groups": Module(GROUPS),
    "utils.timer": Module(TIMERS),
    "utils.zero_to_fp32": Module(CONSOLIDATION, main="zero_runtime.checkpoint.__main__:main"),
    "utils.nvtx": Module(names_from(f"{_HERE}.devices.device_context", "instrument_w_nvtx")),
    "utils.init_on_device": Module(names_from(f"{_HERE}.devices.device_context", "OnDevice")),
    "utils.module_utils": Module(_PATHS),
    "utils.torch": Module(names_from(f"{_HERE}.training.numerics", "required_torch_version")),
    "utils.comms_logging": Module(
        names_from("zero_runtime.groups.comm_log", CommsLogger="CommLog", convert_size="shown_size")
    ),
    "utils.exceptions": Module(names_from("zero_runtime.errors", DeprecatedException="UnsupportedError")),
    "utils.types": Module(refused=KERNELS),
    "utils.numa": Module(
        refused="use `python -m zero_runtime.launch --bind_cores_to_rank` to bind ranks to cores"
    ),
    "utils.debug": Module(
        refused="use commprof, which records the collectives with the names of their parameters"
    ),
    "ops": Module(names_from(f"{_HERE}.devices.op_builders", __compatible_ops__="COMPATIBLE")),
    "ops.adam": Module(_ADAM | _ZENFLOW),
    "ops.adam.fused_adam": Module(names_from(f"{_HERE}.training.optimizer_names", "FusedAdam")),
    "ops.adam.cpu_adam": Module(names_from(f"{_HERE}.training.optimizer_names", "DeepSpeedCPUAdam")),
    "ops.adagrad": Module(_ADAGRAD),
    "ops.adagrad.cpu_adagrad": Module(_ADAGRAD),
    "ops.lamb": Module(_LAMB),
    "ops.lamb.fused_lamb": Module(_LAMB),
    "ops.lion": Module(_LION),
    "ops.lion.cpu_lion": Module(names_from(f"{_HERE}.training.optimizer_names", "DeepSpeedCPULion")),
    "ops.lion.fused_lion": Module(names_from(f"{_HERE}.training.optimizer_names", "FusedLion")),
    "ops.op_builder": Module(_BUILDERS),
    "ops.op_builder.builder": Module({"OpBuilder": _BUILDERS["OpBuilder"]}),
    "ops.op_builder.all_ops": Module(_BUILDERS),
    "ops.transformer": Module(refused=KERNELS),
    "ops.sparse_attention": Module(
        refused=f"{KERNELS}. For sparse attention, use torch.nn.attention.flex_attention"
    ),
    "ops.quantizer": Module(refused=KERNELS),
    "ops.fp_quantizer": Module(refused=KERNELS),
    "ops.random_ltd": Module(refused=KERNELS),
    "ops.deepspeed4science": Module(refused=KERNELS),
    "ops.aio": Module(
        {"AsyncIOBuilder": _BUILDERS["AsyncIOBuilder"]}
        | refused(
            "zero_runtime.offload reads and writes the files. `python -m zero_runtime.bench io` measures its "
            "speed",
            "aio_handle",
        )
    ),
    "ops.gds": Module(
        refused="this runtime does not read files from NVMe directly to the GPU. With the device nvme, data "
        "goes through host memory"
    ),
}  # fmt: skip
