"""Unmodified scripts written for DeepSpeed, on two ranks: the examples, and the calls that libraries make."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[3]


def run_script(rank, world, path, arguments):
    """Run the script as ``__main__`` of a process in which this runtime replaces DeepSpeed.

    Returns the output of the script.
    """
    import zero_runtime

    zero_runtime.as_deepspeed()
    sys.argv = [str(path), *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def example(name, *arguments):
    return run_ranks(2, run_script, ROOT / "examples" / name, arguments)


def test_two_stages_on_one_model():
    first, second = example("deepspeed_stages.py")
    assert [line.split(":")[0] for line in first.splitlines()] == ["stage 2", "stage 3"] and second == ""
    begun = [float(line.split("from ")[1].split()[0]) for line in first.splitlines()]
    # on the same data, the second engine starts from the weights of the first engine
    assert begun[1] < begun[0]


def test_the_time_of_an_all_reduce():
    first, second = example("deepspeed_all_reduce.py")
    lines = first.splitlines()
    assert lines[0].startswith("all_reduce of 1e+06 floats over 2 ranks: ") and lines[0].endswith(" ms")
    outside = float(lines[0].split()[-2])
    size, calls, _, average = lines[3].split()[0:2], *lines[3].split()[2:5]
    assert (size, calls) == (["3.81", "MB"], "10")
    # DeepSpeed's log reports five times as long.
    assert float(average) < 4 * outside
    assert second == ""


@pytest.mark.long
@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_checkpoint_under_a_tag(tmp_path, stage):
    first, _ = example("deepspeed_checkpoint.py", "--dir", str(tmp_path / "dir"), "--stage", stage)
    assert "step_100: loss" in first and (tmp_path / "dir" / "latest").read_text().strip() == "step_100"


SCRIPT = """
import argparse, os
import deepspeed, torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.lr_schedules import WarmupLR
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import RepeatingLoader, groups, log_dist, logger, safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--out")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
deepspeed.runtime.utils.set_random_seed(3)

class Dataset(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.full((16,), index / 64), torch.tensor(index % 2)

with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
    model = torch.nn.Sequential(
        deepspeed.zero.TiledLinear(16, 32, in_splits=2, out_splits=2), torch.nn.ReLU(), torch.nn.Linear(32, 2)
    )
optimizer = FusedAdam(model.parameters(), lr=1e-2)
engine, optimizer, loader, scheduler = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), optimizer=optimizer, training_data=Dataset(),
    lr_scheduler=lambda optimizer: WarmupLR(optimizer, warmup_max_lr=0.001, warmup_num_steps=5), dist_init_required=False,
)
assert isinstance(engine, deepspeed.DeepSpeedEngine) and args.local_rank == int(os.environ["LOCAL_RANK"])
batches = iter(RepeatingLoader(loader))
for step in range(6):
    x, y = next(batches)
    loss = torch.nn.functional.cross_entropy(engine(x.to(engine.device)), y.to(engine.device))
    engine.backward(loss)
    engine.step()
head = model[2].weight
assert head.ds_status is ZeroParamStatus.NOT_AVAILABLE or head.ds_persist
with deepspeed.zero.GatheredParameters(head, modifier_rank=None):
    whole = head.detach().clone()
assert torch.allclose(safe_get_full_fp32_param(head), whole.float())
assert groups._get_data_parallel_world_size() == dist.get_world_size() == engine.dp_world_size
engine.save_checkpoint(args.out, client_state={"step": 6})
dist.barrier()
saved = get_fp32_state_dict_from_zero_checkpoint(args.out)
assert torch.equal(saved["2.weight"], whole.float().cpu())
state = engine._zero3_consolidated_16bit_state_dict()
assert (state is None) == (dist.get_rank() != 0)
if state is not None:
    assert state.keys() == saved.keys() and torch.equal(state["2.weight"], whole.cpu())
deepspeed.utils.logger.setLevel("WARNING")
deepspeed.checkpointing.configure(None, partition_activations=False)
assert deepspeed.checkpointing.is_configured()
print(f"trained to {loss.item():.3f}, lr {scheduler.get_last_lr()[0]:.5f}")
"""

CONFIG = """{
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0,
                          "stage3_gather_16bit_weights_on_model_save": true}
}"""


def test_a_script_with_what_scripts_import(tmp_path):
    script, config = tmp_path / "train.py", tmp_path / "ds.json"
    script.write_text(SCRIPT)
    config.write_text(CONFIG)
    arguments = ["--deepspeed", "--deepspeed_config", str(config), "--out", str(tmp_path / "out")]
    for printed in run_ranks(2, run_script, script, arguments):
        assert printed.startswith("trained to 0.") and printed.strip().endswith("lr 0.00100")


ACCELERATE = """
import importlib.metadata, importlib.util
assert importlib.util.find_spec("deepspeed") is not None and importlib.metadata.metadata("deepspeed")
from packaging.version import parse
assert parse(importlib.metadata.version("deepspeed")) > parse("0.6.5")
import deepspeed, torch
from deepspeed import DeepSpeedEngine, comm as dist
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.utils import set_z3_leaf_modules
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
if not dist.is_initialized():
    dist.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)

class Wrapper:  # the calls that accelerate makes for each micro-batch
    def __init__(self, engine):
        self.engine = engine
    def backward(self, loss, last):
        self.engine.set_gradient_accumulation_boundary(is_boundary=last)
        self.engine.backward(loss)
        self.engine.step()

model = torch.nn.Linear(4, 1)
engine, optimizer, _, scheduler = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
    config_params={"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
                   "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}, "steps_per_print": 1000},
)
before = model.weight.detach().clone()
wrapped = Wrapper(engine)
wrapped.backward(engine(torch.ones(2, 4)).mean(), False)
assert torch.equal(before, model.weight) and engine.global_steps == 0
wrapped.backward(engine(torch.ones(2, 4)).mean(), True)
assert not torch.equal(before, model.weight) and engine.global_steps == 1
assert not optimizer.overflow and engine.get_global_grad_norm() > 0 and hasattr(engine.optimizer, "cur_scale")
assert not engine.zero_gather_16bit_weights_on_model_save() and engine.zero_optimization_partition_gradients()
assert engine.get_data_types() == (torch.float32, torch.float32) and not engine.zero_cpu_offload()
assert engine.get_data_parallel_rank() == dist.get_rank() and not engine.flops_profiler_enabled()
engine.allreduce_gradients()
engine.empty_partition_cache()
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.offload_states import get_state_devices
engine.offload_states(include=[OffloadStateTypeEnum.optim_states], device=OffloadDeviceEnum.cpu)
try:
    engine.step()
except AssertionError as error:
    assert "step was called while optim_states is in host memory" in str(error)
engine.reload_states()
assert get_state_devices(engine, OffloadStateTypeEnum.optim_states) == {torch.device("cpu")}
print("done", set(clone_tensors_for_torch_save(engine.module.state_dict())) == {"weight", "bias"})
"""


def test_the_calls_of_a_library_around_it(tmp_path):
    script = tmp_path / "library.py"
    script.write_text(ACCELERATE)
    assert run_ranks(2, run_script, script, []) == ["done True\n"] * 2
