"""The answers for small runs equal the recorded CSV files, so that any change of a column, type or number is noticed.

``python tests/golden/test_golden_analysis.py`` writes the files again. Review the difference before you commit them.
"""

import sys
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

from commprof.analysis import api  # noqa: E402
from support.runs import SyntheticRun  # noqa: E402 - the path is set above when this is run by itself

BY = ("attempt", "step", "phase", "op", "intended_op", "purpose", "pg", "group_ranks", "group_size")


def _run(reduce_scatter: bool) -> SyntheticRun:
    """Return a run of four ranks.

    The run has two groups of two ranks with the same name, and a second attempt. Each step has a message, and one step
    did not end.
    """
    run = SyntheticRun(
        world_size=4, config={"zero_optimization": {"stage": 2, "reduce_scatter": reduce_scatter}}
    )
    run.add_collective(
        "broadcast", payload_bytes=4096, step=-1, phase="init", peer=0, purpose="parameter_broadcast"
    )
    op, intended = ("all_to_all", "reduce_scatter") if reduce_scatter else ("all_reduce", None)
    for attempt, steps in ((0, (0, 1)), (1, (1, 2, 3))):
        for step in steps:
            last = (attempt, step) == (1, 3)
            run.add_step(
                step,
                attempt=attempt,
                begin_ns=step * 10_000,
                end_ns=None if last else step * 10_000 + 7_000 + 1_000 * step,
                loss=4.0 / (step + 1),
                samples=8.0,
                cpu_ns=3_000,
            )
            at = {"step": step, "attempt": attempt}
            run.add_collective(
                op, payload_bytes=3000, purpose="gradient_reduce", intended_op=intended, exposed_ns=500, **at
            )
            run.add_collective("all_reduce", payload_bytes=64, group=(0, 1), pg="pair", **at)
            run.add_collective("all_reduce", payload_bytes=32, group=(2, 3), pg="pair", **at)
            run.add_collective("send", payload_bytes=40, ranks=(0,), peer=3, phase="forward", **at)
            run.add_collective("recv", payload_bytes=40, ranks=(3,), peer=0, phase="forward", **at)
            run.add_collective("barrier", phase="other", **at)
    return run


@cache
def _answers() -> dict[str, str]:
    runs = [_run(value).open(Path(f"reduce_scatter-{value}".lower())) for value in (True, False)]
    frames = {
        "traffic": api.traffic(runs[0], by=BY),
        "step_times": api.step_times(runs[0]),
        "settings": api.settings(runs),
        "compare": api.compare(runs),
        "traffic_by_setting": api.traffic_by_setting(runs),
    }
    return {name: api.frame_csv(frame) for name, frame in frames.items()}


@pytest.mark.parametrize("name", ["traffic", "step_times", "settings", "compare", "traffic_by_setting"])
def test_the_answer_is_the_recorded_one(name):
    expected = (HERE / "analysis" / f"{name}.csv").read_bytes().decode("utf-8")
    assert _answers()[name].splitlines() == expected.splitlines()


if __name__ == "__main__":
    for answer, text in _answers().items():
        (HERE / "analysis" / f"{answer}.csv").write_bytes(text.encode("utf-8"))
