"""``commprof verify`` and ``check`` on runs of real gloo ranks, recorded by the command itself."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from support import command

ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "COMMPROF_RUN", "PYTHONPATH")
} | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(command.WITHOUT_DYNAMO)}

# One script for all configs, because the ranks would otherwise spend the time of each job on starting Python.
SCRIPT = """
import json, sys
import torch, torch.distributed as dist
import commprof, zero_runtime

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
config = json.load(open(sys.argv[sys.argv.index("--config") + 1]))
engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(3):
    for micro in range(engine.gradient_accumulation_steps()):
        inputs = torch.randn(2, 256).to(next(model.parameters()).dtype)
        engine.backward(engine(inputs).float().square().mean())
        engine.step()
if "--sneak" in sys.argv:
    dist.all_reduce(torch.ones(11))  # line that nobody asked for
dist.destroy_process_group()
"""
NUMEL = 8 * (256 * 256 + 256)
BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


def zero(stage: int, **keys) -> dict:
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 140_000, **keys}}


# For each config: the requested, issued and executed operation, and the modelled bytes per rank and byte of
# gradients of the executed operation (n = 2).
CONFIGS = {
    "stage-0": (zero(0), "all_reduce", "all_reduce", "all_reduce", 1.0),
    "stage-1": (zero(1), "reduce_scatter", "all_reduce", "all_reduce", 1.0),
    "stage-2-owner": (
        zero(2, use_multi_rank_bucket_allreduce=False), "reduce_scatter", "reduce", "reduce", 0.75,
    ),
    "stage-2-native": (
        zero(2, gradient_reduction="reduce_scatter", reduce_scatter_impl="native"),
        "reduce_scatter", "reduce_scatter", "all_reduce", 1.0,
    ),
    "stage-2-exchange-bf16-twice": (
        zero(2, gradient_reduction="reduce_scatter") | {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2},
        "reduce_scatter", "all_to_all", "all_to_all", 0.5,
    ),
    "stage-3": (
        zero(3, stage3_param_persistence_threshold=300), "reduce_scatter", "all_to_all", "all_to_all", 0.5,
    ),
    "stage-3-all-reduce-twice": (
        zero(3, reduce_scatter=False, stage3_prefetch_bucket_size=0) | {"gradient_accumulation_steps": 2},
        "all_reduce", "all_reduce", "all_reduce", 1.0,
    ),
}  # fmt: skip

# These configs run only in the long tests. SyntheticRun also tests what the quick configs do not cover.
LONG = ("stage-0", "stage-1", "stage-2-exchange-bf16-twice", "stage-3-all-reduce-twice")


def commprof(*words: str, cwd: Path) -> subprocess.CompletedProcess:
    return command.commprof(*words, cwd=cwd, env=ENVIRONMENT, timeout=120)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("verify")
    (place / "train.py").write_text(SCRIPT)
    return place


def recorded(place: Path, name: str, config: dict, *arguments: str) -> Path:
    """Return the run called ``name``. The first test that needs it records it."""
    if not (place / name).exists():
        (place / f"{name}.json").write_text(json.dumps(BASE | config))
        done = commprof(
            "run",
            "--nproc",
            "2",
            "--out",
            name,
            "train.py",
            "--config",
            f"{name}.json",
            *arguments,
            cwd=place,
        )
        assert done.returncode == 0, done.stderr
    return place / name


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in CONFIGS]
)
def test_the_ledger_of_a_real_run_closes(place, name):
    config, requested, issued, executed, factor = CONFIGS[name]
    recorded(place, name, config)
    done = commprof("verify", name, "--json", cwd=place)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["state"], answer["unexplained"]) == (0, "closed", [])
    assert answer["issued_bytes"] == answer["explained_bytes"] > 0
    (row,) = [row for row in answer["rows"] if row["purpose"] == "gradient_reduce"]
    assert (row["requested_op"], row["issued_op"], row["executed_op"]) == (requested, issued, executed)
    micro_steps = config.get("gradient_accumulation_steps", 1)
    item_bytes = 2 if "bf16" in config else 4
    gradients = 3 * micro_steps * item_bytes * NUMEL
    # A native reduce_scatter may pad its rows.
    assert gradients <= row["issued_payload_bytes"] <= gradients * (1.07 if issued == "reduce_scatter" else 1)
    assert row["executed_wire_bytes"] == factor * row["issued_payload_bytes"]
    (moved,) = answer["moved"]
    assert moved["device"] == "lo"
    # Other processes on the machine use the same interface. The counters may therefore show more bytes, but
    # not fewer.
    assert moved["sent_bytes"] >= 0.98 * moved["expected_bytes"]


@pytest.mark.ranks
@pytest.mark.long
def test_a_line_that_nobody_asked_for_is_named(place):
    run = recorded(place, "sneaked", zero(1), "--sneak")
    done = commprof("verify", "sneaked", "--json", cwd=place)
    answer = json.loads(done.stdout)
    line = SCRIPT.splitlines().index("    dist.all_reduce(torch.ones(11))  # line that nobody asked for") + 1
    assert done.returncode == 1
    (found,) = answer["unexplained"]
    assert (found["op"], found["payload_bytes"], found["count"]) == ("all_reduce", 44, 1)
    assert f"train.py:{line}" in found["call_site"]
    (place / "only.toml").write_text("only_requested = true\n[step]\nmax_collectives = 100\n")
    checked = commprof("check", str(run), "--budget", "only.toml", cwd=place)
    assert checked.returncode == 1
    assert checked.stdout.count(f"train.py:{line}") == 1


@pytest.mark.ranks
def test_another_config_breaks_the_budget_of_the_first(place):
    for name in ("stage-2-owner", "stage-2-native"):
        recorded(place, name, CONFIGS[name][0])
    assert commprof("check", "stage-2-owner", "--write-budget", "owner.toml", cwd=place).returncode == 0
    assert commprof("check", "stage-2-owner", "--budget", "owner.toml", cwd=place).returncode == 0
    done = commprof("check", "stage-2-native", "--budget", "owner.toml", cwd=place)
    assert done.returncode == 1
    assert "step.allowed_ops: reduce_scatter is not among all_gather, all_reduce, reduce" in done.stdout
