"""The configuration under examples/ with the example GPT, started by the command.

The ledger must close, and the traffic must decrease.
"""

from __future__ import annotations

import json

import pytest

from support.command import ROOT, output

SCRIPT, CONFIG = ROOT / "examples" / "train_gpt.py", ROOT / "examples" / "ds_compressed.json"
SIZES = ("--steps", "13", "--layers", "1", "--width", "32", "--context", "16")


@pytest.mark.long
@pytest.mark.ranks
def test_the_example_of_compressed_gradients(tmp_path):
    words = ("--nproc", "2", "--out", "compressed", str(SCRIPT), *SIZES, "--config", str(CONFIG))
    output("run", *words, cwd=tmp_path)
    answer = json.loads(output("verify", "compressed", "--json", cwd=tmp_path))
    assert (answer["state"], answer["unexplained"]) == ("closed", [])
    rows = {row["issued_op"]: row for row in answer["rows"] if row["purpose"] == "gradient_reduce"}
    before, after = rows["all_reduce"], rows["all_gather"]
    # 10 steps are not compressed and 3 are. A compressed step sends a hundredth of the elements, with their
    # indices, from two ranks.
    share = (after["issued_wire_bytes"] / 3) / (before["issued_wire_bytes"] / 10)
    assert 0.02 <= share < 0.021
