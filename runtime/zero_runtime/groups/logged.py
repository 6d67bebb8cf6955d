"""Logging of a data-parallel group's collectives in the communication log.

The log also contains the program's own calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from zero_runtime.comm import Call, DataParallelGroup
from zero_runtime.groups.comm_log import KINDS, LOG, message_size


class _Logged(NamedTuple):
    """The operation under which a method is logged, and the name of its input argument; None without an input."""

    operation: str
    handed: str | None


_METHODS: Final[Mapping[str, _Logged]] = {
    "all_reduce": _Logged("all_reduce", "tensor"),
    "start_all_reduce": _Logged("all_reduce", "tensor"),
    "reduce": _Logged("reduce", "tensor"),
    "broadcast": _Logged("broadcast", "tensor"),
    "barrier": _Logged("barrier", None),
    "all_gather": _Logged("all_gather", "tensor"),
    "all_gather_single": _Logged("all_gather_into_tensor", "tensor"),
    "start_all_gather": _Logged("all_gather_into_tensor", "tensor"),
    "reduce_scatter": _Logged("reduce_scatter", "rows"),
    "reduce_scatter_single": _Logged("reduce_scatter_tensor", "rows"),
    "all_to_all_single": _Logged("all_to_all_single", "rows"),
}


class MessageLogger:
    """Times the collectives of a group that the settings of the log select.

    Attributes:
        methods: The observed methods (:class:`zero_runtime.comm.Observer`), and the operation under which each
            is logged.
    """

    methods: Final = _METHODS

    def __init__(self, group: DataParallelGroup) -> None:
        self._world_size = group.world_size
        self._on_cuda = group.device.type == "cuda"

    def observe(self, call: Call, issue: Callable[[], Any]) -> Any:
        """Issue the call, and time it if the log selects its operation (:class:`zero_runtime.comm.Observer`)."""
        how = self.methods[call.method]
        if not LOG.wants(how.operation):
            return issue()
        return LOG.time(
            how.operation,
            KINDS.get(how.operation, how.operation),
            self._world_size,
            0 if how.handed is None else message_size(call.arguments[how.handed]),
            issue,
            self._on_cuda,
        )
