"""Programs of accelerate, transformers, TRL, PEFT and Lightning, compared with DeepSpeed.

The programs run with ``--engine zero_runtime``. The results of DeepSpeed are in
``tests/golden/engine_programs.json`` (``tools/record_engine_programs.py``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from commprof.analysis import api
from commprof.ledger.verification import verify
from commprof.trace.reader import open_run
from support.changed_runs import Changed
from support.command import commprof, environment
from support.engine_programs.cases import PROGRAMS, STAGES
from support.engine_programs.forked import ENVIRONMENT

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "tests/support/engine_programs"
NEEDED = {
    "trainer": ("transformers", "accelerate"),
    "accelerate_loop": ("accelerate", "transformers"),
    "lightning_fit": ("lightning",),
    "sft": ("trl", "peft", "datasets"),
}
# Scripts that DeepSpeed puts into a checkpoint. This runtime has commands instead.
SCRIPTS = {"zero_to_fp32.py", "zero_to_torch.py"}
# Stage 3 sums gradients of bf16 in a different order.
EXACT, HALF = 2e-6, 2e-3


def recorded(program, stage, name):
    noted = json.loads((ROOT / "tests/golden/engine_programs.json").read_text("utf-8"))
    return noted["found"][f"{program}/{stage}/{name}"]


def differences(theirs, ours, tolerance, place=""):
    """Return the places where ``ours`` differs from ``theirs``, with both values."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return [
            found
            for key in sorted({*theirs, *ours} - {"engine"})
            for found in differences(theirs.get(key), ours.get(key), tolerance, f"{place}.{key}")
        ]
    if isinstance(theirs, list) and isinstance(ours, list):
        if place.endswith(".saved"):
            theirs, ours = sorted(set(theirs) - SCRIPTS), sorted(ours)
        if len(theirs) != len(ours):
            return [(place, theirs, ours)]
        pairs = enumerate(zip(theirs, ours, strict=True))
        return [each for at, pair in pairs for each in differences(*pair, tolerance, f"{place}[{at}]")]
    if isinstance(theirs, float) and isinstance(ours, float):
        return [] if ours == pytest.approx(theirs, rel=tolerance, abs=1e-9) else [(place, theirs, ours)]
    return [] if theirs == ours else [(place, theirs, ours)]


def need(program):
    missing = [name for name in NEEDED[program] if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def check(program, stage, name, folder):
    """Compare the results of both ranks with DeepSpeed's results, and return the run."""
    tolerance = HALF if "bf16" in name or name == "mixed" else EXACT
    for rank, theirs in enumerate(recorded(program, stage, name)):
        ours = json.loads((folder / f"found-{rank}.json").read_text("utf-8"))
        assert ours["engine"].startswith("zero_runtime.")
        assert differences(theirs, ours, tolerance) == [], (name, rank)
    run = open_run(folder / "run")
    assert run.health.notes == () and api.untagged(run)["collectives"].sum() == 0
    return run


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("program", "stage", "name"),
    [("trainer", 3, "pretrained"), ("accelerate_loop", 2, "file"), ("lightning_fit", 1, "clipped")],
)
def test_a_program_of_deepspeed_trains_alike(tmp_path, program, stage, name):
    need(program)
    case = PROGRAMS[program](stage)[name]
    variables = environment() | {name: text for name, text in ENVIRONMENT.items() if "WORLD" not in name}
    done = commprof(
        "run",
        "--engine",
        "zero_runtime",
        "--nproc",
        "2",
        "--out",
        str(tmp_path / "run"),
        str(FOLDER / f"{program}.py"),
        json.dumps(case),
        str(tmp_path),
        cwd=tmp_path,
        env=variables,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = check(program, stage, name, tmp_path)
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict

    def with_another_gather(row):
        again = row["purpose"] == "parameter_gather" and row["step"] == 1 and row["phase"] == "optimizer"
        return [row, row] if again else [row]

    assert str(verify(Changed(run, with_another_gather)).state) == "mismatch"

    # A message of the script itself does not prevent the explanation of the broadcasts of a model created
    # within zero.Init.
    first = min(row["seq"] for row in run.table("collectives").to_pylist() if row["phase"] == "init")

    def with_a_message_of_the_script(row):
        own = {"op": "all_reduce", "purpose": None, "parameters": None, "seq": 10**6, "pg_seq": 10**6}
        return [row, row | own] if row["seq"] == first else [row]

    told = verify(Changed(run, with_a_message_of_the_script))
    assert str(told.state) == "mismatch" and len(told.unexplained) == 1, told.unexplained


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_case_beside_deepspeed(tmp_path, program, stage):
    need(program)
    cases = PROGRAMS[program](stage)
    (tmp_path / "cases.json").write_text(json.dumps(cases), "utf-8")
    command = [sys.executable, FOLDER / "forked.py", "zero_runtime", FOLDER / f"{program}.py"]
    done = subprocess.run(
        [*map(str, command), str(tmp_path / "cases.json"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in cases:
        verdict = verify(check(program, stage, name, tmp_path / "out" / name))
        assert (str(verdict.state), verdict.unexplained) == ("closed", ()), (name, verdict)
