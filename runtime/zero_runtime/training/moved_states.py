"""The engine's methods that move what it keeps on the device to host memory, and back (``offload_states``)."""

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
# Memory of several belongs to the first: the masters of an fp32 model are its parameters, and move with these.
STATES: Final = (LP_PARAMS, HP_PARAMS, LP_GRADS, OPTIM_STATES, CONTIGUOUS_GRAD_BUFFER)
BACKWARD: Final = (LP_PARAMS, LP_GRADS, CONTIGUOUS_GRAD_BUFFER)  # what a backward pass works on


class MovedStates:
    """States of an engine that are in host memory for a while; the attributes are the engine's."""

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

        What is in host memory already stays there, so that on a CPU nothing is copied.

        Args:
            include: which; default: all. ``optim_states``: of the optimizer; ``hp_params``: the masters; ``lp_params``: the
                model's parameters, at stage 3 their slices; ``lp_grads``: gradients; ``contiguous_grad_buffer``: the
                buffers of gradient buckets, which are dropped and made again when they are needed.
            device: ``cpu``; with ``none`` nothing is moved.
            pin_memory: use page-locked memory where there is a GPU.
            non_blocking: do not wait for the copies. Checkpoints do; who reads the tensors must.

        Raises:
            UsageError: there is no optimizer, or ``offload_param`` keeps the slices off the device anyway.
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
        """Move everything that :meth:`offload_states` has moved back; the training continues as if it had stayed.

        Args:
            non_blocking: begin all copies before the first has ended; this returns when all have.

        Raises:
            UsageError: there is no optimizer.
        """
        if self.optimizer is None:
            raise UsageError("reload_states needs an optimizer, and there is none")
        self._moves.reload(non_blocking)

    def state_devices(self, state: str) -> set[torch.device]:
        """The devices that tensors of one state are on; see :meth:`offload_states`."""
        return {each.device for each in self._tensors_of(_known(state)) if each.numel()}

    def _tensors_of(self, state: str) -> Iterator[torch.Tensor]:
        """All tensors of a state, also those that share their memory."""
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
        """Raise UsageError where one of ``states``, which ``doing`` needs on the device, is in host memory."""
        away = [each for each in self._moves.away if each in states]
        if away:
            raise UsageError(
                f"{doing} was called while {', '.join(away)} {'are' if len(away) > 1 else 'is'} in host memory "
                "(engine.offload_states); call engine.reload_states() first"
            )


def get_state_devices(model: MovedStates, state: str) -> set[torch.device]:
    """The devices that one state of an engine is on, by DeepSpeed's name."""
    return model.state_devices(state)


def _wanted(include: Container[str] | None) -> tuple[str, ...]:
    if include is None:
        return STATES
    if isinstance(include, str):
        return (_known(include),)
    try:
        names = [_known(each) for each in include]  # type: ignore[attr-defined]
    except TypeError:  # it says what is in it, and no more
        return tuple(each for each in STATES if each in include)
    return tuple(each for each in STATES if each in names)


def _known(state: Any) -> str:
    name = str(getattr(state, "value", state))
    if name not in STATES:
        raise ConfigError(f"{name!r} is no state of an engine; expected {', '.join(sorted(STATES))}")
    return name
