"""Tests which values DeepSpeed accepts for each configuration key, with the values that users typically write.

    PYTHONPATH=.:runtime python tools/deepspeed_config_values.py cases CASES.json
    DEEPSPEED_PYTHON tools/deepspeed_config_values.py try CASES.json DEEPSPEED.json       # a Python with DeepSpeed 0.19.8
    PYTHONPATH=.:runtime python tools/deepspeed_config_values.py try CASES.json OURS.json --names
    python tools/deepspeed_config_values.py fixture DEEPSPEED.json tests/golden/deepspeed_config_values.json

Each case runs in a separate process with one gloo rank on the CPU. The process reads the configuration, or trains three
steps of a small model. The outcome is ``ok`` with the configured value or with the loss of the third step, or it is the
error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATIENCE = 30.0  # the longest time of one case, in seconds
VALUES: tuple[Any, ...] = (
    "auto", None, True, False, "true", "False", "on", 0, 1, 2, "0", "1", "2", "1000", "2.0", "2.5", "1e3", " 2 ", "1_000",
    2.0, 2.5, 1e3, float("inf"), -1, "inf", "text", [], {}, ["text"],
)  # fmt: skip
# The values for keys whose effect only a training shows.
FEWER_VALUES: tuple[Any, ...] = (
    "auto", None, True, "true", "False", 1, "2", "2.5", 2.0, 2.5, float("inf"), "text", {},
)  # fmt: skip
STAGE_3 = ("stage3_", "prefetch_", "param_persistence", "model_persistence", "max_", "gather_16", "module_gran",
           "use_all_reduce", "allgather_seq", "offload_param", "leaf", "zero_quantized", "zero_hpz")  # fmt: skip
# The other keys that a key or block needs to have an effect.
BESIDE: dict[str, dict[str, Any]] = {
    "fp16": {"fp16": {"enabled": True}},
    "bf16": {"bf16": {"enabled": True}},
    "bfloat16": {"bfloat16": {"enabled": True}},
    "torch_autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "scheduler": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}},
    "zero_optimization.offload_param": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    "zero_optimization.offload_optimizer": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    },
    "csv_monitor": {"csv_monitor": {"enabled": False}},
}  # fmt: skip
ARGUMENTS: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "optimizer.params": ("optimizer", {"AdamW": ("lr", "betas", "eps", "weight_decay", "torch_adam")}),
    "scheduler.params": (
        "scheduler",
        {
            "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration"),
            "WarmupDecayLR": ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"),
            "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio"),
            "OneCycle": ("cycle_min_lr", "cycle_max_lr", "cycle_first_step_size"),
            "LRRangeTest": ("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate"),
        },
    ),
}  # fmt: skip
REQUIRED: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 5},
    "WarmupDecayLR": {"warmup_num_steps": 5, "total_num_steps": 20},
    "WarmupCosineLR": {"warmup_num_steps": 5, "total_num_steps": 20},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3},
    "LRRangeTest": {},
    "AdamW": {"lr": 1e-3, "torch_adam": True},
}


def merged(one: Any, other: Any) -> Any:
    """Return ``one`` merged with the keys of ``other`` at every level. Values of ``other`` have precedence."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return other
    return {**one, **{name: merged(one.get(name), value) for name, value in other.items()}}


def at(path: list[str], value: Any) -> Any:
    """Return nested dicts in which the keys of ``path`` lead to ``value``."""
    for name in reversed(path):
        value = {name: value}
    return value


# The blocks that DeepSpeed reads with pydantic. Reading the configuration already shows the result of a value.
READ_BY_PYDANTIC = {
    "zero_optimization": "zero_config", "fp16": "float16_config", "bf16": "bfloat16_config", "bfloat16": "bfloat16_config",
    "hybrid_engine": "hybrid_engine", "compile": "compile_config", "csv_monitor": "monitor_config.csv_monitor",
    "tensorboard": "monitor_config.tensorboard", "wandb": "monitor_config.wandb", "comet": "monitor_config.comet",
    "timers": "timers_config", "tensor_parallel": "tensor_parallel_config", "comms_logger": "comms_config.comms_logger",
    "weight_quantization": "weight_quantization_config",
}  # fmt: skip
READ_ONLY = {
    "autotuning",
    "flops_profiler",
    "datastates",
    "data_efficiency",
    "expert_parallel",
}  # no training runs for these blocks


def cases() -> Iterator[dict[str, Any]]:
    """Yield a case for every key of docs/config.md that DeepSpeed has, with each value and each stage to try."""
    from zero_runtime.configuration import all_keys

    base = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 0},
    }
    for block, table in all_keys.BLOCKS.items():
        for name, key in [*table.items(), ("_comment", None)]:
            if key is not None and ("Not a key of DeepSpeed" in key.meaning or key.status.value == "refused"):
                continue
            full = f"{block}.{name}" if block else name
            stages = [2]
            if block.startswith("zero_optimization") or full == "zero_optimization":
                stages = [3] if any(name.startswith(each) or each in block for each in STAGE_3) else [2]
                stages = [1, 2, 3] if name in ("overlap_comm", "reduce_bucket_size") else stages
            if full == "gradient_clipping":
                stages = [0, 1, 2, 3]
            beside = next(
                (BESIDE[each] for each in (full, block, block.partition(".")[0]) if each in BESIDE), {}
            )
            for stage in stages:
                top = full.partition(".")[0]
                is_read = top in READ_ONLY or (bool(block) and top in READ_BY_PYDANTIC)
                for value in ("a comment",) if name == "_comment" else VALUES if is_read else FEWER_VALUES:
                    config = merged(merged(base, {"zero_optimization": {"stage": stage}}), beside)
                    config = merged(config, at(full.split("."), value))
                    yield {"key": full, "stage": stage, "value": value, "config": config}
    for block, (section, types) in ARGUMENTS.items():
        for type_, names in types.items():
            for name in names:
                for value in FEWER_VALUES:
                    config = merged(base, {"zero_optimization": {"stage": 2}})
                    config[section] = {"type": type_, "params": {**REQUIRED[type_], name: value}}
                    yield {"key": f"{block}.{name} ({type_})", "stage": 2, "value": value, "config": config}


def read(case: dict[str, Any]) -> str | None:
    """Return the value of the key of ``case`` in DeepSpeed's configuration.

    The result is None if only a training shows the effect of the value.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    path = case["key"].split(".")
    if path[0] in READ_ONLY:
        DeepSpeedConfig(case["config"])
        return "ok"
    if len(path) < 2 or path[0] not in READ_BY_PYDANTIC:
        return None
    value: Any = DeepSpeedConfig(case["config"])
    names = [*READ_BY_PYDANTIC[path[0]].split("."), *(name.removeprefix("stage3_") for name in path[1:])]
    for name in names:
        value = getattr(value, name, None)
    return f"ok {value!r}"


def train(config: dict[str, Any]) -> str:
    """Train three steps of a small model and return the loss of the third step."""
    import deepspeed
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    dtype = next(engine.module.parameters()).dtype
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 8, dtype=dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
    return f"ok {loss.item():.6f}"


def outcome(case: dict[str, Any], is_ours: bool) -> str:
    """Run one case in a separate process and return its outcome."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        if not os.environ.get("SHOW"):
            os.dup2(silent, 2)
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", LOCAL_SIZE="1")
        os.environ["MASTER_PORT"] = str(20000 + (os.getpid() % 20000))
        try:
            said = (None if is_ours else read(case)) or train(case["config"])
        except BaseException as error:
            said = f"{type(error).__name__}: {str(error)[:300]}"
        os.write(writer, said.encode()[:4000])
        os._exit(0)
    os.close(writer)
    timer = threading.Timer(PATIENCE, os.kill, (child, signal.SIGKILL))
    timer.start()
    said = b""
    while piece := os.read(reader, 65536):
        said += piece
    os.close(reader)
    os.waitpid(child, 0)
    timer.cancel()
    return said.decode() or "hung, or ended its process"


def fixture(found: list[list[Any]]) -> dict[str, str]:
    """Return a string for each key and stage, with one character for each value of VALUES.

    The character is 1 if DeepSpeed accepts the value, 0 if DeepSpeed refuses it, and a period if it was not tried.
    """
    rows: dict[str, list[str]] = {}
    for key, stage, value, said in found:
        marks = rows.setdefault(f"{key} @ {stage}", ["."] * len(VALUES))
        if value == "a comment":
            marks[:] = ["1" if said.startswith("ok") else "0"]
        else:
            marks[index_of(value)] = "1" if said.startswith("ok") else "0"
    return {name: "".join(marks) for name, marks in rows.items()}


def index_of(value: Any) -> int:
    """Return the index of ``value`` in VALUES, in which 1, 1.0 and true are different values."""
    return next(number for number, each in enumerate(VALUES) if type(each) is type(value) and each == value)


def main() -> None:
    """Write the cases, try them, or write the fixture of the tests."""
    if sys.argv[1] == "fixture":
        Path(sys.argv[3]).write_text(
            json.dumps(fixture(json.loads(Path(sys.argv[2]).read_text())), indent=0) + "\n"
        )
        return
    if sys.argv[1] == "cases":
        Path(sys.argv[2]).write_text(json.dumps(list(cases())))
        return
    import torch

    torch.set_num_threads(1)
    if "--names" in sys.argv:
        import zero_runtime

        zero_runtime.as_deepspeed()
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.ops
    import torch._dynamo  # imported once before the forks, because every training needs it
    from deepspeed.accelerator import get_accelerator

    if "--names" not in sys.argv:
        import deepspeed.module_inject.auto_ep_layer
        import deepspeed.runtime.zero.muon.muon_optimizer
        import deepspeed.runtime.zero.stage3
        import deepspeed.runtime.zero.stage_1_and_2

        # Its compilation takes 30 s, and the training does not use it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    get_accelerator().is_fp16_supported = lambda: True
    every = json.loads(Path(sys.argv[2]).read_text())
    target = Path(sys.argv[3])
    # An existing file contains the outcomes of an interrupted run, which is continued.
    found: list[Any] = json.loads(target.read_text()) if target.exists() else []
    for number, case in enumerate(every):
        if number < len(found):
            continue
        found.append([case["key"], case["stage"], case["value"], outcome(case, "--names" in sys.argv)])
        if number % 100 == 0 or number == len(every) - 1:
            print(number, "of", len(every), flush=True)
            target.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
