"""Finalising may be killed at any moment, and several commands may finalise at the same time.

The rows must be the same, and no other files may remain.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from commprof.schema import TABLES
from commprof.trace.finaliser import finalise, finalise_ended
from commprof.trace.reader import open_run
from support.logged_training import fork, outcome
from support.rank_files import write_rank

RANKS, RECORDS = 3, 1_500


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return a run as its ranks leave it, one of them killed, and its rows after an undisturbed finalise."""
    place = tmp_path_factory.mktemp("recorded")
    for rank in range(RANKS):
        write_rank(place / "run", rank, RANKS, RECORDS, ended=rank != 1)
    for file in (place / "run").iterdir():
        os.utime(file, (1, 1))
    shutil.copytree(place / "run", place / "whole")
    begin = time.monotonic()
    finalise(place / "whole")
    return place / "run", rows_of(place / "whole"), time.monotonic() - begin


def rows_of(run: Path) -> dict[str, list[dict]]:
    """Return the rows of all tables in a fixed order, whatever order the ranks were written in."""
    opened = open_run(run)
    return {name: sorted(opened.table(name).to_pylist(), key=repr) for name in TABLES}


def leftovers(run: Path) -> list[str]:
    return [
        file.name
        for file in run.rglob("*")
        if file.name.startswith((".", "rank-")) and file.suffix != ".parquet"
    ]


def _kill_while_finalising(source: Path, run: Path, rows, moments: list[float]) -> None:
    shutil.copytree(source, run)
    for moment in moments:
        pid = fork(finalise, run)
        time.sleep(moment)
        os.kill(pid, signal.SIGKILL)
        assert outcome(pid) in (0, -signal.SIGKILL)
        assert rows_of(run) == rows  # what another command sees in the meantime
    finalise(run)
    assert leftovers(run) == []
    assert rows_of(run) == rows


@pytest.mark.parametrize("seed", range(2))
def test_a_finaliser_killed_at_random_moments_loses_and_doubles_nothing(tmp_path, recorded, seed):
    source, rows, seconds = recorded
    rng = random.Random(seed)
    _kill_while_finalising(source, tmp_path / "run", rows, [rng.uniform(0, seconds) for _ in range(2)])


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_finaliser_killed_at_100_random_moments(tmp_path, recorded):
    source, rows, seconds = recorded
    rng = random.Random(7)
    for number in range(50):
        moments = [rng.uniform(0, 1.2 * seconds) for _ in range(2)]
        _kill_while_finalising(source, tmp_path / str(number) / "run", rows, moments)
        shutil.rmtree(tmp_path / str(number))


def test_commands_that_open_a_killed_run_at_once_agree(tmp_path, recorded):
    source, rows, _ = recorded
    shutil.copytree(source, tmp_path / "run")

    def look() -> None:
        finalise_ended(tmp_path / "run")
        assert rows_of(tmp_path / "run") == rows

    pids = [fork(look) for _ in range(4)]
    assert [outcome(pid) for pid in pids] == [0] * 4
    assert rows_of(tmp_path / "run") == rows and leftovers(tmp_path / "run") == []
