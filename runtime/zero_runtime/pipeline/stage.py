"""A pipeline stage that runs the instructions of a schedule during one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from commprof import hooks
from zero_runtime.activation_checkpointing.held import holding
from zero_runtime.errors import UsageError
from zero_runtime.gradient_reduction.loss_scale import LossScale
from zero_runtime.optimizer_step.dtypes import Precision, autocast
from zero_runtime.optimizer_step.fp32_modules import cast_floating
from zero_runtime.pipeline.model.pipeline_module import PipelineModule
from zero_runtime.pipeline.schedule.bubble import Bubble
from zero_runtime.pipeline.schedule.instructions import Action
from zero_runtime.pipeline.schedule.pipeline_schedules import Schedule
from zero_runtime.pipeline.schedule.step_plan import Plan
from zero_runtime.pipeline.split_backward import WeightGradients, backward_of_inputs
from zero_runtime.pipeline.stage_grid import PipelineGrid
from zero_runtime.pipeline.transfer.channel import Arrival, Channel
from zero_runtime.pipeline.transfer.micro_batches import Source, inputs_of, labels_of


class StageModel(NamedTuple):
    """The objects of the engine that every step of a stage uses.

    Attributes:
        module: The pipeline, with the layers of this rank.
        grid: The ranks of stages and replicas.
        plan: The schedule.
        precision: The dtypes of inputs and of autocast.
        scale: The loss scale.
        finish_backward: A function that is called after each backward pass, to process the gradients.
        device: The device of the parameters.
    """

    module: PipelineModule
    grid: PipelineGrid
    plan: Plan
    precision: Precision
    scale: LossScale
    finish_backward: Callable[[], None]
    device: torch.device


class Pass(NamedTuple):
    """A micro-batch in one of the rank's chunks of the model.

    Attributes:
        number: The number of the micro-batch.
        chunk: The number of the chunk.
    """

    number: int
    chunk: int


class Stage:
    """The state of a stage during one step: inputs, outputs and gradients of the micro-batches in progress.

    Args:
        model: The model and the other objects that the step uses.
        channel: The connections to the neighboring stages.
        bubble: The measurement of the computation.
        source: A function that returns the next batch.
        micro_batches: The number of micro-batches of the step.
        with_loss: Whether the last stage calls the loss function.

    Attributes:
        losses: The detached loss of each micro-batch so far, on the last stage.
        results: The outputs of the last stage for each micro-batch, in an evaluation.
    """

    def __init__(
        self,
        model: StageModel,
        channel: Channel,
        bubble: Bubble,
        source: Source,
        micro_batches: int,
        with_loss: bool,
    ) -> None:
        self._model = model
        self._channel = channel
        self._bubble = bubble
        self._source = source
        self._micro_batches = micro_batches
        self._with_loss = with_loss
        self._inputs: dict[Pass, Any] = {}
        self._labels: dict[int, Any] = {}
        self._outputs: dict[Pass, Any] = {}
        self._arriving: dict[Pass, Arrival] = {}  # activations
        self._gradients: dict[Pass, Arrival] = {}
        self._weights: dict[Pass, WeightGradients] = {}
        self.losses: list[torch.Tensor] = []
        self.results: list[Any] = []
        self._do: dict[Action, Callable[[Pass], None]] = {
            Action.LOAD: self._load,
            Action.FORWARD: self._forward,
            Action.BACKWARD: self._backward,
            Action.BACKWARD_INPUT: self._backward_of_inputs,
            Action.BACKWARD_WEIGHT: self._backward_of_weights,
            Action.SEND_ACTIVATION: self._send_activation,
            Action.RECEIVE_ACTIVATION: self._receive_activation,
            Action.SEND_GRADIENT: self._send_gradient,
            Action.RECEIVE_GRADIENT: self._receive_gradient,
        }

    def run(self, schedule: Schedule) -> None:
        """Run all instructions of ``schedule``."""
        try:
            for step in schedule:
                for action, number, chunk in step:
                    hooks.micro_step(number)
                    self._do[action](Pass(number, chunk))
            self._channel.settle()
        finally:
            hooks.micro_step(0)
            hooks.phase("other")

    @property
    def _training(self) -> bool:
        return torch.is_grad_enabled()

    def _is_first(self, current: Pass) -> bool:
        return self._model.grid.is_first and not current.chunk

    def _is_last(self, current: Pass) -> bool:
        return self._model.grid.is_last and current.chunk == self._model.module.virtual_stages - 1

    def _load(self, current: Pass) -> None:
        if current.chunk and self._model.grid.is_first:
            return  # There is only one rank, which has read the labels together with the inputs.
        batch = self._source()
        if self._is_first(current):
            inputs = self._on_device(inputs_of(batch))
            dtype = self._model.precision.inputs
            inputs = inputs if dtype is None else cast_floating(inputs, dtype)
            if self._training and self._model.module.differentiates_inputs:
                inputs = tree_map(_requiring_gradients, inputs)
            self._inputs[current] = inputs
        if self._model.grid.is_last and self._with_loss:
            self._labels[current.number] = self._on_device(labels_of(batch))

    def _on_device(self, values: Any) -> Any:
        device = self._model.device
        return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, values)

    def _receive_activation(self, current: Pass) -> None:
        hooks.phase("forward" if self._training else "evaluation")
        self._arriving[current] = self._channel.receive_activation(self._training, current.chunk)

    def _forward(self, current: Pass) -> None:
        hooks.phase("forward" if self._training else "evaluation")
        if current in self._arriving:
            self._inputs[current] = self._arriving.pop(current).value()
        model, inputs = self._model, self._inputs[current]
        if not self._training:
            del self._inputs[current]
        # The inputs are copied so that the first layer may work in place although they require gradients.
        layer_inputs = tree_map(_copied, inputs) if self._training else inputs
        # With a split backward pass, checkpointed layers run again only once, for both halves.
        halves = holding(model.plan.splits_backward)
        with self._bubble.working(), autocast(model.precision.autocast, model.device), halves:
            outputs = (
                model.module(layer_inputs, current.chunk) if current.chunk else model.module(layer_inputs)
            )
            if not self._is_last(current):
                self._outputs[current] = outputs
                return
            if not self._training:
                self.results.append(outputs)
                if not self._with_loss:
                    return
            loss = self._loss(outputs, current.number)
        self.losses.append(loss.detach())
        if self._training:
            self._outputs[current] = loss

    def _loss(self, outputs: Any, number: int) -> torch.Tensor:
        function, labels = self._model.module.loss_fn, self._labels.pop(number)
        if function is not None and labels is None:
            raise UsageError(
                "the batch has no labels, which loss_fn needs; give pairs (inputs, labels), or call inference_batch"
            )
        loss = outputs if function is None else function(outputs, labels)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shown = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, torch.Tensor)
                else type(loss).__name__
            )
            raise UsageError(
                f"the loss of a micro-batch is {shown}; expected one element: give PipelineModule a loss_fn(output, "
                "labels) that returns one, or let the last layer return it"
            )
        return loss

    def _send_activation(self, current: Pass) -> None:
        hooks.phase("forward" if self._training else "evaluation")
        self._channel.send_activation(self._outputs[current], current.chunk)
        if not self._training:
            del self._outputs[current]

    def _receive_gradient(self, current: Pass) -> None:
        hooks.phase("backward")
        self._gradients[current] = self._channel.receive_gradients(self._outputs[current])

    def _ends(self, current: Pass) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """Return the tensors at which the backward pass begins, and their gradients.

        If the tensor is the loss, None replaces the gradients.
        """
        outputs = self._outputs.pop(current)
        if self._is_last(current):
            scale = self._model.scale.value / self._micro_batches
            return [outputs if scale == 1.0 else outputs * scale], None
        pairs = zip(_differentiable(outputs), self._gradients.pop(current).value(), strict=True)
        differentiable = [(end, gradient) for end, gradient in pairs if end.requires_grad]
        return [end for end, _ in differentiable], [gradient for _, gradient in differentiable]

    def _backward(self, current: Pass) -> None:
        hooks.phase("backward")
        ends, gradients = self._ends(current)
        with self._bubble.working():
            if ends:
                torch.autograd.backward(ends, gradients)
        self._finish_backward(current)

    def _backward_of_inputs(self, current: Pass) -> None:
        hooks.phase("backward")
        ends, gradients = self._ends(current)
        leaves = [leaf for leaf in tree_leaves(self._inputs[current]) if isinstance(leaf, torch.Tensor)]
        with self._bubble.working():
            received = [leaf for leaf in leaves if leaf.requires_grad]
            self._weights[current] = backward_of_inputs(ends, gradients, received)

    def _backward_of_weights(self, current: Pass) -> None:
        hooks.phase("backward")
        with self._bubble.working():
            self._weights.pop(current).run()
        self._finish_backward(current)

    def _finish_backward(self, current: Pass) -> None:
        with torch.no_grad():
            self._model.finish_backward()
        if self._is_first(current):
            del self._inputs[current]

    def _send_gradient(self, current: Pass) -> None:
        hooks.phase("backward")
        self._channel.send_gradients(self._inputs.pop(current))


def _requiring_gradients(value: Any) -> Any:
    """Return a copy of a floating-point tensor that requires gradients. Any other value is returned unchanged."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().clone().requires_grad_()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and value.requires_grad else value


def _differentiable(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors of ``outputs`` whose gradients the next stage sends back."""
    tensors = (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
    return [each for each in tensors if each.is_floating_point() or each.is_complex()]
