"""``commprof run --engine zero_runtime`` with real processes.

With every launcher, the ranks import zero_runtime as deepspeed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from commprof.analysis import api
from support.command import WITHOUT_DYNAMO

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam"},
    "zero_optimization": {"stage": 2},
}
SCRIPT = """
import argparse
import os
import deepspeed
import torch

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
model = torch.nn.Linear(10, 10)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for step in range(3):
    engine.backward(engine(torch.randn(4, 10)).pow(2).mean())
    engine.step()
ranks = deepspeed.comm.get_world_size()
os.write(1, f"trained by {deepspeed.__version__} on {ranks} ranks\\n".encode())  # at once: ranks share the output
"""


def execute(words, cwd):
    launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in launchers and not name.startswith("COMMPROF")
    }
    environment = {
        **kept,
        "PYTHONPATH": f"{WITHOUT_DYNAMO}:{ROOT}:{ROOT / 'runtime'}",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "program",
    [
        ["--nproc", "2", "train.py"],
        ["--", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"],
        ["--", sys.executable, "-m", "zero_runtime.launch", "--num_gpus", "2", "train.py"],
    ],
    ids=["none", "torchrun", "launch"],
)
def test_every_rank_gets_this_runtime_and_is_recorded_with_its_purposes(tmp_path, program):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    words = ["-m", "commprof", "run", "--engine", "zero_runtime", "--out", "run", *program]
    done = execute([sys.executable, *words, "--deepspeed_config", "ds.json"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained by 0.19.8+zero.runtime") == 2 and "on 2 ranks" in done.stdout
    assert json.loads((tmp_path / "run" / "run.json").read_text())["launcher"]["engine"] == "zero_runtime"
    traffic = api.traffic(tmp_path / "run", by=("purpose",))
    assert {"parameter_broadcast", "gradient_reduce", "parameter_gather"} <= set(traffic["purpose"])


@pytest.mark.long
def test_a_script_without_commprof(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.replace("args=args", f"args=args, config={CONFIG!r}"))
    done = execute([sys.executable, "-m", "zero_runtime.deepspeed_names", "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "on 1 ranks" in done.stdout
