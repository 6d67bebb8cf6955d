"""The models of the recorded DeepSpeed runs as lists of parameters, and the configs of these runs.

The runs are not part of the repository. COMMPROF_RECORDED_RUNS sets a different folder for them.
"""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

from commprof.requested import Parameter

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(os.environ.get("COMMPROF_RECORDED_RUNS", ROOT.parent / "shared" / "data" / "deepspeed"))


def gpt_shapes(width=64, blocks=2, vocabulary=96, context=16):
    yield "tok.weight", (vocabulary, width)
    yield "pos.weight", (context, width)
    for block in range(blocks):
        for layer, shape in (
            ("ln1", (width,)),
            ("qkv", (3 * width, width)),
            ("proj", (width, width)),
            ("ln2", (width,)),
            ("fc1", (4 * width, width)),
            ("fc2", (width, 4 * width)),
        ):
            yield f"blocks.{block}.{layer}.weight", shape
            yield f"blocks.{block}.{layer}.bias", shape[:1]
    yield from (("lnf.weight", (width,)), ("lnf.bias", (width,)))
    yield from (("head.weight", (vocabulary, width)), ("head.bias", (vocabulary,)))


def mlp_shapes(sizes=(37, 131, 257, 67, 11)):
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        yield f"layers.{layer}.weight", (outputs, inputs)
        yield f"layers.{layer}.bias", (outputs,)


def unused_shapes():
    """Yield the shapes of the MLP with one unused layer and one frozen layer."""
    yield from mlp_shapes()
    yield from (("never.weight", (53, 101)), ("never.bias", (53,)))
    yield from (("frozen.weight", (37, 37)), ("frozen.bias", (37,)))


def parameters_of(case: dict[str, Any]) -> list[Parameter]:
    if case.get("kind") == "unused":
        shapes = list(unused_shapes())
    else:
        shapes = list(mlp_shapes() if case.get("model") == "mlp" else gpt_shapes())
    # The two groups are the matrices and the other parameters. Muon splits a model in the same way.
    split = case.get("two_groups") or case["config"].get("optimizer", {}).get("type") == "Muon"
    return [
        Parameter(
            name,
            math.prod(shape),
            param_group=int(bool(split) and len(shape) == 1),
            requires_grad=not name.startswith("frozen"),
            forward_index=index,
        )
        for index, (name, shape) in enumerate(shapes)
    ]


def finished_cases() -> dict[str, dict[str, Any]]:
    """Return the configs of the recorded runs that succeeded and have a file of collectives, by name."""
    cases = {}
    for folder in sorted(RECORDED.glob("*/")) if RECORDED.is_dir() else ():
        if not all((folder / name).exists() for name in ("config.json", "losses.json", "collectives.csv")):
            continue
        if json.loads((folder / "losses.json").read_text())["status"] == "ok":
            cases[folder.name] = json.loads((folder / "config.json").read_text())
    return cases
