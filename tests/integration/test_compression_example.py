"""The configuration under examples/ with the example GPT, by the command: the ledger closes, and the traffic falls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, CONFIG = ROOT / "examples" / "train_gpt.py", ROOT / "examples" / "ds_compressed.json"
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "COMMPROF_RUN", "PYTHONPATH")
} | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime")])}
SIZES = ("--steps", "13", "--layers", "1", "--width", "32", "--context", "16")


def commprof(*words: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "commprof", *words],
        cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.ranks
def test_the_example_of_compressed_gradients(tmp_path):
    words = ("--nproc", "2", "--out", "compressed", str(SCRIPT), *SIZES, "--config", str(CONFIG))
    commprof("run", *words, cwd=tmp_path)
    answer = json.loads(commprof("verify", "compressed", "--json", cwd=tmp_path))
    assert (answer["state"], answer["unexplained"]) == ("closed", [])
    rows = {row["issued_op"]: row for row in answer["rows"] if row["purpose"] == "gradient_reduce"}
    before, after = rows["all_reduce"], rows["all_gather"]
    # 10 steps are not compressed, 3 are: a hundredth of the elements, with their places, from two ranks.
    share = (after["issued_wire_bytes"] / 3) / (before["issued_wire_bytes"] / 10)
    assert 0.02 <= share < 0.021
