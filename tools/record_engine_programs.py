"""Records the results of DeepSpeed for the programs in ``tests/support/engine_programs``, as reference for the tests.

    python tools/record_engine_programs.py DEEPSPEED_PYTHON [PROGRAM...]

DEEPSPEED_PYTHON is an interpreter with DeepSpeed, accelerate, transformers, TRL, PEFT and Lightning in the versions of
``constraints.txt``. Each case runs on two gloo ranks. The results are written to ``tests/golden/engine_programs.json``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
GOLDEN: Final = ROOT / "tests/golden/engine_programs.json"
FOLDER: Final = ROOT / "tests/support/engine_programs"
_PACKAGES: Final = ("deepspeed", "torch", "accelerate", "transformers", "trl", "peft", "lightning")


def main() -> int:
    """Run all selected programs; the exit code is the number of stages of programs that failed."""
    python, *chosen = sys.argv[1:]
    sys.path.insert(0, str(ROOT / "tests/support"))
    from engine_programs.cases import PROGRAMS, STAGES

    noted: dict[str, Any] = json.loads(GOLDEN.read_text("utf-8")) if GOLDEN.exists() else {"found": {}}
    asked = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    noted["versions"] = json.loads(subprocess.check_output([python, "-c", asked, *_PACKAGES]))
    failed = 0
    for program in chosen or PROGRAMS:
        for stage in STAGES:
            with tempfile.TemporaryDirectory() as scratch:
                cases, out = Path(scratch) / "cases.json", Path(scratch) / "out"
                cases.write_text(json.dumps(PROGRAMS[program](stage)), "utf-8")
                command = [python, str(FOLDER / "forked.py"), "deepspeed", str(FOLDER / f"{program}.py")]
                failed += subprocess.run([*command, str(cases), str(out)], check=False).returncode != 0
                for case in sorted(each for each in out.iterdir() if (each / "found-1.json").exists()):
                    ranks = [json.loads((case / f"found-{rank}.json").read_text("utf-8")) for rank in (0, 1)]
                    noted["found"][f"{program}/{stage}/{case.name}"] = ranks
    rows = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(ranks)}" for name, ranks in sorted(noted["found"].items())
    )
    text = f'{{"versions": {json.dumps(noted["versions"])},\n"found": {{\n{rows}\n}}}}\n'
    GOLDEN.write_text(text, "utf-8")
    return failed


if __name__ == "__main__":
    sys.exit(main())
