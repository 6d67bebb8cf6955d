"""Measures memory and time of activation checkpointing in torch and zero_runtime, and without it, on two gloo ranks.

Both ranks share one model, as tensor-parallel ranks do. They have the same activations, and
partition_activations divides these activations among the ranks. A peak is the maximum of torch's allocations in
one forward and backward pass of transformer blocks. Peaks include gradients but not parameters. They are exact
and equal in every run. With --deepspeed-python, DeepSpeed is measured in the same way.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
PEER = "deepspeed"
LAYERS, WIDTH, HEADS, BATCH, CONTEXT = 24, 64, 4, 32, 128
INPUT_BYTES: Final = BATCH * CONTEXT * WIDTH * 4  # of one block
PARTITION: Final = {"partition_activations": True}
BUFFERS: Final = {**PARTITION, "contiguous_checkpointing": True, "num_checkpoints": LAYERS}
HOST: Final = {**PARTITION, "checkpoint_in_cpu": True}


class Way(NamedTuple):
    """A way to call a block, with or without activation checkpointing.

    Attributes:
        name: The name in the table.
        library: The library whose checkpoint function is used; None for no checkpointing.
        settings: The arguments of ``configure`` or of torch's checkpoint function.
        inputs_kept: The fraction of each block's input that a rank keeps; None if a block keeps more than its input.
    """

    name: str
    library: str | None
    settings: Mapping[str, Any] = {}
    inputs_kept: float | None = 1.0


WAYS: Final = (
    Way("no checkpoints", None, inputs_kept=None),
    Way("torch, reentrant", "torch", {"use_reentrant": True}),
    Way("torch, not reentrant", "torch", {"use_reentrant": False}),
    Way("checkpoint()", "zero_runtime"),
    Way("partition_activations", "zero_runtime", PARTITION, 1 / RANKS),
    Way("... in buffers made once", "zero_runtime", BUFFERS, 1 / RANKS),
    Way("... and cpu_checkpointing (a CPU)", "zero_runtime", HOST, 1 / RANKS),
)
PEERS: Final = (
    Way("DeepSpeed, checkpoint()", PEER),
    Way("DeepSpeed, partition_activations", PEER, PARTITION, 1 / RANKS),
)


class Everybody:
    """A model-parallel unit (mpu) in which all ranks share one model."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.get_model_parallel_rank = dist.get_rank
        self.get_model_parallel_world_size = dist.get_world_size
        self.get_data_parallel_rank = lambda: 0
        self.group = dist.new_group(list(range(dist.get_world_size())))

    def get_model_parallel_group(self) -> Any:
        """Return the group of all ranks."""
        return self.group


def caller(way: Way) -> Callable[..., Any]:
    """Return the function that calls a block in the given way."""
    if way.library is None:
        return lambda function, *args: function(*args)
    if way.library == "torch":
        from torch.utils.checkpoint import checkpoint

        return partial(checkpoint, **way.settings)
    checkpointing = importlib.import_module(way.library).checkpointing
    checkpointing.configure(Everybody(), **way.settings)
    return checkpointing.checkpoint


def measured(way: Way, rounds: int) -> dict[str, float]:
    """Return the figures of one way.

    Returns:
        ``peak``: The largest allocation of one forward and backward pass, in bytes.
        ``kept``: The bytes that are still allocated after the forward pass.
        ``ms``: The median CPU time of one forward and backward pass, in ms.
        ``gradients``: The sum of the absolute values of the gradients.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function
    from train_gpt import Block

    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(Block(WIDTH, HEADS) for _ in range(LAYERS))
    call = caller(way)
    # The first call triggers lazy imports, which must not be measured.
    call(torch.nn.Linear(2, 2), torch.ones(2, 2, requires_grad=True)).sum().backward()

    def run() -> None:
        blocks.zero_grad()
        torch.manual_seed(1)
        hidden = torch.randn(BATCH, CONTEXT, WIDTH, requires_grad=True) * 1
        for block in blocks:
            hidden = call(block, hidden)
        loss = hidden.square().mean()
        del hidden
        with record_function("backward"):
            loss.backward()

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    held = peak = kept = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "backward":
            kept = held
        elif event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    seconds = []
    for _ in range(rounds):
        begun = time.process_time()
        run()
        seconds.append(time.process_time() - begun)
    gradients = sum(parameter.grad.double().abs().sum().item() for parameter in blocks.parameters())
    return {"peak": peak, "kept": kept, "ms": 1e3 * median(seconds), "gradients": gradients}


def rank_main(words: list[str]) -> None:
    """Run one rank: measure the ways of one library. Rank 0 prints the figures."""
    import torch
    import torch.distributed as dist

    store, library, rounds = words
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    if library == PEER:
        importlib.import_module(PEER).init_distributed("gloo", auto_mpi_discovery=False)
    ways = PEERS if library == PEER else WAYS
    found = {way.name: measured(way, int(rounds)) for way in ways}
    if rank == 0:
        print("figures", json.dumps(found), flush=True)
    dist.destroy_process_group()


def figures_of(python: str, library: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return the figures of rank 0 by way.

    Raises:
        SystemExit: A rank failed. The message contains the end of its error output.
    """
    with tempfile.TemporaryDirectory() as place:
        words = [python, __file__, "--rank", f"{place}/store", library, str(rounds)]
        processes = [
            subprocess.Popen(
                words, env=_environment(rank), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(RANKS)
        ]
        said = [process.communicate(timeout=600) for process in processes]
    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode:
            raise SystemExit(f"activation_checkpointing: a rank of {library} failed\n{errors[-3000:]}")
    (line,) = (line for line in said[0][0].splitlines() if line.startswith("figures "))
    found: dict[str, dict[str, float]] = json.loads(line.removeprefix("figures "))
    return found


def _environment(rank: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COMMPROF_", "NCCL_"))}
    return kept | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime")]),
    }


def rows_of(figures: Mapping[str, Mapping[str, float]], ways: tuple[Way, ...]) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    none, torch = figures[WAYS[0].name], figures[WAYS[2].name]
    for way in ways:
        mine = figures[way.name]
        if mine["gradients"] != none["gradients"]:
            raise SystemExit(f"activation_checkpointing: {way.name} has other gradients")
        inputs = "-" if way.inputs_kept is None else f"{way.inputs_kept * LAYERS * INPUT_BYTES / 2**20:.2f}"
        yield [
            way.name,
            f"{mine['peak'] / 2**20:.2f}",
            f"{mine['peak'] / none['peak']:.3f}",
            f"{mine['peak'] / torch['peak']:.3f}",
            f"{mine['kept'] / 2**20:.2f}",
            inputs,
            f"{mine['kept'] / torch['kept']:.3f}",
            f"{mine['ms'] / none['ms']:.2f}",
        ]


HEADER = [
    "way",
    "peak, MiB",
    "of none",
    "of torch's",
    "kept after forward, MiB",
    "inputs of the blocks, MiB",
    "kept, of torch's",
    "CPU time, of none",
]


def main() -> None:
    """Measure, print the table and write it."""
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2:])
        return
    from results import arguments, publish

    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--deepspeed-python", help="the Python of an environment that has DeepSpeed")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    figures, ways = figures_of(sys.executable, "zero_runtime", args.rounds), WAYS
    if args.deepspeed_python:
        figures |= figures_of(args.deepspeed_python, PEER, args.rounds)
        ways += PEERS
    publish(
        args,
        f"Activation checkpoints: {LAYERS} blocks of width {WIDTH}, {BATCH} x {CONTEXT} tokens, fp32, {RANKS} "
        "model-parallel gloo ranks",
        HEADER,
        list(rows_of(figures, ways)),
        figures,
    )


if __name__ == "__main__":
    main()
