"""Publishes each gradient bucket of DeepSpeed when one of its optimizers or its engine flushes the bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch

from commprof import hooks
from commprof.recorder.adapters.deepspeed_padding import gradient_padding, with_padding
from commprof.recorder.adapters.flushes import open_bucket
from commprof.recorder.adapters.patching import Patches


class Flush(NamedTuple):
    """A method that reduces a whole bucket."""

    module: str
    path: str
    of_engine: bool  # True: the bucket is the first argument; False: the optimizer stores it


BUCKETS: Final = (
    Flush("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer.reduce_ipg_grads", False),
    Flush(
        "deepspeed.runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",
        False,
    ),
    Flush("deepspeed.runtime.engine", "DeepSpeedEngine.allreduce_bucket", True),
)


class Content(NamedTuple):
    """The content of a bucket that is about to be reduced."""

    numel: int
    dtype: torch.dtype
    capacity: int | None
    names: tuple[str, ...]
    padding: int = 0  # elements


class Buckets:
    """Numbers the buckets within each step, and publishes them.

    Args:
        names: The names of the parameters by their ``id``.
        on_fault: A function that is called with each exception of the recorder's own code.
    """

    def __init__(self, names: Mapping[int, str], on_fault: Callable[[Exception], None]) -> None:
        self._names = names
        self._on_fault = on_fault
        self._step = hooks.position.step
        self._next = 0

    def wrap(self, module: ModuleType, flush: Flush, patches: Patches) -> bool:
        """Wrap the method ``flush``, and return whether this version has such a method."""
        read = self._engine_content if flush.of_engine else self._optimizer_content
        return patches.wrap(module, flush.path, lambda original: self._numbered(original, read))

    def _numbered(
        self,
        original: Callable[..., Any],
        read: Callable[[Any, tuple[Any, ...], dict[str, Any]], Content | None],
    ) -> Callable[..., Any]:
        def flush(owner: Any, *args: Any, **kwargs: Any) -> Any:
            tag = None
            try:
                content = read(owner, args, kwargs)
                tag = None if content is None else self._open(content)
            except Exception as error:
                self._on_fault(error)
            with tag or _NO_BUCKET:
                return original(owner, *args, **kwargs)

        return flush

    def _open(self, content: Content) -> hooks.tag:
        if hooks.position.step != self._step:
            self._step, self._next = hooks.position.step, 0
        number, self._next = self._next, self._next + 1
        nbytes = content.numel * content.dtype.itemsize
        tag = open_bucket(number, content.numel, nbytes, content.dtype, content.names, content.capacity)
        return with_padding(tag, content.padding * content.dtype.itemsize) if content.padding else tag

    def _engine_content(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Content | None:
        gradients = kwargs.get("bucket", args[0] if args else None)
        if not gradients:
            return None
        padding = gradient_padding(engine.optimizer, gradients)
        return Content(sum(g.numel() for g in gradients), engine.communication_data_type, None, (), padding)

    def _optimizer_content(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Content | None:
        """Return the content of the only bucket that is not empty.

        The result is None if all buckets are empty, or if buckets of several dtypes are not empty.
        """
        buckets = getattr(optimizer, "ipg_buckets", None)
        if buckets is None:  # before DeepSpeed 0.18
            entries: Sequence[Any] = optimizer.params_in_ipg_bucket
            dtype, numel = optimizer.communication_data_type, optimizer.elements_in_ipg_bucket
        else:
            asked = next((d for d in (*args, *kwargs.values()) if isinstance(d, torch.dtype)), None)
            filled = [d for d in ([asked] if asked is not None else buckets) if buckets[d].params]
            if len(filled) != 1:
                return None
            dtype = filled[0]
            entries, numel = buckets[dtype].params, buckets[dtype].elements
        if not entries:
            return None
        names = [self._names.get(id(_parameter(optimizer, entry)), "?") for entry in entries]
        return Content(int(numel), dtype, int(optimizer.reduce_bucket_size), tuple(names))


def _parameter(optimizer: Any, entry: Any) -> Any:
    """Return the parameter of an entry of a bucket.

    The entry is the parameter itself. At stages 1 and 2 it is a tuple of the group, the position or the
    parameter, and an id.
    """
    if not isinstance(entry, tuple | list):
        return entry
    group, position = entry[0], entry[1]
    return optimizer.bit16_groups[group][position] if isinstance(position, int) else position


_NO_BUCKET: Final = hooks.tag("gradient_reduce")
