"""The functions of ``deepspeed.utils.groups`` for experts. The groups have the names ``ep_size_<number>``."""

from __future__ import annotations

from typing import Any

from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import UsageError
from zero_runtime.experts.expert_groups import ExpertRanks, group_name
from zero_runtime.groups.parallelism import current


def _all() -> dict[str, ExpertRanks]:
    parallelism = current()
    return {} if parallelism is None else dict(parallelism.experts)


def _ranks(name: str) -> ExpertRanks:
    groups = _all()
    if name not in groups:
        raise UsageError(
            f"there is no group of experts {name!r}; there are {', '.join(groups) or 'none'}: initialize creates those of "
            "the model's MoE layers"
        )
    return groups[name]


def get_expert_parallel_group(group_name: str) -> Any:
    """Return torch's group of the ranks that exchange tokens with this rank.

    Raises UsageError if the name is unknown.
    """
    return _ranks(group_name).parallel.group


def get_expert_parallel_group_dict() -> dict[str, Any]:
    """Return torch's expert-parallel group for each name of a group of experts."""
    return {name: each.parallel.group for name, each in _all().items()}


def get_expert_parallel_group_ranks(group_name: str) -> list[int]:
    """Return the global ranks of the ranks that exchange tokens with this rank."""
    return list(_ranks(group_name).parallel.global_ranks)


def get_expert_parallel_world_size(group_name: str) -> int:
    """Return the number of ranks that exchange tokens with this rank, including this rank."""
    return _ranks(group_name).parallel.world_size


def get_expert_parallel_rank(group_name: str) -> int:
    """Return the rank of this process within the expert-parallel group."""
    return _ranks(group_name).parallel.rank


def get_expert_data_parallel_group(group_name: str) -> Any:
    """Return torch's group of the ranks that have the same experts as this rank.

    Raises UsageError if the name is unknown.
    """
    return _ranks(group_name).data.group


def get_expert_data_parallel_group_dict() -> dict[str, Any]:
    """Return a mapping from the name of an expert group to torch's group of the ranks with the same experts."""
    return {name: each.data.group for name, each in _all().items()}


def get_expert_data_parallel_group_ranks(group_name: str) -> list[int]:
    """Return the global ranks of the ranks that have the same experts as this rank."""
    return list(_ranks(group_name).data.global_ranks)


def get_expert_data_parallel_world_size(group_name: str) -> int:
    """Return the number of ranks that have the same experts as this rank, including this rank."""
    return _ranks(group_name).data.world_size


def get_expert_data_parallel_rank(group_name: str) -> int:
    """Return the rank of this process within the group of ranks with the same experts."""
    return _ranks(group_name).data.rank


def get_expert_broadcast_src_rank(group_name: str) -> int:
    """Return the global rank whose experts are broadcast to the other ranks with the same experts."""
    return _ranks(group_name).data.global_ranks[0]


def _largest() -> DataParallelGroup | None:
    return max((each.parallel for each in _all().values()), key=lambda each: each.world_size, default=None)


def get_max_expert_size() -> int | None:
    """Return the largest ``ep_size`` of the model; None without experts."""
    largest = _largest()
    return None if largest is None else largest.world_size


def get_max_expert_size_name() -> str:
    """Return the name of the groups with the largest ``ep_size`` of the model."""
    return group_name(get_max_expert_size() or 1)


def get_max_expert_parallel_group() -> Any:
    """Return torch's expert-parallel group with the largest ``ep_size``; None without experts."""
    largest = _largest()
    return None if largest is None else largest.group
