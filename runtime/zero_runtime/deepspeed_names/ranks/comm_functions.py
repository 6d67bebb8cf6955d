"""``deepspeed.comm``: torch.distributed with DeepSpeed's signatures; calls are timed if the log is enabled.

No call is tagged, because all calls are issued by the script. Three keywords concern the log. ``prof`` times the call
regardless of ``prof_all``, ``log_name`` is the name of the log entry of the call, and ``debug`` has no effect.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zero_runtime.comm import (
    ProcessGroup,
    ReduceOp,
    Work,
    all_gather_single,
    get_global_rank,
    get_local_rank,
    get_rank,
    get_world_size,
    init_distributed,
    is_initialized,
    new_group,
    reduce_scatter_single,
)
from zero_runtime.deepspeed_names.ranks.launcher_environment import (
    get_local_rank_from_launcher,
    get_world_rank_from_launcher,
    get_world_size_from_launcher,
)
from zero_runtime.deepspeed_names.ranks.logged_calls import Function, logged
from zero_runtime.errors import UsageError

__all__ = [
    "P2POp", "ProcessGroup", "ReduceOp", "all_gather", "all_gather_coalesced", "all_gather_into_tensor",
    "all_gather_object", "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "allgather_fn", "barrier",
    "batch_isend_irecv", "broadcast", "broadcast_object_list", "destroy_process_group", "gather",
    "get_all_ranks_from_group", "get_global_rank", "get_local_rank",
    "get_local_rank_from_launcher", "get_rank", "get_world_group",
    "get_world_rank_from_launcher", "get_world_size", "get_world_size_from_launcher",
    "has_all_gather_into_tensor", "has_all_reduce_coalesced", "has_coalescing_manager", "has_reduce_scatter_tensor",
    "inference_all_reduce", "init_distributed", "initialize_mesh_device", "irecv", "is_available", "is_initialized", "isend",
    "monitored_barrier", "new_group", "recv", "reduce", "reduce_scatter", "reduce_scatter_fn", "reduce_scatter_tensor",
    "scatter", "send",
]  # fmt: skip

Group = ProcessGroup | None


# Groups.


def is_available() -> bool:
    """Return whether torch.distributed is available."""
    return dist.is_available()


def available_backends() -> list[str]:
    """Return the names of the backends that this build of torch provides."""
    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return [name for name, here in known.items() if here()]


def destroy_process_group(group: Group = None) -> None:
    """Destroy ``group``; by default, destroy all groups."""
    dist.destroy_process_group(group)


def get_world_group() -> Group:
    """Return the group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: Group = None) -> list[int]:
    """Return the global ranks of ``group``, in the order of their ranks within the group."""
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """Return a mesh of all ranks, a DeviceMesh of torch.

    Args:
        mesh_shape: The number of ranks in each dimension. The product must be the number of all ranks.
        mesh_dim_names: The names of the dimensions.

    Raises:
        UsageError: The product of the dimensions is not the number of ranks.
    """
    shape, world = tuple(mesh_shape), dist.get_world_size()
    product = 1
    for extent in shape:
        product *= extent
    if product != world:
        raise UsageError(
            f"a mesh of {' x '.join(map(str, shape))} has {product} places, and there are {world} ranks; they must be equal"
        )
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return dist.device_mesh.init_device_mesh(device, shape, mesh_dim_names=tuple(mesh_dim_names))


def has_reduce_scatter_tensor() -> bool:
    """Return whether one tensor can be reduced and scattered, which is always true."""
    return True


def has_all_gather_into_tensor() -> bool:
    """Return whether tensors can be gathered into one tensor, which is always true."""
    return True


def has_all_reduce_coalesced() -> bool:
    """Return whether several tensors can be reduced in one call, which is always true."""
    return True


def has_coalescing_manager() -> bool:
    """Return whether torch can coalesce calls, which is always true."""
    return True


# Collectives.


@logged(0, "tensor")
def broadcast(tensor: torch.Tensor, src: int, group: Group = None, async_op: bool = False) -> Work | None:
    """Send ``tensor`` of global rank ``src`` to all ranks, in place."""
    return dist.broadcast(tensor, src, group=group, async_op=async_op)


@logged()
def broadcast_object_list(object_list: list[Any], src: int, group: Group = None, device: Any = None) -> None:
    """Send the picklable objects of global rank ``src`` to all ranks, in place."""
    dist.broadcast_object_list(object_list, src, group=group, device=device)


@logged(1, "tensor")
def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Gather every rank's ``tensor`` into ``tensor_list``, one tensor for each rank."""
    return dist.all_gather(tensor_list, tensor, group=group, async_op=async_op)


@logged()
def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Gather every rank's picklable ``obj`` into ``object_list``."""
    dist.all_gather_object(object_list, obj, group=group)


@logged(1, "tensor")
def all_gather_into_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Gather ``tensor`` (n elements) of every rank into ``output_tensor`` (ranks x n)."""
    work: Work | None = all_gather_single(output_tensor, tensor, group=group, async_op=async_op)
    return work


def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    debug: Any = None,
) -> Any:
    """Gather a tensor. This is another name of :func:`all_gather_into_tensor`."""
    return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


@logged(1, "input_tensors")
def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Gather several tensors, each like :func:`all_gather_into_tensor`.

    Returns:
        With ``async_op``, a work handle for all tensors; otherwise None.
    """
    works = [
        all_gather_single(output, source, group=group, async_op=True)
        for output, source in zip(output_tensors, input_tensors, strict=True)
    ]
    together = Works(works)
    return together if async_op else together.wait()


@logged(1, "tensor")
def reduce_scatter_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce ``tensor`` (ranks x n elements) and keep this rank's n elements in ``output_tensor``."""
    work: Work | None = reduce_scatter_single(output_tensor, tensor, op=op, group=group, async_op=async_op)
    return work


def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    debug: Any = None,
) -> Any:
    """Reduce and scatter a tensor. This is another name of :func:`reduce_scatter_tensor`."""
    return reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op, prof=prof)


@logged(1, "input_list")
def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce entry r of ``input_list`` into ``output`` of rank r."""
    return dist.reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)


@logged(1, "tensor")
def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Send row r of ``tensor`` to rank r, and write the rows that this rank receives to ``output``."""
    return dist.all_to_all_single(
        output, tensor, output_split_sizes, input_split_sizes, group=group, async_op=async_op
    )


@logged(1, "input_tensor_list")
def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Send entry r of ``input_tensor_list`` to rank r.

    gloo does not support this call, so that point-to-point messages are used with gloo.
    """
    if dist.get_backend(group) != "gloo":
        return dist.all_to_all(output_tensor_list, input_tensor_list, group=group, async_op=async_op)
    rank = dist.get_rank(group)
    output_tensor_list[rank].copy_(input_tensor_list[rank])
    works: list[Any] = []
    for peer, global_rank in enumerate(get_all_ranks_from_group(group)):
        if peer != rank:
            works.append(dist.isend(input_tensor_list[peer], global_rank, group=group))
            works.append(dist.irecv(output_tensor_list[peer], global_rank, group=group))
    together = Works(works)
    return together if async_op else together.wait()


@logged(0, "tensor")
def all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Reduce ``tensor`` in place on every rank."""
    return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


@logged(0, "tensor")
def inference_all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Reduce ``tensor`` in place on every rank. There is no special version for inference."""
    return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


@logged(0, "tensors")
def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor], op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Reduce several tensors, each like :func:`all_reduce`."""
    works = [dist.all_reduce(tensor, op=op, group=group, async_op=True) for tensor in tensors]
    together = Works(works)
    return together if async_op else together.wait()


@logged(0, "tensor")
def reduce(
    tensor: torch.Tensor, dst: int, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Reduce ``tensor`` to global rank ``dst``. On all other ranks, its content is undefined afterwards."""
    return dist.reduce(tensor, dst, op=op, group=group, async_op=async_op)


@logged(0, "tensor")
def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Gather every rank's ``tensor`` into ``gather_list`` of global rank ``dst``."""
    return dist.gather(tensor, gather_list, dst, group=group, async_op=async_op)


@logged(0, "tensor")
def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Send each rank its entry of the ``scatter_list`` of global rank ``src``."""
    return dist.scatter(tensor, scatter_list, src, group=group, async_op=async_op)


@logged()
def barrier(group: Group = None, async_op: bool = False, device_ids: list[int] | None = None) -> Work | None:
    """Wait for all ranks."""
    return dist.barrier(group=group, async_op=async_op, device_ids=device_ids)


@logged()
def monitored_barrier(
    group: Group = None, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait for all ranks, and report the ranks that do not arrive before the timeout.

    With a backend other than gloo, this function is an ordinary barrier.
    """
    if dist.get_backend(group) == "gloo":
        dist.monitored_barrier(group=group, timeout=timeout, wait_all_ranks=wait_all_ranks)
    else:
        dist.barrier(group=group)


# Messages between two ranks.


@logged(0, "tensor")
def send(tensor: torch.Tensor, dst: int, group: Group = None, tag: int = 0) -> None:
    """Send ``tensor`` to global rank ``dst``."""
    dist.send(tensor, dst, group=group, tag=tag)


@logged(0, "tensor")
def recv(tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0) -> int:
    """Receive ``tensor`` from global rank ``src``, or from any rank, and return the rank of the sender."""
    return dist.recv(tensor, src, group=group, tag=tag)


@logged(0, "tensor")
def isend(tensor: torch.Tensor, dst: int, group: Group = None, tag: int = 0) -> Work | None:
    """Start to send ``tensor`` to global rank ``dst``."""
    return dist.isend(tensor, dst, group=group, tag=tag)


@logged(0, "tensor")
def irecv(tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0) -> Work | None:
    """Start to receive ``tensor`` from global rank ``src``, or from any rank."""
    return dist.irecv(tensor, src, group=group, tag=tag)


class P2POp:
    """One message of :func:`batch_isend_irecv`.

    Args:
        op: :func:`isend` or :func:`irecv` of this module, or the functions of torch with these names.
        tensor: The tensor to send, or to receive into.
        peer: The global rank of the other side.
        group: The group of both ranks.
        tag: The tag of the message.
    """

    def __init__(
        self, op: Function, tensor: torch.Tensor, peer: int, group: Group = None, tag: int = 0
    ) -> None:
        torch_op = {isend: dist.isend, irecv: dist.irecv}.get(op, op)
        if torch_op not in (dist.isend, dist.irecv):
            raise UsageError(f"op of P2POp is {op!r}; expected isend or irecv")
        self.op, self.tensor, self.peer, self.group, self.tag = torch_op, tensor, peer, group, tag


@logged(0, "p2p_op_list")
def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Start several messages together, and return the work handles of the messages."""
    return dist.batch_isend_irecv(
        [dist.P2POp(each.op, each.tensor, each.peer, each.group, each.tag) for each in p2p_op_list]
    )


class Works:
    """The work handle of several messages."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = [work for work in works if work is not None]

    def wait(self, *arguments: Any) -> None:
        """Wait for all messages."""
        for work in self._works:
            work.wait(*arguments)

    def is_completed(self) -> bool:
        """Return whether all messages are complete."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        """Raise RuntimeError, because several messages have no common future."""
        raise RuntimeError("several messages have no common future; call wait() instead")
