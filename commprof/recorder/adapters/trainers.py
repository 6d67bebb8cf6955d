"""Adapter for accelerate, transformers, Lightning, torchmetrics and torchtitan.

It tags collectives that no model wrapper issues. A few internal functions issue most of these collectives, and
each of these functions is called for many purposes. Such a function gets its most frequent purpose, unless a
caller has set a purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from commprof import hooks
from commprof.recorder.adapters.checkpoints import Checkpoints
from commprof.recorder.adapters.parts import Part, default_purpose, purpose
from commprof.recorder.adapters.patching import tagged_by_default
from commprof.schema import Phase, Purpose

_OPERATIONS: Final = "accelerate.utils.operations"
_ACCELERATOR: Final = "accelerate.accelerator"
_FSDP: Final = "accelerate.utils.fsdp_utils"
_LOADER: Final = "accelerate.data_loader"
_TRAINER: Final = "transformers.trainer"
_GATHERS: Final = "transformers.trainer_pt_utils"
_METRICS: Final = "torchmetrics.utilities.distributed"
_TITAN: Final = "torchtitan.distributed.utils"
_TITAN_EXPERTS: Final = "torchtitan.distributed.expert_parallel"
_LIGHTNING: Final = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))
_STRATEGIES: Final = (
    ("ddp", "DDPStrategy"),
    ("fsdp", "FSDPStrategy"),
    ("model_parallel", "ModelParallelStrategy"),
)

_ACCELERATE: Final = (
    default_purpose(_OPERATIONS, "_gpu_gather", Purpose.METRIC),
    default_purpose(_OPERATIONS, "reduce", Purpose.METRIC),
    default_purpose(_OPERATIONS, "_gpu_broadcast", Purpose.CONTROL, optional=True),
    default_purpose("accelerate.utils", "reduce", Purpose.METRIC, optional=True),
    default_purpose(_ACCELERATOR, "Accelerator.reduce", Purpose.METRIC),
    default_purpose(_ACCELERATOR, "Accelerator.gather_for_metrics", Purpose.METRIC, optional=True),
    purpose(_ACCELERATOR, "Accelerator.check_trigger", Purpose.CONTROL, optional=True),
    purpose(_ACCELERATOR, "Accelerator.clip_grad_norm_", Purpose.GRADIENT_NORM, optional=True),
    # The main process reads batches for all processes, and broadcasts the batches and their shapes.
    purpose(_LOADER, "broadcast", Purpose.INPUT, optional=True),
    purpose(_LOADER, "broadcast_object_list", Purpose.INPUT, optional=True),
    purpose("accelerate.utils.random", "synchronize_rng_state", Purpose.CONTROL, optional=True),
    purpose(_FSDP, "fsdp2_load_full_state_dict", Purpose.PARAMETER_BROADCAST, optional=True),
    # Like torch's average_parameters, this averages parameters that ranks have updated independently for some steps.
    purpose(
        "accelerate.local_sgd",
        "LocalSGD._sync_and_avg_model_params",
        Purpose.PARAMETER_BROADCAST,
        optional=True,
    ),
)
_TRANSFORMERS: Final = (
    default_purpose(_GATHERS, "distributed_concat", Purpose.METRIC),
    default_purpose(_GATHERS, "distributed_broadcast_scalars", Purpose.METRIC, optional=True),
    default_purpose(_TRAINER, "Trainer.store_flos", Purpose.METRIC, optional=True),
    default_purpose(_TRAINER, "Trainer._get_num_items_in_batch", Purpose.METRIC, optional=True),
    purpose(
        _TRAINER, "Trainer._sync_replicated_trainable_parameters", Purpose.PARAMETER_BROADCAST, optional=True
    ),
    purpose(
        "transformers.generation.utils",
        "GenerationMixin._has_unfinished_sequences",
        Purpose.CONTROL,
        optional=True,
    ),
)
_TORCHMETRICS: Final = (
    default_purpose(_METRICS, "gather_all_tensors", Purpose.METRIC),
    default_purpose(_METRICS, "_simple_gather_all_tensors", Purpose.METRIC, optional=True),
    # This covers any gather function that the program passes.
    default_purpose("torchmetrics.metric", "Metric._sync_dist", Purpose.METRIC, optional=True),
)
_TORCHTITAN: Final = (
    # These reduce losses and token counts. Only newer versions have the second function, which the first one calls.
    default_purpose(_TITAN, "_dist_reduce", Purpose.METRIC, optional=True),
    default_purpose(_TITAN, "_dist_reduce_tensor", Purpose.METRIC, optional=True),
    purpose(_TITAN, "set_determinism", Purpose.CONTROL, optional=True),
    purpose(_TITAN, "clip_grad_norm_", Purpose.GRADIENT_NORM, optional=True),
    # These send the number of tokens for the experts of each rank, and the tokens.
    *(
        default_purpose(_TITAN_EXPERTS, f"{style}._token_dispatch", Purpose.ACTIVATION, optional=True)
        for style in ("ExpertParallel", "ExpertTensorParallel")
    ),
)
_CHECKPOINTS: Final = (
    *((_ACCELERATOR, f"Accelerator.{name}") for name in ("save_state", "load_state", "save_model")),
    (_ACCELERATOR, "Accelerator.get_state_dict"),
    *((_FSDP, f"{verb}_fsdp_{what}") for verb in ("save", "load") for what in ("model", "optimizer")),
    (_FSDP, "merge_fsdp_weights"),
    *((_TRAINER, f"Trainer.{name}") for name in ("save_model", "_save_checkpoint", "_load_from_checkpoint")),
    *((_TRAINER, f"Trainer.{name}") for name in ("_load_best_model", "_load_optimizer_and_scheduler")),
    *((_TRAINER, f"Trainer.{name}") for name in ("_load_rng_state", "_load_scaler")),
)
# Methods with which Lightning saves and loads checkpoints.
_LIGHTNING_CHECKPOINTS: Final = (
    ("trainer.trainer", "Trainer.save_checkpoint"),
    ("callbacks.model_checkpoint", "ModelCheckpoint._save_checkpoint"),
    ("callbacks.model_checkpoint", "ModelCheckpoint.file_exists"),
    ("callbacks.model_checkpoint", "ModelCheckpoint.setup"),
    ("trainer.connectors.checkpoint_connector", "_CheckpointConnector._restore_modules_and_callbacks"),
    ("trainer.connectors.checkpoint_connector", "_CheckpointConnector.restore_training_state"),
    ("trainer.connectors.checkpoint_connector", "_CheckpointConnector.resume_end"),
)


class Trainers:
    """Wraps functions of libraries that contain the training loop.

    Args:
        checkpoints: The object that wraps functions that write or read a checkpoint.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def parts(self) -> list[Part]:
        """Return the functions to wrap, each with its wrapper."""
        return [
            *_ACCELERATE,
            *_TRANSFORMERS,
            Part(_TRAINER, "Trainer.evaluation_loop", _wrap_evaluation, True),
            *_TORCHMETRICS,
            *_TORCHTITAN,
            *(self._checkpoints.part(module, name) for module, name in _CHECKPOINTS),
            *(part for packages in _LIGHTNING for part in self._lightning(*packages)),
        ]

    def _lightning(self, trainer: str, fabric: str) -> Iterator[Part]:
        """Yield the functions of Lightning to wrap.

        Lightning has two names for each of its packages, so this is called for each pair of names.
        """
        sync = f"{fabric}.utilities.distributed"
        yield default_purpose(sync, "_sync_ddp", Purpose.METRIC)
        yield default_purpose(sync, "_gather_all_tensors", Purpose.METRIC, optional=True)
        yield Part(sync, "_all_gather_ddp_if_available", _wrap_gather, True)
        # These broadcast the whole model for an evaluation, even if no training ran before.
        for module in ("overrides.distributed", "strategies.ddp"):
            yield purpose(f"{trainer}.{module}", "_sync_module_states", Purpose.EVALUATION, True)
        for package in (trainer, fabric):
            parallel = f"{package}.strategies.parallel"
            yield default_purpose(parallel, "ParallelStrategy.reduce_boolean_decision", Purpose.CONTROL, True)
            for module, strategy in _STRATEGIES:
                yield default_purpose(
                    f"{package}.strategies.{module}", f"{strategy}.broadcast", Purpose.CONTROL, True
                )
        loop = f"{trainer}.loops.training_epoch_loop"
        yield purpose(loop, "_TrainingEpochLoop._broadcast_sigterm_tensor", Purpose.CONTROL, True)
        yield default_purpose(f"{trainer}.utilities.data", "has_len_all_ranks", Purpose.CONTROL, True)
        for module, name in _LIGHTNING_CHECKPOINTS:
            yield self._checkpoints.part(f"{trainer}.{module}", name)
        for name in ("save", "load", "load_raw"):
            yield self._checkpoints.part(f"{fabric}.fabric", f"Fabric.{name}")


def _wrap_evaluation(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the evaluation loop of the Trainer, to report the evaluation phase with DeepSpeed.

    With DeepSpeed, the Trainer evaluates the model without the engine, so the DeepSpeed adapter sees no pass.
    """

    def evaluation_loop(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(trainer, "is_deepspeed_enabled", False) or not hooks.has_stepped():
            return original(trainer, *args, **kwargs)
        hooks.phase(Phase.EVALUATION.value)
        try:
            return original(trainer, *args, **kwargs)
        finally:
            hooks.phase(Phase.OTHER.value)

    return evaluation_loop


def _wrap_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a gather so that it is tagged as a metric, unless gradients flow through it.

    A gather with gradients is part of the model. torch's differentiable function, which is wrapped too, then
    sets the purpose.
    """
    metric = tagged_by_default(original, hooks.tag(Purpose.METRIC.value))

    def gather(tensor: Any, group: Any = None, sync_grads: bool = False, *args: Any, **kwargs: Any) -> Any:
        call = original if sync_grads else metric
        return call(tensor, group, sync_grads, *args, **kwargs)

    return gather
