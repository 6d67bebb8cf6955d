"""Logging of a data-parallel group's collectives in the communication log, which has the program's own too."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final, NamedTuple

from zero_runtime.comm import DataParallelGroup
from zero_runtime.groups.comm_log import KINDS, LOG, message_size


class _Logged(NamedTuple):
    """The operation that a method is logged as, and the position of its input argument; None without an input."""

    operation: str
    handed: int | None


_METHODS: Final = {
    "all_reduce": _Logged("all_reduce", 0),
    "start_all_reduce": _Logged("all_reduce", 0),
    "reduce": _Logged("reduce", 0),
    "broadcast": _Logged("broadcast", 0),
    "barrier": _Logged("barrier", None),
    "all_gather": _Logged("all_gather", 1),
    "all_gather_single": _Logged("all_gather_into_tensor", 1),
    "start_all_gather": _Logged("all_gather_into_tensor", 1),
    "reduce_scatter": _Logged("reduce_scatter", 1),
    "reduce_scatter_single": _Logged("reduce_scatter_tensor", 1),
    "all_to_all_single": _Logged("all_to_all_single", 1),
}


def log_messages(group: DataParallelGroup) -> None:
    """Time every collective of ``group`` that the log's settings select."""
    for name, how in _METHODS.items():
        setattr(group, name, _logged(group, getattr(group, name), how))


def _logged(group: DataParallelGroup, method: Callable[..., Any], how: _Logged) -> Callable[..., Any]:
    @wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        if not LOG.wants(how.operation):
            return method(*arguments, **options)
        return LOG.time(
            how.operation,
            KINDS.get(how.operation, how.operation),
            group.world_size,
            0 if how.handed is None else message_size(arguments[how.handed]),
            lambda: method(*arguments, **options),
            group.device.type == "cuda",
        )

    return call
