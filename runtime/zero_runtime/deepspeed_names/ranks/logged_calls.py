"""A decorator that times calls of ``deepspeed.comm`` for the communication log."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch

from zero_runtime.comm import ProcessGroup, get_world_size, is_initialized
from zero_runtime.errors import UsageError
from zero_runtime.groups.comm_log import KINDS, LOG, message_size

Function = Callable[..., Any]
# The names that DeepSpeed's log uses for some operations.
_NAMES: Final = {"inference_all_reduce": "all_reduce", "all_reduce_coalesced": "all_reduce"}


def logged(*tensors: str | int) -> Callable[[Function], Function]:
    """Return a decorator that times the calls of a function if the log is enabled for the function.

    Args:
        tensors: The position and the name of the argument that this rank sends. Without these two values, the logged
            message has no size.
    """

    def decorate(function: Function) -> Function:
        own = function.__name__
        name = _NAMES.get(own, own)
        kind = KINDS.get(own, name)

        @wraps(function)
        def call(
            *args: Any, prof: bool = False, log_name: str | None = None, debug: Any = None, **kwargs: Any
        ) -> Any:
            if not is_initialized():
                raise UsageError(
                    f"deepspeed.comm.{own} was called before the process group exists; call "
                    "deepspeed.init_distributed() or deepspeed.initialize first"
                )
            kept_as = log_name or name
            if not LOG.wants(kept_as, prof):
                return function(*args, **kwargs)
            group = kwargs.get("group") or next(
                (each for each in args if isinstance(each, ProcessGroup)), None
            )
            handed = _handed_in(args, kwargs, tensors)
            if LOG.debug:
                kept_as = f"{kept_as} | [Caller Func: {sys._getframe(1).f_code.co_name}]"
            return LOG.time(
                kept_as,
                kind,
                get_world_size(group),
                message_size(handed),
                lambda: function(*args, **kwargs),
                _on_cuda(handed),
            )

        return call

    return decorate


def _handed_in(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: tuple[str | int, ...]) -> Any:
    if not tensors:
        return None
    position, name = tensors
    assert isinstance(position, int)
    value = kwargs.get(str(name)) if str(name) in kwargs else args[position] if position < len(args) else None
    return [getattr(each, "tensor", each) for each in value] if isinstance(value, list | tuple) else value


def _on_cuda(value: Any) -> bool:
    first = next((each for each in value), None) if isinstance(value, list) else value
    return isinstance(first, torch.Tensor) and first.is_cuda
