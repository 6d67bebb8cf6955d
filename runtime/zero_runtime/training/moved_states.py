"""Moving the engine's states from the device to host memory and back (``offload_states``)."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from zero_runtime import log
from zero_runtime.errors import ConfigError, UnsupportedError, UsageError
from zero_runtime.experimental.one_bit import OneBitOptimizer
from zero_runtime.offload.moves import Moves
from zero_runtime.sharding.shards import shard_of

OPTIM_STATES: Final = "optim_states"
HP_PARAMS: Final = "hp_params"
LP_PARAMS: Final = "lp_params"
LP_GRADS: Final = "lp_grads"
CONTIGUOUS_GRAD_BUFFER: Final = "contiguous_grad_buffer"
# A tensor can belong to several states: the masters of an fp32 model are its parameters. Such a tensor moves with
# the first of its states in this order.
STATES: Final = (LP_PARAMS, HP_PARAMS, LP_GRADS, OPTIM_STATES, CONTIGUOUS_GRAD_BUFFER)
BACKWARD: Final = (LP_PARAMS, LP_GRADS, CONTIGUOUS_GRAD_BUFFER)  # states that a backward pass uses


class Movable(NamedTuple):
    """The objects that contain the tensors of an engine's states.

    Attributes:
        module: The model.
        optimizer: The sharded optimizer, or None without an optimizer.
        gradients: The reducer of the gradients, with its buffers.
        residency: The residency of gathered parameters at stage 3; None at other stages.
    """

    module: torch.nn.Module
    optimizer: Any
    gradients: Any
    residency: Any


class MovedStates:
    """The states of one engine, which can be moved to host memory and back.

    Args:
        movable: The objects that contain the tensors.
        offloads_parameters: Whether ``offload_param`` keeps the shards of parameters off the device.
        global_rank: This process's rank. Only rank 0 warns.
    """

    def __init__(self, movable: Movable, offloads_parameters: bool, global_rank: int) -> None:
        self._movable = movable
        self._offloads_parameters = offloads_parameters
        self._global_rank = global_rank
        self._moves = Moves()

    @property
    def away(self) -> tuple[str, ...]:
        """The states that are in host memory now."""
        return self._moves.away

    def settle(self) -> None:
        """Wait for the copies to host memory to end."""
        self._moves.settle()

    def offload(
        self, include: Container[str] | None, device: str, pin_memory: bool, non_blocking: bool
    ) -> None:
        """Move states to host memory; see :meth:`zero_runtime.training.engine.Engine.offload_states`."""
        if self._movable.optimizer is None:
            raise UsageError(
                "offload_states needs an optimizer, and there is none; move the model itself: engine.module.to('cpu')"
            )
        if self._offloads_parameters:
            raise UsageError(
                "offload_states was called, and zero_optimization.offload_param keeps the parameters off the device all "
                "the time; remove that key, or this call"
            )
        optimizer = self._movable.optimizer.optimizer
        if isinstance(optimizer, OneBitOptimizer):
            raise UnsupportedError(
                f"offload_states with optimizer {type(optimizer).__name__}, which keeps the errors of its "
                "compression apart from its state, is not in this version; use AdamW"
            )
        if str(device) == "none":
            if self._global_rank == 0:
                log.warning("offload_states moved nothing: device is none; use cpu")
            return
        if str(device) != "cpu":
            raise ConfigError(f"device of offload_states is {str(device)!r}; expected cpu")
        wanted = _wanted(include)
        if self._movable.residency is not None:
            self._movable.residency.release_all()
        if CONTIGUOUS_GRAD_BUFFER in wanted:
            self._movable.gradients.free_buffers()
        states = {name: list(self.tensors(name)) for name in STATES}
        self._moves.offload(states, wanted, pin_memory, non_blocking)

    def reload(self, non_blocking: bool) -> None:
        """Move everything back to the device; see :meth:`zero_runtime.training.engine.Engine.reload_states`."""
        if self._movable.optimizer is None:
            raise UsageError("reload_states needs an optimizer, and there is none")
        self._moves.reload(non_blocking)

    def devices(self, state: str) -> set[torch.device]:
        """Return the devices of the tensors of one state."""
        return {each.device for each in self.tensors(_known(state)) if each.numel()}

    def tensors(self, state: str) -> Iterator[torch.Tensor]:
        """Yield all tensors of a state, including those that share memory."""
        module, optimizer, gradients, _ = self._movable
        if state == LP_PARAMS:
            yield from optimizer.parameter_tensors()
            for parameter in module.parameters():
                shard = shard_of(parameter)
                if shard is None:
                    yield parameter
                else:
                    yield from shard.tensors()
        elif state == HP_PARAMS:
            yield from optimizer.masters
        elif state == LP_GRADS:
            yield from gradients.tensors()
            yield from (each.grad for each in module.parameters() if each.grad is not None)
        elif state == OPTIM_STATES:
            values = tree_leaves([dict(each) for each in optimizer.state.values()])
            yield from (each for each in values if isinstance(each, torch.Tensor))
        else:
            yield from gradients.buffers()

    def refuse(self, doing: str, *states: str) -> None:
        """Raise UsageError if one of ``states`` is in host memory.

        The operation ``doing`` needs these states on the device.
        """
        away = [each for each in self.away if each in states]
        if away:
            raise UsageError(
                f"{doing} was called while {', '.join(away)} {'are' if len(away) > 1 else 'is'} in host memory "
                "(engine.offload_states); call engine.reload_states() first"
            )


def get_state_devices(model: Any, state: str) -> set[torch.device]:
    """Return the devices of one state of the engine ``model``. DeepSpeed has a function of the same name."""
    devices: set[torch.device] = model.state_devices(state)
    return devices


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
        raise ConfigError(
            f"{name!r} is not a state of an engine; expected one of {', '.join(sorted(STATES))}"
        )
    return name
