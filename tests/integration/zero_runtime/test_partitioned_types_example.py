"""The configurations under examples/ that keep chosen parameters whole, started by the command.

The ledger must close.
"""

from __future__ import annotations

import json

import pytest

from support.command import ROOT, output

SCRIPT = ROOT / "examples" / "train_gpt.py"
SIZES = ("--steps", "4", "--layers", "1", "--width", "32", "--context", "16")
NORMS = {f"{place}.{kind}" for place in ("blocks.0.attention_norm", "norm") for kind in ("weight", "bias")}


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.parametrize("name", ["allowed", "forced"])
def test_the_examples_of_partitioned_types(tmp_path, name):
    config = ROOT / "examples" / f"ds_{name}_types.json"
    output(
        "run", "--nproc", "2", "--out", "types", str(SCRIPT), *SIZES, "--config", str(config), cwd=tmp_path
    )
    answer = json.loads(output("verify", "types", "--json", cwd=tmp_path))
    assert (answer["state"], answer["unexplained"]) == ("closed", [])
    question = (
        "SELECT DISTINCT parameters FROM collectives WHERE purpose = 'gradient_reduce' AND op = 'all_reduce'"
    )
    rows = json.loads(output("query", "types", question, "--json", cwd=tmp_path))
    whole = {each for row in rows for each in str(row["parameters"]).split(",")}
    assert whole >= NORMS and not any("qkv" in each for each in whole)
