"""The settings and parameters that decide what is sent, compared between the ranks at the start (``traffic_contract``)."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import torch

from zero_runtime import comm, log
from zero_runtime.comm import DataParallelGroup
from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import TrafficContractError
from zero_runtime.groups.agreements import as_first_decides
from zero_runtime.sharding.shards import shard_of

# The blocks and keys of the effective configuration that decide what is sent.
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
)
_EQUAL: Final = ""


def check_equal(config: RuntimeConfig, module: torch.nn.Module, group: DataParallelGroup) -> None:
    """Compare the settings and the parameters of the ranks of each group. All ranks must call it.

    Raises:
        TrafficContractError: on every rank, if they differ and ``traffic_contract`` is stop; rank 0 warns otherwise.
    """
    effective = config.effective()
    settings = {name: effective[name] for name in _SETTINGS}
    named = [
        [name, list(_shape(each)), str(each.dtype), each.requires_grad]
        for name, each in module.named_parameters()
    ]
    mine = json.dumps([settings, named], default=str)
    members = list(group.global_ranks)
    digest = json.dumps([members, hashlib.sha256(mine.encode()).hexdigest()])
    if as_first_decides("digests", digest, _digests_differ) == _EQUAL:
        return
    text = as_first_decides("settings", json.dumps([members, mine]), _first_difference)
    if config.traffic_contract == "stop":
        raise TrafficContractError(text)
    if comm.get_rank() == 0:
        log.warning(text)


def _shape(parameter: torch.nn.Parameter) -> Sequence[int]:
    shard = shard_of(parameter)
    return parameter.shape if shard is None else shard.shape


def _grouped(texts: Sequence[str]) -> list[dict[int, str]]:
    """What each rank says, by the group that it is in."""
    groups: dict[tuple[int, ...], dict[int, str]] = defaultdict(dict)
    for rank, text in enumerate(texts):
        members, said = json.loads(text)
        groups[tuple(members)][rank] = said
    return list(groups.values())


def _digests_differ(texts: Sequence[str]) -> str:
    return _EQUAL if all(len(set(each.values())) == 1 for each in _grouped(texts)) else "different"


def _first_difference(texts: Sequence[str]) -> str:
    for said in _grouped(texts):
        first = min(said)
        for rank in sorted(said):
            if said[rank] != said[first]:
                return _sentence(first, json.loads(said[first]), rank, json.loads(said[rank]))
    return "traffic_contract: the ranks are started differently; start them with the same script and configuration"


def _sentence(first: int, theirs: list[Any], rank: int, mine: list[Any]) -> str:
    every = "before step 0; every rank needs the same configuration and model"
    flat, other = _flat(mine[0]), _flat(theirs[0])
    for name in sorted(flat.keys() | other.keys()):
        if flat.get(name) != other.get(name):
            return (
                f"traffic_contract: {name} is {flat.get(name)!r} on rank {rank} and {other.get(name)!r} on rank {first}, so "
                f"that messages differ from bucket 0 on, {every}"
            )
    names, others = ([each[0] for each in listed[1]] for listed in (mine, theirs))
    for missing_on, has, lacks in ((rank, others, names), (first, names, others)):
        missing = next((name for name in has if name not in lacks), None)
        if missing is not None:
            return (
                f"traffic_contract: parameter {missing} of module {missing.rpartition('.')[0] or '(the model)'} is missing "
                f"on rank {missing_on}, which has {len(lacks)} parameters where rank {first + rank - missing_on} has "
                f"{len(has)}, {every}"
            )
    position = next(i for i, pair in enumerate(zip(mine[1], theirs[1], strict=True)) if pair[0] != pair[1])
    return (
        f"traffic_contract: parameter {position} of the model is {_shown(mine[1][position])} on rank {rank} and "
        f"{_shown(theirs[1][position])} on rank {first}, {every}"
    )


def _shown(parameter: list[Any]) -> str:
    name, shape, dtype, trains = parameter
    return f"{name} of shape {shape} in {dtype.removeprefix('torch.')}{'' if trains else ', frozen'}"


def _flat(values: Any, name: str = "") -> dict[str, Any]:
    """The values of nested blocks by their dotted keys."""
    if not isinstance(values, dict):
        return {name: values}
    return {
        full: value
        for key, each in values.items()
        for full, value in _flat(each, f"{name}.{key}" if name else key).items()
    }
