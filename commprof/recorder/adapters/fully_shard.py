"""FSDP 2 (``fully_shard``): the module that its collectives are for, and the parameters that travel."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from commprof import hooks
from commprof.recorder.adapters.flushes import Numbers, open_bucket
from commprof.recorder.adapters.parts import Doubts, Part
from commprof.recorder.journal import Journal
from commprof.recorder.models import plain_name
from commprof.schema import Purpose

_GROUP: Final = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
ROOT: Final = "(root)"  # the name of the outermost module, which torch calls ""
_GATHER: Final = hooks.tag(Purpose.PARAMETER_GATHER.value)
_REDUCE: Final = hooks.tag(Purpose.GRADIENT_REDUCE.value)


class FullyShard:
    """What is known of the modules that ``fully_shard`` was applied to."""

    def __init__(self, journal: Journal) -> None:
        self._doubt = Doubts(journal, "FSDP 2")
        self._numbers = Numbers()
        self._gathers: weakref.WeakKeyDictionary[Any, hooks.tag] = weakref.WeakKeyDictionary()

    def parts(self) -> list[Part]:
        """What to wrap."""
        return [
            Part(_GROUP, "FSDPParamGroup.unshard", self._wrap_unshard),
            Part(_GROUP, "FSDPParamGroup.post_backward", self._wrap_post_backward),
            Part(_GROUP, "foreach_reduce", self._wrap_reduce),
        ]

    def _wrap_unshard(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def unshard(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not group.is_sharded and group.is_unsharded:
                return original(group, *args, **kwargs)
            with self._gather_of(group):
                return original(group, *args, **kwargs)

        return unshard

    def _gather_of(self, group: Any) -> hooks.tag:
        tag = self._gathers.get(group)
        if tag is not None:
            return tag
        try:
            names = _names(group.fsdp_params)
            tag = hooks.tag(
                Purpose.PARAMETER_GATHER.value, parameters=names, module=module_name(group._module_fqn)
            )
            if "?" not in names:  # the names are known from the first forward pass on
                self._gathers[group] = tag
            return tag
        except Exception as error:
            self._doubt(error)
            return _GATHER

    def _wrap_post_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def post_backward(group: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                tag = hooks.tag(Purpose.GRADIENT_REDUCE.value, module=module_name(group._module_fqn))
            except Exception as error:
                self._doubt(error)
                tag = _REDUCE
            with tag:
                return original(group, *args, **kwargs)

        return post_backward

    def _wrap_reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Called only where gradients are reduced, with the parameters that have some."""

        def reduce(parameters: Any, gradients: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                tag = self._bucket(parameters, gradients, 1 if group is None else group.size())
            except Exception as error:
                self._doubt(error)
                tag = _REDUCE
            with tag:
                return original(parameters, gradients, group, *args, **kwargs)

        return reduce

    def _bucket(self, parameters: Sequence[Any], gradients: Sequence[Any], world: int) -> hooks.tag:
        outer = hooks.current_tag()
        dtype = parameters[0].reduce_dtype or gradients[0].dtype
        padded = sum(_padded(gradient.shape, world) for gradient in gradients)
        return open_bucket(
            self._numbers.take(),
            sum(gradient.numel() for gradient in gradients),
            padded * dtype.itemsize,
            dtype,
            _names(parameters),
            module=None if outer is None else outer.module,
        )


def _padded(shape: Sequence[int], world: int) -> int:
    """Elements of a gradient that is cut into ``world`` equal parts along its first dimension."""
    if not shape:
        return 1
    return -(-shape[0] // world) * world * math.prod(shape[1:])


def _names(parameters: Sequence[Any]) -> tuple[str, ...]:
    return tuple(plain_name(each._param_fqn) if each._param_fqn else "?" for each in parameters)


def module_name(name: str | None) -> str | None:
    """How the module is called in a record; None where torch does not know it yet."""
    return name if name is None else plain_name(name) or ROOT
