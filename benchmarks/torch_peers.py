"""What torch itself offers for data parallelism, behind the three calls of an engine, for the ranks of the benchmarks.

The optimizer is AdamW with torch's defaults, which is what DeepSpeed makes of ``{"type": "Adam", "params": {"torch_adam":
true}}``. On gloo FSDP2's reduce_scatter is an all_reduce of which a rank keeps its part, which it is not with NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

DDP: Final = "torch DDP"
ZERO_REDUNDANCY: Final = "torch ZeroRedundancyOptimizer"
FSDP2: Final = "torch FSDP2"
FSDP2_NO_RESHARD: Final = "torch FSDP2 no reshard"


class Peer(nn.Module):
    """A wrapped model and its optimizer. ``optimizer`` is what holds the state."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return self.module(*inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of ``loss``, reduced over the ranks."""
        loss.backward()

    def step(self) -> None:
        """Update the parameters, and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def _ddp(model: nn.Module, rate: float) -> Peer:
    module = nn.parallel.DistributedDataParallel(model)
    return Peer(module, torch.optim.AdamW(module.parameters(), lr=rate))


def _zero_redundancy(model: nn.Module, rate: float) -> Peer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = nn.parallel.DistributedDataParallel(model)
    return Peer(module, ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=rate))


def _fsdp2(model: nn.Module, rate: float, reshard: bool) -> Peer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return Peer(model, torch.optim.AdamW(model.parameters(), lr=rate))


PEERS: Final[Mapping[str, Callable[[nn.Module, float], Peer]]] = {
    DDP: _ddp,
    ZERO_REDUNDANCY: _zero_redundancy,
    FSDP2: lambda model, rate: _fsdp2(model, rate, True),
    FSDP2_NO_RESHARD: lambda model, rate: _fsdp2(model, rate, False),
}


def peer(name: str, model: nn.Module, config: Mapping[str, Any]) -> Peer:
    """``model``, the GPT of the example, under ``name`` with the learning rate of ``config``."""
    return PEERS[name](model, config["optimizer"]["params"]["lr"])
