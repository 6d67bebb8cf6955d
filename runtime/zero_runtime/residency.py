"""When sharded parameters are whole: gathered before a module uses them, released after (stage 3).

The life of a model under stage 3, in order::

    residency = Residency(module, group, policy)
    residency.shard()        # cuts every parameter; those that zero.Init has cut already stay as they are
    ...                      # the optimizer takes shard_of(parameter).own of each parameter
    residency.install()      # hooks; the messages of DeepSpeed's start
    ... forward              # the hooks gather and release
    ... backward             # gradients of a parameter come while it is whole
    residency.finish_backward()       # after each backward pass
    residency.release_all()           # first thing in a step: every parameter is its slices again
    ...                      # the optimizer writes shard_of(parameter).own
    residency.parameters_changed()    # gathers the persistent ones again
    residency.shut_down()    # only to leave stage 3: no hooks, parameters whole and ordinary again
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from zero_runtime.comm import DataParallelGroup


class ResidencyPolicy(NamedTuple):
    """When parameters are gathered and released. Sizes are elements; the defaults are DeepSpeed's.

    Attributes:
        prefetch: gather at most about this much ahead of its use; 0 for never.
        reuse_distance: keep what is used again within this many elements.
        max_live: gather ahead only while less than this is whole.
        persistence: parameters of at most this many elements stay whole.
        model_persistence: at most this many elements stay whole.
        sequential: one message for each parameter.
        by_all_reduce: gather several parameters by an all_reduce of their padded whole.
        secondary_size: ranks that share out a second, larger slice (hpZ); 1 for none.
        leaf_classes, leaf_names, leaf_suffixes: modules that are gathered as one, children included.
        granularity: modules of fewer elements per layer than this are gathered as one; 0 for none.
        report_trace: say on stderr when the recorded order of modules no longer holds.
        remote_device: where slices are kept; None for the parameters' device.
    """

    prefetch: int = 50_000_000
    reuse_distance: int = 1_000_000_000
    max_live: int = 1_000_000_000
    persistence: int = 100_000
    model_persistence: int = 2**63 - 1
    sequential: bool = False
    by_all_reduce: bool = False
    secondary_size: int = 1
    leaf_classes: tuple[str, ...] = ()
    leaf_names: tuple[str, ...] = ()
    leaf_suffixes: tuple[str, ...] = ()
    granularity: int = 0
    report_trace: bool = False
    remote_device: str | None = None


class Residency:
    """Gathers the parameters of one model before their use and releases them after.

    Args:
        module: the model.
        group: the data-parallel ranks.
        policy: when parameters are gathered and released.
        dtypes: in which dtype parameters travel, where it is not their own (autocast).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        group: DataParallelGroup,
        policy: ResidencyPolicy,
        dtypes: Mapping[torch.nn.Parameter, torch.dtype] | None = None,
    ) -> None:
        raise NotImplementedError

    def shard(self) -> None:
        """Cut every parameter that is not a shard yet: one broadcast of its elements from rank 0 for each."""

    def install(self) -> None:
        """Put hooks on the modules, and send what DeepSpeed sends: 3 barriers, 1 all_gather for each parameter."""

    def gather(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Make ``parameters`` whole, one all_gather each, by number; those that are whole or not sharded stay."""

    def release(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Make of ``parameters`` slices again, unless a module is using them."""

    def finish_backward(self) -> None:
        """Release what the modules without differentiable inputs have left whole. Call it after each backward pass."""

    def release_all(self) -> None:
        """Make of every parameter slices again, persistent ones too: the first thing in a step."""

    def parameters_changed(self) -> None:
        """Gather the persistent parameters again, one all_gather each, after the optimizer has written the slices.

        Not called when a step is skipped: the next forward gathers them.
        """

    def shut_down(self) -> None:
        """Take the hooks away and make every parameter whole and ordinary again."""


def residency_of(module: torch.nn.Module) -> Residency | None:
    """The installed residency of a model, or None."""
    return None
