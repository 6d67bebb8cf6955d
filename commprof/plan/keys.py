"""List the keys of a config that can change a prediction, so that a misspelled ``--set`` is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final

from commprof.errors import UsageError
from commprof.plan.experts import KEY as EXPERTS
from commprof.plan.experts import Settings
from commprof.requested.config_keys import nearest_key

_ZERO: Final = (
    "stage",
    "allgather_bucket_size",
    "allgather_partitions",
    "compute_grad_norm",
    "contiguous_gradients",
    "cpu_offload",
    "cpu_offload_param",
    "enable_sanity_checks",
    "gradient_accumulation_limit",
    "gradient_accumulation_reduce",
    "gradient_reduction",
    "hierarchical_compress",
    "memory_efficient_linear",
    "mics_shard_size",
    "overlap_comm",
    "overlap_parameter_gather",
    "parameter_alignment",
    "reduce_bucket_size",
    "reduce_scatter",
    "reduce_scatter_impl",
    "round_robin_gradients",
    "use_multi_rank_bucket_allreduce",
    "zenflow",
    "zero_allowed_param_types",
    "zero_force_param_types",
    "zero_hpz_partition_size",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_weights",
    "offload_optimizer.device",
    "offload_optimizer.nvme_path",
    "offload_optimizer.ratio",
    "offload_optimizer.buffer_count",
    "offload_param.device",
    "offload_param.nvme_path",
    "offload_param.buffer_size",
    "offload_param.buffer_count",
    "offload_param.max_in_cpu",
    "offload_params.device",
    "offload_params.nvme_path",
    "offload_params.buffer_size",
    "offload_params.buffer_count",
    "offload_params.max_in_cpu",
    "leaf_module.names",
    "leaf_module.name_suffixes",
)
# DeepSpeed reads these keys with and without the prefix ``stage3_``.
_STAGE_3: Final = (
    "allgather_sequential",
    "max_live_parameters",
    "max_reuse_distance",
    "model_persistence_threshold",
    "module_granularity_threshold",
    "param_persistence_threshold",
    "prefetch_bucket_size",
    "use_all_reduce_for_fetch_params",
)
_OTHERS: Final = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "managed_gradient_accumulation",
    "gradient_clipping",
    "communication_data_type",
    "seq_parallel_communication_data_type",
    "disable_allgather",
    "compress_communication",
    "sparse_gradients",
    "fp16_override_modules",
    "sequence_parallel_size",
    "tp_size",
    "bf16.enabled",
    "bf16.check_grad_overflow",
    "bf16.bf16_master_weights_and_grads",
    "bfloat16.enabled",
    "bfloat16.check_grad_overflow",
    "bfloat16.bf16_master_weights_and_grads",
    "fp16.enabled",
    "fp16.fp16_override_modules",
    "data_types.grad_accum_dtype",
    "torch_autocast.enabled",
    "torch_autocast.dtype",
    "compile.deepcompile",
    "expert_parallel.enabled",
    "communication.topology",
    "communication.calibration",
    "communication.bounded_delay",
    "use_data_before_expert_parallelism",
    "gradient_compression.algorithm",
    "gradient_compression.clip_before_residual",
    "gradient_compression.enabled",
    "gradient_compression.error_feedback",
    "gradient_compression.hierarchical_compress",
    "gradient_compression.huffman_coding",
    "gradient_compression.momentum_correction",
    "gradient_compression.topk_ratio",
    "gradient_compression.topk_warmup_ratio",
    "gradient_compression.topk_warmup_steps",
    "gradient_compression.two_phase",
    "gradient_compression.warmup_steps",
    "optimizer.type",
    "optimizer.params.momentum",
    "optimizer.params.freeze_step",
    "optimizer.params.var_freeze_step",
    "optimizer.params.var_update_scaler",
    "optimizer.params.local_step_scaler",
    "optimizer.params.local_step_clipper",
    "pipeline.stages",
    "pipeline_parallel.enabled",
    "pipeline_parallel.pp_size",
    "pipeline_parallel.micro_batches",
    "pipeline_parallel.schedule",
    "tensor_parallel.autotp_size",
    "tensor_parallel.tp.tp_size",
    "tensor_parallel.sequence_parallel",
)

KNOWN: Final = frozenset(
    (
        *_OTHERS,
        *(f"zero_optimization.{name}" for name in _ZERO),
        *(f"zero_optimization.{prefix}{name}" for name in _STAGE_3 for prefix in ("", "stage3_")),
        "zero_optimization.sub_group_size",
    )
)
# The options for experts set these keys.
_OF_EXPERTS: Final = frozenset(f"{EXPERTS}.{name}" for name in Settings._fields)


def misspelled(config: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each key of ``config`` that is probably a misspelled key of a rule.

    Only keys at the top level and in ``zero_optimization`` are examined.
    """
    tops = {name.partition(".")[0] for name in KNOWN}
    zero = {name.split(".")[1] for name in KNOWN if name.startswith("zero_optimization.")}
    sentences = []
    for prefix, block, names in (
        ("", config, tops),
        ("zero_optimization.", config.get("zero_optimization"), zero),
    ):
        if not isinstance(block, Mapping):
            continue
        for name in block:
            near = [] if name in names else get_close_matches(name, names, 1, 0.9)
            if near and near[0] not in block:
                sentences.append(
                    f"{prefix}{name} in the config is not used: no rule reads it. Did you mean {near[0]}?"
                )
    return sentences


def check_keys(keys: Iterable[str]) -> None:
    """Raise UsageError for a dotted key that is neither a known key nor a section with known keys."""
    for key in keys:
        if key in KNOWN | _OF_EXPERTS or any(name.startswith(f"{key}.") for name in KNOWN):
            continue
        meant = nearest_key(key, KNOWN | _OF_EXPERTS)
        raise UsageError(
            f"--set {key}: no rule of plan reads this key, so its values could not be compared; "
            + (f"did you mean {meant}?" if meant else "expected a dotted key of docs/plan.md")
        )
