"""Whole training and evaluation steps from an iterator of batches, and data loaders of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch.utils._pytree import tree_map

from commprof import hooks
from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import UsageError
from zero_runtime.groups.parallelism import Parallelism
from zero_runtime.training.data_loading import TRAIN, RankLoader, RepeatingLoader, rank_loader

if TYPE_CHECKING:
    from zero_runtime.comm import DataParallelGroup

_LOSS: Final = hooks.tag("metric")


class Stepping(Protocol):
    """What whole steps need of the engine (:class:`zero_runtime.training.engine.Engine`), which inherits them."""

    module: torch.nn.Module
    device: torch.device
    training: bool
    _group: DataParallelGroup
    _in_batch: bool

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model forward."""

    def backward(self, loss: torch.Tensor) -> Any:
        """Run the backward pass of a micro-batch."""

    def step(self) -> None:
        """Update the parameters if the micro-batch was the last one of its step."""

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""

    def train(self, mode: bool = True) -> Any:
        """Set the mode of the model."""

    def eval(self) -> Any:
        """Set the model to evaluation mode."""

    def _checked(self, data_iter: Iterator[Any] | None) -> Iterator[Any]: ...


class WholeSteps:
    """The engine's methods for whole steps. The attributes are the engine's."""

    _config: RuntimeConfig
    parallelism: Parallelism
    training: bool
    training_dataloader: RankLoader | None
    collate_fn: Callable[[list[Any]], Any] | None
    _batches: Iterator[Any] | None

    def train_batch(self: Stepping, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Take one whole step: forward, backward and step of as many micro-batches as are accumulated.

        Args:
            data_iter: of batches (see :func:`loss_of`); default: the training data, repeated.

        Returns:
            The mean loss of the micro-batches of all ranks, 0-D.
        """
        if not self.training:
            raise UsageError("train_batch was called in eval mode; call engine.train() first")
        return _train(self, self._checked(data_iter), self._group)

    def eval_batch(self: Stepping, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """The mean loss of as many micro-batches as a step has, over all ranks, 0-D; the model does not change."""
        return _evaluate(self, self._checked(data_iter), self._group)

    def _checked(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        if data_iter is None:
            return self._own_batches()
        if not hasattr(data_iter, "__next__"):
            raise UsageError(
                f"the batches are a {type(data_iter).__name__}; expected an iterator of batches: make one of a loader, "
                "once, with iter(loader) or zero_runtime.RepeatingLoader(loader), and give it in each call"
            )
        return data_iter

    def _own_batches(self) -> Iterator[Any]:
        if self._batches is None:
            if self.training_dataloader is None:
                raise UsageError(
                    "there is no training data; give an iterator of batches, or training_data to initialize"
                )
            self._batches = RepeatingLoader(self.training_dataloader)
        return self._batches

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = TRAIN,
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> RankLoader:
        """A loader of this rank's share of ``dataset``.

        Args:
            dataset: the samples.
            batch_size: samples of a batch; default: those of a micro-batch.
            route: train shuffles; eval and predict do not.
            pin_memory: page-locked host memory, where there is a GPU.
            data_sampler: chooses this rank's samples instead.
            collate_fn: makes a batch of a list of samples; default: that of ``initialize``.
            num_local_io_workers: processes that load; default: none.
        """
        return rank_loader(
            dataset,
            batch_size or self._config.train_micro_batch_size_per_gpu,
            drop_last=self._config.dataloader_drop_last,
            shuffle=route == TRAIN,
            sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            workers=num_local_io_workers or 0,
            pin_memory=pin_memory,
            replicas=self.parallelism.replicas,
            replica=self.parallelism.replica,
        )


def _train(engine: Stepping, batches: Iterator[Any], group: DataParallelGroup) -> torch.Tensor:
    """One step: as many micro-batches as are accumulated, and the update. Returns the mean loss of all ranks, 0-D."""
    total = torch.zeros((), device=engine.device)
    engine._in_batch = True
    try:
        for _ in range(engine.gradient_accumulation_steps()):
            loss = loss_of(engine, _next(batches, engine))
            engine.backward(loss)
            total += loss.detach().float()
            engine.step()
        mean = _mean(total / engine.gradient_accumulation_steps(), group)
    finally:
        engine._in_batch = False
    hooks.end_step()
    return mean


@torch.no_grad()
def _evaluate(engine: Stepping, batches: Iterator[Any], group: DataParallelGroup) -> torch.Tensor:
    """The mean loss of as many micro-batches as a step has, over all ranks, 0-D; the model is in eval mode meanwhile."""
    training = engine.training
    engine.eval()
    try:
        losses = [
            loss_of(engine, _next(batches, engine)).detach().float()
            for _ in range(engine.gradient_accumulation_steps())
        ]
    finally:
        engine.train(training)
    return _mean(torch.stack(losses).mean(), group)


def loss_of(engine: Stepping, batch: Any) -> torch.Tensor:
    """The loss of one batch.

    A model with a ``loss_fn`` gets the first item of a batch of two, and ``loss_fn`` its output and the second item. Any
    other model gets a mapping as keyword arguments, a tuple or list as arguments, and any other batch as its one argument.
    Its loss is the output itself, ``output.loss``, ``output["loss"]`` or the first of several outputs.

    Raises:
        UsageError: none of these is a tensor of one element.
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
            f"the iterator of batches has ended within a step of {engine.gradient_accumulation_steps()} micro-batches; "
            "pass one that repeats, such as RepeatingLoader(loader)"
        ) from None


def _mean(loss: torch.Tensor, group: DataParallelGroup) -> torch.Tensor:
    if group.world_size > 1:
        group.all_reduce(loss, why=_LOSS)
        loss /= group.world_size
    return loss
