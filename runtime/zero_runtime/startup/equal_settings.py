"""A comparison of the settings and parameters that decide which messages are sent (``traffic_contract``).

The ranks compare them at the start.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from zero_runtime import comm, log
from zero_runtime.comm import DataParallelGroup
from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import TrafficContractError
from zero_runtime.groups.agreements import as_first_decides
from zero_runtime.groups.traffic_contract import OFF, STOP
from zero_runtime.sharding.shards import shard_of
from zero_runtime.startup.common_start import CommonStart

# The blocks and keys of the effective configuration that decide which messages are sent.
_SETTINGS: Final = (
    "zero_optimization",
    "communication",
    "gradient_compression",
    "communication_data_type",
    "fp16",
    "bf16",
    "data_types",
    "torch_autocast",
    "gradient_accumulation_steps",
    "gradient_allreduce_op",
    "tp_size",
    "sequence_parallel_size",
    "tensor_parallel",
    "pipeline_parallel",
    "use_data_before_expert_parallelism",
)
_EQUAL: Final = ""
_EVERY: Final = "before step 0; every rank needs the same configuration and model"
_MODE: Final = "traffic_contract"
# Reported before other settings, which may follow from these settings.
_FIRST: Final = (_MODE, "zero_optimization.stage")
# Keys in these blocks whose values may differ between ranks.
_OWN: Final = frozenset({"nvme_path", "calibration"})


def check_settings(config: RuntimeConfig, start: CommonStart) -> RuntimeConfig:
    """Compare the settings of all ranks, before anything is sent. All ranks must call this function.

    Returns:
        ``config``, without a contract if another rank has no contract.

    Raises:
        TrafficContractError: The settings differ and ``traffic_contract`` is stop. The error is raised on every rank
            with a contract. With other values of ``traffic_contract`` a rank warns.
    """
    mode = config.traffic_contract
    effective = config.effective()
    effective["zero_optimization"].update(dict.fromkeys(config.zero.open_sizes, "auto"))
    settings = {_MODE: mode, **{name: effective[name] for name in _SETTINGS}}
    text = start.decided("" if mode == OFF else json.dumps(settings, default=str), _different_settings)
    if text == _EQUAL:
        return config
    if mode == STOP:
        raise TrafficContractError(text)
    modes_differ = text.startswith(f"{_MODE}: {_MODE} is ")
    if comm.get_rank() == 0 or modes_differ:
        log.warning(text)
    return dataclasses.replace(config, traffic_contract=OFF) if modes_differ else config


def check_parameters(config: RuntimeConfig, module: torch.nn.Module, group: DataParallelGroup) -> None:
    """Compare the parameters of the ranks of each group. All ranks must call this function.

    Raises:
        TrafficContractError: The parameters differ and ``traffic_contract`` is stop. The error is raised on every
            rank. With other values of ``traffic_contract`` rank 0 warns.
    """
    named = [
        [name, list(_shape(each)), str(each.dtype), each.requires_grad]
        for name, each in module.named_parameters()
    ]
    mine = json.dumps(named)
    members = list(group.global_ranks)
    digest = json.dumps([members, hashlib.sha256(mine.encode()).hexdigest()])
    if as_first_decides("digests", digest, _digests_differ) == _EQUAL:
        return
    text = as_first_decides("parameters", json.dumps([members, mine]), _first_difference)
    if config.traffic_contract == STOP:
        raise TrafficContractError(text)
    if comm.get_rank() == 0:
        log.warning(text)


def _different_settings(texts: Mapping[int, str]) -> str:
    """Return the error text about the first setting in which ranks differ.

    An empty input text belongs to a rank without a contract.
    """
    settings = {rank: _flat(json.loads(text)) if text else {_MODE: OFF} for rank, text in texts.items()}
    names = {name for each in settings.values() for name in each if _OWN.isdisjoint(name.split("."))}
    for name in sorted(names, key=lambda name: (*(name != first for first in _FIRST), name)):
        usual, other = _most_and_first({rank: json.dumps(each.get(name)) for rank, each in settings.items()})
        if other is not None:
            effect = "messages differ from bucket 0 on"
            if name == _MODE:
                effect = "not all ranks compare their messages"
            return (
                f"traffic_contract: {name} is {settings[other].get(name)!r} on rank {other} and "
                f"{settings[usual].get(name)!r} on rank {usual}, so that {effect}, {_EVERY}"
            )
    return _EQUAL


def _most_and_first(texts: Mapping[int, str]) -> tuple[int, int | None]:
    """Return the first rank whose text is the most frequent, and the first rank with a different text."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(texts):
        ranks[texts[rank]].append(rank)
    most = min(ranks.values(), key=lambda those: (-len(those), those))
    return most[0], next((rank for rank in sorted(texts) if rank not in most), None)


def _shape(parameter: torch.nn.Parameter) -> Sequence[int]:
    shard = shard_of(parameter)
    return parameter.shape if shard is None else shard.shape


def _grouped(texts: Sequence[str]) -> list[dict[int, str]]:
    """Return the value of each rank, for each group of ranks."""
    groups: dict[tuple[int, ...], dict[int, str]] = defaultdict(dict)
    for rank, text in enumerate(texts):
        members, value = json.loads(text)
        groups[tuple(members)][rank] = value
    return list(groups.values())


def _digests_differ(texts: Sequence[str]) -> str:
    return _EQUAL if all(len(set(each.values())) == 1 for each in _grouped(texts)) else "different"


def _first_difference(texts: Sequence[str]) -> str:
    for settings in _grouped(texts):
        usual, other = _most_and_first(settings)
        if other is not None:
            return _sentence(usual, json.loads(settings[usual]), other, json.loads(settings[other]))
    return "traffic_contract: the ranks are started differently; start them with the same script and configuration"


def _sentence(first: int, theirs: list[Any], rank: int, mine: list[Any]) -> str:
    names, others = ([each[0] for each in listed] for listed in (mine, theirs))
    for missing_on, has, lacks in ((rank, others, names), (first, names, others)):
        missing = next((name for name in has if name not in lacks), None)
        if missing is not None:
            return (
                f"traffic_contract: parameter {missing} of module {missing.rpartition('.')[0] or '(the model)'} is missing "
                f"on rank {missing_on}, which has {len(lacks)} parameters where rank {first + rank - missing_on} has "
                f"{len(has)}, {_EVERY}"
            )
    position = next(i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
    return (
        f"traffic_contract: parameter {position} of the model is {_shown(mine[position])} on rank {rank} and "
        f"{_shown(theirs[position])} on rank {first}, {_EVERY}"
    )


def _shown(parameter: list[Any]) -> str:
    name, shape, dtype, trains = parameter
    return f"{name} of shape {shape} in {dtype.removeprefix('torch.')}{'' if trains else ', frozen'}"


def _flat(values: Any, name: str = "") -> dict[str, Any]:
    """Return the values of nested blocks by their dotted keys."""
    if not isinstance(values, dict):
        return {name: values}
    return {
        full: value
        for key, each in values.items()
        for full, value in _flat(each, f"{name}.{key}" if name else key).items()
    }
