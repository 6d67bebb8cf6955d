"""The keys of tensor and sequence parallelism: the ranks along each axis, and the partition of modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from zero_runtime.configuration.reading.checks import (
    anything,
    boolean,
    choice,
    integer,
    mapping,
    optional,
    text,
)
from zero_runtime.configuration.reading.key_table import Table, inert, inside, later, refused, used, waiting
from zero_runtime.errors import ConfigError

_PART: Final = "tensor parallelism"
_SIZE: Final = "the number of ranks that share each tensor"

_TP: Final[Table] = {
    "tp_size": used(integer(1), 1, "the same as autotp_size"),
    "tp_grain_size": inert(
        integer(1), 1, "the grain size of uneven partitions", "tensors are partitioned evenly"
    ),
    "mpu": refused(
        "an object cannot be part of a configuration; pass mpu to initialize", "model parallelism"
    ),
    "tp_group": refused(
        "a group cannot be part of a configuration; pass mpu to initialize", "a group of ranks"
    ),
}

TENSOR_PARALLEL: Final[Table] = {
    "autotp_size": used(
        integer(0), 0, f"{_SIZE}. Modules are partitioned by their names. The value 0 disables this"
    ),
    "tp": used(optional(inside(_TP)), None, "an object whose key tp_size is another name for autotp_size"),
    "tensor_parallel": used(optional(inside(_TP)), None, "the old name of tp"),
    "plan": used(
        optional(mapping),
        None,
        "patterns of module names, and how the modules that match each pattern are partitioned. See "
        "docs/parallelism.md. Not a key of DeepSpeed",
    ),
    "partition_config": used(
        optional(mapping), None, "the plan in DeepSpeed's form, with the key layer_specs"
    ),
    "sequence_parallel": used(
        boolean,
        False,
        "between partitioned modules, shard activations along the sequence. Not a key of DeepSpeed",
    ),
    "dtype": inert(anything, None, "the dtype of the layers", "bf16 and fp16 set the dtype of the training"),
    "tp_overlap_comm": later(boolean, False, "overlap reductions with computation", "overlap within a layer"),
    "vocab_parallel_lm_head": later(
        optional(boolean), None, "also partition the output layer", "a separate key for the output layer",
        'in tensor_parallel.plan, give the output layer the value "column" and the loss the value "loss"',
    ),
    "vocab_parallel_ce_backend": waiting(
        choice("torch", "liger"),
        "torch",
        "the backend of the vocabulary-parallel loss",
        _PART,
    ),
    "injection_policy_tuple": later(
        anything,
        None,
        "the layers to partition",
        "DeepSpeed's policies",
        "name the modules in tensor_parallel.plan",
    ),
    "preset_model": later(
        optional(text),
        None,
        "the name of a known model",
        "a table of models",
        "name the modules in tensor_parallel.plan",
    ),
    "keep_module_on_host": inert(
        boolean,
        False,
        "partition the model in host memory",
        "a model is always partitioned in the memory where it is, before it is moved to the rank's device",
    ),
    "replace_with_kernel_inject": later(
        boolean, False, "replace kernels of the model", "kernels for inference"
    ),
}  # fmt: skip

KEYS: Final[Table] = {
    "tensor_parallel": used(
        inside(TENSOR_PARALLEL), {}, "the settings of tensor parallelism, described in docs/parallelism.md"
    ),
    "tp_size": used(
        integer(1), 1, f"{_SIZE}. Not a key of DeepSpeed, which uses tensor_parallel.autotp_size"
    ),
    "sequence_parallel_size": used(
        integer(1), 1, "the number of ranks that share the sequences of a batch (Ulysses)"
    ),
    "data_parallel_size": used(
        optional(integer(1)),
        None,
        "the expected number of data-parallel ranks. It is checked: the number of ranks, divided by the "
        "product of the number of pipeline stages, tp_size and sequence_parallel_size, must equal this value",
    ),
    "use_data_before_expert_parallelism": used(
        boolean,
        False,
        "if true, ranks with the same experts are adjacent, and ranks that exchange tokens are far apart. "
        "See docs/experts.md",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """The parallel keys of a configuration.

    Attributes:
        tp_size: The number of ranks that share each tensor.
        sequence_parallel_size: The number of ranks that share the sequences of a batch.
        data_parallel_size: The number of replicas that the configuration states; None if the key is absent.
        plan: The patterns of module names, and how the modules that match each pattern are partitioned.
        partition_config: The plan in DeepSpeed's form.
        sequence_parallel: Whether activations between partitioned modules are sharded along the sequence.
        counts_slices: Whether ``train_batch_size`` may count a sample once for each tensor-parallel rank.
        data_before_experts: Whether the ranks with the same experts are adjacent. Otherwise, the ranks that exchange
            tokens are adjacent.
    """

    tp_size: int = 1
    sequence_parallel_size: int = 1
    data_parallel_size: int | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    partition_config: Mapping[str, Any] = field(default_factory=dict)
    sequence_parallel: bool = False
    counts_slices: bool = False
    data_before_experts: bool = False

    def replicas(self, world_size: int, stages: int = 1) -> int:
        """Return the number of replicas: ``world_size`` divided by the ranks that share one model or its sequences.

        Args:
            world_size: The number of all ranks.
            stages: The number of pipeline stages.

        Raises:
            ConfigError: ``world_size`` is not divisible by the number of these ranks, or the result differs from
                ``data_parallel_size``.
        """
        sizes = {
            "stages of a pipeline": stages,
            "tp_size": self.tp_size,
            "sequence_parallel_size": self.sequence_parallel_size,
        }
        shared = stages * self.tp_size * self.sequence_parallel_size
        shown = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        if world_size % shared:
            raise ConfigError(
                f"{shown} makes {shared} ranks for each model, which does not divide the {world_size} ranks there are; "
                f"start a multiple of {shared} ranks, or change one of them"
            )
        replica_count = world_size // shared
        if self.data_parallel_size not in (None, replica_count):
            raise ConfigError(
                f"data_parallel_size is {self.data_parallel_size}, but {world_size} ranks"
                f"{f' divided by {shown}' if shown else ''} leave {replica_count}; remove data_parallel_size, or make "
                "the product of "
                "all axes the number of ranks"
            )
        return replica_count


def read_parallel(top: Mapping[str, Any]) -> ParallelConfig:
    """Return the parallel keys in the checked values of a configuration.

    Raises:
        ConfigError: Two keys set different sizes, or ``sequence_parallel`` is true without tensor parallelism.
    """
    block = top["tensor_parallel"]
    configured = {"tp_size": top["tp_size"], "tensor_parallel.autotp_size": block["autotp_size"]}
    for name in ("tp", "tensor_parallel"):
        if block[name] is not None:
            configured[f"tensor_parallel.{name}.tp_size"] = block[name]["tp_size"]
    wide = {name: size for name, size in configured.items() if size > 1}
    if len(set(wide.values())) > 1:
        shown = " and ".join(f"{name} {size}" for name, size in wide.items())
        raise ConfigError(f"{shown} differ; keep one of them")
    size = next(iter(wide.values()), 1)
    if size == 1 and block["sequence_parallel"]:
        raise ConfigError(
            "tensor_parallel.sequence_parallel is true, which acts between partitioned tensors, and tp_size is 1; set "
            "tp_size, or use sequence_parallel_size for sequences without partitioned tensors"
        )
    return ParallelConfig(
        tp_size=size,
        sequence_parallel_size=top["sequence_parallel_size"],
        data_parallel_size=top["data_parallel_size"],
        plan=block["plan"] or {},
        partition_config=block["partition_config"] or {},
        sequence_parallel=block["sequence_parallel"],
        counts_slices=top["tp_size"] == 1 and size > 1,
        data_before_experts=top["use_data_before_expert_parallelism"],
    )


def check_parallel(config: ParallelConfig, optimizer: str | None) -> None:
    """Refuse optimizers that conflict with tensor parallelism. Raises ConfigError.

    Args:
        config: The parallel keys.
        optimizer: The type of the optimizer in the configuration.
    """
    optimizer_name = (optimizer or "").lower()
    if config.tp_size > 1 and optimizer_name in ("muon", "lamb"):
        raise ConfigError(
            f"optimizer.type is {optimizer}, whose step depends on whole matrices, and tp_size is {config.tp_size}, which "
            "partitions them; use AdamW or another optimizer that works element by element"
        )
