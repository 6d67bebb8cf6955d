"""A check that tensor-parallel ranks get equal inputs.

With different inputs, a partitioned model computes wrong results.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from commprof import hooks
from zero_runtime.comm import DataParallelGroup, ReduceOp
from zero_runtime.errors import UsageError

_CHECK: Final = hooks.tag("trace_check")


def check_first_inputs(module: torch.nn.Module, group: DataParallelGroup) -> None:
    """Compare the inputs of the first call of ``module`` over the ranks of ``group``.

    The comparison runs once and issues one all_reduce MAX of two numbers. If the inputs differ, the first
    call of ``module`` raises UsageError on all ranks.
    """

    def compare(_module: torch.nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        handle.remove()
        number = _checksum((inputs, keywords))
        message = torch.tensor([number, -number], dtype=torch.int64, device=group.device)
        group.all_reduce(message, ReduceOp.MAX, why=_CHECK)
        highest, lowest = message.tolist()
        if highest != -lowest:
            raise UsageError(
                f"ranks {', '.join(map(str, group.global_ranks))} share each tensor of the model, and were given different "
                "inputs; give them the same samples: select the samples by engine.parallelism.replica (of "
                "engine.parallelism.replicas), not by the rank"
            )

    handle = module.register_forward_pre_hook(compare, with_kwargs=True)


def _checksum(values: Any) -> int:
    crc = 0
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            data = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8)
            crc = zlib.crc32(data.numpy().tobytes(), crc)
    return crc
