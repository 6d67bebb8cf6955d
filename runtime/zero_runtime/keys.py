"""Every key of the DeepSpeed 0.19.8 configuration, and what this version does with it.

One table for each block. ``USED`` keys act. ``INERT`` keys act neither here nor in DeepSpeed at stages 0 to 2; their
values are checked, and nothing else. ``LATER`` keys exist in DeepSpeed and not here yet: their default is accepted, any
other value refused with the reason. ``REMOVED`` keys are refused as DeepSpeed refuses them. A key in no table is an
error that names the nearest known one.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple

from zero_runtime.checks import (
    Check,
    anything,
    block,
    boolean,
    choice,
    choice_of_any_case,
    either,
    integer,
    mapping,
    number,
    optional,
    positive,
    strings,
    text,
    unknown_key,
)
from zero_runtime.errors import ConfigError, UnsupportedError


class Status(StrEnum):
    """What this version does with a key."""

    USED = "used"
    INERT = "inert"
    LATER = "later"
    REMOVED = "removed"


class Key(NamedTuple):
    """One key of one block."""

    check: Check
    default: Any = None
    status: Status = Status.USED
    note: str = ""


Table = Mapping[str, Key]


def _used(check: Check, default: Any = None) -> Key:
    return Key(check, default)


def _inert(check: Check, default: Any = None, note: str = "") -> Key:
    return Key(check, default, Status.INERT, note)


def _later(check: Check, default: Any = None, note: str = "") -> Key:
    return Key(check, default, Status.LATER, note)


def _stage_3(check: Check, default: Any = None) -> Key:
    return Key(check, default, Status.USED, _STAGE_3)


def _removed(note: str) -> Key:
    return Key(anything, None, Status.REMOVED, note)


def _offload(*names: str) -> Check:
    """A check for a block that moves something off the device; None where its device is none."""

    def check(name: str, value: Any) -> dict[str, Any] | None:
        found = block("device", *names)(name, value) or {}
        device = choice("none", "cpu", "nvme")(f"{name}.device", found.get("device", "none"))
        return None if device == "none" else found

    return check


def _disabled(*names: str, note: str, enabled: str = "enabled") -> Key:
    """A block that does nothing unless ``enabled`` is true in it, which this version refuses."""

    def check(name: str, value: Any) -> None:
        found = block(enabled, *names)(name, value) or {}
        if found.get(enabled, False) is not False:
            raise UnsupportedError(f"{name}: {note}; remove the block or set {enabled} to false in it")

    return Key(check)


_STAGE_3: Final = "acts at stage 3 only"
DTYPES: Final = ("fp32", "fp16", "bf16")
_ANY_LAYOUT: Final = "every checkpoint loads at any world size and stage"
_SIZE: Final = integer(0)

ZERO: Final[Table] = {
    "stage": _used(integer(0), 0),
    "contiguous_gradients": _used(boolean, True),
    "reduce_scatter": _used(boolean, True),
    "reduce_bucket_size": _used(integer(1), 500_000_000),
    "use_multi_rank_bucket_allreduce": _used(boolean, True),
    "gradient_reduction": _used(
        choice("auto", "all_reduce", "multi_rank_all_reduce", "reduce_to_owner", "reduce_scatter"), "auto"
    ),
    "reduce_scatter_impl": _used(choice("auto", "native", "all_to_all"), "auto"),
    "allgather_partitions": _used(boolean, True),
    "allgather_bucket_size": _used(optional(integer(2))),
    "overlap_comm": _used(optional(boolean)),
    "compute_grad_norm": _used(boolean, True),
    "round_robin_gradients": _used(boolean, False),
    "parameter_alignment": _used(boolean, False),
    "load_from_fp32_weights": _used(boolean, True),
    "elastic_checkpoint": _inert(boolean, False, _ANY_LAYOUT),
    "ignore_unused_parameters": _inert(boolean, True, "acts with an offloaded optimizer only"),
    "offload_param": _stage_3(
        block("device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory")
    ),
    "sub_group_size": _stage_3(integer(1), 1_000_000_000),
    "cpu_offload_param": _stage_3(optional(boolean)),
    "cpu_offload_use_pin_memory": _inert(optional(boolean)),
    "offload_optimizer": _later(
        _offload(
            "nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init", "ratio",
            "super_offload", "cpuadam_cores_perc",
        ),
        None,
        "the optimizer stays on the device",
    ),
    "cpu_offload": _later(optional(boolean), None, "the optimizer stays on the device"),
    "zenflow": _later(
        block(
            "topk_ratio", "select_strategy", "select_interval", "update_interval", "overlap_step", "offload", "auto_ratio",
            "full_warm_up_rounds", "pt_reserved_cores_perc", "steps_per_epoch",
        ),
        None,
        "ZenFlow",
    ),
    "legacy_stage1": _removed(
        "the old ZeRO stage 1 does not exist any more, in DeepSpeed either; use stage 1"
    ),
    "mics_shard_size": _removed("MiCS has been removed from DeepSpeed; use stage 1, 2 or 3 without it"),
    "mics_hierarchical_params_gather": _removed("MiCS has been removed from DeepSpeed; remove the key"),
    "zeropp_loco_param": _removed("LoCo has been removed from DeepSpeed; remove the key"),
    **{
        prefix + name: _stage_3(check, default)
        for name, check, default in (
            ("prefetch_bucket_size", _SIZE, 50_000_000),
            ("param_persistence_threshold", _SIZE, 100_000),
            ("model_persistence_threshold", _SIZE, 2**63 - 1),
            ("max_live_parameters", _SIZE, 1_000_000_000),
            ("max_reuse_distance", _SIZE, 1_000_000_000),
            ("gather_16bit_weights_on_model_save", boolean, False),
            ("module_granularity_threshold", integer(-(2**63)), 0),
            ("use_all_reduce_for_fetch_params", boolean, False),
            ("allgather_sequential", boolean, False),
        )
        for prefix in ("", "stage3_")
    },
    "stage3_gather_fp16_weights_on_model_save": _stage_3(boolean, False),
    "zero_hpz_partition_size": _stage_3(_SIZE, 1),
    "zero_quantized_weights": _stage_3(boolean, False),
    "zero_quantized_nontrainable_weights": _stage_3(boolean, False),
    "zero_quantized_gradients": _stage_3(boolean, False),
    "memory_efficient_linear": _stage_3(boolean, True),
    "pipeline_loading_checkpoint": _inert(boolean, False, "ranks read what they need by themselves"),
    "override_module_apply": _inert(boolean, True, "module.apply needs no help here"),
    "log_trace_cache_warnings": _stage_3(boolean, False),
    "enable_sanity_checks": _stage_3(boolean, False),
    "save_muon_momentum_buffer_in_memory": _inert(boolean, False, "acts with Muon at stage 3 only"),
    "leaf_module": _stage_3(block("classes", "names", "name_suffixes"), None),
}  # fmt: skip

FP16: Final[Table] = {
    "enabled": _used(boolean, False),
    "auto_cast": _used(boolean, False),
    "loss_scale": _used(number(0.0), 0.0),
    "initial_scale_power": _used(integer(0), 16),
    "loss_scale_window": _used(integer(1), 1000),
    "hysteresis": _used(integer(1), 2),
    "consecutive_hysteresis": _used(boolean, False),
    "min_loss_scale": _used(positive, 1.0),
    "fp16_override_modules": _used(optional(strings)),
    "fp16_master_weights_and_grads": _later(
        boolean,
        False,
        "it needs an optimizer offloaded to the CPU, in DeepSpeed too; master weights are fp32",
    ),
}

BF16: Final[Table] = {
    "enabled": _used(boolean, False),
    "check_grad_overflow": _used(boolean, True),
    "immediate_grad_update": _inert(boolean, False, "the gradients are the same"),
    "bf16_master_weights_and_grads": _used(boolean, False),
    "bf16_optimizer_states": _used(boolean, False),
}

DATA_TYPES: Final[Table] = {
    "grad_accum_dtype": _used(optional(choice(*DTYPES))),
    "param_dtype": _used(optional(choice(*DTYPES))),
    "buffer_dtype": _used(optional(choice(*DTYPES))),
    "keep_in_fp32_modules": _used(either("auto", strings), "auto"),
}

TORCH_AUTOCAST: Final[Table] = {
    "enabled": _used(boolean, False),
    "dtype": _used(choice("bfloat16", "bf16", "float16", "fp16"), "bfloat16"),
    "lower_precision_safe_modules": _used(optional(strings)),
}

OPTIMIZER: Final[Table] = {
    "type": _used(text),
    "params": _used(mapping, {}),
    "legacy_fusion": _inert(boolean, False),
}

SCHEDULER: Final[Table] = {"type": _used(text), "params": _used(mapping, {})}

TOP: Final[Table] = {
    "train_batch_size": _used(optional(integer(1))),
    "train_micro_batch_size_per_gpu": _used(optional(integer(1))),
    "gradient_accumulation_steps": _used(optional(integer(1))),
    "managed_gradient_accumulation": _used(boolean, True),
    "optimizer": _used(optional(mapping)),
    "scheduler": _used(optional(mapping)),
    "zero_optimization": _used(mapping, {}),
    "fp16": _used(mapping, {}),
    "fp16_override_modules": _used(optional(strings)),
    "bf16": _used(mapping, {}),
    "bfloat16": _used(mapping, {}),
    "data_types": _used(mapping, {}),
    "torch_autocast": _used(mapping, {}),
    "zero_allow_untested_optimizer": _used(boolean, False),
    "gradient_clipping": _used(number(0.0), 1.0),
    "prescale_gradients": _used(boolean, False),
    "gradient_predivide_factor": _used(number(), 1.0),
    "gradient_allreduce_op": _used(choice("mean", "sum"), "mean"),
    "communication_data_type": _used(optional(choice(*DTYPES))),
    "disable_allgather": _used(boolean, False),
    "steps_per_print": _used(optional(integer(1))),
    "dataloader_drop_last": _used(boolean, False),
    "wall_clock_breakdown": _used(boolean, False),
    "dump_state": _used(boolean, False),
    "zero_force_ds_cpu_optimizer": _inert(boolean, True, "acts with an offloaded optimizer only"),
    "seq_parallel_communication_data_type": _inert(choice(*DTYPES), "fp32", "acts with sequence parallelism"),
    "log_level": _inert(anything),
    "vocabulary_size": _inert(anything),
    "memory_breakdown": _later(boolean, False, "memory reports"),
    "disable_python_gc": _later(boolean, False, "garbage collection stays on"),
    "sequence_parallel_size": _later(integer(1), 1, "sequence parallelism"),
    "use_data_before_expert_parallelism": _later(boolean, False, "expert parallelism"),
    "comms_logger": _disabled(
        "prof_all", "prof_ops", "verbose", "debug",
        note="the communication logger is not in this version yet; `commprof run` records every collective",
    ),
    "activation_checkpointing": _disabled(
        "number_checkpoints", "contiguous_memory_optimization", "synchronize_checkpoint_boundary", "profile",
        "cpu_checkpointing", enabled="partition_activations",
        note="activation checkpointing is not in this version yet; torch.utils.checkpoint works",
    ),
    "flops_profiler": _disabled(
        "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed", "output_file",
        note="the flops profiler is not in this version yet",
    ),
    "tensorboard": _disabled("output_path", "job_name", note="monitors are not in this version yet"),
    "wandb": _disabled("group", "team", "project", note="monitors are not in this version yet"),
    "csv_monitor": _disabled("output_path", "job_name", note="monitors are not in this version yet"),
    "comet": _disabled(
        "samples_log_interval", "project", "workspace", "api_key", "experiment_name", "experiment_key", "online",
        "mode", note="monitors are not in this version yet",
    ),
    "pipeline": _inert(
        block(
            "stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned",
            "use_reentrant",
        ),
        None,
        "acts with a pipeline module only",
    ),
    "checkpoint": _used(optional(mapping)),
    "aio": _inert(
        block(
            "block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"
        ),
        None,
        "acts with offload to NVMe only",
    ),
    "timers": _inert(block("throughput"), None, "there are no throughput timers"),
    "autotuning": _disabled(
        "fast", "start_profile_step", "end_profile_step", "metric", "metric_path", "arg_mappings", "tuner_type",
        "tuner_early_stopping", "tuner_num_trials", "results_dir", "exps_dir", "overwrite", "max_train_batch_size",
        "min_train_batch_size", "max_train_micro_batch_size_per_gpu", "min_train_micro_batch_size_per_gpu",
        "num_tuning_micro_batch_sizes", "mp_size", "model_info", "model_info_path",
        note="autotuning is not in this version yet; `commprof sweep` varies settings",
    ),
    "compile": _disabled(
        "autoep_non_moe", "free_activation", "free_activation_threshold", "offload_activation",
        "offload_activation_pin_memory", "offload_opt_states", "double_buffer", "symmetric_memory", "debug_log",
        "offload_parameters", "sync_before_reduce", "sync_after_reduce", "sync_before_allgather",
        "sync_after_allgather", "keep_int_input_tensors", "keep_all_input_tensors", "passes",
        enabled="deepcompile", note="DeepCompile is not in this version yet",
    ),
    "hybrid_engine": _disabled(
        "max_out_tokens", "inference_tp_size", "release_inference_cache", "pin_parameters",
        "tp_gather_partition_size", "enable_cuda_graph", note="the hybrid engine is not in this version yet",
    ),
    "data_efficiency": _disabled(
        "seed", "data_sampling", "data_routing", note="data efficiency is not in this version yet",
    ),
    "expert_parallel": _later(optional(mapping), None, "expert parallelism"),
    "tensor_parallel": _later(optional(mapping), None, "tensor parallelism"),
    "weight_quantization": _later(optional(mapping), None, "weight quantization"),
    "datastates": _later(optional(mapping), None, "DataStates checkpoints"),
    "nebula": _removed("Nebula checkpoints have been removed from DeepSpeed; remove the block"),
    "compression_training": _removed("the compression library has been removed from DeepSpeed; remove the block"),
    "amp": _removed("Apex AMP has been removed from DeepSpeed; use bf16 or torch_autocast"),
    "quantize_training": _removed("quantized training has been removed from DeepSpeed; remove the block"),
    "sparse_gradients": _removed("sparse gradients have been removed from DeepSpeed; remove the key"),
    "eigenvalue": _removed("the eigenvalue block has been removed from DeepSpeed; remove it"),
    "sparse_attention": _removed("sparse attention has been removed from DeepSpeed; remove the block"),
    "elasticity": _removed("elastic training has been removed from DeepSpeed; set the batch sizes themselves"),
    "graph_harvesting": _removed("graph harvesting has been removed from DeepSpeed; remove the key"),
    "curriculum_learning": _removed("the old curriculum block has been removed from DeepSpeed; remove it"),
    "progressive_layer_drop": _removed("progressive layer drop has been removed from DeepSpeed; remove it"),
}  # fmt: skip

CHECKPOINT: Final[Table] = {
    "tag_validation": _used(choice_of_any_case("Ignore", "Warn", "Fail"), "Warn"),
    "load_universal": _inert(boolean, False, _ANY_LAYOUT),
    "use_node_local_storage": _later(boolean, False, "checkpoints need a directory that all ranks see"),
    "parallel_write": _inert(block("pipeline_stage"), None, "every rank writes its own file"),
    "writer": _inert(mapping, None, "files are written in one way"),
    "checkpoint_serialization": _inert(boolean, True, "files are written in one format"),
}

BLOCKS: Final[Mapping[str, Table]] = {
    "": TOP,
    "zero_optimization": ZERO,
    "fp16": FP16,
    "bf16": BF16,
    "bfloat16": BF16,
    "data_types": DATA_TYPES,
    "torch_autocast": TORCH_AUTOCAST,
    "optimizer": OPTIMIZER,
    "scheduler": SCHEDULER,
    "checkpoint": CHECKPOINT,
}


def read(block: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of ``block``: what was given, checked, and defaults for the rest.

    Raises:
        ConfigError: an unknown key, or a value of the wrong kind.
        UnsupportedError: a key that is not in this version, with a value other than its default.
    """
    table = BLOCKS[block]
    values = {name: key.default for name, key in table.items()}
    for name, value in given.items():
        if name not in table:
            full = f"{block}.{name}" if block else name
            raise ConfigError(unknown_key(full, name, table, block, _elsewhere(block)))
        key, full = table[name], f"{block}.{name}" if block else name
        if key.status is Status.REMOVED:
            if value and not (isinstance(value, Mapping) and value.get("enabled") is False):
                raise ConfigError(f"{full}: {key.note}")
            continue
        values[name] = key.check(full, value)
        if key.status is Status.LATER and values[name] not in (key.default, False, {}, None):
            raise UnsupportedError(
                f"{full} = {value!r} is not in this version yet ({key.note}); remove the key"
            )
    return values


def inert(block: str, given: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys of ``block`` that were set to something other than their default, act nowhere, and why."""
    table = BLOCKS[block]
    return [
        (f"{block}.{name}" if block else name, table[name].note)
        for name, value in given.items()
        if name in table
        and table[name].status is Status.INERT
        and table[name].note
        and value not in (table[name].default, None)
    ]


def stage_3_only(given: Mapping[str, Any]) -> list[str]:
    """Keys of ``zero_optimization`` that were set to something other than their default and act at stage 3 only."""
    return [
        f"zero_optimization.{name}"
        for name, value in given.items()
        if name in ZERO and ZERO[name].note is _STAGE_3 and value not in (ZERO[name].default, None)
    ]


def _elsewhere(name: str) -> dict[str, str]:
    """Full names, by key, of the keys of all blocks but ``name``."""
    return {
        key: f"{other}.{key}" if other else key
        for other, table in BLOCKS.items()
        if other != name
        for key in table
    }
