"""The example under examples/, started by the command.

The loss must be equal with and without checkpoints, and the ledger must close.
"""

from __future__ import annotations

import json
import re

import pytest

from support.command import ROOT, output

SCRIPT = ROOT / "examples" / "train_gpt_checkpointed.py"
SIZES = ("--steps", "2", "--layers", "3", "--width", "32", "--context", "16")


@pytest.mark.ranks
@pytest.mark.long
def test_the_example_of_activation_checkpoints(tmp_path):
    losses = []
    for name, words in (("checkpointed", ()), ("plain", ("--plain",))):
        said = output("run", "--nproc", "2", "--out", name, str(SCRIPT), *SIZES, *words, cwd=tmp_path)
        losses.append(re.search(r"2 steps, loss (\S+)", said)[1])
    assert losses[0] == losses[1]
    answer = json.loads(output("verify", "checkpointed", "--json", cwd=tmp_path, expected=3))
    assert (answer["state"], answer["unexplained"]) == ("unknown", [])
    assert any("activation" in text and "labelled, not predicted" in text for text in answer["sentences"])
    assert "activation" in output("report", "checkpointed", cwd=tmp_path)
