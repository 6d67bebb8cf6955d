"""The example under examples/, started by the command.

The loss must not depend on how ranks share the model.
"""

from __future__ import annotations

import re

import pytest

from support.command import ROOT, output

SCRIPT = ROOT / "examples" / "train_gpt_parallel.py"
SIZES = ("--steps", "2", "--width", "32", "--context", "16")


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
        said = output(
            "run", "--nproc", ranks, "--out", "run", "--force", str(SCRIPT), *SIZES, *words, cwd=tmp_path
        )
        losses.add(re.search(r"2 steps, loss (\S+)", said)[1])
    assert len(losses) == 1
    assert "data+sequence 0-3" in output("report", "run", cwd=tmp_path)
