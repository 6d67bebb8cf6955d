"""DeepSpeed's top-level names: ``deepspeed`` itself, ``deepspeed.comm``, ``deepspeed.accelerator``, ``deepspeed.pipe``."""

from __future__ import annotations

import datetime
from typing import Final

from zero_runtime.comm import DEFAULT_PORT
from zero_runtime.deepspeed_names.distribution import FOLLOWED, NAMES_VERSION
from zero_runtime.deepspeed_names.tables.names import Module, Name, live, names_from, refused, values

_HERE: Final = "zero_runtime.deepspeed_names"
INFERENCE: Final = (
    "inference engines are not part of this runtime. Call the model itself under torch.inference_mode()"
)
DUAL_PIPELINE: Final = (
    "pipelines that take micro-batches from both ends are not in this version. Use the schedule zero_bubble"
)
TENSOR_PARALLEL: Final = (
    "set tensor_parallel.autotp_size or tensor_parallel.plan in the configuration, and initialize partitions "
    "the model. The module zero_runtime.tensor_parallel has tensor-parallel layers"
)
EXPERTS: Final = "in this version, experts can be combined with data parallelism only"
KERNELS: Final = "zero_runtime builds and injects no kernels of its own. It uses torch's kernels"

LOG: Final = names_from(
    f"{_HERE}.ranks.comm_summary",
    "configure", "get_comm_operation_count", "get_logged_comm_ops", "has_comm_data", "reset_log",
) | names_from(
    f"{_HERE}.ranks.comm_summary",
    "log_summary",
    note="each call is timed separately. Bandwidths are computed as in nccl-tests. Nothing synchronizes with "
    "the device",
)  # fmt: skip

_GROUPS: Final = names_from(
    f"{_HERE}.ranks.comm_functions",
    "ProcessGroup", "ReduceOp", "destroy_process_group", "get_all_ranks_from_group", "get_global_rank", "get_local_rank",
    "get_local_rank_from_launcher", "get_rank", "get_world_group", "get_world_rank_from_launcher", "get_world_size",
    "get_world_size_from_launcher", "has_all_gather_into_tensor", "has_all_reduce_coalesced", "has_coalescing_manager",
    "has_reduce_scatter_tensor", "init_distributed", "initialize_mesh_device", "is_available", "is_initialized", "new_group",
)  # fmt: skip

_MESSAGES: Final = names_from(
    f"{_HERE}.ranks.comm_functions",
    "P2POp", "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "allgather_fn", "barrier", "batch_isend_irecv", "broadcast",
    "broadcast_object_list", "gather", "irecv", "isend", "recv", "reduce", "reduce_scatter", "reduce_scatter_fn",
    "reduce_scatter_tensor", "scatter", "send",
) | names_from(
    f"{_HERE}.ranks.comm_functions", "inference_all_reduce", note="it is an ordinary all_reduce"
) | names_from(
    f"{_HERE}.ranks.comm_functions",
        "monitored_barrier",
        note="on gloo it names the ranks that are missing. On other backends it is an ordinary barrier",
)  # fmt: skip

_WORDS: Final = values(
    NCCL_BACKEND="nccl",
    GLOO_BACKEND="gloo",
    MPI_BACKEND="mpi",
    CCL_BACKEND="ccl",
    HCCL_BACKEND="hccl",
    TORCH_DISTRIBUTED_DEFAULT_PORT=DEFAULT_PORT,
    default_pg_timeout=datetime.timedelta(minutes=30),
)

COMM: Final[dict[str, Name]] = {
    **refused("call init_distributed, which detects the launcher", "mpi_discovery", "set_backend"),
    **_GROUPS,
    **_MESSAGES,
    **LOG,
    **_WORDS,
    **names_from("zero_runtime.groups.comm_log", comms_logger="LOG"),
    **refused(
        "messages are sent with torch.distributed directly. Call the functions of deepspeed.comm",
        "TorchBackend",
    ),
}

_PIPELINE: Final = names_from("zero_runtime.pipeline.model.pipeline_module", "PipelineModule")

PIPE: Final[dict[str, Name]] = {
    **_PIPELINE,
    **names_from("zero_runtime.pipeline.model.layer_specs", "LayerSpec", "TiedLayerSpec"),
    **refused(DUAL_PIPELINE, "DualPipeVModule"),
}

_ENGINE_NAMES: Final = names_from("zero_runtime.training.engine", DeepSpeedEngine="Engine")

DEEPSPEED: Final[dict[str, Name]] = {
    **names_from("zero_runtime.startup.initialization", "initialize"),
    **names_from("zero_runtime.comm", "init_distributed"),
    **names_from(
        "zero_runtime.startup.script_arguments",
        "add_core_arguments",
        add_config_arguments="add_core_arguments",
        _add_core_arguments="add_core_arguments",
    ),
    **_ENGINE_NAMES,
    **names_from(f"{_HERE}.configs.config_object", "DeepSpeedConfig"),
    **names_from("zero_runtime.errors", DeepSpeedConfigError="ConfigError"),
    **names_from(
        "zero_runtime.training.data_loading",
        DeepSpeedDataLoader="RankLoader",
        note="engine.deepspeed_io creates the instance",
    ),
    **names_from("zero_runtime.optimizer_step.interface", DeepSpeedOptimizer="WrappedOptimizer"),
    **names_from(f"{_HERE}.ranks.logging_names", "log_dist", "logger"),
    **names_from(f"{_HERE}.devices.device_context", "OnDevice"),
    **names_from(f"{_HERE}.devices.accelerator", "get_accelerator"),
    **names_from("deepspeed.runtime.zero", zero=""),
    **names_from("deepspeed.runtime.activation_checkpointing.checkpointing", checkpointing=""),
    **names_from("deepspeed.comm", dist=""),
    **values(
        __version__=NAMES_VERSION,
        version=NAMES_VERSION,
        __version_major__=int(FOLLOWED.split(".")[0]),
        __version_minor__=int(FOLLOWED.split(".")[1]),
        __version_patch__=int(FOLLOWED.split(".")[2]),
        __git_hash__=None,
        __git_branch__=None,
        git_hash=None,
        git_branch=None,
        HAS_TRITON=False,
        MUON_OPTIMIZER="muon",
        TORCH_DISTRIBUTED_DEFAULT_PORT=DEFAULT_PORT,
    ),
    **refused(
        INFERENCE, "init_inference", "InferenceEngine", "DeepSpeedInferenceConfig", "default_inference_config"
    ),
    **_PIPELINE,
    **names_from("zero_runtime.pipeline.pipeline_engine", "PipelineEngine"),
    **refused(DUAL_PIPELINE, "DualPipeVEngine", "DualPipeVModule"),
    **refused(TENSOR_PARALLEL, "tp_model_init", "set_autotp_mode"),
    **refused("the hybrid engine is not in this version", "DeepSpeedHybridEngine"),
    **refused(
        KERNELS, "DeepSpeedTransformerLayer", "DeepSpeedTransformerConfig", "replace_transformer_layer"
    ),
}

ACCELERATOR: Final[dict[str, Name]] = {
    **names_from(
        f"{_HERE}.devices.accelerator",
        "get_accelerator",
        "set_accelerator",
        "is_current_accelerator_supported",
    ),
    **names_from(f"{_HERE}.devices.accelerator", DeepSpeedAccelerator="Accelerator"),
}

MODULES: Final[dict[str, Module]] = {
    "": Module(DEEPSPEED, main="zero_runtime.launch:main"),
    "comm": Module(COMM),
    "comm.comm": Module(COMM),
    "comm.torch": Module(
        refused="this runtime calls torch.distributed directly. Use the functions of deepspeed.comm"
    ),
    "comm.reduce_op": Module(names_from(f"{_HERE}.ranks.comm_functions", "ReduceOp")),
    "comm.constants": Module({name: row for name, row in _WORDS.items() if name.endswith("_BACKEND")}),
    "comm.utils": Module(
        names_from(
            f"{_HERE}.ranks.comm_functions",
            "get_local_rank_from_launcher",
            "get_world_rank_from_launcher",
            "get_world_size_from_launcher",
        )
    ),
    "constants": Module(values(
        TORCH_DISTRIBUTED_DEFAULT_PORT=DEFAULT_PORT, default_pg_timeout=datetime.timedelta(minutes=30),
        CROSS_RANK="CROSS_RANK", CROSS_SIZE="CROSS_SIZE", LOCAL_RANK="LOCAL_RANK",
    )),
    "accelerator": Module(ACCELERATOR),
    "accelerator.real_accelerator": Module(ACCELERATOR),
    "accelerator.abstract_accelerator": Module(names_from(f"{_HERE}.devices.accelerator",
        DeepSpeedAccelerator="Accelerator")),
    "accelerator.cpu_accelerator": Module(names_from(f"{_HERE}.devices.accelerator", CPU_Accelerator="Accelerator")),
    "accelerator.cuda_accelerator": Module(names_from(f"{_HERE}.devices.accelerator", CUDA_Accelerator="Accelerator")),
    "pipe": Module(PIPE),
    "git_version_info": Module(
        values(version=NAMES_VERSION, git_hash=None, git_branch=None)
        | names_from(f"{_HERE}.devices.torch_versions", torch_info="TORCH")
    ),
    "env_report": Module(names_from("zero_runtime.report", "main", cli_main="main"), main="zero_runtime.report:main"),
    "launcher": Module(),
    "launcher.runner": Module(
        names_from("zero_runtime.launch", "main", fetch_hostfile="read_hosts")
        | live(f"{_HERE}.ranks.launcher_environment", DEEPSPEED_ENVIRONMENT_NAME="environment_file")
        | refused(
            "python -m zero_runtime.launch starts the ranks", "parse_inclusion_exclusion", "encode_world_info"
        ),
        main="zero_runtime.launch:main",
    ),
    "inference": Module(refused=INFERENCE),
    "module_inject": Module(refused=KERNELS),
    "model_implementations": Module(refused=INFERENCE),
    "moe": Module(),
    "moe.layer": Module(names_from("zero_runtime.experts.layer", "MoE")),
    "moe.experts": Module(names_from("zero_runtime.experts.layer", "Experts")),
    "moe.sharded_moe": Module(
        names_from("zero_runtime.experts.layer", "MOELayer", _AllToAll="Exchange")
        | names_from(
            "zero_runtime.experts.layer", "TopKGate", note="its forward method returns routes, not masks"
        )
        | names_from(
            f"{_HERE}.training.gates",
            "top1gating", "top2gating", "topkgating",
            _route_slots="route_slots",
            _sparse_encode="sparse_encode",
            _sparse_decode="sparse_decode",
        )
        | live(f"{_HERE}.training.gates", dist="communication")
    ),
    "moe.utils": Module(names_from(
        f"{_HERE}.training.experts",
        "configure_moe_param_groups", "has_moe_layers", "is_moe_param", "is_moe_param_group",
        "split_params_into_different_moe_groups_for_optimizer", "split_params_into_shared_and_expert_params",
    )),
    **{f"moe.{name}": Module(refused=EXPERTS) for name in ("mappings", "capacity_bins")},
    "sequence": Module({}),
    "sequence.layer": Module(
        names_from("zero_runtime.sequence_parallel", "DistributedAttention")
        | names_from(f"{_HERE}.training.sequence_exchange", "single_all_to_all", "_SeqAllToAll")
    ),
    "sequence.cross_entropy": Module(names_from(f"{_HERE}.training.sequence_loss", "vocab_sequence_parallel_cross_entropy")),
    "compression": Module(),
    "compression.helper": Module(names_from(f"{_HERE}.training.numerics", "recursive_getattr", "recursive_setattr")),
    "autotuning": Module(refused="`commprof sweep --set KEY=V1,V2` tries several settings and compares them"),
    "elasticity": Module(
        refused="elastic batch sizes are not in this version. To restart failed ranks, use torchrun "
        "--max-restarts"
    ),
    "profiling": Module(
        refused="use torch.utils.flop_counter to count operations, and `commprof run` to record messages"
    ),
    "linear": Module(refused="OptimizedLinear (LoRA with quantized weights) is not in this version"),
    "nebula": Module(refused="Nebula is an online service. Use save_checkpoint, which writes files"),
    "compile": Module(
        refused="DeepCompile is not in this version. engine.compile() compiles the model with torch.compile"
    ),
    "io": Module(
        refused="`python -m zero_runtime.bench io` measures disks, and save_checkpoint writes its own files"
    ),
    "nvme": Module(refused="`python -m zero_runtime.bench io` measures disks"),
    "datastates": Module(refused="checkpoints with DataStates are not in this version"),
    "monitor": Module(
        refused="set the keys csv_monitor and tensorboard in the configuration to create monitors"
    ),
}  # fmt: skip
