"""Runs one rank of a calibration that commprof starts: ``python -m commprof.calibration PLAN OUT [force]``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from commprof.calibration.calibration_plan import Plan
from commprof.calibration.rank import FORCE, carry_out, member_of


def main() -> int:
    """Read the arguments, run this rank of the calibration, and return its exit code."""
    plan, out, *rest = sys.argv[1:]
    member = member_of(os.environ, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return carry_out(Plan.from_json(plan), Path(out), FORCE in rest, member)


if __name__ == "__main__":
    sys.exit(main())
