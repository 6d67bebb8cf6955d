"""The engine of a pipeline, whose calls train or evaluate one complete step of many micro-batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

import torch

from commprof import hooks
from zero_runtime import comm
from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError, UsageError
from zero_runtime.gradient_reduction.whole_gradients import AccumulatedGradients
from zero_runtime.pipeline.model import ties
from zero_runtime.pipeline.model.pipeline_module import PipelineModule
from zero_runtime.pipeline.model.preparation import plan_of
from zero_runtime.pipeline.schedule.bubble import Bubble
from zero_runtime.pipeline.stage import Stage, StageModel
from zero_runtime.pipeline.stage_checkpoints import StageCheckpoints
from zero_runtime.pipeline.transfer.channel import Channel
from zero_runtime.pipeline.transfer.micro_batches import Share, Source, micro_batches_of, next_of
from zero_runtime.pipeline.transfer.step_results import combined, mean_of, share_loss, share_result
from zero_runtime.startup.assembly import Assembly
from zero_runtime.training.engine import Engine
from zero_runtime.training.moved_states import LP_PARAMS, STATES
from zero_runtime.training.reporting import BatchTimes

_OTHER: Final = hooks.tag("other")


class PipelineEngine(Engine):
    """The engine of a pipeline. :func:`zero_runtime.initialize` returns it for a ``PipelineModule``.

    Attributes:
        grid, mpu: The ranks of stages and replicas.
        stage_id: The stage of this rank.
        plan: The schedule of the steps.
        num_stages: The number of stages.
        micro_batches: The number of micro-batches of a step, which is the number of gradient accumulation
            steps.
        total_parameters: The number of trainable elements of all stages. Shared parameters count once for
            each stage.
        unique_parameters: The number of trainable elements of all stages. Shared parameters count once.
        agg_train_loss: The last result of ``train_batch``.
    """

    module: PipelineModule
    pipeline_parallelism = True

    def __init__(self, config: RuntimeConfig, assembly: Assembly, lr_scheduler: Any, dataloader: Any) -> None:
        super().__init__(config, assembly, lr_scheduler, dataloader)
        assert self.module.grid is not None
        self.grid = self.mpu = self.module.grid
        self.stage_id = self.grid.stage
        self.num_stages = self.grid.num_stages
        self.batch_fn: Callable[[Any], Any] | None = None
        self.agg_train_loss: torch.Tensor | None = None
        self._source: Iterator[Any] | None = None
        self._batch_seconds, self._timed_batches = (
            0.0,
            0,
        )  # sums over train_batch since the last progress line
        self.plan = plan_of(self.module, config.pipeline)
        self._channel = Channel(
            self.grid.pipe, self.module.dynamic_shape, self.plan.chunks, begun=self.plan.begins_messages
        )
        self._bubble = Bubble(self.grid.pipe)
        self.total_parameters, self.unique_parameters = self._count_parameters()
        if self.num_stages > 1:
            self._channel.open()

    def _count_parameters(self) -> tuple[int, int]:
        trained = [each for each in self.module.parameters() if each.requires_grad]
        copies = sum(each.numel() for each in trained if getattr(each, "ds_pipe_replicated", False))
        numel = sum(each.numel() for each in trained)
        counts = torch.tensor([numel, numel - copies], dtype=torch.int64, device=self.device)
        if self.grid.model.world_size > 1:
            self.grid.model.all_reduce(counts, why=_OTHER)
        total, unique = counts.tolist()
        return total, unique

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a step."""
        return self._config.gradient_accumulation_steps

    @property
    def micro_batch_size(self) -> int:
        """The number of samples of a micro-batch of one replica."""
        return self._config.train_micro_batch_size_per_gpu

    def is_first_stage(self) -> bool:
        """Return whether this rank's stage is the first, which receives the inputs."""
        return self.grid.is_first

    def is_last_stage(self) -> bool:
        """Return whether this rank's stage is the last, which receives the labels."""
        return self.grid.is_last

    def get_pipeline_parallel_rank(self) -> int:
        """Return the stage of this rank."""
        return self.stage_id

    # Steps.

    def train_batch(
        self, data_iter: Iterator[Any] | None = None, *, data: Any = None, targets: Any = None
    ) -> torch.Tensor:
        """Run one complete training step. All ranks must call this method.

        Args:
            data_iter: An iterator of (inputs, labels), one pair for each micro-batch. Only the first and the
                last stage read it. The default is the training data, repeated.
            data: All inputs of the step, in place of ``data_iter``. The first dimension of the tensors has
                the samples of this replica, or of all replicas. The tensors are divided into micro-batches.
            targets: All labels of the step, in the same form as ``data``.

        Returns:
            The mean loss of all micro-batches of all replicas, a 0-D tensor, on every rank.
        """
        if not torch.is_grad_enabled():
            raise UsageError(
                "train_batch was called without gradients (torch.no_grad); call eval_batch there"
            )
        if self.optimizer is None:
            raise UsageError(
                "train_batch needs an optimizer, and there is none; name one in the config, or pass one to initialize"
            )
        self._moved.refuse("train_batch", *STATES)
        source = self._source_of(data_iter, data, targets, self.micro_batches, lasting=True)
        self.train()
        self.tput_timer.start()
        begin = time.perf_counter()
        hooks.step(self._numbers.of(self.global_steps), 0)
        hooks.metric("samples", float(self._config.train_micro_batch_size_per_gpu * self.micro_batches))
        stage = self._stage(source, self.micro_batches)
        with self._clock("pipeline"):
            self._accumulate(stage)
        self._bubble.publish(self.expected_bubble_fraction())
        with self._clock("backward"):
            self._reduce()
        with self._clock("optimizer"):
            self._update()
        self.agg_train_loss = self._loss_of(stage)
        self._batch_seconds += time.perf_counter() - begin
        self._timed_batches += 1
        self._finish_step(stage)
        return self.agg_train_loss

    def _accumulate(self, stage: Stage) -> None:
        """Run the forward and backward passes of all micro-batches, and accumulate their gradients."""
        self._gradients.begin_step()
        self._gradients.pause(True)
        try:
            with self._bubble.step():
                stage.run(self.plan.training(self.micro_batches, self.stage_id))
        except BaseException:
            self._gradients.clear()
            raise
        finally:
            self._gradients.pause(False)

    @torch.no_grad()
    def _reduce(self) -> None:
        hooks.phase("backward")
        ties.reduce_gradients(self.module.ties, self._gradient_of)
        self._gradients.reduce_accumulated()
        hooks.phase("other")

    def _gradient_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if isinstance(self._gradients, AccumulatedGradients):
            accumulated = self._gradients.accumulated(parameter)
            if accumulated is not None:
                return accumulated
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def _update(self) -> None:
        hooks.phase("optimizer")
        self._step_applied = False
        self._window.passes = self.micro_batches
        self._take_step({})
        self._window.restart(self._window.micro_steps + self.micro_batches)
        hooks.phase("other")

    def _finish_step(self, stage: Stage) -> None:
        if hooks.recording() and self.device.type != "cuda" and self.agg_train_loss is not None:
            hooks.metric("loss", float(self.agg_train_loss))
        for loss in stage.losses:
            self._report.see_loss(loss)
        if self._watch is not None:
            self._watch.see_step(self.global_steps)
        self._report.see_memory("after step")
        # The timer prints no line, because the progress line of the step contains the speed.
        self.tput_timer.stop(global_step=True, report_speed=False)
        self._report.see_step(self._progress()._replace(batches=self._batch_times))
        hooks.end_step()

    def _batch_times(self) -> BatchTimes:
        """Return the loss and the times of the batches since the last call. The call waits for the loss."""
        assert self.agg_train_loss is not None
        seconds = self._batch_seconds / self._timed_batches
        self._batch_seconds, self._timed_batches = 0.0, 0
        return BatchTimes(float(self.agg_train_loss), seconds, self._config.train_batch_size / seconds)

    @torch.no_grad()
    def _loss_of(self, stage: Stage) -> torch.Tensor:
        mean = mean_of(stage.losses) if self.is_last_stage() else torch.zeros((), device=self.device)
        return share_loss(mean, self.grid)

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
        *,
        data: Any = None,
        targets: Any = None,
    ) -> Any:
        """Evaluate as many micro-batches as a step has, without changing the model. All ranks must call this method.

        Args:
            data_iter: An iterator of batches, as for :meth:`train_batch`.
            return_logits: Whether to also return the outputs of the last micro-batch, on the last stage.
            compute_loss: Whether to call ``loss_fn``. Otherwise the outputs themselves are reduced.
            reduce_output: ``avg`` for the mean over micro-batches and replicas, or None for a list with one
                value for each micro-batch.
            bcast_loss: Whether to send the mean loss to all stages.
            num_micro_batches: The number of micro-batches. The default is the number of a step.
            data, targets: The inputs and labels, as for :meth:`train_batch`.

        Returns:
            The mean loss, a 0-D tensor. Only the last stage returns a value if ``bcast_loss`` or
            ``compute_loss`` is false, or if the result is a list. The other stages then return None. With
            ``return_logits`` the result is a pair of the loss and the outputs.
        """
        if reduce_output not in ("avg", None):
            raise UsageError(f"reduce_output is {reduce_output!r}; expected 'avg' or None")
        self._moved.refuse("eval_batch", LP_PARAMS)
        count = num_micro_batches or self.micro_batches
        source = self._source_of(data_iter, data, targets, count)
        self.eval()
        stage = self._stage(source, count, with_loss=compute_loss)
        self._wait_for_all()
        stage.run(self.plan.inference(count, self.stage_id))
        result: Any = None
        if self.is_last_stage():
            values = stage.losses if compute_loss else stage.results
            result = list(values) if reduce_output is None else mean_of(values, self.grid)
        if compute_loss and bcast_loss and reduce_output is not None:
            result = share_result(result, self.grid)
        if return_logits:
            return result, (stage.results[-1] if stage.results else None)
        return result

    @torch.no_grad()
    def inference_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        *,
        data: Any = None,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run the layers without labels or loss. All ranks must call this method.

        Returns:
            On the last stage the outputs of all micro-batches, joined along the first dimension. None on
            other stages.
        """
        self._moved.refuse("inference_batch", LP_PARAMS)
        count = num_micro_batches or self.micro_batches
        source = self._source_of(data_iter, data, None, count)
        self.eval()
        stage = self._stage(source, count, with_loss=False)
        self._wait_for_all()
        stage.run(self.plan.inference(count, self.stage_id))
        return combined(stage.results) if self.is_last_stage() else None

    def _wait_for_all(self) -> None:
        """Wait for all ranks, as DeepSpeed does, so that no rank is several evaluations ahead of another rank."""
        with _OTHER:
            comm.barrier()

    def _stage(self, source: Source, micro_batches: int, with_loss: bool = True) -> Stage:
        model = StageModel(
            self.module,
            self.grid,
            self.plan,
            self._precision,
            self._scale,
            self._gradients.finish_backward,
            self.device,
        )
        return Stage(model, self._channel, self._bubble, source, micro_batches, with_loss)

    # Data.

    def _source_of(
        self, data_iter: Iterator[Any] | None, data: Any, targets: Any, count: int, lasting: bool = False
    ) -> Source:
        """Return the source of the batches of a call.

        If ``lasting`` is true, later calls without data use the same iterator.
        """
        if data is None and targets is not None and self.is_first_stage():
            raise UsageError("targets are given without data; give the first stage both, or data alone")
        if data is not None or targets is not None:
            if data_iter is not None:
                raise UsageError("both data_iter and data or targets are given; give one of the two")
            batches = micro_batches_of(data, targets, count, self._share())
            return next_of(batches, count, self.batch_fn)
        if data_iter is not None:
            batches = self._batches.of(data_iter, self.training_dataloader)
            if lasting:
                self._source = batches
            return next_of(batches, count, self.batch_fn)
        if self._source is None and (self.is_first_stage() or self.is_last_stage()):
            self._source = self._batches.own(self.training_dataloader)
        return next_of(self._source, count, self.batch_fn)

    def _share(self) -> Share:
        return Share(self.micro_batch_size, self.parallelism.replicas, self.parallelism.replica)

    def set_dataloader(self, loader: Any) -> None:
        """Use the batches of ``loader`` from now on in calls without data."""
        self.training_dataloader = loader
        self._batches.restart()
        self._source = None

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Use the batches of ``iterator`` from now on in calls without data."""
        self._source = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Set a function that is called with each batch. Its result replaces the batch."""
        self.batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Allow activations to have new shapes from now on. All ranks must call this method."""
        self._channel.reset()

    # Checkpoints.

    def _checkpoints_of(self, config: RuntimeConfig) -> StageCheckpoints:
        return StageCheckpoints(self.module, config, self.parallelism, self._moved, self._settled_state)

    def module_state_dict(  # type: ignore[override]
        self, exclude_frozen_parameters: bool = False, whole: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return the state of this stage's layers, by their names in the complete model.

        Args:
            exclude_frozen_parameters: Whether to leave out frozen parameters.
            whole: Whether to return the state of all stages, in host memory on rank 0, and None on other
                ranks. All ranks must then call this method.
        """
        if whole:
            return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        state: dict[str, torch.Tensor] = self.module.state_dict()
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    state.pop(name, None)
        return state

    # Idle time.

    def bubble_fraction(self) -> float:
        """Return the share of the last step in which stages did not compute, over all stages.

        All ranks must call this method. Messages count as idle time. So the share is at least
        :meth:`expected_bubble_fraction` if stages take equal time.
        """
        return self._bubble.idle_fraction()

    def expected_bubble_fraction(self) -> float:
        """Return the idle share of the schedule if stages and passes take equal time and messages take no time.

        The share is (stages - 1) / (virtual stages x micro-batches + stages - 1). With ``zero_bubble``, each
        half of a backward pass takes the time of a forward pass. The share is then (stages - 1) / (3 x
        micro-batches + stages - 1) if there are at least as many micro-batches as stages.
        """
        return self.plan.idle_fraction(self.micro_batches)

    # These calls are refused, because a pipeline runs only complete steps.

    def forward(self, *inputs: Any, **kwargs: Any) -> NoReturn:
        """Raise UsageError, because a pipeline runs only complete steps; see :meth:`train_batch`."""
        raise _whole_steps("forward")

    def backward(self, *arguments: Any, **options: Any) -> NoReturn:  # type: ignore[override]
        """Raise UsageError, because a pipeline runs only complete steps; see :meth:`train_batch`."""
        raise _whole_steps("backward")

    def step(self, *arguments: Any, **options: Any) -> NoReturn:  # type: ignore[override]
        """Raise UsageError, because a pipeline runs only complete steps; see :meth:`train_batch`."""
        raise _whole_steps("step")


def _whole_steps(name: str) -> UsageError:
    return UsageError(
        f"{name} was called on the engine of a pipeline, where stages work on several micro-batches at a time; call "
        "train_batch(data_iter) for a whole step, or eval_batch and inference_batch"
    )


def check_pipeline(config: RuntimeConfig) -> None:
    """Check that a pipeline supports the configuration.

    Raises:
        ConfigError: The stage shards gradients, or managed_gradient_accumulation is false.
    """
    if config.zero.stage.shards_gradients:
        raise ConfigError(
            f"zero_optimization.stage is {config.zero.stage.number}, and the model is a pipeline, which adds "
            "gradients up over many micro-batches before they can be sharded; use stage 0 or 1"
        )
    if not config.managed_gradient_accumulation:
        raise ConfigError(
            "managed_gradient_accumulation is false, and the model is a pipeline, which runs only complete steps; "
            "remove the key"
        )
