"""Replays with zero_runtime the recorded runs of DeepSpeed 0.19.8, whose collectives were recorded one by one.

The recorded runs are not part of the repository. They are read from ``../shared/data/deepspeed`` beside the
repository, or from the directory COMMPROF_RECORDED_RUNS. Without them the tests are skipped. A predicate over
the configuration selects the replayed cases. Cases are never selected by name.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import zero_runtime
from support.process_group_log import Call, logged
from support.ranks import device
from support.recorded_models import CLASSES, make_batch, make_model
from support.stated_differences import shown_difference

ROOT = Path(
    os.environ.get("COMMPROF_RECORDED_RUNS")
    or Path(__file__).resolve().parents[2].parent / "shared" / "data" / "deepspeed"
)
MISSING = f"no recorded runs at {ROOT}; set COMMPROF_RECORDED_RUNS to the directory that holds them"

# The flags of a case that describe how it was recorded, or that ``_engine`` and ``_SCRIPTS`` support.
_KNOWN_FLAGS = {
    "name",
    "world",
    "config",
    "model",
    "steps",
    "timeout",
    "profile",
    "shm",
    "backend",
    "two_groups",
    "client_opt",
    "kind",
    "args",
    "force_fp16",
    "zero_init",
}
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
_OPTIMIZERS = {"adam", "adamw", "adagrad", "sgd", "rmsprop", "muon", "lamb", "lion"}


@dataclass(frozen=True)
class Case:
    """One recorded run."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def flags(self) -> dict[str, Any]:
        return json.loads((self.path / "config.json").read_text())

    @cached_property
    def results(self) -> dict[str, Any]:
        return json.loads((self.path / "losses.json").read_text())

    @property
    def config(self) -> dict[str, Any]:
        return self.flags["config"]

    @property
    def zero(self) -> dict[str, Any]:
        return self.config.get("zero_optimization", {})

    @property
    def world(self) -> int:
        return self.flags["world"]

    @property
    def model(self) -> str:
        by_script = {"unused": "partly_used", "actckpt": f"{self.flags.get('args', {}).get('mode')}_gpt"}
        return by_script.get(self.script) or self.flags.get("model", "gpt")

    @property
    def script(self) -> str:
        """The kind of the recorded program: ``std`` or a different key of ``_SCRIPTS``."""
        return self.flags.get("args", {}).get("which") or self.flags.get("kind", "std")

    @property
    def succeeded(self) -> bool:
        return self.results["status"] == "ok"

    def expected_calls(self, rank: int) -> list[Call]:
        """Return the recorded collectives of ``rank``.

        If the record of the rank contains no initialization, the initialization of rank 0 is used.
        """
        with (self.path / "collectives.csv").open() as file:
            rows = list(csv.DictReader(file))
        mine = [_call(row) for row in rows if int(row["rank"]) == rank]
        if not any(call.step == -1 for call in mine):
            mine = [
                call for call in (_call(row) for row in rows if row["rank"] == "0") if call.step == -1
            ] + mine
        return mine


def _call(row: Mapping[str, str]) -> Call:
    return Call(
        int(row["step"]),
        int(row["micro"]),
        row["phase"],
        row["op"],
        int(row["root"]) if row["root"] else None,
        row["group"],
        int(row["numel_in"]),
        int(row["numel_out"]),
        row["dtype"],
        row["redop"],
    )


def all_cases() -> list[Case]:
    """Return all recorded runs, sorted by name."""
    return [Case(path.parent) for path in sorted(ROOT.glob("*/config.json"))]


def known_features(case: Case) -> bool:
    """Return whether a replay supports all flags, scripts, optimizers and configuration blocks of the case."""
    config, zero = case.config, case.zero
    optimizer = config.get("optimizer", {"type": "SGD"})["type"].lower()
    return (
        set(case.flags) <= _KNOWN_FLAGS
        and case.script in _SCRIPTS
        and optimizer in _OPTIMIZERS
        and not any(zero.get(name) for name in _QUANTIZED)
        and not config.get("comms_logger", {}).get("enabled")
        and not config.get("flops_profiler", {}).get("enabled")
        and not {"checkpoint", "compile", "tensor_parallel"} & set(config)
        and case.flags.get("args", {}).get("mode") in (None, "reentrant", "nonreentrant", "ds")
    )


def precision_of(case: Case) -> str:
    """Return the precision of the parameters of the case: fp16, bf16 or fp32."""
    return next((name for name in ("fp16", "bf16") if case.config.get(name, {}).get("enabled")), "fp32")


def compute_precision(case: Case) -> str:
    """Return the precision in which the case computes.

    This is the precision of ``torch_autocast`` (bf16 by default) if it is enabled, otherwise that of the parameters.
    """
    autocast = case.config.get("torch_autocast", {})
    if not autocast.get("enabled"):
        return precision_of(case)
    return "fp16" if autocast.get("dtype") in ("float16", "fp16", "half") else "bf16"


def draws_otherwise(case: Case) -> bool:
    """Return whether zero.Init draws other random parameters than the recorded run.

    This happens on a GPU, and in 16 bits with a version of torch that draws 16-bit numbers as torch 2.11 does.
    """
    if not case.flags.get("zero_init"):
        return False
    drawn = torch.empty(1, dtype=torch.bfloat16).uniform_(generator=torch.Generator().manual_seed(0)).item()
    return device() == "cuda" or (precision_of(case) != "fp32" and drawn != 0.49609375)


def difference(case: Case) -> str | None:
    """Return the difference from the run that docs/deepspeed-differences.md states; None if it states none."""
    return shown_difference(case.config, case.succeeded)


def replayable(case: Case) -> bool:
    """Return whether the recorded run succeeded and zero_runtime must reproduce it."""
    return known_features(case) and difference(case) is None and case.succeeded


def refused(case: Case) -> bool:
    """Return whether the recorded run failed and zero_runtime must also refuse its configuration."""
    return known_features(case) and difference(case) is None and not case.succeeded


def features(case: Case) -> frozenset[tuple[str, Any]]:
    """Return the features of a case, which are used to choose a varied subset of the cases."""
    config, zero = case.config, case.zero
    size = zero.get("reduce_bucket_size", 500_000_000)
    plain = {
        "world": case.world,
        "model": case.model,
        "stage": zero.get("stage", 0),
        "reduce_scatter": zero.get("reduce_scatter", True),
        "multi_rank": zero.get("use_multi_rank_bucket_allreduce", True),
        "contiguous": zero.get("contiguous_gradients", True),
        "overlap": bool(zero.get("overlap_comm")),
        "bucket": "small" if size <= 20_000 else "large",
        "gas": config.get("gradient_accumulation_steps", 1),
        "precision": precision_of(case),
        "clip": config.get("gradient_clipping", "absent"),
        "two_groups": bool(case.flags.get("two_groups")),
    }
    rest = {
        f"{name}={value!r}": True
        for block in (config, zero)
        for name, value in block.items()
        if not isinstance(value, dict) and name not in ("train_batch_size", "train_micro_batch_size_per_gpu")
    }
    return frozenset({**plain, **rest, "optimizer": config.get("optimizer", {}).get("type")}.items())


def varied(cases: Iterable[Case], count: int) -> list[Case]:
    """Return ``count`` cases that together cover many pairs of features.

    A greedy algorithm chooses the cases.
    """
    pairs = {case: {frozenset(pair) for pair in combinations(features(case), 2)} for case in cases}
    chosen: list[Case] = []
    uncovered = set().union(*pairs.values()) if pairs else set()
    while pairs and len(chosen) < count:
        best = max(sorted(pairs, key=lambda case: case.name), key=lambda case: len(pairs[case] & uncovered))
        uncovered -= pairs.pop(best)
        chosen.append(best)
    return chosen


@dataclass
class Replay:
    """The results of one rank in the replay of one case."""

    calls: list[Call]
    losses: list[Any]
    grad_norms: list[float | None] | None
    parameters: dict[str, list[float]]
    optimizer_numel: int
    loss_scales: list[float] | None = None
    error: str | None = None
    error_kind: str | None = None


def replay_all(rank: int, world: int, cases: list[Case]) -> dict[str, Replay]:
    """Replay ``cases`` on this rank. The world size of all cases is ``world``.

    If one case fails, the other cases are still replayed.
    """
    replays = {}
    # The random numbers of the recorded runs were drawn on the CPU, so they must be drawn on the CPU even if a
    # GPU trains.
    torch.set_default_device("cpu")
    for case in cases:
        with logged() as log:
            replays[case.name] = _replay(case, rank, log)
            replays[case.name].calls = [call for call in log.calls if call.phase != "report"]
    return replays


def _replay(case: Case, rank: int, log) -> Replay:
    try:
        engine = _engine(case)
        losses, norms, *scales = _SCRIPTS[case.script](case, engine, rank, log)
        log.at("report")
    except zero_runtime.ZeroRuntimeError as error:
        return Replay([], [], [], {}, 0, None, str(error), type(error).__name__)
    return Replay([], losses, norms, _parameters(engine), _state_numel(engine), scales[0] if scales else None)


def _engine(case: Case):
    with zero_runtime.zero.Init(config_dict_or_path=_config(case), enabled=bool(case.flags.get("zero_init"))):
        model = make_model(case.model)
    if case.flags.get("args", {}).get("mode") == "ds":
        zero_runtime.checkpointing.configure(None, deepspeed_config=_config(case))
    parameters: Any = model.parameters()
    arguments: dict[str, Any] = {}
    if case.flags.get("two_groups"):
        matrices = [each for each in model.parameters() if each.dim() > 1]
        vectors = [each for each in model.parameters() if each.dim() <= 1]
        parameters = [
            {"params": matrices, "weight_decay": 0.01},
            {"params": vectors, "weight_decay": 0.0},
        ]
    if case.flags.get("client_opt") == "torch_sgd":
        arguments["optimizer"] = torch.optim.SGD(model.parameters(), lr=1e-2)
        parameters = None
    engine, *_ = zero_runtime.initialize(
        model=model, model_parameters=parameters, config=_config(case), **arguments
    )
    return engine


def _config(case: Case) -> dict[str, Any]:
    """Return the config of the case, adapted to this process.

    At stage 3, a missing ``reduce_scatter_impl`` is set to ``native``. Class names are replaced by the names of the
    classes of this package, and the scratch directory is replaced by a directory of this process.
    """
    config = json.loads(json.dumps(case.config).replace("@SCRATCH", _scratch().name))
    zero = config.get("zero_optimization", {})
    if zero.get("stage") == 3:
        zero.setdefault("reduce_scatter_impl", "native")
    if "leaf_module" in zero:
        zero["leaf_module"]["classes"] = [CLASSES.get(name, name) for name in zero["leaf_module"]["classes"]]
    return config


@cache
def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="recorded-")


def _train(case: Case, engine, rank: int, log):
    accumulation = case.config.get("gradient_accumulation_steps", 1)
    losses, norms, scales = [], [], []
    for step in range(case.flags.get("steps", 3)):
        row = []
        for micro in range(accumulation):
            loss = _forward(case, engine, rank, log, step, micro)
            log.at("backward")
            engine.backward(loss)
            log.at("step")
            engine.step()
            log.at("between")
            row.append(loss.item())
        losses.append(row if accumulation > 1 else row[0])
        norm = engine.get_global_grad_norm()
        norms.append(None if norm is None else float(norm))
        scales.append(engine.optimizer.cur_scale)
    return losses, norms, scales


def _train_coalesced(case: Case, engine, rank: int, log):
    losses = []
    for step in range(3):
        with engine.coalesce_grad_reduction():
            loss = _accumulate(case, engine, rank, log, step)
            log.at("exit_ctx")
        log.at("step")
        engine.step()
        log.at("between")
        losses.append(loss.item())
    return losses, None


def _accumulate(case: Case, engine, rank: int, log, step: int):
    """Run two forward and backward passes and return the last loss."""
    for micro in range(2):
        loss = _forward(case, engine, rank, log, step, micro)
        log.at("backward")
        engine.backward(loss)
    return loss


def _train_without_sync(case: Case, engine, rank: int, log):
    losses = []
    for step in range(3):
        with engine.no_sync():
            _accumulate(case, engine, rank, log, step)
        loss = _forward(case, engine, rank, log, step, 2)
        log.at("backward")
        engine.backward(loss)
        log.at("step")
        engine.step()
        log.at("between")
        losses.append(loss.item())
    return losses, None


def _train_from_the_loss(case: Case, engine, rank: int, log):
    losses = []
    for step in range(3):
        loss = _forward(case, engine, rank, log, step, 0)
        log.at("backward")
        loss.backward()
        log.at("step")
        engine.step()
        log.at("between")
        losses.append(loss.item())
    return losses, None


def _evaluate(case: Case, engine, rank: int, log):
    engine.eval()
    with torch.no_grad():
        return [_forward(case, engine, rank, log, step, 0, "eval").item() for step in range(3)], None


def _forward(case: Case, engine, rank: int, log, step: int, micro: int, phase: str = "forward"):
    batch = make_batch(case.model, step, micro, rank, _DTYPES[precision_of(case)])
    log.at(phase, step, micro)
    return engine(*(tensor.to(engine.device) for tensor in batch))


_SCRIPTS = {
    "std": _train,
    "unused": _train,
    "actckpt": _train,
    "no_sync": _train_without_sync,
    "coalesce": _train_coalesced,
    "torch_backward": _train_from_the_loss,
    "eval_forward": _evaluate,
}


def _parameters(engine) -> dict[str, list[float]]:
    found = {}
    with zero_runtime.zero.GatheredParameters(engine.module.parameters()):
        for name, parameter in engine.module.named_parameters():
            values = parameter.detach().float()
            found[name] = [values.norm().item(), values.flatten()[0].item()]
    return found


def _state_numel(engine) -> int:
    return sum(
        tensor.numel()
        for state in engine.optimizer.state.values()
        for tensor in state.values()
        if torch.is_tensor(tensor) and tensor.numel() > 1
    )
