"""Adapter for functions of torch that issue collectives for a fixed purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from commprof import hooks
from commprof.recorder.adapters.checkpoints import Checkpoints
from commprof.recorder.adapters.parts import Doubts, Part, default_purpose, purpose
from commprof.recorder.process.journal import Journal
from commprof.recorder.training.training_loop import TrainingLoop
from commprof.schema import Phase, Purpose

_ZERO: Final = "torch.distributed.optim.zero_redundancy_optimizer"
_ZERO_HOOK: Final = "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook"
_AVERAGING: Final = "torch.distributed.algorithms.model_averaging.utils"
_SCHEDULES: Final = "torch.distributed.pipelining.schedules"
_STAGE: Final = "torch.distributed.pipelining.stage"
_SAVER: Final = "torch.distributed.checkpoint.state_dict_saver"
_LOADER: Final = "torch.distributed.checkpoint.state_dict_loader"
_STATE: Final = "torch.distributed.checkpoint.state_dict"
_CHECKPOINT: Final = "torch.distributed.checkpoint"

_DISTRIBUTED: Final = "torch.distributed"
_C10D: Final = "torch.distributed.distributed_c10d"
_AUTOGRAD: Final = "torch.distributed.nn.functional"
_FUNCTIONAL: Final = "torch.distributed._functional_collectives"
_SCALER: Final = "torch.distributed.fsdp.sharded_grad_scaler"
_GRAPH: Final = "torch._dynamo.output_graph"
_OBJECTS: Final = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)
_DIFFERENTIABLE: Final = (
    "_Broadcast",
    "_Gather",
    "_Scatter",
    "_Reduce",
    "_Reduce_Scatter",
    "_AllGather",
    "_AllGatherBase",
    "_AlltoAll",
    "_AlltoAllSingle",
    "_AllReduce",
)

_PURPOSES: Final = (
    purpose("torch.nn.modules._functions", "SyncBatchNorm.forward", Purpose.ACTIVATION),
    purpose("torch.nn.modules._functions", "SyncBatchNorm.backward", Purpose.ACTIVATION),
    purpose(_ZERO_HOOK, "_broadcast_bucket", Purpose.PARAMETER_BROADCAST, optional=True),
    # This averages parameters that ranks have updated independently for some steps (post-local SGD).
    purpose(_AVERAGING, "average_parameters", Purpose.PARAMETER_BROADCAST, optional=True),
    # The package re-exports these functions from the module that defines them, so both names are wrapped.
    *(
        default_purpose(module, name, Purpose.OBJECT, optional=True)
        for module in (_DISTRIBUTED, _C10D)
        for name in _OBJECTS
    ),
    *(
        default_purpose(module, name, Purpose.CONTROL, optional=True)
        for module in (_DISTRIBUTED, _C10D)
        for name in ("barrier", "monitored_barrier")
    ),
    # Gradients flow through these collectives.
    *(
        default_purpose(_AUTOGRAD, f"{name}.{direction}", Purpose.ACTIVATION, optional=True)
        for name in _DIFFERENTIABLE
        for direction in ("forward", "backward")
    ),
    *(
        default_purpose(_FUNCTIONAL, f"{name}_autograd", Purpose.ACTIVATION, optional=True)
        for name in (
            "all_gather_tensor",
            "reduce_scatter_tensor",
            "all_to_all_single",
            "all_gather_single",
            "reduce_scatter_single",
        )
    ),
    purpose(_SCALER, "ShardedGradScaler.unscale_", Purpose.OVERFLOW_CHECK, optional=True),
    # All ranks share this seed, with which they shuffle the same list of samples.
    purpose("torch.utils.data.dataloader", "_share_dist_seed", Purpose.CONTROL, optional=True),
    # The compilers of all ranks exchange what they found, so that all ranks compile the same graph.
    purpose(_GRAPH, "OutputGraph.run_compiler_collective", Purpose.CONTROL, optional=True),
    # The stages exchange metadata before the first batch.
    purpose(_STAGE, "PipelineStage._recv_meta", Purpose.PIPELINE, optional=True),
    purpose(_STAGE, "PipelineStage._send_meta", Purpose.PIPELINE, optional=True),
    purpose(_STAGE, "PipelineStage._warmup_forward_vote", Purpose.PIPELINE, optional=True),
    purpose(_STAGE, "PipelineStage._warmup_backward_result", Purpose.PIPELINE, optional=True),
    purpose(_STAGE, "PipelineStage._shape_inference", Purpose.PIPELINE, optional=True),
    purpose(
        _SCHEDULES,
        "_PipelineSchedule._initialize_pipeline_distributed_state",
        Purpose.PIPELINE,
        optional=True,
    ),
)
_CHECKPOINTS: Final = (
    (_ZERO, "ZeroRedundancyOptimizer.consolidate_state_dict"),
    (_SAVER, "save"),
    (_SAVER, "async_save"),
    (_LOADER, "load"),
    (_STATE, "get_state_dict"),
    (_STATE, "get_model_state_dict"),
    (_STATE, "get_optimizer_state_dict"),
    (_STATE, "set_state_dict"),
    (_STATE, "set_model_state_dict"),
    (_STATE, "set_optimizer_state_dict"),
    (_CHECKPOINT, "save"),
    (_CHECKPOINT, "async_save"),
    (_CHECKPOINT, "load"),
    ("torch.serialization", "_save"),  # torch.save calls this, whichever name a program uses for torch.save
    ("torch.serialization", "_legacy_save"),
)
_DIRECTIONS: Final = {"fwd": Phase.FORWARD, "bwd": Phase.BACKWARD}


class TorchFunctions:
    """Wraps functions of torch: sharded optimizers, pipelines, checkpoints, clipping and batch norms.

    Args:
        journal: The journal that receives notes on details that could not be determined.
        loop: The training loop that receives the phases of the functions.
        checkpoints: The object that wraps functions that write or read a checkpoint.
    """

    def __init__(self, journal: Journal, loop: TrainingLoop, checkpoints: Checkpoints) -> None:
        self._loop = loop
        self._checkpoints = checkpoints
        self._doubt = Doubts(journal, "ZeroRedundancyOptimizer")

    def parts(self) -> list[Part]:
        """Return the functions to wrap, each with its wrapper."""
        return [
            *_PURPOSES,
            *(self._checkpoints.part(module, name) for module, name in _CHECKPOINTS),
            Part(_ZERO, "ZeroRedundancyOptimizer._broadcast_params_from_rank", self._wrap_shard),
            Part(_SCHEDULES, "_batch_p2p", self._wrap_messages),
            Part(_SCHEDULES, "PipelineScheduleSingle.step", self._wrap_batch),
            Part(_SCHEDULES, "PipelineScheduleMulti.step", self._wrap_batch),
        ]

    def _wrap_shard(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the broadcast of parameters that one rank has updated, to tag it with this rank."""

        def broadcast(optimizer: Any, rank: int, *args: Any, **kwargs: Any) -> Any:
            owner = None
            try:
                group = optimizer.process_group
                owner = rank if group is None else _global_rank(group, rank)
            except Exception as error:
                self._doubt(error)
            with hooks.tag(Purpose.PARAMETER_BROADCAST.value, owner=owner):
                return original(optimizer, rank, *args, **kwargs)

        return broadcast

    def _wrap_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a pipeline step, which passes a whole batch. Its messages begin before its first pass begins."""

        def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            with self._loop.one_batch(getattr(schedule, "_has_backward", True)):
                return original(schedule, *args, **kwargs)

        return step

    def _wrap_messages(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that sends activations and their gradients between pipeline stages.

        The schedule passes the direction in ``desc``.
        """
        tag = hooks.tag(Purpose.PIPELINE.value)

        def batch(messages: Any, desc: str | None = None, *args: Any, **kwargs: Any) -> Any:
            phase = _DIRECTIONS.get((desc or "")[:3])
            before = None if phase is None else self._loop.enter(phase)
            try:
                with tag:
                    return original(messages, desc, *args, **kwargs)
            finally:
                if before is not None:
                    self._loop.leave(before)

        return batch


def _global_rank(group: Any, rank: int) -> int:
    import torch.distributed as dist

    return dist.get_global_rank(group, rank)
