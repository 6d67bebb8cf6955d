"""Demonstrate commprof from recording to dashboard (``make demo``).

The demo sweeps DeepSpeed's two reduction keys, and the true reduce-scatter that DeepSpeed's ZeRO-1/2 never had, with a
small GPT on two gloo ranks. It compares the requested with the issued communication. It aligns one run with an NCCL
log, which is generated because gloo writes none. It exports the tables and prints how to open the dashboard.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "examples" / "train_gpt.py"
CONFIG = ROOT / "examples" / "ds_zero2.json"
LOG_GENERATOR = ROOT / "tests" / "support" / "planted_nccl.py"


def heading(text: str) -> None:
    """Print the heading of the next part."""
    print(f"\n== {text}", flush=True)


def run(*arguments: str | Path) -> None:
    """Print a command and run it. If the command fails, stop the demo with its exit code."""
    command = [str(argument) for argument in arguments]
    shown = command[2:] if command[1] == "-m" else ["python", *command[1:]]
    print("$ " + " ".join(shown), flush=True)
    code = subprocess.run([sys.executable, *command[1:]], check=False).returncode
    if code:
        sys.exit(code)


def commprof(*arguments: str | Path) -> None:
    """Run a command of commprof."""
    run(sys.executable, "-m", "commprof", *arguments)


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=None, help="where the runs go (default: traces/demo-<time>)"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    os.chdir(ROOT)
    out = args.out or Path("traces") / time.strftime("demo-%Y%m%d-%H%M%S")
    script = [TRAIN.relative_to(ROOT), "--config", CONFIG.relative_to(ROOT), "--steps", args.steps]
    script = [str(part) for part in script]
    sweep = ["sweep", "--nproc", "2", "--repeat", str(args.repeat)]

    heading("1. DeepSpeed's two keys, every combination")
    commprof(
        *sweep,
        "--out",
        out / "keys",
        "--set",
        "zero_optimization.reduce_scatter=true,false",
        "--set",
        "zero_optimization.use_multi_rank_bucket_allreduce=true,false",
        "--",
        *script,
    )
    heading("2. A true reduce-scatter, which DeepSpeed's ZeRO-1 and 2 do not have")
    commprof(
        *sweep,
        "--out",
        out / "reduce_scatter",
        "--set",
        "zero_optimization.gradient_reduction=reduce_scatter",
        "--",
        *script,
    )
    first = min(path.parent for path in out.rglob("run.json"))

    heading("3. A run beside its NCCL log (GENERATED from the run: gloo writes no such log)")
    logs = out / "generated-nccl-log"
    run(sys.executable, LOG_GENERATOR.relative_to(ROOT), first, "--out", logs)
    commprof("align", first, logs)

    heading("4. The tables of that run as CSV")
    commprof("export", first, "--format", "csv", "--out", out / "csv")

    heading("5. Requested against issued")
    commprof("compare", out)
    print(f"\nLook at it:  .venv/bin/commprof dashboard {out}   (then open http://127.0.0.1:8050)")


if __name__ == "__main__":
    main()
