"""The peak of a plan, against the most bytes of tensors that real ranks have at once, each storage counted once."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from commprof.plan.models import Model, parameters_of
from commprof.plan.predictions import Job, predict
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks

REAL = "COMMPROF_DEEPSPEED_PYTHON"  # an interpreter that has the real DeepSpeed
WORLD = 2
TESTS = Path(__file__).parents[2]
COMPARED = (  # with DeepSpeed
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


def measured_peaks(rank, world):
    import zero_runtime
    from support.peaks import most_bytes

    return {name: most_bytes(zero_runtime, *case) for name, case in cases().items()}


def planned_peak(config, kind, framework="zero_runtime"):
    import torch

    from support.peaks import make_model

    def build(micro_batch, sequence):
        with torch.device("meta"):
            return make_model(kind)

    model = Model(parameters_of(build(0, None)[0]), None, "", build)
    planned = predict(config, Job(model, WORLD, WORLD, "gloo", framework=framework))
    # On a CPU, the host's memory is the device's.
    return planned.peak.device + sum(each.host for each in planned.memory)


def errors(measured, framework):
    return {name: planned_peak(*cases()[name], framework) / peak - 1 for name, peak in measured.items()}


def test_peaks_are_within_five_percent():
    measured = run_ranks(WORLD, measured_peaks)[0]
    assert {
        name: error for name, error in errors(measured, "zero_runtime").items() if abs(error) > 0.05
    } == {}


@pytest.mark.long
def test_peaks_of_deepspeed_are_as_the_page_says(tmp_path):
    python = os.environ.get(REAL)
    if not python:
        pytest.skip(f"{REAL} names no interpreter that has the real DeepSpeed")
    given = {name: case for name, case in cases().items() if name in COMPARED}
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    for config, _ in given.values():
        config.update(zero_force_ds_cpu_optimizer=False, zero_allow_untested_optimizer=True)
    ranks = []
    for rank in range(WORLD):
        variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith("COMMPROF_")},
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(WORLD),
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
        assert [each.wait(timeout=280) for each in ranks] == [0, 0]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    measured = json.loads((tmp_path / "0.out").read_text().splitlines()[-1])
    assert {name: each for name, each in errors(measured, "deepspeed").items() if abs(each) > 0.05} == {}
