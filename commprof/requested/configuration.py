"""The keys of a DeepSpeed config that decide what is sent, with DeepSpeed 0.19's defaults.

Only these keys are read; the runtime validates the rest of a config. Some of them are zero_runtime's
own: in ``zero_optimization`` those of :data:`OWN_KEYS`.
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
    """The settings of a config that decide what is sent.

    Attributes:
        model_dtype: element type that the config gives the model; None leaves the parameters as they are.
        communication_dtype: element type of sent gradients.
        accumulation_dtype: element type in which gradients are accumulated; None is the model's.
        reduce_bucket_size: elements per gradient bucket.
        gradient_reduction: ``"auto"`` or a name in :data:`REDUCTIONS`.
        gather_by_broadcast: ``allgather_partitions: false`` or ``disable_allgather: true``, which DeepSpeed ignores.
        allgather_bucket_size: elements per gathering message; None where the key is not set. DeepSpeed ignores it.
        gradient_clipping: largest norm; 0 turns clipping off.
        check_overflow: 16-bit gradients are checked for overflow at stages 1 and 2.
        offload_device: where the optimizer states are: ``"none"``, ``"cpu"`` or ``"nvme"``.
        accumulation_steps: micro-batches per step as written; None when it follows from the batch sizes.
        managed_accumulation: False makes each call of ``step()`` a step.
        compression: how gradients are compressed (zero_runtime only); None where they are not.
        quantises_gradients: gradients are sent in 4 bits at stages 1 and 2 (zero_runtime only).
        quantises_weights: updated parameters are sent in 8 bits (zero_runtime only).
        accumulation_reduce: ``each``, or ``boundary``: stages 2 and 3 reduce in the last micro-batch of a step alone
            (zero_runtime only). :mod:`commprof.requested.auto_values` replaces ``auto``.
        data_before_experts: ranks with the same experts are neighbors (``use_data_before_expert_parallelism``).
        fuses_adam: the optimizer is Adam without ``torch_adam``, which has its own class for 16-bit parameters.
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
        """Whether the optimizer states are partitioned: stages 1 and 2."""
        return self.stage > 0

    @property
    def reduces_flat_groups(self) -> bool:
        """Whether the flat gradient of each parameter group is reduced as a whole.

        Only in this case DeepSpeed keeps fp32 gradients next to a bf16 model. The optimizer class for it has neither
        buckets nor an overflow check nor a message for the norm.
        """
        return (
            self.stage == 1
            and self.model_dtype == "bfloat16"
            and self.accumulation_dtype == "float32"
            and self.offload_device != "cpu"
        )

    @property
    def reduces_whole_in_buckets(self) -> bool:
        """Whether stage 0 sends whole gradients in buckets during the backward pass (zero_runtime only)."""
        return not self.partitions and self.gradient_reduction != "auto" and self.overlap_comm

    @property
    def buffers_are_contiguous(self) -> bool:
        """Whether gradients are gathered in contiguous buckets, without which both reduction keys are ignored."""
        return self.contiguous_gradients or self.offload_device != "none"

    @property
    def reduction(self) -> str:
        """The gradient reduction that takes place, a name in :data:`REDUCTIONS`."""
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
        """Whether the flat buffers are divided into chunks, each reduced to the owners of its rows."""
        return self.stage in (1, 2) and self.reduction == "reduce_scatter"

    def reduce_scatter_on(self, backend: str) -> str:
        """How a reduce_scatter is issued on ``backend``: ``native`` or ``all_to_all``.

        gloo runs a native one as an all_reduce, so there the config's auto means an all_to_all.
        """
        if self.reduce_scatter_impl != "auto":
            return self.reduce_scatter_impl
        return "all_to_all" if backend == "gloo" else "native"

    @property
    def reduces_in_backward_order(self) -> bool:
        """Whether gradients enter buckets as backward produces them, rather than in the order of the groups."""
        return self.stage >= 2 or (self.stage == 1 and self.overlap_comm)

    def as_deepspeed_reads(self) -> Configuration:
        """The config as DeepSpeed reads it, without the keys of zero_runtime."""
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
        """Whether gradients are reduced in each micro-batch, rather than once per step."""
        return self.stage >= 2 and self.accumulation_reduce != "boundary"


def read_configuration(config: Mapping[str, Any]) -> Configuration:
    """Read the keys that decide what is sent.

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
    """The element type in which torch.autocast computes, as torch spells it; None where it is off."""
    block = section(config, "torch_autocast")
    if not flag(block, "torch_autocast.enabled", False, is_checked=False):
        return None
    return dtype(block, "torch_autocast.dtype") or "bfloat16"


def zero_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of ``zero_optimization``."""
    value = config.get("zero_optimization")
    if isinstance(value, bool):  # the oldest form of the key: stage 1, on or off
        return {"stage": int(value)}
    return section(config, "zero_optimization")


def _clipping(config: Mapping[str, Any]) -> float:
    """The largest norm; null does not clip."""
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
