"""The example under examples/, started by the command.

The loss must not depend on how experts are divided over ranks.
"""

from __future__ import annotations

import re

import pytest

from support.command import ROOT, output

SCRIPT = ROOT / "examples" / "train_gpt_experts.py"
SIZES = ("--steps", "3", "--width", "32", "--context", "16", "--layers", "2")


@pytest.mark.long
@pytest.mark.ranks
def test_the_loss_is_the_same_however_experts_are_divided(tmp_path):
    losses = set()
    for ep_size in ("1", "2", "4"):
        words = ("--nproc", "4", "--out", ep_size, str(SCRIPT), *SIZES, "--ep-size", ep_size)
        losses.add(re.search(r"3 steps, loss (\S+)", output("run", *words, cwd=tmp_path))[1])
    assert len(losses) == 1
