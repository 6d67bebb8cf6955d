"""A run that is aligned with an NCCL log that contains the algorithm of each collective.

Only rank 0 prints the algorithms, as NCCL 2.24 and newer do.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from support import planted_nccl
from support.runs import SyntheticRun

# The printed choice for each size in bytes: algorithm, protocol, first channel and last channel.
CHOICES = {4096: ("TREE", "LL", 0, 0), 1 << 20: ("RING", "LL128", 0, 7)}
STEPS = 3


def with_choices(path: Path) -> Path:
    """Write a run of two ranks with two all_reduces per step. The log of the second rank contains no choices."""
    from commprof.cli.application import invoke

    run = SyntheticRun(2, backend="nccl")
    for step in range(STEPS):
        run.add_step(step, begin_ns=10_000_000 * (step + 1), duration_ns=9_000_000)
        for place, size in enumerate(CHOICES):
            begin = 10_000_000 * (step + 1) + 1_000_000 * place
            run.add_collective(
                "all_reduce", payload_bytes=size, step=step, issue_ns=begin, device_begin_ns=begin + 1000,
                device_end_ns=begin + 1000 + size,
            )  # fmt: skip
    written = run.write(path)
    (written / "nccl").mkdir()
    planted = planted_nccl.plant(run.table("collectives").to_pylist())
    for number, (name, lines) in enumerate(sorted(planted.files.items())):
        text = lines if number else [line for each in lines for line in (each, *_choice(each))]
        (written / "nccl" / name).write_text("\n".join(text) + "\n")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert invoke(["align", str(written), "--json"]) == 0
    return written


def _choice(line: str) -> list[str]:
    """Return the line with the choice that follows the COLL line of an AllReduce of floats; empty for other lines."""
    if "AllReduce: opCount" not in line:
        return []
    size = 4 * int(line.partition(" count ")[2].split()[0])
    algorithm, protocol, first, last = CHOICES[size]
    head = line.partition("AllReduce")[0]
    choice = f"Algo {algorithm} proto {protocol} channel{{Lo..Hi}}={{{first}..{last}}}"
    return [f"{head}AllReduce: {size} Bytes -> {choice}"]
