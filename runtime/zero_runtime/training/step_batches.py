"""Complete training steps and evaluation steps that read their batches from an iterator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch.utils._pytree import tree_map

from commprof import hooks
from zero_runtime.errors import UsageError
from zero_runtime.training.data_loading import RankLoader, RepeatingLoader

if TYPE_CHECKING:
    from zero_runtime.comm import DataParallelGroup

_LOSS: Final = hooks.tag("metric")


class Stepping(Protocol):
    """The interface of an engine for complete steps (:class:`zero_runtime.training.engine.Engine`)."""

    module: torch.nn.Module
    device: torch.device
    training: bool

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model forward."""

    def backward(self, loss: torch.Tensor) -> Any:
        """Run the backward pass of a micro-batch."""

    def step(self) -> None:
        """Update the parameters if the micro-batch was the last one of its step."""

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches of a step."""

    def train(self, mode: bool = True) -> Any:
        """Set the model to training mode, or to evaluation mode if ``mode`` is false."""

    def eval(self) -> Any:
        """Set the model to evaluation mode."""


class Batches:
    """The source of batches for complete steps: the iterator passed to a call, or the repeated training data."""

    def __init__(self) -> None:
        self._own: Iterator[Any] | None = None

    def of(self, data_iter: Iterator[Any] | None, training_data: RankLoader | None) -> Iterator[Any]:
        """Return ``data_iter`` after a check of its type, or the batches of ``training_data`` if it is None."""
        if data_iter is None:
            return self.own(training_data)
        if not hasattr(data_iter, "__next__"):
            raise UsageError(
                f"the batches are a {type(data_iter).__name__}; expected an iterator of batches: create one, once, "
                "with iter(loader) or zero_runtime.RepeatingLoader(loader), and pass it to each call"
            )
        return data_iter

    def own(self, training_data: RankLoader | None) -> Iterator[Any]:
        """Return an iterator of the batches of ``training_data``.

        Later calls return the same iterator, until :meth:`restart` is called.
        """
        if self._own is None:
            if training_data is None:
                raise UsageError(
                    "there is no training data; give an iterator of batches, or training_data to initialize"
                )
            self._own = RepeatingLoader(training_data)
        return self._own

    def restart(self) -> None:
        """Let the next call of :meth:`own` create a new iterator, from the training data of that call."""
        self._own = None


def train_step(engine: Stepping, batches: Iterator[Any], group: DataParallelGroup) -> torch.Tensor:
    """Run the micro-batches of one step, with its update, and return the mean loss of all ranks, a 0-D tensor."""
    total = torch.zeros((), device=engine.device)
    for _ in range(engine.gradient_accumulation_steps()):
        loss = loss_of(engine, _next(batches, engine))
        engine.backward(loss)
        total += loss.detach().float()
        engine.step()
    return _mean(total / engine.gradient_accumulation_steps(), group)


@torch.no_grad()
def evaluate_step(engine: Stepping, batches: Iterator[Any], group: DataParallelGroup) -> torch.Tensor:
    """Return the mean loss over all ranks of as many micro-batches as a step has, a 0-D tensor.

    The model is in evaluation mode during the call.
    """
    training = engine.training
    engine.eval()
    try:
        losses = [
            loss_of(engine, _next(batches, engine)).detach().float()
            for _ in range(engine.gradient_accumulation_steps())
        ]
    finally:
        engine.train(training)
    hooks.phase("evaluation")
    mean = _mean(torch.stack(losses).mean(), group)
    hooks.phase("other")
    return mean


def loss_of(engine: Stepping, batch: Any) -> torch.Tensor:
    """Return the loss of one batch.

    If the model has a ``loss_fn`` and the batch is a pair, the model gets the first item of the pair.
    ``loss_fn`` then gets the output of the model and the second item. In all other cases the model gets a
    mapping as keyword arguments, a tuple or list as positional arguments, and any other batch as its only
    argument. The loss is then the output of the model itself, ``output.loss``, ``output["loss"]`` or the
    first of several outputs.

    Raises:
        UsageError: The loss is not a tensor of one element.
    """
    batch = tree_map(lambda leaf: leaf.to(engine.device) if isinstance(leaf, torch.Tensor) else leaf, batch)
    loss_function = getattr(engine.module, "loss_fn", None)
    if callable(loss_function) and isinstance(batch, tuple | list) and len(batch) == 2:
        loss = loss_function(engine(batch[0]), batch[1])
    elif isinstance(batch, Mapping):
        loss = _loss_in(engine(**batch))
    else:
        loss = _loss_in(engine(*batch) if isinstance(batch, tuple | list) else engine(batch))
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shown = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else type(loss).__name__
        )
        raise UsageError(
            f"the loss of a batch is {shown}; expected a model that returns a loss of one element, or one with a "
            "loss_fn(output, target)"
        )
    return loss


def _loss_in(outputs: Any) -> Any:
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return outputs["loss"]
    if getattr(outputs, "loss", None) is not None:
        return outputs.loss
    return outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs


def _next(batches: Iterator[Any], engine: Stepping) -> Any:
    try:
        return next(batches)
    except StopIteration:
        raise UsageError(
            f"the iterator of batches ended in the middle of a step of {engine.gradient_accumulation_steps()} "
            "micro-batches; pass an iterator that repeats, such as RepeatingLoader(loader)"
        ) from None


def _mean(loss: torch.Tensor, group: DataParallelGroup) -> torch.Tensor:
    if group.world_size > 1:
        group.all_reduce(loss, why=_LOSS)
        loss /= group.world_size
    return loss
