"""Synthetic runs with expert layers, whose loads are specified by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.runs import SyntheticRun

LAYER: dict[str, Any] = {
    "num_experts": 4,
    "ep_size": 2,
    "k": 2,
    "capacity_factor": 1.0,
    "eval_capacity_factor": 1.0,
    "min_capacity": 4,
    "drop_tokens": True,
    "hidden": 8,
}


def add_layer(run: SyntheticRun, layer: str = "moe", **changes: Any) -> None:
    """Add the rows of an expert layer that groups of ``ep_size`` consecutive ranks share, one row per rank."""
    row = LAYER | changes
    size = row["ep_size"]
    for rank in range(run.world_size):
        first = rank // size * size
        group = ",".join(map(str, range(first, first + size)))
        run.add(
            "expert_layers", rank=rank, attempt=0, pid=run.pid(rank), layer=layer, expert_ranks=group, **row
        )


def add_load(
    run: SyntheticRun,
    rank: int,
    counts: Sequence[int],
    step: int = 0,
    layer: str = "moe",
    capacity: int = 100,
    sent: int | None = None,
    **changes: Any,
) -> None:
    """Add the rows of a forward pass of ``layer`` on one rank.

    ``counts`` contains, for each expert, the number of tokens of ``rank`` that chose this expert.
    """
    row = {
        "rank": rank,
        "attempt": 0,
        "pid": run.pid(rank),
        "step": step,
        "after_step": None,
        "micro_step": 0,
        "phase": "forward",
        "call": 0,
        "layer": layer,
        "capacity": capacity,
        "time_ns": 1,
        "sent": sum(counts) // 2 if sent is None else sent,
    }
    for expert, count in enumerate(counts):
        load = {"expert": expert, "tokens": count, "dropped": max(0, count - capacity)}
        run.add("expert_loads", **row | load | changes)


def uneven_experts(steps: int = 12) -> SyntheticRun:
    """Return a run in which the load moves to expert 5 of the first of two expert layers.

    Four ranks on two hosts share the eight experts of each layer. Each rank has 64 tokens, and with an even load each
    expert gets 8 tokens per rank. From step 4 on, expert 5 of ``blocks.0.moe`` gets 7 more tokens per rank in each
    step, up to 36. Each of the other experts gets one token less for every 7 tokens more. The capacity is 16.
    """
    run = SyntheticRun(world_size=4)
    run.hosts = {0: "host-a", 1: "host-a", 2: "host-b", 3: "host-b"}
    layers = ("blocks.0.moe", "blocks.1.moe")
    for layer in layers:
        add_layer(run, layer, num_experts=8, ep_size=4, k=1, capacity_factor=2.0)
    for step in range(steps):
        run.add_step(step, duration_ns=20_000_000, loss=3.0 / (step + 1))
        for layer in layers:
            for rank in range(4):
                more = min(7 * max(0, step - 3), 28) if layer == layers[0] else 0
                counts = [8 - more // 7] * 8
                counts[5] = 8 + more
                add_load(run, rank, counts, step, layer, capacity=16, sent=64)
            for phase in ("forward", "forward", "backward", "backward"):
                run.add_collective(
                    "all_to_all", payload_bytes=8 * 16 * 32, step=step, phase=phase, purpose="activation", module=layer
                )  # fmt: skip
        run.add_collective("all_reduce", payload_bytes=4096, step=step, purpose="gradient_reduce")
    return run
