"""The peak of a plan, compared with the largest number of tensor bytes that real ranks have at once.

Each storage is counted once.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from commprof.plan.models import Model, expert_layers, parameters_of
from commprof.plan.predictions import Job, predict
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

REAL = "COMMPROF_DEEPSPEED_PYTHON"  # an interpreter that has the real DeepSpeed
WORLD = 2
TESTS = Path(__file__).parents[2]
COMPARED = (  # the cases that are compared with DeepSpeed
    *(f"stage {stage}" for stage in range(4)),
    "stage 1, checkpoints",
    "stage 2, offload",
    "stage 1 in fp32",
)
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
ONE_AT_A_TIME = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


def cases():
    from support.peaks import make_config as config

    return {
        **{f"stage {stage}": (config(stage), "plain") for stage in range(4)},
        **{f"stage {stage}, checkpoints": (config(stage), "checkpoints") for stage in range(4)},
        **{f"stage {stage}, own": (config(stage, None), "own") for stage in range(3)},
        "stage 1 in fp32": (config(1, None), "plain"),
        "stage 1, accumulation": (config(1, micro_batches=2), "checkpoints"),
        "stage 2, offload": (config(2, **OFFLOAD), "plain"),
        "stage 3, offload, checkpoints": (config(3, **OFFLOAD), "checkpoints"),
        "stage 3 in fp32, one at a time": (config(3, None, **ONE_AT_A_TIME), "checkpoints"),
        "stage 2, reduce_scatter": (config(2, gradient_reduction="reduce_scatter"), "checkpoints"),
    }


def expert_cases(world):
    """Return cases of a GPT with experts at stages 0 to 2."""
    from support.peaks import make_config as config

    kinds = {"": {}, ", k 2": {"k": 2}, ", residual": {"use_residual": True}}
    kinds |= {", dropping half": {"capacity_factor": 0.5}, ", twice the slots": {"capacity_factor": 2.0}}
    return {
        f"stage {stage}, ep_size {ep_size}{name}{', fp32' if precision is None else ''}": (
            config(stage, precision),
            {"ep_size": ep_size, **layer},
        )
        for stage in range(3)
        for ep_size in (1, 2, 4)
        if ep_size <= world and (ep_size == 4 or world == WORLD)
        for name, layer in (kinds.items() if stage == 1 and ep_size == 2 else [("", {})])
        for precision in ("bf16", *([None] if ep_size == 2 else []))
    }


def measured_peaks(rank, world, given):
    import zero_runtime
    from support.peaks import most_bytes

    zero_runtime.as_deepspeed()
    return {name: most_bytes(zero_runtime, *case) for name, case in given.items()}


def planned_peak(config, kind, framework="zero_runtime", world=WORLD):
    import torch

    import zero_runtime
    from support.peaks import make_model
    from zero_runtime.deepspeed_names.finder import uninstall

    def build(micro_batch, sequence):
        with torch.device("meta"):
            return make_model(kind)

    zero_runtime.as_deepspeed()
    try:
        module = build(0, None)[0]
        model = Model(parameters_of(module), None, "", build, tuple(expert_layers(module)))
        planned = predict(config, Job(model, world, world, "gloo", framework=framework))
    finally:
        # Without this, later tests in this process cannot import a deepspeed of their own.
        uninstall()
    # On a CPU, host memory and device memory are the same.
    return planned.peak.device + sum(each.host for each in planned.memory)


def errors(measured, framework, given, world=WORLD):
    peaks = planned_peaks(given, framework, world)
    return {name: peaks[name] / peak - 1 for name, peak in measured.items()}


def planned_peaks(given, framework="zero_runtime", world=WORLD):
    return {name: planned_peak(*case, framework, world) for name, case in given.items()}


def errors_here(given, world=WORLD):
    """Return the relative error of each case on forked ranks of zero_runtime.

    Planning comes first, so that this process imports the modules that each rank would otherwise import for
    itself.
    """
    peaks = planned_peaks(given, world=world)
    measured = run_ranks(world, measured_peaks, given)[0]
    return {name: peaks[name] / peak - 1 for name, peak in measured.items()}


def large(found, limit=0.05):
    return {name: error for name, error in found.items() if abs(error) > limit}


def test_peaks_are_within_five_percent():
    assert large(errors_here(cases())) == {}


def secondary_cases():
    """Return cases of stage 3 with secondary shards.

    Without activation checkpointing and limits, all parameters stay gathered until the backward pass.
    """
    from support.peaks import make_config as config

    return {
        f"secondary shards, {kind}": (
            config(3, zero_hpz_partition_size=2, stage3_param_persistence_threshold=0, **limits),
            kind,
        )
        for kind, limits in (("plain", {}), ("checkpoints", ONE_AT_A_TIME))
    }


def test_peaks_with_secondary_shards_are_within_five_percent():
    assert large(errors_here(secondary_cases(), 4)) == {}


def block_cases():
    """Return cases of stage 3 by block, gathered once or again in the backward pass."""
    from support.peaks import make_config as config

    again = {"stage3_max_reuse_distance": 0}
    kinds = {"": {}, "gathered again, ": again, "one ahead, ": {**again, "stage3_prefetch_bucket_size": 1}}
    return {
        f"by block, {name}{kind}": (config(3, stage3_gather_unit="block", **zero), kind)
        for name, zero in kinds.items()
        for kind in ("plain", "checkpoints")
    }


def test_peaks_by_block_are_not_below_the_measured_ones_and_at_most_six_percent_above():
    found = errors_here(block_cases())
    assert {name: error for name, error in found.items() if not -0.001 < error < 0.06} == {}


@pytest.mark.long
@pytest.mark.parametrize("world", [WORLD, 4])
def test_peaks_with_experts_are_within_five_percent(world):
    assert large(errors_here(expert_cases(world), world)) == {}


@pytest.mark.long
def test_peaks_of_deepspeed_are_as_the_page_says(tmp_path):
    python = os.environ.get(REAL)
    if not python:
        pytest.skip(f"{REAL} names no interpreter that has the real DeepSpeed")
    given = {name: case for name, case in cases().items() if name in COMPARED}
    measured = measured_on_deepspeed(python, WORLD, given, tmp_path)
    assert large(errors(measured, "deepspeed", given)) == {}


@pytest.mark.long
@pytest.mark.parametrize("world", [WORLD, 4])
def test_peaks_of_deepspeed_with_experts_are_as_the_page_says(world, tmp_path):
    python = os.environ.get(REAL)
    if not python:
        pytest.skip(f"{REAL} names no interpreter that has the real DeepSpeed")
    given = expert_cases(world)
    measured = measured_on_deepspeed(python, world, given, tmp_path)
    # The plan counts the reduced gradients of all parameters, including experts, from the first gradient of a
    # pass on.
    assert large(errors(measured, "deepspeed", given, world), limit=0.07) == {}


def measured_on_deepspeed(python, world, given, tmp_path):
    given = copy.deepcopy(given)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    for config, _ in given.values():
        config.update(zero_force_ds_cpu_optimizer=False, zero_allow_untested_optimizer=True)
    ranks = []
    for rank in range(world):
        variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith("COMMPROF_")},
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(TESTS),
        }
        with (tmp_path / f"{rank}.in").open("w") as stream:
            json.dump(given, stream)
        with (tmp_path / f"{rank}.in").open() as stream, (tmp_path / f"{rank}.out").open("w") as out:
            words = [python, "-m", "support.peaks", "deepspeed"]
            ranks.append(
                subprocess.Popen(words, env=variables, stdin=stream, stdout=out, stderr=subprocess.DEVNULL)
            )
    try:
        assert [each.wait(timeout=580) for each in ranks] == [0] * world
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    return json.loads((tmp_path / "0.out").read_text().splitlines()[-1])
