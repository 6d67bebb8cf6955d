"""``commprof verify`` of programs that stop within a pass.

The programs run out of memory or are killed. Neither is a mismatch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from commprof.ledger.verification import verify
from commprof.trace.reader import open_run
from support.command import commprof

pytestmark = pytest.mark.ranks
PROGRAM = """
import os, signal, sys
import torch, torch.distributed as dist
from torch import nn

model_kind, place, last, way, plants = sys.argv[1:]
stops_now = lambda where, step: (where, step) == (place, int(last))

def stop():
    if way == "raise":
        raise RuntimeError("no memory is left")
    os.kill(os.getpid(), signal.SIGKILL)

class Halt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if stops_now("backward", step):
            stop()
        return grad

class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.up, self.down = number, nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        if self.number == 1 and stops_now("forward", step):
            stop()
        x = self.down(self.up(x).relu())
        return Halt.apply(x) if self.number == 1 else x

dist.init_process_group("gloo")
model = nn.Sequential(*map(Block, range(3)))
if model_kind == "ddp":
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
elif model_kind == "fsdp":
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    policy = ModuleWrapPolicy({Block})
    model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
elif model_kind == "fully_shard":
    from torch.distributed.fsdp import fully_shard
    for block in model:
        fully_shard(block)
    fully_shard(model)
elif model_kind == "zero":
    import zero_runtime
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 200,
            "stage3_prefetch_bucket_size": 300,
            "stage3_param_persistence_threshold": 10,
        },
    }
    model, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model:
        parallelize_module(block, init_device_mesh("cpu", (2,)), styles)
optimizer = model if model_kind == "zero" else torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.ones(2, 8)).sum()
    model.backward(loss) if model_kind == "zero" else loss.backward()
    if plants == "plant" and step == 0:
        import commprof
        with commprof.tag("gradient_reduce"):
            dist.all_reduce(torch.ones(3))
    if stops_now("optimizer", step):
        stop()
    optimizer.step()
    model.zero_grad()
"""


def stopped(place: Path, *arguments: str):
    """Return the run of the program, which failed."""
    (place / "train.py").write_text(PROGRAM)
    done = commprof("run", "--nproc", "2", "--out", "run", "train.py", *arguments, cwd=place)
    assert done.returncode not in (0, 2), done.stdout + done.stderr
    return open_run(place / "run")


# The data published until then is enough if an earlier step ran the same passes, or if the pass gathers
# nothing ahead.
CASES = {
    "ddp optimizer 0 kill": "unknown",
    "fsdp forward 0 kill": "unknown",
    "fsdp backward 0 raise": "unknown",
    "fsdp backward 1 raise": "closed",
    "fully_shard forward 0 raise": "unknown",
    "fully_shard forward 1 raise": "closed",
    "fully_shard optimizer 0 kill": "unknown",
    "fully_shard optimizer 1 kill": "closed",
    "tensor_parallel forward 1 kill": "closed",
    "zero backward 1 raise": "closed",  # the gradients that arrived do not show the order of all gradients
}


@pytest.mark.sampled("fsdp backward 0 raise", "fully_shard forward 0 raise", "zero backward 1 raise")
@pytest.mark.parametrize("case", CASES)
def test_a_program_that_stops_in_a_pass_is_no_mismatch(tmp_path, case):
    verdict = verify(stopped(tmp_path, *case.split(), "nothing"))
    assert (str(verdict.state), verdict.unexplained) == (CASES[case], ()), verdict.sentences
    said = "not all passes that it began were recorded" in " ".join(verdict.sentences)
    assert said == (CASES[case] == "unknown")


def test_what_an_earlier_step_of_a_stopped_program_planted_is_a_mismatch(tmp_path):
    verdict = verify(stopped(tmp_path, "fully_shard", "forward", "2", "raise", "plant"))
    assert str(verdict.state) == "mismatch"
    assert [(each.steps, each.payload_bytes) for each in verdict.unexplained] == [("0", 12)]
