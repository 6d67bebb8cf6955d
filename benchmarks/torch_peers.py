"""Wraps the data parallelism of torch in the three calls of an engine, for the ranks of the benchmarks.

The optimizer is AdamW with torch's defaults. DeepSpeed creates the same optimizer for ``{"type": "Adam", "params":
{"torch_adam": true}}``. On gloo, FSDP2's reduce_scatter is an all_reduce, after which each rank uses only its shard.
NCCL runs a real reduce_scatter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

DDP: Final = "torch DDP"
ZERO_REDUNDANCY: Final = "torch ZeroRedundancyOptimizer"
FSDP2: Final = "torch FSDP2"
FSDP2_NO_RESHARD: Final = "torch FSDP2 no reshard"
MESSAGES: Final = "gloo, the messages of a step alone"


class Peer(nn.Module):
    """A wrapped model and its optimizer. ``optimizer`` contains the optimizer state."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return self.module(*inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of ``loss``, reduced over the ranks."""
        loss.backward()

    def step(self) -> None:
        """Update the parameters and clear the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


class Messages(Peer):
    """Sends the messages of a step of ``model`` at stage 2 with reduce_scatter, and does not train.

    The messages are those of zero_runtime on gloo. A rank sends its shard of the parameters to all other ranks. It also
    sends to each rank the gradients of that rank's shard. Both are divided into parts, and several parts are in flight
    at the same time.
    """

    PARTS: Final = 16
    IN_FLIGHT: Final = 3

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.0))
        world = dist.get_world_size()
        part = -(-sum(parameter.numel() for parameter in model.parameters()) // (self.PARTS * world))
        self.shard = torch.zeros(self.PARTS, part)
        self.whole, self.gradients = torch.zeros(2, self.PARTS, world * part)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Gather the shards; return zero as the loss."""
        self._send(
            lambda part: dist.all_gather_into_tensor(self.whole[part], self.shard[part], async_op=True)
        )
        return self.whole[0, 0]

    def backward(self, loss: torch.Tensor) -> None:
        """Exchange the gradients."""
        self._send(lambda part: dist.all_to_all_single(self.gradients[part], self.whole[part], async_op=True))

    def step(self) -> None:
        """Do nothing."""

    def _send(self, issue: Callable[[int], Any]) -> None:
        works: deque[Any] = deque()
        for part in range(self.PARTS):
            if len(works) == self.IN_FLIGHT:
                works.popleft().wait()
            works.append(issue(part))
        for work in works:
            work.wait()


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
    MESSAGES: lambda model, rate: Messages(model),
}


def peer(name: str, model: nn.Module, config: Mapping[str, Any]) -> Peer:
    """Wrap ``model``, the GPT of the example, in the method ``name`` with the learning rate of ``config``."""
    return PEERS[name](model, config["optimizer"]["params"]["lr"])
