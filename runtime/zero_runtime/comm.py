"""The collectives of the runtime: the only module that calls torch.distributed.

This module issues every collective of the runtime inside a ``commprof.hooks.tag``. The tag contains the
purpose, bucket, owner, parameters and intended operation of the collective. This module never reports bytes,
because the recorder observes them below torch.distributed.

The functions have the names of ``deepspeed.comm`` and are meant for scripts. The runtime itself uses
:class:`DataParallelGroup`.
"""

from __future__ import annotations

import datetime
import os
import socket
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist

from commprof import hooks
from zero_runtime.errors import ConfigError, UsageError

ReduceOp = dist.ReduceOp
ProcessGroup = dist.ProcessGroup
Work = dist.Work
# torch 2.13 introduced new names for these two functions, and the old names warn since then. Earlier versions have only
# the old names.
all_gather_single: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Final = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_UNTAGGED: Final = nullcontext()

DEFAULT_PORT: Final = 29500  # the default of torch.distributed and of DeepSpeed
DEFAULT_TIMEOUT: Final = datetime.timedelta(minutes=30)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: datetime.timedelta = DEFAULT_TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialize torch.distributed, unless it is initialized already.

    The default backend is nccl if CUDA is available, and gloo otherwise. If RANK is not in the environment, no launcher
    started the process, and it becomes rank 0 of 1. With ``auto_mpi_discovery``, it becomes the rank that Open MPI
    started instead. ``verbose`` and ``config`` are in DeepSpeed's signature and have no effect here.

    Raises:
        ConfigError: ``dist_init_required`` is False and torch.distributed is not initialized; Open MPI started ranks on
            several hosts and MASTER_ADDR is missing; or accelerate chose no backend for several ranks.
    """
    if dist.is_initialized():
        return
    if dist_backend is None and not auto_mpi_discovery:
        _refuse_ranks_of_accelerate(os.environ)
    if dist_init_required is False:
        raise ConfigError(
            "dist_init_required is False, but torch.distributed is not initialized. Call "
            "torch.distributed.init_process_group first, or leave dist_init_required out."
        )
    if auto_mpi_discovery and "RANK" not in os.environ and rank < 0 and init_method is None:
        _take_over_mpi(distributed_port)
    if "RANK" not in os.environ and rank < 0 and init_method is None:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(distributed_port or _free_port()))
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl":
        torch.cuda.set_device(get_local_rank())
    dist.init_process_group(
        backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size
    )


def _refuse_ranks_of_accelerate(environment: Mapping[str, str]) -> None:
    """Refuse several ranks that accelerate starts on CPUs.

    On CPUs, accelerate chooses no backend and treats each rank as the only one.
    """
    asked = environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    ranks = int(environment.get("WORLD_SIZE", "1"))
    if asked and ranks > 1 and not torch.cuda.is_available():
        raise ConfigError(
            f"accelerate found no GPU, so it chose no backend for these {ranks} ranks, and each would train alone; "
            "to train on CPUs, write Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend='gloo')]), or with Trainer "
            "PartialState(backend='gloo') before TrainingArguments(accelerator_config={'use_configured_state': True})"
        )


def _take_over_mpi(port: int | None) -> None:
    """Set the variables of a launcher from the variables of Open MPI, if Open MPI started this process."""
    names = {
        "RANK": "RANK",
        "WORLD_SIZE": "SIZE",
        "LOCAL_RANK": "LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "LOCAL_SIZE",
    }
    mpi_values = {name: os.environ.get(f"OMPI_COMM_WORLD_{theirs}") for name, theirs in names.items()}
    variables = {name: value for name, value in mpi_values.items() if value is not None}
    if len(variables) < len(names):
        return
    if variables["WORLD_SIZE"] != variables["LOCAL_WORLD_SIZE"] and "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            f"Open MPI has started {variables['WORLD_SIZE']} ranks, {variables['LOCAL_WORLD_SIZE']} of them here; set "
            "MASTER_ADDR to the host of rank 0 (mpirun -x MASTER_ADDR=...), so that the others find it"
        )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(port or DEFAULT_PORT))
    os.environ.update(variables)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def is_initialized() -> bool:
    """Return whether torch.distributed is initialized."""
    return dist.is_initialized()


def get_rank(group: ProcessGroup | None = None) -> int:
    """Return the rank of this process in ``group`` (default: all ranks)."""
    return dist.get_rank(group)


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks of ``group`` (default: all ranks)."""
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """Return the local rank of this process, from LOCAL_RANK; 0 if LOCAL_RANK is not set."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Return the global rank of member ``group_rank`` of ``group``."""
    return dist.get_global_rank(group, group_rank)


def new_group(ranks: Sequence[int], name: str | None = None) -> ProcessGroup:
    """Create a group of global ranks, with the same timeout as the group of all ranks. Every rank must call it.

    Args:
        ranks: The global ranks of the members, in the order of their ranks within the group.
        name: The name of the group in traces, such as the axis of a topology. Names need not be unique.
    """
    return dist.new_group(list(ranks), timeout=_time_limit(default_group()), group_desc=name)


def _time_limit(group: ProcessGroup) -> datetime.timedelta | None:
    """Return the timeout of the collectives of ``group``; None if the backend does not provide it.

    For a new group, torch uses the default of the backend (10 minutes with NCCL), not the timeout that the program set
    for the group of all ranks. With None, a new group therefore has the default of its backend.
    """
    for device in ("cuda", "cpu"):
        # The device may have no backend, or the backend no options.
        with suppress(RuntimeError, AttributeError):
            limit: datetime.timedelta = group._get_backend(torch.device(device)).options._timeout
            return limit
    return None


def default_group() -> ProcessGroup:
    """Return the group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


def store() -> Any:
    """Return the key-value store that the ranks used to find each other."""
    return dist.distributed_c10d._get_default_store()


_lookouts: Final[list[weakref.WeakMethod[Callable[[], None]]]] = []
_PATIENCE: Final = datetime.timedelta(seconds=2)


def watch_waits(look: Callable[[], None]) -> None:
    """Register the method ``look``, which :func:`wait` calls after long waits and after failures.

    ``look`` may raise an exception. Only a weak reference to its object is kept.
    """
    _lookouts[:] = [each for each in _lookouts if each() is not None]
    _lookouts.append(weakref.WeakMethod(look))


def look() -> None:
    """Call the methods that are registered with :func:`watch_waits`.

    This function is for code that waits for something other than a collective.
    """
    for reference in _lookouts:
        watcher = reference()
        if watcher is not None:
            # The store is no longer available if the process that serves it exits first.
            with suppress(dist.DistError):
                watcher()


def wait(work: Work) -> None:
    """Wait for ``work``. If :func:`watch_waits` was called, the tensors of ``work`` must be on the CPU."""
    looks = [look for reference in _lookouts if (look := reference()) is not None]
    if not looks:
        work.wait()
        return
    while True:
        try:
            work.wait(_PATIENCE)
            return
        except RuntimeError as error:
            for look in looks:
                # The store is no longer available if the process that serves it exits first.
                with suppress(dist.DistError):
                    look()
            if "Operation timed out" not in str(error):
                raise


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait for all ranks of ``group``."""
    dist.barrier(group, device_ids=_devices_of_barrier(group))


def _devices_of_barrier(group: ProcessGroup | None) -> list[int] | None:
    """Return the current device for a barrier of NCCL; None for another backend.

    NCCL runs a barrier on a device, and torch warns if it has to guess the device.
    """
    return [torch.cuda.current_device()] if dist.get_backend(group) == "nccl" else None


def all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Reduce ``tensor`` over ``group`` in place, on every rank."""
    return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce ``tensor`` to global rank ``dst``. On all other ranks, its content is undefined afterwards."""
    return dist.reduce(tensor, dst, op=op, group=group, async_op=async_op)


def broadcast(
    tensor: torch.Tensor, src: int, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Send ``tensor`` of global rank ``src`` to all ranks of ``group``, in place."""
    return dist.broadcast(tensor, src, group=group, async_op=async_op)


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Gather ``tensor`` (n elements) of every rank into ``output_tensor`` (world_size x n)."""
    return all_gather_single(output_tensor, tensor, group=group, async_op=async_op)


def reduce_scatter_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce ``tensor`` (world_size x n elements) and keep this rank's n elements in ``output_tensor``."""
    return reduce_scatter_single(output_tensor, tensor, op=op, group=group, async_op=async_op)


class Call(NamedTuple):
    """A call of a method of :class:`DataParallelGroup`, as passed to the observers of the group.

    Attributes:
        method: The name of the method.
        arguments: All arguments of the call by name, including the defaults of arguments that were not passed.
    """

    method: str
    arguments: Mapping[str, Any]

    @property
    def why(self) -> hooks.tag | None:
        """The tag of the call."""
        why: hooks.tag | None = self.arguments["why"]
        return why


class Observer(Protocol):
    """An object that intercepts calls of a group in order to measure or replace them."""

    @property
    def methods(self) -> Collection[str]:
        """The names of the methods of :class:`DataParallelGroup` whose calls the observer intercepts."""
        ...

    def observe(self, call: Call, issue: Callable[[], Any]) -> Any:
        """Issue ``call``, either with ``issue()`` or in another way.

        Returns:
            The result of ``issue()``. If the result is a work handle and the observer also measures waits, the
                handle is
            wrapped.
        """


class DataParallelGroup:
    """The data-parallel ranks, which have the same parameters, and the collectives among these ranks.

    Collectives are issued in the same way as in DeepSpeed: with blocking calls, and in place if possible. On CUDA, a
    blocking call makes only the current stream wait, not the host. A call with ``asynchronous`` returns a work handle.
    The caller must wait for the handle before it uses the tensors.

    Attributes:
        group: The process group of torch; None for all ranks.
        rank: The rank of this process within the group.
        world_size: The number of ranks of the group.
        device: The device of the parameters. It is the CUDA device with the number LOCAL_RANK. It is the CPU if CUDA is
            not available, or if the group has no backend for CUDA except gloo, which lacks some collectives there.
        backend: The name of the backend for ``device`` (gloo or nccl).
        global_ranks: The global rank of each member.
        observers: The observers that :meth:`observe` added, innermost first.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise UsageError(
                "torch.distributed is not initialized; call zero_runtime.init_distributed() first"
            )
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        backends = dict(
            each.split(":", 1) for each in dist.get_backend_config(group).split(",") if ":" in each
        )
        on_cuda = torch.cuda.is_available() and backends.get("cuda", "gloo") != "gloo"
        self.device = torch.device("cuda", get_local_rank()) if on_cuda else torch.device("cpu")
        self.backend = backends.get(self.device.type, "gloo")
        members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self.global_ranks = tuple(members)
        self.observers: tuple[Observer, ...] = ()

    def observe(self, observer: Observer) -> None:
        """Pass later calls of ``observer.methods`` to ``observer``, before the observers that were added earlier."""
        self.observers = (*self.observers, observer)
        for method in observer.methods:
            # A method is wrapped only when it is observed, so that a method without observers has no overhead.
            plain = getattr(DataParallelGroup, method)
            setattr(self, method, partial(self._issue, method, plain, *_signature(plain)))

    def forget(self, observer: Observer) -> None:
        """Stop passing calls to ``observer``."""
        self.observers = tuple(each for each in self.observers if each is not observer)
        for method in observer.methods:
            if not any(method in each.methods for each in self.observers):
                self.__dict__.pop(method, None)

    def abort(self) -> None:
        """Abort the collectives in flight on this rank, so that they fail. With gloo, this has no effect."""
        group = default_group() if self.group is None else self.group
        group._get_backend(self.device).abort()

    def _issue(
        self,
        method: str,
        plain: Callable[..., Any],
        names: tuple[str, ...],
        defaults: Mapping[str, Any],
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """Pass a call through the observers of ``method``, the one added last first.

        Args:
            method: The name of the method.
            plain: The method itself, which issues the collective.
            names: The names of the method's arguments.
            defaults: The defaults of the method's arguments.
            arguments: The positional arguments of the call.
            options: The keyword arguments of the call.
        """
        call = Call(method, {**defaults, **dict(zip(names, arguments, strict=False)), **options})
        issue = partial(plain, self, **call.arguments)
        for observer in self.observers:
            if method in observer.methods:
                issue = partial(observer.observe, call, issue)
        return issue()

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Any = ReduceOp.SUM,
        why: hooks.tag | None = None,
        asynchronous: bool = False,
    ) -> dist.Work | None:
        """Reduce ``tensor`` in place on every rank."""
        with why or _UNTAGGED:
            return dist.all_reduce(tensor, op=op, group=self.group, async_op=asynchronous)

    def reduce(
        self,
        tensor: torch.Tensor,
        owner: int,
        why: hooks.tag | None = None,
        asynchronous: bool = False,
    ) -> dist.Work | None:
        """Sum ``tensor`` to group member ``owner``. On all other members, its content is undefined afterwards."""
        with why or _UNTAGGED:
            return dist.reduce(tensor, self.global_ranks[owner], group=self.group, async_op=asynchronous)

    def broadcast(self, tensor: torch.Tensor, owner: int, why: hooks.tag | None = None) -> None:
        """Send ``tensor`` of group member ``owner`` to all members, in place."""
        with why or _UNTAGGED:
            dist.broadcast(tensor, self.global_ranks[owner], group=self.group)

    def all_gather_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        why: hooks.tag | None = None,
        asynchronous: bool = False,
    ) -> Work | None:
        """Gather every rank's ``tensor`` (n elements) into ``output`` (world_size x n)."""
        with why or _UNTAGGED:
            return all_gather_single(output, tensor, group=self.group, async_op=asynchronous)

    def start_all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, why: hooks.tag | None = None
    ) -> dist.Work:
        """Start :meth:`all_gather_single`; the result is available after ``wait()`` on the returned handle."""
        with why or _UNTAGGED:
            return all_gather_single(output, tensor, group=self.group, async_op=True)

    def start_all_reduce(self, tensor: torch.Tensor, why: hooks.tag | None = None) -> dist.Work:
        """Start :meth:`all_reduce` by sum; the result is available after ``wait()`` on the returned handle."""
        with why or _UNTAGGED:
            return dist.all_reduce(tensor, group=self.group, async_op=True)

    def barrier(self, why: hooks.tag | None = None) -> None:
        """Wait for all ranks of the group."""
        with why or _UNTAGGED:
            dist.barrier(self.group, device_ids=_devices_of_barrier(self.group))

    def all_gather(
        self,
        outputs: list[torch.Tensor],
        tensor: torch.Tensor,
        why: hooks.tag | None = None,
        asynchronous: bool = False,
    ) -> Work | None:
        """Gather every rank's ``tensor`` into ``outputs``, one tensor for each rank."""
        with why or _UNTAGGED:
            return dist.all_gather(outputs, tensor, group=self.group, async_op=asynchronous)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        rows: Sequence[torch.Tensor],
        why: hooks.tag | None = None,
        asynchronous: bool = False,
    ) -> dist.Work | None:
        """Sum row r over the ranks, and write the sum to ``output`` of rank r. Rows may differ in length."""
        with why or _UNTAGGED:
            return dist.reduce_scatter(output, list(rows), group=self.group, async_op=asynchronous)

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        why: hooks.tag | None = None,
        asynchronous: bool = False,
    ) -> dist.Work | None:
        """Sum ``rows`` (world_size equal, concatenated rows) and write this rank's row to ``output``."""
        with why or _UNTAGGED:
            return reduce_scatter_single(output, rows, group=self.group, async_op=asynchronous)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        row_numels: Sequence[int] | None,
        why: hooks.tag | None = None,
        asynchronous: bool = False,
    ) -> dist.Work | None:
        """Send row r of ``rows`` to rank r, and write the rows that this rank receives to ``output``.

        Args:
            output: The received rows, concatenated in rank order: world_size x row_numels[rank] elements.
            rows: The rows to send, in rank order: sum(row_numels) elements.
            row_numels: The number of elements of each rank's row. The numbers may differ and may be 0. None if all rows
                have the same number.
        """
        sent = None if row_numels is None else list(row_numels)
        received = None if sent is None else [sent[self.rank]] * self.world_size
        with why or _UNTAGGED:
            return dist.all_to_all_single(
                output, rows, received, sent, group=self.group, async_op=asynchronous
            )

    def send(self, tensor: torch.Tensor, member: int, why: hooks.tag | None = None) -> None:
        """Send ``tensor`` to group member ``member``, which must receive it."""
        with why or _UNTAGGED:
            dist.send(tensor, self.global_ranks[member], group=self.group)

    def receive(self, tensor: torch.Tensor, member: int, why: hooks.tag | None = None) -> None:
        """Receive a message of group member ``member`` into ``tensor``."""
        with why or _UNTAGGED:
            dist.recv(tensor, self.global_ranks[member], group=self.group)

    def start_send(self, tensor: torch.Tensor, member: int, why: hooks.tag | None = None) -> dist.Work | None:
        """Start :meth:`send`; do not change ``tensor`` before ``wait()`` on the returned handle."""
        with why or _UNTAGGED:
            return dist.isend(tensor, self.global_ranks[member], group=self.group)

    def start_receive(
        self, tensor: torch.Tensor, member: int, why: hooks.tag | None = None
    ) -> dist.Work | None:
        """Start :meth:`receive`; ``tensor`` is filled after ``wait()`` on the returned handle."""
        with why or _UNTAGGED:
            return dist.irecv(tensor, self.global_ranks[member], group=self.group)

    def sum_rows(
        self,
        received: torch.Tensor,
        rows: torch.Tensor,
        row_numels: Sequence[int],
        why: hooks.tag | None = None,
        asynchronous: bool = False,
    ) -> tuple[Work | None, Callable[[], torch.Tensor]]:
        """Start a reduce_scatter that is implemented as an all_to_all and a local sum.

        Args:
            received: The buffer for the received rows: world_size x row_numels[rank] elements.
            rows, row_numels: The same arguments as those of :meth:`all_to_all_single`.

        Returns:
            A work handle, and a function that returns this rank's sum (1-D) after the wait on the handle. The function
            sums 16-bit rows in fp32, so that the sum is rounded only once.
        """
        work = self.all_to_all_single(received, rows, row_numels, why=why, asynchronous=asynchronous)
        width = row_numels[self.rank]
        return work, lambda: sum_of_rows(received.view(self.world_size, width))


def _signature(method: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of the arguments of ``method`` without ``self``, and the defaults by argument name."""
    names = method.__code__.co_varnames[1 : method.__code__.co_argcount]
    return names, dict(zip(reversed(names), reversed(method.__defaults__), strict=False))


def sum_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rows of a matrix, in fp32.

    On the CPU, this function adds one row at a time, so that every column is summed in the order of the rows.
    torch's own reduction of a few long rows takes 2 to 6 times as long on a CPU, and 10 times as long for 16
    rows of 16-bit numbers.
    """
    if rows.device.type != "cpu" or len(rows) < 2:
        return rows.sum(0, dtype=torch.float32)
    total = rows[0].to(torch.float32, copy=True)
    for row in rows[1:]:
        total.add_(row)
    return total


# The names of the methods of DataParallelGroup that issue collectives. Timers and counters of all calls use them.
COLLECTIVES: Final = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather_single",
    "start_all_gather",
    "start_all_reduce",
    "barrier",
    "all_gather",
    "reduce_scatter",
    "reduce_scatter_single",
    "all_to_all_single",
)
MESSAGES: Final = ("send", "receive", "start_send", "start_receive")
