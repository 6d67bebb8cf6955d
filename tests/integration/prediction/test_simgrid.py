"""The schedule of a step compared with that of SimGrid, whose own solver shares links among flows.

The test needs SimGrid for some Python of this machine (Debian: python3-simgrid, which ``make test-all``
installs).
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from commprof.prediction.program import Event, Message, Program, Step
from commprof.prediction.schedule import play

PLAYER = Path(__file__).resolve().parents[2] / "support" / "simgrid_player.py"
WORLD = ((0, 1, 2, 3),)
ROWS, COLUMNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))


@cache
def python_of_simgrid() -> str | None:
    """Return a Python interpreter that can import SimGrid."""
    for name in ("/usr/bin/python3", shutil.which("python3")):
        if (
            name
            and not subprocess.run(
                [name, "-c", "import simgrid"], capture_output=True, check=False
            ).returncode
        ):
            return name
    return None


@pytest.fixture(autouse=True)
def _needs_simgrid() -> None:
    if python_of_simgrid() is None:
        pytest.skip("no Python here has SimGrid (Debian: python3-simgrid)")


def simgrid(cases: list[tuple[Program, Step, np.ndarray]]) -> list[np.ndarray]:
    """Return the times in ns at which each rank ends each program in SimGrid."""
    given = [
        {
            "events": [list(event) for event in program.events],
            "spans": step.spans.tolist(),
            "groups": [message.groups for message in program.messages],
            "durations": durations.tolist(),
        }
        for program, step, durations in cases
    ]
    done = subprocess.run(
        [str(python_of_simgrid()), str(PLAYER)], input=json.dumps(given), capture_output=True, text=True, check=True,
        timeout=200,
    )  # fmt: skip
    return [np.array(ends) for ends in json.loads(done.stdout)]


def ours(program: Program, step: Step, durations: np.ndarray) -> np.ndarray:
    return play(program, step, durations, np.zeros(step.spans.shape[1]), {}).ends


def drawn(
    chance: random.Random, groups, ranks: int, messages: int, late_ns: int
) -> tuple[Program, Step, np.ndarray]:
    """Return a random program whose messages are waited for at once or after a few others.

    The spans of the ranks differ by at most ``late_ns``.
    """
    chosen = [chance.choice(groups) for _ in range(messages)]
    listed = tuple(Message("all_reduce", 0, "gradient_reduce", each, False) for each in chosen)
    events: list[Event] = []
    flying: list[int] = []
    for number in range(messages):
        events.append(Event("issue", number))
        flying.append(number)
        # At most two messages are in flight. They are in different groups if there are several.
        while len(flying) > 1 or (flying and chance.random() < 0.4):
            events.append(Event("wait", flying.pop(0)))
    events += [Event("wait", each) for each in flying]
    base = [chance.randrange(0, 3_000_000) for _ in range(len(events) + 1)]
    spans = np.array(
        [[each + chance.randrange(0, late_ns + 1) for _ in range(ranks)] for each in base], float
    )
    times = np.array([[chance.randrange(100_000, 5_000_000)] * ranks for _ in listed], float)
    return Program(listed, tuple(events)), Step(spans, np.zeros((messages, ranks)), False), times


@pytest.mark.long
def test_where_ranks_are_late_and_groups_share_a_link_ends_are_close():
    # The schedule assumes that a flow that waits for a late rank fills its link from the issue on.
    chance = random.Random(3)
    for groups in ([ROWS, COLUMNS], [WORLD, ROWS]):
        cases = [drawn(chance, groups, 4, chance.randrange(1, 9), 2_000_000) for _ in range(40)]
        errors = [
            np.abs(ours(*case) / theirs - 1.0).max()
            for case, theirs in zip(cases, simgrid(cases), strict=True)
        ]
        assert np.mean(np.array(errors) < 1e-6) > 0.9 and max(errors) < 0.05


@pytest.mark.long
@pytest.mark.parametrize(
    ("groups", "late_ns"), [([WORLD], 2_000_000), ([ROWS], 2_000_000), ([ROWS, COLUMNS], 0)],
    ids=["one group", "two groups side by side", "a grid"],
)  # fmt: skip
def test_ends_are_those_of_simgrid(groups, late_ns):
    chance = random.Random(7)
    cases = [drawn(chance, groups, 4, chance.randrange(1, 9), late_ns) for _ in range(25)]
    for case, theirs in zip(cases, simgrid(cases), strict=True):
        assert ours(*case) == pytest.approx(theirs, rel=1e-6), case
