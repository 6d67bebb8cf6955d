"""Record trainings with experts of the real DeepSpeed for tests, on gloo ranks on the CPU.

Run it with an interpreter that has DeepSpeed 0.19.8::

    python tools/deepspeed_experts.py tests/golden/deepspeed_experts [--only NAME ...]

It records the cases of ``tests/support/expert_cases.py``. Each case becomes one JSON file. The file contains the case
and, for each rank, the losses, norms and counts of the gates. It also contains the messages of the initialization, of
every step and of one evaluation. Messages are counted at the ProcessGroup objects of torch
(``tests/support/process_group_log.py``). All ranks of a case use the same PYTHONHASHSEED, because DeepSpeed orders the
param groups of experts by a set of strings.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import expert_cases as cases
from support.ranks import RankError, run_ranks

HASH_SEED = "0"
WIDTH = 120


def main() -> int:
    """Record the cases that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the directory of the recorded cases")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases; default: all")
    given = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED, "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    import deepspeed  # noqa: F401, once for the ranks that are forked

    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.only or cases.CASES:
        record(given.out / f"{name}.json", name)
    return 0


def record(path: Path, name: str) -> None:
    """Train case ``name`` on fresh ranks and write ``path``."""
    case = cases.CASES[name]
    try:
        trainings = run_ranks(case["world"], one_rank, name, timeout=120)
    except RankError as error:
        print(f"{name}: not recorded\n{error}", file=sys.stderr)
        return
    written = {"case": case, "ranks": [summary(each) for each in trainings]}
    errors = [each.error for each in trainings]
    if any(errors):
        written["ranks"] = [{"error": each} for each in errors]
    else:
        written |= messages(trainings)
    path.write_text(laid_out(written) + "\n")
    print(f"{name}: {path.stat().st_size} bytes, {errors[0] or trainings[0].losses}", flush=True)


def one_rank(rank: int, world: int, name: str) -> cases.Training:
    """Train the case ``name`` on this rank."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # The compilation would take minutes, and gloo gives the same results. The module is looked up in sys.modules,
    # because the attribute deepspeed.comm.torch is torch itself.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    # oneDNN reports that it does not support fp16, but the arithmetic works.
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed("gloo")
    return cases.train(name, rank, (Exception,))


def summary(training: cases.Training) -> dict:
    """Return the results of one rank without its calls and its error."""
    return {name: value for name, value in asdict(training).items() if name not in ("calls", "error")}


def messages(trainings: list[cases.Training]) -> dict:
    """Return each distinct message once, and for each rank the indices of its messages.

    The indices are grouped by initialization, steps and evaluation. A step with the same messages as the previous step
    is None.
    """
    distinct: dict[str, int] = {}
    ranks = []
    for training in trainings:
        texts = [training.messages(step) for step in range(-1, cases.STEPS + 1)]
        numbers = [[distinct.setdefault(each, len(distinct)) for each in step] for step in texts]
        ranks.append([None if at and each == numbers[at - 1] else each for at, each in enumerate(numbers)])
    return {"messages": list(distinct), "messages_of_ranks": ranks}


def laid_out(value: object, indent: int = 0) -> str:
    """Return JSON in which each list and each object takes one line if it fits."""
    line = json.dumps(value)
    if not isinstance(value, dict | list) or len(line) + indent <= WIDTH:
        return line
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {laid_out(each, indent + 1)}" for key, each in value.items()]
    else:
        parts = [laid_out(each, indent + 1) for each in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    margin = "\n" + " " * indent
    return begin + f"{margin} " + f",{margin} ".join(parts) + margin + end


if __name__ == "__main__":
    sys.exit(main())
