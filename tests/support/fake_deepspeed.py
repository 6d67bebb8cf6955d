"""A fake package ``deepspeed`` with the parts of the real package that the adapter of commprof uses.

The package is so small that the collectives it must issue can be read from its source. Its ``__init__`` imports
torch.distributed first, as in the real package. Tests write the package to a directory, because its version varies.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

_INIT = """
import torch.distributed
from . import comm
from .runtime.engine import DeepSpeedEngine
from .git_version_info import version
__version__ = version

def initialize(model, optimizer, config):
    engine = DeepSpeedEngine(model, optimizer, config)
    return engine, engine.optimizer, None, None
"""

_ENGINE = """
import torch
import torch.distributed as dist
from torch.nn import Module

class Config:
    def __init__(self, given):
        self._param_dict = given
        self.train_batch_size = given["train_micro_batch_size_per_gpu"] * dist.get_world_size() * 2
        self.gradient_accumulation_steps = 2
        self.zero_config = Zero()

class Zero:
    def dict(self, by_alias):
        return {"stage": 1, "reduce_bucket_size": 40, "grad_dtype": torch.float32}

class Group(list):
    pass

class DeepSpeedEngine(Module):
    def __init__(self, model, optimizer, config):
        super().__init__()
        self.module = model
        self._config = Config(config)
        self.global_steps = self.micro_steps = 0
        self.communication_data_type = torch.float32
        self._broadcast_model()
        dist.barrier()
        self.basic = optimizer
        self.optimizer = self._configure_zero_optimizer(optimizer)

    def _broadcast_model(self):
        for parameter in self.module.parameters():
            dist.broadcast(parameter.data, 0)

    def _configure_zero_optimizer(self, optimizer):
        from .zero.stage_1_and_2 import DeepSpeedZeroOptimizer
        return DeepSpeedZeroOptimizer(optimizer, self)

    def _configure_bf16_optimizer(self, optimizer): raise NotImplementedError
    def _configure_fp16_optimizer(self, optimizer): raise NotImplementedError
    def sparse_allreduce(self, sparse): raise NotImplementedError
    def clip_fp32_gradients(self): raise NotImplementedError
    def allreduce_bucket(self, bucket): raise NotImplementedError
    def load_checkpoint(self, place): raise NotImplementedError
    def _zero3_consolidated_16bit_state_dict(self): raise NotImplementedError
    def save_16bit_model(self, place): raise NotImplementedError
    def _commit_decoupled_checkpoint(self): raise NotImplementedError

    def bfloat16_enabled(self): return False
    def fp16_enabled(self): return False
    def train_micro_batch_size_per_gpu(self): return 3

    def forward(self, value):
        return self.module(value)

    def backward(self, loss):
        "Docstring of backward."
        if loss.numel() != 1:
            raise ValueError("a loss of one element")
        (loss / 2).backward()
        if self.micro_steps % 2:
            self.optimizer.reduce_gradients()
        return loss / 2

    def step(self):
        if self.micro_steps % 2:
            self._take_model_step({})
        self.micro_steps += 1

    def _take_model_step(self, lr_kwargs):
        self.optimizer.step()
        self._global_grad_norm = 0.5
        self.global_steps += 1

    def save_checkpoint(self, place):
        dist.barrier()
        return place
"""

_STAGE_1_2 = """
import torch
import torch.distributed as dist
from ..utils import all_gather_dp_groups

class Bucket:
    def __init__(self):
        self.params, self.elements = [], 0

class DeepSpeedZeroOptimizer:
    reduce_bucket_size = 40

    def __init__(self, optimizer, engine):
        self.optimizer = optimizer
        self.bit16_groups = [list(group["params"]) for group in optimizer.param_groups]
        self.bit16_groups_flat = []
        for group in self.bit16_groups:
            numel = sum(parameter.numel() for parameter in group)
            self.bit16_groups_flat.append(torch.zeros(numel + -numel % (2 * dist.get_world_size())))
        for group in optimizer.param_groups:
            group["params"] = [torch.nn.Parameter(torch.zeros(4))]
        self.ipg_buckets = {torch.float32: Bucket()}
        self.communication_data_type = torch.float32

    def reduce_gradients(self):
        for number, group in enumerate(self.bit16_groups):
            for position, parameter in enumerate(group):
                bucket = self.ipg_buckets[torch.float32]
                if bucket.elements + parameter.numel() > self.reduce_bucket_size and bucket.elements:
                    self.reduce_ipg_grads(torch.float32)
                bucket.params.append((number, position, id(parameter)))
                bucket.elements += parameter.numel()
        self.reduce_ipg_grads()

    def reduce_ipg_grads(self, comm_dtype=None):
        bucket = self.ipg_buckets[torch.float32]
        flat = torch.cat([self.bit16_groups[g][p].grad.reshape(-1) for g, p, _ in bucket.params])
        self.gradient_reduction_w_predivide(flat, torch.float32)
        bucket.params, bucket.elements = [], 0

    def gradient_reduction_w_predivide(self, tensor, communication_data_type):
        dist.all_reduce(tensor)

    def step(self):
        self.get_grad_norm_direct([], [])
        self.has_overflow()
        all_gather_dp_groups(self.bit16_groups_flat)
        self.sequential_execution(lambda: None, "done")
        for group in self.bit16_groups:
            for parameter in group:
                parameter.grad = None

    def get_grad_norm_direct(self, gradients, params, norm_type=2): dist.all_reduce(torch.zeros(1))
    def has_overflow(self, partition_gradients=True): dist.all_reduce(torch.zeros(1), op=dist.ReduceOp.MAX)
    def sequential_execution(self, function, message, group=None): dist.barrier()
    def allreduce_bucket(self): raise NotImplementedError
    def complete_grad_norm_calculation_for_cpu_offload(self, params): raise NotImplementedError
    def _average_expert_grad_norms(self, norm_groups): raise NotImplementedError
    def _muon_all_gather_partitions(self): raise NotImplementedError
"""

_UTILS = """
import torch
from .. import comm as dist

def all_gather_dp_groups(groups_flat):
    for flat in groups_flat:
        dist.all_gather_into_tensor(flat, torch.zeros(flat.numel() // dist.get_world_size()))

class PartitionedTensor:
    def full(self): raise NotImplementedError

class CheckOverflow:
    def check_using_norm(self, norm_group): raise NotImplementedError
    def has_overflow(self, params): raise NotImplementedError
"""


_COMM = """
from torch import distributed
from torch.distributed import get_world_size

def all_gather_into_tensor(output_tensor, tensor, group=None, async_op=False):
    return distributed.all_gather_into_tensor(output_tensor, tensor, group, async_op)
"""


def write_fake(directory: Path, version: str, without: str = "") -> Path:
    """Write the package below ``directory`` as ``version``, without the method ``without`` of stages 1 and 2."""
    package = directory / "deepspeed"
    stage = _STAGE_1_2.replace(f"{without}(", "renamed(") if without else _STAGE_1_2
    files = {
        "__init__.py": _INIT,
        "comm.py": _COMM,
        "git_version_info.py": f"version = {version!r}",
        "runtime/__init__.py": "",
        "runtime/engine.py": _ENGINE,
        "runtime/utils.py": _UTILS,
        "runtime/zero/__init__.py": "",
        "runtime/zero/stage_1_and_2.py": stage,
    }
    for name, text in files.items():
        file = package / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return directory
