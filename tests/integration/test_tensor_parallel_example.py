"""The example under examples/, run by the command: the same loss however ranks share the model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_gpt_parallel.py"
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "COMMPROF_RUN", "PYTHONPATH")
} | {"OMP_NUM_THREADS": "1"}
SIZES = ("--steps", "2", "--width", "32", "--context", "16")


def commprof(*words: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "commprof", *words],
        cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.ranks
def test_the_loss_is_the_same_however_ranks_share_the_model(tmp_path):
    losses = set()
    for ranks, words in (
        ("2", ()),
        ("4", ("--tp-size", "2")),
        ("2", ("--tp-size", "2", "--sequence-parallel")),
        ("4", ("--sequence-size", "2", "--stage", "2")),
    ):
        said = commprof(
            "run", "--nproc", ranks, "--out", "run", "--force", str(SCRIPT), *SIZES, *words, cwd=tmp_path
        )
        losses.add(re.search(r"2 steps, loss (\S+)", said)[1])
    assert len(losses) == 1
    assert "data+sequence 0-3" in commprof("report", "run", cwd=tmp_path)
