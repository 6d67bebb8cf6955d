"""Train a small byte-level GPT on text that every machine has: the sources of Python's standard library.

The program uses DeepSpeed's API. It runs on zero_runtime (the default) and, if DeepSpeed is installed, on DeepSpeed::

    commprof run --nproc 2 examples/train_gpt.py --config examples/ds_zero2.json
    torchrun --nproc-per-node 2 examples/train_gpt.py --config examples/ds_zero2.json --engine deepspeed
"""

from __future__ import annotations

import argparse
import importlib
import math
import resource
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import commprof


class Block(nn.Module):
    """A transformer block: attention and a feed-forward layer, each preceded by a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        """Return the output of attention, which the block adds to ``x``. Both are (batch, context, width)."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, self.head_width))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(attended.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block. Input and output have the shape (batch, context, width)."""
        x = x + self.attend(x)
        return x + self.contract(F.gelu(self.expand(self.feed_forward_norm(x))))


class GPT(nn.Module):
    """A decoder over bytes. Its forward returns the loss, as DeepSpeed's examples do."""

    def __init__(self, width: int, layers: int, heads: int, context: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.loss = nn.CrossEntropyLoss()
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("projection.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if deep else 1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross entropy (nats per byte) of predicting ``y`` from ``x``, both (batch, context) int64."""
        hidden = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        return self.loss(self.head(self.norm(hidden)).float().flatten(0, 1), y.flatten())


def read_text(limit_bytes: int) -> tuple[Tensor, Tensor]:
    """Return the sources of the standard library as uint8: (training, validation).

    Every tenth file is for validation.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    training, validation, size = [], [], 0
    for number, path in enumerate(sorted(root.glob("*.py"))):
        data = path.read_bytes()
        (validation if number % 10 == 9 else training).append(data)
        size += len(data)
        if size > limit_bytes:
            break
    return tuple(
        torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in (training, validation)
    )


def batches(text: Tensor, batch: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random pieces of ``text`` without end, as inputs and targets, both (batch, context) int64.

    The targets are the inputs shifted by one byte.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - context - 1, (batch,), generator=generator)
        pieces = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
        yield pieces[:, :-1], pieces[:, 1:]


def validate(engine: nn.Module, text: Tensor, args: argparse.Namespace, device: torch.device) -> float:
    """Return the mean loss over a few fixed validation batches, averaged over the ranks."""
    engine.eval()
    pieces = batches(text, args.validation_batch, args.context, seed=10_000 + dist.get_rank())
    with torch.no_grad():
        losses = [
            engine(x.to(device), y.to(device)).float()
            for x, y in (next(pieces) for _ in range(args.validation_batches))
        ]
    engine.train()
    mean = torch.stack(losses).mean()
    with commprof.tag("metric"):
        dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def progress(total: int, shown: bool):
    """Show the progress: a progress bar on a terminal, or occasional lines otherwise. Only rank 0 prints."""
    if not shown:
        return lambda step, text: None
    if sys.stderr.isatty():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )
        bar.start()
        task = bar.add_task("training", total=total, text="")

        def draw(step: int, text: str) -> None:
            bar.update(task, completed=step, text=text)
            if step == total:
                bar.stop()

        return draw

    def write(step: int, text: str) -> None:
        if step == total or step % max(1, total // 5) == 0:
            print(f"step {step}/{total}  {text}", file=sys.stderr, flush=True)

    return write


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line. DeepSpeed's launcher adds ``--local_rank``."""
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT with ZeRO.")
    parser.add_argument(
        "--config", default=str(Path(__file__).with_name("ds_zero2.json")), help="DeepSpeed config file"
    )
    parser.add_argument("--engine", choices=("zero_runtime", "deepspeed"), default="zero_runtime")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="bytes of context")
    parser.add_argument("--text-bytes", type=int, default=2_000_000)
    parser.add_argument("--validation-batch", type=int, default=8)
    parser.add_argument("--validation-batches", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train and print the validation loss."""
    args = parse_arguments()
    runtime = importlib.import_module(args.engine)
    runtime.init_distributed()
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = GPT(args.width, args.layers, args.heads, args.context)
    engine, _, _, _ = runtime.initialize(
        args=args, model=model, model_parameters=model.parameters(), config=args.config
    )
    device = next(engine.module.parameters()).device
    training_text, validation_text = read_text(args.text_bytes)
    micro_batch = engine.train_micro_batch_size_per_gpu()
    pieces = batches(training_text, micro_batch, args.context, seed=args.seed * 1000 + rank)
    show = progress(args.steps, shown=rank == 0)
    for step in range(1, args.steps + 1):
        for _ in range(engine.gradient_accumulation_steps()):
            x, y = next(pieces)
            loss = engine(x.to(device), y.to(device))
            engine.backward(loss)
            engine.step()
        loss_value = loss.item()
        commprof.metric("loss", loss_value)
        show(step, f"loss {loss_value:.4f}")
    validation_loss = validate(engine, validation_text, args, device)
    commprof.metric("validation_loss", validation_loss)
    commprof.metric("peak_rss_bytes", 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    if rank == 0:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(
            f"{parameters:,} parameters, {args.steps} steps, validation loss {validation_loss:.4f} nats per byte"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
