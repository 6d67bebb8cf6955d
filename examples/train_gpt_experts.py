"""Train the byte-level GPT of ``train_gpt.py`` with experts in every second block, divided over ranks.

The same file runs on zero_runtime (the default) and on DeepSpeed itself::

    commprof run --nproc 4 examples/train_gpt_experts.py --ep-size 2
    commprof run --nproc 4 examples/train_gpt_experts.py --ep-size 4 --top 2 --capacity-factor 1.5
    torchrun --nproc-per-node 4 examples/train_gpt_experts.py --ep-size 2 --engine deepspeed
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from train_gpt import GPT, Block, batches, progress, read_text

import commprof


class ExpertBlock(Block):
    """A transformer block whose feed-forward layer is a mixture of experts."""

    def __init__(self, width: int, heads: int, mixture: nn.Module) -> None:
        super().__init__(width, heads)
        del self.expand, self.contract
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block, and store the load-balancing loss in ``gate_loss``.

        Input and output have the shape (batch, context, width).
        """
        x = x + self.attend(x)
        output, self.gate_loss, _ = self.mixture(self.feed_forward_norm(x))
        return x + output


class ExpertGPT(GPT):
    """The GPT with experts in every second block."""

    def __init__(self, args: argparse.Namespace, mixture: type[nn.Module]) -> None:
        super().__init__(args.width, args.layers, args.heads, args.context)
        self.gate_factor = args.gate_factor
        for number in range(1, args.layers, 2):
            expert = nn.Sequential(
                nn.Linear(args.width, 4 * args.width), nn.GELU(), nn.Linear(4 * args.width, args.width)
            )
            layer = mixture(
                args.width,
                expert,
                num_experts=args.experts,
                ep_size=args.ep_size,
                k=args.top,
                capacity_factor=args.capacity_factor,
            )
            self.blocks[number] = ExpertBlock(args.width, args.heads, layer)
        # The same initialization as in GPT-2. With biases larger than the embeddings, all tokens would look alike to
        # the gates.
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of the GPT, plus the load-balancing losses multiplied by ``gate_factor``."""
        loss = super().forward(x, y)
        gates = [block.gate_loss for block in self.blocks if isinstance(block, ExpertBlock)]
        return loss + self.gate_factor * torch.stack(gates).sum()


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line. DeepSpeed's launcher adds ``--local_rank``."""
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT with experts.")
    parser.add_argument(
        "--config", default=str(Path(__file__).with_name("ds_experts.json")), help="DeepSpeed config file"
    )
    parser.add_argument("--engine", choices=("zero_runtime", "deepspeed"), default="zero_runtime")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--experts", type=int, default=4, help="experts of a layer")
    parser.add_argument("--ep-size", type=int, default=1, help="ranks that the experts are divided over")
    parser.add_argument("--top", type=int, default=1, help="experts of each token")
    parser.add_argument("--capacity-factor", type=float, default=1.25)
    parser.add_argument("--gate-factor", type=float, default=0.01, help="of the load-balancing loss")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="bytes of context")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train and print the loss."""
    args = parse_arguments()
    if args.engine == "zero_runtime":
        importlib.import_module("zero_runtime").as_deepspeed()
    runtime = importlib.import_module("deepspeed")
    mixture = importlib.import_module("deepspeed.moe.layer").MoE
    runtime.init_distributed()
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = ExpertGPT(args, mixture)
    engine, _, _, _ = runtime.initialize(
        args=args, model=model, model_parameters=list(model.parameters()), config=args.config
    )
    device = next(engine.module.parameters()).device
    text, _ = read_text(1_000_000)
    pieces = batches(text, engine.train_micro_batch_size_per_gpu(), args.context, seed=rank)
    show = progress(args.steps, shown=rank == 0)
    for step in range(1, args.steps + 1):
        for _ in range(engine.gradient_accumulation_steps()):
            x, y = next(pieces)
            loss = engine(x.to(device), y.to(device))
            engine.backward(loss)
            engine.step()
        commprof.metric("loss", loss.item())
        show(step, f"loss {loss.item():.4f}")
    if rank == 0:
        print(f"{args.experts} experts over {args.ep_size} ranks, {args.steps} steps, loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
