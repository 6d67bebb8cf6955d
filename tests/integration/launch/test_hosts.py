"""A torchrun job on two hosts with a shared file system.

The job makes one run, although it was started without a name.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from commprof.trace.reader import open_run
from support import hosts as network

WHY_NOT = network.why_impossible()
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.long,
]

PROGRAM = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(8))
dist.barrier()
dist.destroy_process_group()
"""


def launch(directory: Path) -> None:
    """Start two ranks on each of two hosts, with one torchrun per host."""
    with network.hosts(2) as machines:
        meeting = ["--master-addr", machines[0].address, "--master-port", str(network.PORT)]
        torchruns = []
        for number, machine in enumerate(machines):
            variables = {
                name: value
                for name, value in network.environment(machines, number).items()
                if not any(word in name for word in ("RANK", "WORLD", "MASTER"))
            }
            words = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
            words += ["--node-rank", str(number), *meeting, "train.py"]
            torchruns.append(
                machine.start(
                    [sys.executable, *words], variables | {"COMMPROF": "1"}, cwd=directory,
                    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
        said = [torchrun.communicate(timeout=200)[1] for torchrun in torchruns]
        assert [torchrun.returncode for torchrun in torchruns] == [0, 0], said


def test_the_ranks_of_all_hosts_find_one_run_without_an_id(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    for _ in range(2):
        launch(tmp_path)
    first, second = sorted((tmp_path / "traces").iterdir())
    # A second job with the same name gets its own run.
    assert (first.name, second.name) == (f"train-10.77.0.1-{network.PORT}", f"{first.name}-2")
    for path in (first, second):
        run = open_run(path)
        assert (run.health.ranks_recorded, run.health.ranks_expected, run.health.lost) == (4, 4, 0)
        assert len({entry["host"] for entry in run.manifest.ranks}) == 2
