"""Every collective of every kind of program exactly once: against lists derived by hand, torch's Flight Recorder, complete mode."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from commprof.trace.reader import open_run
from support import programs
from support.programs import LAYER, PROGRAMS, WIDTH
from support.ranks import run_ranks
from support.recording import calls, record, recorded

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

# What torch's Flight Recorder calls an operation of gloo.
EXECUTED = {"reduce_scatter": "all_reduce"}
MODES = ("layers", "complete")


def has_kernel(operator: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, "BackendSelect")


def run_every_program(rank: int, world: int, directory: str) -> dict[str, dict]:
    """All programs in one process, each recorded twice by itself: with the layers, and completely."""
    outcomes = {}
    warnings.simplefilter("ignore")
    for program in PROGRAMS:
        for mode in MODES:
            outcomes[program.name, mode] = recorded(
                rank,
                world,
                f"{directory}/{program.name}-{mode}",
                program.body,
                (),
                {"complete": mode == "complete"},
            )
    return outcomes


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    directory = tmp_path_factory.mktemp("programs")
    outcomes = run_ranks(programs.WORLD, run_every_program, str(directory))
    return {
        (program, mode): (open_run(directory / f"{program}-{mode}"), outcome)
        for (program, mode), outcome in outcomes[0].items()
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_each_collective_of_a_program_is_recorded_once(recordings, program, mode):
    run, outcome = recordings[program.name, mode]
    rows = calls(run, 0, "op", "payload_bytes")
    assert [op for op, _ in rows] == [op for op, _ in program.expected]
    told = zip(rows, program.expected, strict=True)
    assert all(found == known for (_, found), (_, known) in told if known is not None), rows
    assert len(calls(run, 1, "op")) == len(rows)
    assert run.health.unseen == run.health.lost == run.health.raised == 0 and run.health.notes == ()
    assert all("support/programs.py:" in site for site in calls(run, 0, "call_site"))
    assert set(calls(run, 0, "status")) == {"ok"}
    assert all(issued < returned for issued, returned in calls(run, 0, "issue_ns", "return_ns"))
    if program.flight:
        assert outcome["flights"] == [EXECUTED.get(op, op) for op, _ in rows]
        assert outcome["number"] == len(rows)
    layers = program.layers if mode == "layers" else {"c10d"} | (program.layers & {"backend"})
    assert set(calls(run, 0, "layer")) == layers
