"""Train the GPT of train_gpt.py with tensor parallelism or sequence parallelism.

With ``--tp-size``, each rank stores shards of the heads, of the feed-forward columns and of the vocabulary, according
to the plan below. With ``--sequence-parallel``, each rank also stores only a part of the activations between these
layers. With ``--sequence-size``, each rank has the whole model and a part of every sequence. Attention exchanges this
part for some of the heads of whole sequences. The loss is the same in all cases::

    commprof run --nproc 2 examples/train_gpt_parallel.py                                   # two replicas
    commprof run --nproc 4 examples/train_gpt_parallel.py --tp-size 2                       # of two shards each
    commprof run --nproc 4 examples/train_gpt_parallel.py --tp-size 2 --sequence-parallel
    commprof run --nproc 4 examples/train_gpt_parallel.py --sequence-size 2                 # sequences in two parts
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from train_gpt import GPT, batches, read_text

import commprof
import zero_runtime
from zero_runtime.sequence_parallel import DistributedAttention, mean_over_sequence, own_piece

PLAN = {
    "token": "vocabulary",
    "position": "split",
    "blocks.*_norm": "sequence",
    "blocks.*.qkv": "column:3",
    "blocks.*.projection": "row",
    "blocks.*.expand": "column",
    "blocks.*.contract": "row",
    "norm": "sequence",
    "head": "column",
    "loss": "loss",
}


class Attention(nn.Module):
    """Causal attention over tensors of shape (batch, sequence, heads, width)."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the output of attention, in the shape of ``query``."""
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


class SharedSequences(GPT):
    """The GPT on this rank's part of every sequence. Its attention processes whole sequences for some of the heads."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__(width, layers, heads, context)
        for block in self.blocks:
            block.attention = DistributedAttention(Attention())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss over the whole sequences.

        ``x`` and ``y`` are the whole sequences, (batch, context) int64, on all ranks that share the sequences.
        """
        places = torch.arange(x.shape[1], device=x.device).expand_as(x)
        x, y, places = (own_piece(each) for each in (x, y, places))
        hidden = self.token(x) + self.position(places)
        for block in self.blocks:
            qkv = block.qkv(block.attention_norm(hidden)).unflatten(-1, (3, -1, block.head_width))
            hidden = hidden + block.projection(block.attention(*qkv.unbind(2)).flatten(2))
            hidden = hidden + block.contract(F.gelu(block.expand(block.feed_forward_norm(hidden))))
        loss = self.loss(self.head(self.norm(hidden)).float().flatten(0, 1), y.flatten())
        return mean_over_sequence(loss)


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        description="Train a small byte-level GPT whose tensors or sequences ranks share."
    )
    parser.add_argument("--tp-size", type=int, default=1, help="ranks that share each tensor")
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="share activations between cut tensors, too"
    )
    parser.add_argument("--sequence-size", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--stage", type=int, default=1, help="ZeRO stage: 0, 1 or 2")
    parser.add_argument("--batch", type=int, default=8, help="samples of a step, over all replicas")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=32, help="bytes of context")
    return parser.parse_args()


def configuration(args: argparse.Namespace) -> dict:
    """Return the configuration for ``initialize``."""
    return {
        "train_batch_size": args.batch,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
        "zero_optimization": {"stage": args.stage},
        "tp_size": args.tp_size,
        "sequence_parallel_size": args.sequence_size,
        "tensor_parallel": {"plan": PLAN, "sequence_parallel": args.sequence_parallel},
    }


def main() -> None:
    """Train and print the loss of the last step over the whole batch."""
    args = parse_arguments()
    zero_runtime.init_distributed()
    torch.manual_seed(0)
    kind = SharedSequences if args.sequence_size > 1 else GPT
    model = kind(args.width, args.layers, args.heads, args.context)
    engine, _, _, _ = zero_runtime.initialize(
        model=model, model_parameters=model.parameters(), config=configuration(args)
    )
    text, _ = read_text(200_000)
    pieces = batches(text, args.batch, args.context, seed=1)
    replicas, replica = engine.parallelism.replicas, engine.parallelism.replica
    for _ in range(args.steps):
        # All ranks have the same batch. The ranks that share a model take the same part of the batch.
        x, y = (each.chunk(replicas)[replica].to(engine.device) for each in next(pieces))
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        commprof.metric("loss", loss.item())
    mean = loss.detach().clone()
    with commprof.tag("metric"):
        dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"{args.steps} steps, loss {mean.item() / dist.get_world_size():.5f} nats per byte")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
