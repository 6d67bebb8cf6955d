"""Programs that ``accelerate launch`` or a shell script with ``deepspeed`` starts, with ``--engine zero_runtime``."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from commprof.analysis import api
from commprof.ledger.verification import verify
from commprof.trace.reader import open_run
from support.command import commprof, environment

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed itself is installed"),
]

LOOP = """
import sys
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed

handlers = [InitProcessGroupKwargs(backend="gloo")] if "--gloo" in sys.argv else []
accelerator = Accelerator(kwargs_handlers=handlers)
set_seed(5)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randint(0, 4, (32,)))
loader = torch.utils.data.DataLoader(data, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, (x, y) in enumerate(loader):
    if step == 3:
        break
    loss = torch.nn.functional.cross_entropy(model(x).float(), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print("loss", accelerator.reduce(loss.detach(), "mean").item())
accelerator.print("stage", model.zero_optimization_stage(), type(model).__module__)
accelerator.end_training()
"""
STAGED = "zero_stage: {stage}\n  zero3_init_flag: false\n  zero3_save_16bit_model: false"
FILE = "deepspeed_config_file: ds.json\n  zero3_init_flag: {init}"


def launch(folder: Path, block: str, *words: str, **settings: str):
    """Run the loop with ``accelerate launch`` and a config file whose DeepSpeed block is ``block``."""
    (folder / "train.py").write_text(LOOP)
    lines = {
        "num_machines": "1",
        "num_processes": "2",
        "machine_rank": "0",
        "main_process_port": "0",
        **settings,
    }
    (folder / "accelerate.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\n"
        f"deepspeed_config:\n  {block}\n" + "".join(f"{name}: {value}\n" for name, value in lines.items())
    )
    variables = environment(PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    return commprof(
        "run",
        "--engine",
        "zero_runtime",
        "--out",
        str(folder / "run"),
        "--",
        "accelerate",
        "launch",
        "--config_file",
        "accelerate.yaml",
        "train.py",
        *words,
        cwd=folder,
        env=variables,
    )


def ranks(folder: Path) -> set[int]:
    return set(api.table(open_run(folder / "run"), "collectives")["rank"])


def losses(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"^loss (\S+)$", text, re.MULTILINE)]


def check(done, folder: Path, stage: int) -> list[float]:
    """Check what a user sees of the run of two ranks, and return the losses of the run."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"stage {stage} zero_runtime.training.engine" in done.stdout
    run = open_run(folder / "run")
    assert ranks(folder) == {0, 1} and run.health.notes == ()
    assert api.untagged(run)["collectives"].sum() == 0
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained) == ("closed", ())
    assert len(losses(done.stdout)) == 3
    return losses(done.stdout)


def test_accelerate_launch_with_a_config_file(tmp_path):
    check(launch(tmp_path, STAGED.format(stage=2), "--gloo"), tmp_path, 2)


@pytest.mark.long
def test_without_a_backend_accelerate_is_refused_in_one_sentence(tmp_path):
    done = launch(tmp_path, STAGED.format(stage=2))
    assert done.returncode != 0
    said = {line for line in done.stderr.splitlines() if line.startswith("zero_runtime: error:")}
    assert len(said) == 1 and "InitProcessGroupKwargs(backend='gloo')" in said.pop()
    assert "Traceback" not in done.stderr.partition("zero_runtime: error:")[0]


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_both_kinds_of_config_file_train_alike(tmp_path, stage):
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    found = []
    for kind, block in (("staged", STAGED), ("file", FILE)):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "ds.json").write_text(json.dumps(config))
        done = launch(folder, block.format(stage=stage, init=str(stage == 3).lower()), "--gloo")
        found.append(check(done, folder, stage))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.long
def test_several_machines_over_ssh_are_refused_in_one_sentence(tmp_path):
    done = launch(
        tmp_path,
        STAGED.format(stage=2) + "\n  deepspeed_multinode_launcher: pdsh\n  deepspeed_hostfile: hosts",
        "--gloo",
        num_machines="2",
        main_process_ip="127.0.0.1",
    )
    assert done.returncode != 0
    assert (
        "zero_runtime: error: accelerate's deepspeed_multinode_launcher pdsh starts ranks on other hosts"
        in done.stderr
    )
    assert "deepspeed_multinode_launcher: standard" in done.stderr


@pytest.mark.long
def test_a_shell_script_that_starts_deepspeed(tmp_path):
    (tmp_path / "train.py").write_text(
        "import deepspeed, torch\n"
        "deepspeed.init_distributed()\n"
        "deepspeed.comm.all_reduce(torch.ones(8))\n"
        "print(f'engine {deepspeed.DeepSpeedEngine.__module__}\\n', end='', flush=True)\n"
    )
    (tmp_path / "run.sh").write_text("deepspeed --num_gpus 2 --no_local_rank train.py\n")
    done = commprof(
        "run",
        "--engine",
        "zero_runtime",
        "--out",
        "run",
        "--",
        "sh",
        "run.sh",
        cwd=tmp_path,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("engine zero_runtime.training.engine") == 2
    assert ranks(tmp_path) == {0, 1}
