"""Records collectives at torch's ProcessGroup objects, independently of commprof and of the runtime.

Every Python-issued collective calls exactly one method of the pybind class ``ProcessGroup`` exactly once.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ReduceOp

# For each method, the positions of the inputs and of the outputs among the arguments after self.
_METHODS = {
    "allreduce": (0, 0),
    "allreduce_coalesced": (0, 0),
    "broadcast": (0, 0),
    "reduce": (0, 0),
    "allgather": (1, 0),
    "gather": (1, 0),
    "scatter": (1, 0),
    "reduce_scatter": (1, 0),
    "_allgather_base": (1, 0),
    "all_gather_single": (1, 0),
    "_reduce_scatter_base": (1, 0),
    "reduce_scatter_single": (1, 0),
    "alltoall_base": (1, 0),
    "all_to_all_single": (1, 0),
    "alltoall": (1, 0),
    "send": (0, None),
    "recv": (None, 0),
    "barrier": (None, None),
}
# The method names before torch 2.13, and the names since then.
_RENAMED = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall_base": "all_to_all_single",
}
_REDUCTIONS = {str(getattr(ReduceOp, name)): name for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")}


class Call(NamedTuple):
    """One collective. Broadcast buffers count as input and output on every rank."""

    step: int
    micro: int
    phase: str
    method: str
    root: int | None  # the global rank of the root, or the peer of a send or recv
    group: str
    numel_in: int
    numel_out: int
    dtype: str
    reduction: str


class Log:
    """The collectives of this process in the order of issue.

    The method ``at`` sets the phase, step and micro-batch of the calls that follow.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.step, self.micro, self.phase = -1, 0, "init"

    def at(self, phase: str, step: int | None = None, micro: int | None = None) -> None:
        self.phase = phase
        self.step = self.step if step is None else step
        self.micro = self.micro if micro is None else micro

    def add(self, method: str, group, arguments, keywords) -> None:
        inputs, outputs = (_tensors(arguments, position) for position in _METHODS[method])
        options = next(
            (each for each in (*arguments, *keywords.values()) if type(each).__name__.endswith("Options")),
            None,
        )
        ranks = dist.get_process_group_ranks(group)
        first = (inputs or outputs or [None])[0]
        rooted = method in ("broadcast", "reduce", "gather", "scatter")
        self.calls.append(
            Call(
                self.step,
                self.micro,
                self.phase,
                _RENAMED.get(method, method),
                _root(method, ranks, options if rooted else None, arguments),
                "-".join(map(str, ranks)),
                sum(tensor.numel() for tensor in inputs),
                sum(tensor.numel() for tensor in outputs),
                "" if first is None else str(first.dtype).removeprefix("torch."),
                _REDUCTIONS.get(str(options.reduceOp.op), "OTHER") if hasattr(options, "reduceOp") else "",
            )
        )


def _root(method, ranks, options, arguments):
    if method in ("send", "recv"):
        return ranks[arguments[1]]
    return None if options is None else ranks[options.rootRank]


def _tensors(arguments, position):
    if position is None or len(arguments) <= position:
        return []
    found, pending = [], [arguments[position]]
    while pending:
        each = pending.pop(0)
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            pending = [*each, *pending]
    return found


@contextmanager
def logged():
    """Yield a :class:`Log` of the collectives inside the block."""
    log = Log()
    # Read the methods from the dict of the class. A value from getattr would not be a method after it is set again.
    originals = {name: vars(ProcessGroup)[name] for name in _METHODS if name in vars(ProcessGroup)}

    def wrap(name, original):
        def call(group, *arguments, **keywords):
            log.add(name, group, arguments, keywords)
            return original(group, *arguments, **keywords)

        return call

    for name, original in originals.items():
        setattr(ProcessGroup, name, wrap(name, original))
    try:
        yield log
    finally:
        for name, original in originals.items():
            setattr(ProcessGroup, name, original)
