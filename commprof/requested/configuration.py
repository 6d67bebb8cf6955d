"""The keys of a DeepSpeed config that determine the messages, with DeepSpeed 0.19's defaults.

Only these keys are read. The runtime validates the rest of a config. Some keys exist only in zero_runtime. In
``zero_optimization`` these are the keys in :data:`OWN_KEYS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from commprof.requested.communication.compression import Compression, read_compression
from commprof.requested.config_keys import choice, count, dtype, flag, number, section, set_keys, truth, wrong
from commprof.requested.errors import RequestedError
from commprof.requested.zero.reductions import REDUCTIONS

OWN_KEYS: Final = (
    "gradient_reduction",
    "reduce_scatter_impl",
    "gradient_accumulation_reduce",
    "gradient_accumulation_limit",
)
ACCUMULATION_REDUCES: Final = ("each", "boundary")
REDUCE_SCATTER_IMPLS: Final = ("auto", "native", "all_to_all")


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """The settings of a config that determine the messages.

    Attributes:
        model_dtype: The element type to which the config converts the model, or None if it converts nothing.
        communication_dtype: The element type of the gradients that are sent.
        accumulation_dtype: The element type in which gradients are accumulated, or None for the type of the model.
        reduce_bucket_size: The maximum number of elements per gradient bucket.
        gradient_reduction: ``"auto"`` or a name in :data:`REDUCTIONS`.
        gather_by_broadcast: ``allgather_partitions: false`` or ``disable_allgather: true``. DeepSpeed ignores both.
        allgather_bucket_size: The number of elements per gathering message, or None for no limit. DeepSpeed ignores the
            key.
        gradient_clipping: The largest gradient norm. 0 turns clipping off.
        check_overflow: Whether 16-bit gradients are checked for overflow at stages 1 and 2.
        offload_device: The place of the optimizer states: ``"none"`` (the device), ``"cpu"`` or ``"nvme"``.
        accumulation_steps: The number of micro-batches per step, or None if it follows from the batch sizes.
        managed_accumulation: If False, each call of ``step()`` is a training step.
        compression: The gradient compression (zero_runtime only), or None if gradients are not compressed.
        quantises_gradients: Whether gradients are sent in 4 bits at stages 1 and 2 (zero_runtime only).
        quantises_weights: Whether updated parameters are sent in 8 bits at stages 1 and 2 (zero_runtime only).
        accumulation_reduce: ``each`` or ``boundary`` (zero_runtime only). With ``boundary``, stages 2 and 3 reduce
            gradients only in the last micro-batch of a step. :mod:`commprof.requested.auto_values` replaces ``auto``.
        data_before_experts: Whether ranks with the same experts are neighbors (``use_data_before_expert_parallelism``).
        fuses_adam: Whether the optimizer is Adam without ``torch_adam``. DeepSpeed has a separate optimizer class for
            this Adam with 16-bit parameters.
    """

    stage: int
    model_dtype: str | None
    communication_dtype: str
    accumulation_dtype: str | None
    reduce_scatter: bool
    use_multi_rank_bucket_allreduce: bool
    contiguous_gradients: bool
    overlap_comm: bool
    reduce_bucket_size: int
    round_robin_gradients: bool
    parameter_alignment: bool
    compute_grad_norm: bool
    gradient_reduction: str
    reduce_scatter_impl: str
    gather_by_broadcast: bool
    allgather_bucket_size: int | None
    gradient_clipping: float
    check_overflow: bool
    offload_device: str
    train_batch_size: int | None
    micro_batch_size: int | None
    accumulation_steps: int | None
    managed_accumulation: bool
    compression: Compression | None = None
    quantises_gradients: bool = False
    quantises_weights: bool = False
    accumulation_reduce: str = "each"
    data_before_experts: bool = False
    fuses_adam: bool = False

    @property
    def partitions(self) -> bool:
        """Return whether the optimizer states are partitioned, which is the case at stages 1 to 3."""
        return self.stage > 0

    @property
    def reduces_flat_groups(self) -> bool:
        """Return whether the flat gradient of each parameter group is reduced as a whole.

        Only in this case does DeepSpeed keep fp32 gradients for a bf16 model. DeepSpeed's optimizer class for this case
        has neither buckets nor an overflow check nor a message for the norm.
        """
        return (
            self.stage == 1
            and self.model_dtype == "bfloat16"
            and self.accumulation_dtype == "float32"
            and self.offload_device != "cpu"
        )

    @property
    def reduces_whole_in_buckets(self) -> bool:
        """Return whether stage 0 sends full gradients in buckets during the backward pass (zero_runtime only)."""
        return not self.partitions and self.gradient_reduction != "auto" and self.overlap_comm

    @property
    def buffers_are_contiguous(self) -> bool:
        """Return whether gradients are copied into contiguous buckets.

        Without contiguous buckets, ``reduce_scatter`` and ``use_multi_rank_bucket_allreduce`` are ignored.
        """
        return self.contiguous_gradients or self.offload_device != "none"

    @property
    def reduction(self) -> str:
        """The gradient reduction that is used, a name in :data:`REDUCTIONS`."""
        if not self.partitions or self.reduces_flat_groups:
            return "all_reduce"
        if self.quantises_gradients:
            return "reduce_scatter"
        if self.stage == 3 and self.gradient_reduction == "auto":
            return "reduce_scatter" if self.reduce_scatter or not self.contiguous_gradients else "all_reduce"
        if self.gradient_reduction != "auto":
            return self.gradient_reduction
        if not self.buffers_are_contiguous or not self.reduce_scatter:
            return "all_reduce"
        return "multi_rank_all_reduce" if self.use_multi_rank_bucket_allreduce else "reduce_to_owner"

    @property
    def reduces_chunks(self) -> bool:
        """Return whether the flat buffers are divided into chunks. Each row of a chunk is reduced to its owner."""
        return self.stage in (1, 2) and self.reduction == "reduce_scatter"

    def reduce_scatter_on(self, backend: str) -> str:
        """Return how a reduce_scatter is issued on ``backend``: ``native`` or ``all_to_all``.

        gloo runs a native reduce_scatter as an all_reduce. On gloo, ``auto`` in the config therefore means all_to_all.
        """
        if self.reduce_scatter_impl != "auto":
            return self.reduce_scatter_impl
        return "all_to_all" if backend == "gloo" else "native"

    @property
    def reduces_in_backward_order(self) -> bool:
        """Return whether gradients enter buckets in the order of the backward pass, not in the order of the groups."""
        return self.stage >= 2 or (self.stage == 1 and self.overlap_comm)

    def as_deepspeed_reads(self) -> Configuration:
        """Return the configuration as DeepSpeed reads it, without the keys of zero_runtime."""
        return replace(
            self,
            gradient_reduction="auto",
            compression=None,
            quantises_gradients=False,
            quantises_weights=False,
            accumulation_reduce="each",
        )

    @property
    def reduces_every_micro_step(self) -> bool:
        """Return whether gradients are reduced in each micro-batch, not once per step."""
        return self.stage >= 2 and self.accumulation_reduce != "boundary"


def read_configuration(config: Mapping[str, Any]) -> Configuration:
    """Return the settings of ``config`` that determine the messages.

    Raises:
        RequestedError: a key has a value of the wrong type or outside its range.
    """
    if not isinstance(config, Mapping):
        raise RequestedError(
            f"the config is {config!r}; expected an object with keys, as in a DeepSpeed config file"
        )
    zero = zero_section(config)
    bf16_name = "bf16" if "bf16" in config or "bfloat16" not in config else "bfloat16"
    bf16, fp16 = section(config, bf16_name), section(config, "fp16")
    model_dtype = None
    if flag(fp16, "fp16.enabled", False):
        model_dtype = "float16"
    elif flag(bf16, f"{bf16_name}.enabled", False):
        model_dtype = "bfloat16"
    stage = count(zero, "zero_optimization.stage", 0, least=0)
    if stage is None or stage > 3:
        raise RequestedError(f"zero_optimization.stage is {stage}; expected 0, 1, 2 or 3")
    overlap = zero.get("overlap_comm")
    return Configuration(
        stage=stage,
        model_dtype=model_dtype,
        communication_dtype=dtype(config, "communication_data_type") or model_dtype or "float32",
        accumulation_dtype=dtype(section(config, "data_types"), "data_types.grad_accum_dtype"),
        reduce_scatter=flag(zero, "zero_optimization.reduce_scatter", True),
        use_multi_rank_bucket_allreduce=flag(zero, "zero_optimization.use_multi_rank_bucket_allreduce", True),
        contiguous_gradients=flag(zero, "zero_optimization.contiguous_gradients", True),
        overlap_comm=stage == 3 if overlap is None else flag(zero, "zero_optimization.overlap_comm", False),
        reduce_bucket_size=count(zero, "zero_optimization.reduce_bucket_size", 500_000_000, least=1) or 0,
        round_robin_gradients=flag(zero, "zero_optimization.round_robin_gradients", False),
        parameter_alignment=flag(zero, "zero_optimization.parameter_alignment", False),
        compute_grad_norm=flag(zero, "zero_optimization.compute_grad_norm", True),
        gradient_reduction=choice(zero, "zero_optimization.gradient_reduction", ("auto", *REDUCTIONS)),
        reduce_scatter_impl=choice(zero, "zero_optimization.reduce_scatter_impl", REDUCE_SCATTER_IMPLS),
        gather_by_broadcast=flag(config, "disable_allgather", False, is_checked=False)
        or not flag(zero, "zero_optimization.allgather_partitions", True),
        allgather_bucket_size=count(zero, "zero_optimization.allgather_bucket_size", None, least=0) or None,
        gradient_clipping=_clipping(config),
        check_overflow=model_dtype == "float16"
        or (model_dtype == "bfloat16" and flag(bf16, f"{bf16_name}.check_grad_overflow", True)),
        offload_device=_offload_device(zero),
        train_batch_size=count(config, "train_batch_size", None, least=1),
        micro_batch_size=count(config, "train_micro_batch_size_per_gpu", None, least=1),
        accumulation_steps=count(config, "gradient_accumulation_steps", None, least=1),
        managed_accumulation=flag(config, "managed_gradient_accumulation", True, is_checked=False),
        compression=read_compression(config),
        quantises_gradients=stage in (1, 2)
        and flag(zero, "zero_optimization.zero_quantized_gradients", False),
        quantises_weights=stage in (1, 2) and flag(zero, "zero_optimization.zero_quantized_weights", False),
        accumulation_reduce=choice(
            zero, "zero_optimization.gradient_accumulation_reduce", ACCUMULATION_REDUCES
        ),
        data_before_experts=flag(config, "use_data_before_expert_parallelism", False, is_checked=False),
        fuses_adam=_fuses_adam(config),
    )


def autocast_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the element type of torch.autocast in torch's spelling, or None if autocast is off."""
    block = section(config, "torch_autocast")
    if not flag(block, "torch_autocast.enabled", False, is_checked=False):
        return None
    return dtype(block, "torch_autocast.dtype") or "bfloat16"


def zero_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of ``zero_optimization``."""
    value = config.get("zero_optimization")
    # The oldest form of the key is a boolean, which turns stage 1 on or off.
    if isinstance(value, bool):
        return {"stage": int(value)}
    return section(config, "zero_optimization")


def _clipping(config: Mapping[str, Any]) -> float:
    """Return the largest gradient norm, or 0 if the config turns clipping off by null."""
    if config.get("gradient_clipping", 0.0) is None:
        return 0.0
    return number(config, "gradient_clipping", 0.0 if "gradient_clipping" in config else 1.0)


def _fuses_adam(config: Mapping[str, Any]) -> bool:
    optimizer = set_keys(config.get("optimizer"))
    is_adam = str(optimizer.get("type")).lower() in ("adam", "adamw")
    return is_adam and not truth(set_keys(optimizer.get("params")).get("torch_adam"))


def _offload_device(zero: Mapping[str, Any]) -> str:
    if flag(zero, "zero_optimization.cpu_offload", None):
        return "cpu"
    device = section(zero, "offload_optimizer").get("device")
    if device is None:
        return "none"
    if device not in ("none", "cpu", "nvme"):
        raise wrong("zero_optimization.offload_optimizer.device", device, "none, cpu or nvme")
    return str(device)
