"""A job with one launcher on each of two hosts.

Each launcher writes the file of its host, and one of them finalises the run.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

from commprof.analysis import api
from commprof.analysis.storage import host_files
from commprof.trace.directory import HOSTS_DIRECTORY, SUMMARIES_DIRECTORY
from commprof.trace.reader import open_run
from support import hosts as network
from support.warm_hosts import run_commprof

WHY_NOT = network.why_impossible()
pytestmark = [
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]

PROGRAM = """
import torch, torch.distributed as dist
from commprof import hooks

dist.init_process_group("gloo")
for step in range(4):
    hooks.step(step)
    for _ in range(3):
        dist.all_reduce(torch.ones(8))
dist.barrier()
hooks.step(step + 1)
dist.destroy_process_group()
"""


def launch(directory: Path) -> list[tuple[str, str]]:
    """Start what `srun commprof run -- torchrun ...` starts, with two ranks on each of two hosts.

    Returns the output of each launcher.
    """
    with network.hosts(2) as machines:
        commands, environments = [], []
        for number in range(len(machines)):
            variables = {
                name: value
                for name, value in network.environment(machines, number).items()
                if not any(word in name for word in ("RANK", "WORLD", "MASTER"))
            }
            variables |= {
                "SLURM_PROCID": str(number), "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0",
                "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0",
            }  # fmt: skip
            words = ["run", "--out", "run", "--", sys.executable, "-m", "torch.distributed.run"]
            words += ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(number)]
            words += ["--master-addr", machines[0].address, "--master-port", str(network.PORT), "train.py"]
            commands.append(words)
            environments.append(variables)
        return run_commprof(machines, commands, directory, environments)


def test_each_launcher_writes_the_file_of_its_host(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    said = launch(tmp_path)
    path = tmp_path / "run"
    run = open_run(path)
    assert run.health.ranks_recorded == 4 and not run.pending, said
    files = host_files.valid_files(path)
    assert len(files) == 2 == len(list((path / HOSTS_DIRECTORY).iterdir())), said
    assert {file.host for file in files} == {entry["host"] for entry in run.manifest.ranks}
    assert sorted(len(file.stems) for file in files) == [2, 2]
    # A small run also has summaries. The files of the hosts must give the same answers without them.
    shutil.rmtree(path / SUMMARIES_DIRECTORY)
    found = host_files.answers(open_run(path))
    assert ("step_times",) in found
    by = ("step", "op", "span")
    answers = [(api.traffic(path, by), api.step_times(path), api.exposure_per_step(path))]
    assert answers[0][0].query("op == 'all_reduce'")["collectives"].tolist() == [3] * 4
    shutil.rmtree(path / HOSTS_DIRECTORY)
    answers.append((api.traffic(path, by), api.step_times(path), api.exposure_per_step(path)))
    for ours, theirs in zip(*answers, strict=True):
        pd.testing.assert_frame_equal(ours, theirs)
