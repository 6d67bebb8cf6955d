"""The counts of torch's own hooks for groups with an unknown backend, compared with the records.

torch has these hooks from version 2.14 on.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from commprof.recorder.coverage import selfcheck
from commprof.recorder.coverage.dispatch_hooks import DispatchCount
from commprof.trace.reader import open_run
from support import programs
from support.programs import PROGRAMS
from support.ranks import run_ranks
from support.recording import record, recorded

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        not hasattr(ProcessGroup, "register_pre_hook"), reason="this torch has no hooks of its dispatcher"
    ),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def run_every_program(rank: int, world: int, directory: str) -> dict[str, int]:
    """Return the number of calls that the hooks counted in each program."""
    watch, counts, found = selfcheck.watch, [], {}
    selfcheck.watch = lambda pg: counts.append(watch(pg)) or counts[-1]
    for program in PROGRAMS:
        counts.clear()
        recorded(rank, world, f"{directory}/{program.name}", program.body, (), {})
        found[program.name] = sum(count.calls for count in counts)
    return found


@pytest.fixture(autouse=True)
def unknown_backend(monkeypatch):
    """Treat gloo as a backend whose way of counting is unknown, like a third-party backend.

    The ranks are forked from this process, and inherit the patch.
    """
    monkeypatch.setattr(selfcheck, "expected_number", lambda group: None)


def test_the_hooks_count_of_every_program_what_is_recorded(tmp_path):
    (found, *_) = run_ranks(programs.WORLD, run_every_program, str(tmp_path))
    assert found.keys() == {program.name for program in PROGRAMS}
    for name, counted in found.items():
        run = open_run(tmp_path / name)
        rows = [row for row in run.table("collectives").to_pylist() if row["rank"] == 0]
        # The dispatcher sees neither methods called directly on a backend nor monitored_barrier.
        seen = [row for row in rows if row["layer"] != "backend" and "monitored" not in row["backend_method"]]
        assert (name, counted) == (name, len(seen))
        assert counted > 0 or not seen
        assert run.health.unseen == 0


def test_a_call_below_every_layer_is_told_by_the_hooks(tmp_path):
    def body(rank, world):
        import commprof

        def hidden():
            torch.ops.c10d.broadcast_([torch.ones(4)], dist.group.WORLD.boxed(), 0, 0, False, -1)

        commprof.step(0)
        dist.all_reduce(torch.ones(2))
        hidden()
        hidden()
        for step in (1, 2):
            commprof.step(step)
            hidden()
            dist.all_reduce(torch.ones(2))

    run, _ = record(tmp_path / "run", 2, body)
    assert run.health.unseen == 4  # two on each rank
    notes = "\n".join(run.health.notes)
    assert "2 collectives were issued unseen in group default_pg (on each of ranks 0-1)" in notes
    assert "from step 1 on, every operator of c10d is recorded" in notes


def test_calls_that_raise_are_no_gap_whether_they_were_dispatched_or_not(tmp_path):
    def body(rank, world):
        import commprof

        for step in range(3):
            commprof.step(step)
            dist.all_reduce(torch.ones(2))
            with pytest.raises(TypeError):
                dist.group.WORLD.allreduce("not a tensor")
            with pytest.raises(RuntimeError):
                dist.group.WORLD.allreduce([torch.ones(2, 2).to_sparse_csr()])
            dist.all_reduce(torch.ones(2))

    run, _ = record(tmp_path / "run", 2, body)
    assert run.health.raised == 12 and run.health.unseen == 0


def test_what_makes_a_group_or_a_window_is_no_collective():
    from torch._C._distributed_c10d import HookOpName

    count = DispatchCount()
    for name in (HookOpName.SPLIT, HookOpName.NEW_WINDOW, HookOpName.ALLREDUCE, HookOpName.SEND):
        count.hook(SimpleNamespace(name=name))
    assert count.calls == 2


PROGRAM = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
kept = dist.group.WORLD
for _ in range(3):
    dist.all_reduce(torch.ones(4))
torch.ops.c10d.broadcast_([torch.ones(4)], kept.boxed(), 0, 0, False, -1)
"""


def test_a_process_that_keeps_its_group_to_the_end_ends_as_it_would(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    words = [sys.executable, "-m", "commprof", "run", "--nproc", "1", "--out", "run", "train.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert open_run(tmp_path / "run").health.unseen == 1
