"""Recording changes neither the exit code nor the last output of a rank, however its interpreter ends.

The tests run real processes, as users start them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from commprof.trace.reader import open_run
from support.command import commprof
from support.logged_training import issued, results
from support.recording import calls

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[3]

_PROGRAM = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch, torch.distributed as dist
from support.command import commprof
from support.logged_training import Log, train
place, ending = Path(sys.argv[1]), sys.argv[3]
rank = int(os.environ["RANK"])
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(str(place / "store"), 2), rank=rank, world_size=2)
def end(step):
    if rank == 1 and step == 5 and ending == "sigint":
        os.kill(os.getpid(), signal.SIGINT)
    if rank == 1 and step == 5 and ending == "exception":
        raise ValueError("a bug of the program")
    if rank == 1 and step == 5 and ending == "exit":
        sys.exit(9)
train(Log(place / f"log-{rank}"), 8, end)
"""


def _start(place: Path, ending: str, recorded: bool) -> list[tuple[int, str]]:
    place.mkdir()
    (place / "program.py").write_text(_PROGRAM)
    words = [str(place / "program.py"), str(place), str(ROOT / "tests"), ending]
    environment = {name: value for name, value in os.environ.items() if name != "COMMPROF_RUN"}
    environment |= {"OMP_NUM_THREADS": "1"}
    if recorded:
        (place / "attach.py").write_text(
            f"import sys, runpy, commprof\ncommprof.attach({str(place / 'run')!r})\n"
            "del sys.argv[0]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
        )
        words.insert(0, str(place / "attach.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, *words],
            env={**environment, "RANK": str(rank), "WORLD_SIZE": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=100)[1] for process in processes]
    # A program that exits on its own may print nothing.
    return [
        (process.returncode, (text.strip().splitlines() or [""])[-1])
        for process, text in zip(processes, said, strict=True)
    ]


@pytest.mark.long
@pytest.mark.parametrize("ending", ["exception", "sigint", "exit"])
def test_an_exception_in_one_rank_leaves_exit_code_and_last_words_alone(tmp_path, ending):
    if ending == "exit":
        plain = [(code, "") for code, _ in _start(tmp_path / "plain", ending, False)]
        recorded = [(code, "") for code, _ in _start(tmp_path / "recorded", ending, True)]
    else:
        plain, recorded = (
            _start(tmp_path / "plain", ending, False),
            _start(tmp_path / "recorded", ending, True),
        )
    assert recorded[1] == plain[1] and recorded[0][0] == plain[0][0] != 0
    run = open_run(tmp_path / "recorded" / "run")
    for rank in range(2):
        log = tmp_path / "recorded" / f"log-{rank}"
        assert results(log) == results(tmp_path / "plain" / f"log-{rank}")
        assert issued(log) == len(calls(run, rank, "op"))
    # Each rank ended normally and recorded that it did.
    assert run.health.state == "complete" and run.health.ranks_recorded == 2


_ELASTIC = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch, torch.distributed as dist
from support.command import commprof
from support.logged_training import Log, train
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
torch.set_num_threads(1)
# A store of its own for each attempt: in the launcher's, gloo finds the addresses of the attempt before.
store = dist.FileStore(str(Path(sys.argv[1]) / f"store-{attempt}"), 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
def end(step):
    if rank == 1 and step == 3 and attempt == 0:
        os._exit(5)
train(Log(Path(sys.argv[1]) / f"log-{rank}-{attempt}"), 6, end)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_an_elastic_restart_keeps_both_attempts_apart(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(_ELASTIC)
    words = ["run", "--out", str(tmp_path / "run"), "--"]
    words += [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    words += [str(program), str(tmp_path), str(ROOT / "tests")]
    done = commprof(*words, cwd=tmp_path, timeout=150)
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    rows = run.table("collectives").to_pylist()
    for rank in range(2):
        lines = issued(tmp_path / f"log-{rank}-0")
        first = sum(row["rank"] == rank and row["attempt"] == 0 for row in rows)
        assert lines - 1 <= first <= lines
        second = sum(row["rank"] == rank and row["attempt"] == 1 for row in rows)
        assert second == issued(tmp_path / f"log-{rank}-1") == 30
        assert results(tmp_path / f"log-{rank}-0") == results(tmp_path / f"log-{rank}-1")[:3]
    assert run.health.lost == run.health.torn == 0 and len(run.manifest.ranks) == 4
    assert run.health.ranks_recorded == run.health.ranks_expected == 2
