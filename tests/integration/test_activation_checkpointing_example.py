"""The example under examples/, run by the command: the same loss with and without checkpoints, and a ledger that closes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_gpt_checkpointed.py"
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "COMMPROF_RUN", "PYTHONPATH")
} | {"OMP_NUM_THREADS": "1"}
SIZES = ("--steps", "2", "--layers", "3", "--width", "32", "--context", "16")


def commprof(*words: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "commprof", *words],
        cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.ranks
def test_the_example_of_activation_checkpoints(tmp_path):
    losses = []
    for name, words in (("checkpointed", ()), ("plain", ("--plain",))):
        said = commprof("run", "--nproc", "2", "--out", name, str(SCRIPT), *SIZES, *words, cwd=tmp_path)
        losses.append(re.search(r"2 steps, loss (\S+)", said)[1])
    assert losses[0] == losses[1]
    answer = json.loads(commprof("verify", "checkpointed", "--json", cwd=tmp_path))
    assert (answer["state"], answer["unexplained"]) == ("closed", [])
    assert "activation" in commprof("report", "checkpointed", cwd=tmp_path)
