"""Moving the engine's states from the device to host memory and back (``offload_states``)."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from zero_runtime import log
from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError, UnsupportedError, UsageError
from zero_runtime.experimental.one_bit import OneBitOptimizer
from zero_runtime.offload.moves import Moves
from zero_runtime.sharding.shards import shard_of

OPTIM_STATES: Final = "optim_states"
HP_PARAMS: Final = "hp_params"
LP_PARAMS: Final = "lp_params"
LP_GRADS: Final = "lp_grads"
CONTIGUOUS_GRAD_BUFFER: Final = "contiguous_grad_buffer"
# Tensors of several states move with the first: the masters of an fp32 model are its parameters.
STATES: Final = (LP_PARAMS, HP_PARAMS, LP_GRADS, OPTIM_STATES, CONTIGUOUS_GRAD_BUFFER)
BACKWARD: Final = (LP_PARAMS, LP_GRADS, CONTIGUOUS_GRAD_BUFFER)  # states that a backward pass uses


class MovedStates:
    """The engine's methods that move states. The attributes are the engine's."""

    _config: RuntimeConfig
    _moves: Moves
    _gradients: Any
    _residency: Any
    module: torch.nn.Module
    optimizer: Any
    global_rank: int

    def offload_states(
        self,
        include: Container[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states from the device to host memory, where they stay until :meth:`reload_states`.

        Tensors that are in host memory already stay there, so that on a CPU nothing is copied.

        Args:
            include: which; default: all. ``optim_states``: of the optimizer; ``hp_params``: the masters; ``lp_params``: the
                model's parameters, at stage 3 their shards; ``lp_grads``: gradients; ``contiguous_grad_buffer``: the
                buffers of gradient buckets, which are dropped and allocated again when needed.
            device: ``cpu``; with ``none`` nothing is moved.
            pin_memory: use page-locked memory where there is a GPU.
            non_blocking: do not wait for the copies. Checkpoints wait; other readers of the tensors must wait too.

        Raises:
            UsageError: there is no optimizer, or ``offload_param`` keeps the shards off the device anyway.
            ConfigError: another device, or an unknown state.
        """
        if self.optimizer is None:
            raise UsageError(
                "offload_states needs an optimizer, and there is none; move the model itself: engine.module.to('cpu')"
            )
        if self._config.zero.sharding.residency.offload.device != "none":
            raise UsageError(
                "offload_states was called, and zero_optimization.offload_param keeps the parameters off the device all "
                "the time; remove that key, or this call"
            )
        if isinstance(self.optimizer.optimizer, OneBitOptimizer):
            raise UnsupportedError(
                f"offload_states with optimizer {type(self.optimizer.optimizer).__name__}, which keeps the errors of its "
                "compression apart from its state, is not in this version; use AdamW"
            )
        if str(device) == "none":
            if self.global_rank == 0:
                log.warning("offload_states moved nothing: device is none; use cpu")
            return
        if str(device) != "cpu":
            raise ConfigError(f"device of offload_states is {str(device)!r}; expected cpu")
        wanted = _wanted(include)
        if self._residency is not None:
            self._residency.release_all()
        if CONTIGUOUS_GRAD_BUFFER in wanted:
            self._gradients.free_buffers()
        states = {name: list(self._tensors_of(name)) for name in STATES}
        self._moves.offload(states, wanted, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move everything that :meth:`offload_states` has moved back to the device. The training is not affected.

        Args:
            non_blocking: start all copies before waiting for the first; this returns when all have ended.

        Raises:
            UsageError: there is no optimizer.
        """
        if self.optimizer is None:
            raise UsageError("reload_states needs an optimizer, and there is none")
        self._moves.reload(non_blocking)

    def state_devices(self, state: str) -> set[torch.device]:
        """The devices of the tensors of one state; see :meth:`offload_states`."""
        return {each.device for each in self._tensors_of(_known(state)) if each.numel()}

    def _tensors_of(self, state: str) -> Iterator[torch.Tensor]:
        """All tensors of a state, including those that share memory."""
        if state == LP_PARAMS:
            yield from self.optimizer.parameter_tensors()
            for parameter in self.module.parameters():
                shard = shard_of(parameter)
                if shard is None:
                    yield parameter
                else:
                    yield from shard.tensors()
        elif state == HP_PARAMS:
            yield from self.optimizer.masters
        elif state == LP_GRADS:
            yield from self._gradients.tensors()
            yield from (each.grad for each in self.module.parameters() if each.grad is not None)
        elif state == OPTIM_STATES:
            values = tree_leaves([dict(each) for each in self.optimizer.state.values()])
            yield from (each for each in values if isinstance(each, torch.Tensor))
        else:
            yield from self._gradients.buffers()

    def _refuse_moved(self, doing: str, *states: str) -> None:
        """Raise UsageError if one of ``states``, which ``doing`` needs on the device, is in host memory."""
        away = [each for each in self._moves.away if each in states]
        if away:
            raise UsageError(
                f"{doing} was called while {', '.join(away)} {'are' if len(away) > 1 else 'is'} in host memory "
                "(engine.offload_states); call engine.reload_states() first"
            )


def get_state_devices(model: MovedStates, state: str) -> set[torch.device]:
    """The devices of one state of an engine, under DeepSpeed's name."""
    return model.state_devices(state)


def _wanted(include: Container[str] | None) -> tuple[str, ...]:
    if include is None:
        return STATES
    if isinstance(include, str):
        return (_known(include),)
    try:
        names = [_known(each) for each in include]  # type: ignore[attr-defined]
    except TypeError:  # a container that cannot be iterated
        return tuple(each for each in STATES if each in include)
    return tuple(each for each in STATES if each in names)


def _known(state: Any) -> str:
    name = str(getattr(state, "value", state))
    if name not in STATES:
        raise ConfigError(f"{name!r} is no state of an engine; expected {', '.join(sorted(STATES))}")
    return name
