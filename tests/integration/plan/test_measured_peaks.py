"""The peak of a plan, against the most bytes of tensors that real ranks have at once, each storage counted once."""

from __future__ import annotations

import json
import os
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


def planned_peak(config, kind):
    import torch

    from support.peaks import make_model

    def build(micro_batch, sequence):
        with torch.device("meta"):
            return make_model(kind)

    model = Model(parameters_of(build(0, None)[0]), None, "", build)
    planned = predict(config, Job(model, WORLD, WORLD, "gloo"))
    # On a CPU, the host's memory is the device's.
    return planned.peak.device + sum(each.host for each in planned.memory)


def errors(measured):
    return {name: planned_peak(*cases()[name]) / peak - 1 for name, peak in measured.items()}


def test_peaks_are_within_five_percent():
    measured = run_ranks(WORLD, measured_peaks)[0]
    assert {name: error for name, error in errors(measured).items() if abs(error) > 0.05} == {}


@pytest.mark.long
def test_peaks_of_deepspeed_are_as_the_page_says(tmp_path):
    python = os.environ.get(REAL)
    if not python:
        pytest.skip(f"{REAL} names no interpreter that has the real DeepSpeed")
    given = {name: case for name, case in cases().items() if "reduce_scatter" not in name}
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
            "MASTER_PORT": "29618",
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
    assert [each.wait(timeout=900) for each in ranks] == [0, 0]
    measured = json.loads((tmp_path / "0.out").read_text().splitlines()[-1])
    found = errors(measured)
    print(json.dumps({name: (peak, round(found[name], 3)) for name, peak in measured.items()}))
    assert all(-0.16 < error < 0.12 for error in found.values()), found
