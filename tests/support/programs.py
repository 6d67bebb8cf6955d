"""Programs that issue collectives in every way that torch offers, and the expected collectives, derived by hand.

A program runs on two ranks. ``expected`` contains the operation and the payload in bytes of each collective of
rank 0, in order of issue. The payload is None if internal data of torch determine it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from support.ranks import device

WORLD = 2
STEPS = 3
WIDTH = 8
LAYER = WIDTH * WIDTH * 4  # bytes of the weight of one layer
# The gloo backend of torch 2.11 has no all_to_all with lists of tensors.
EXCHANGES_LISTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


Calls = list[tuple[str, int | None]]


class Program(NamedTuple):
    """One program.

    Attributes:
        name: The name of the program in docs/coverage.md.
        body: The function that each rank calls with its rank and the number of ranks.
        expected: The collectives that rank 0 issues.
        layers: The layers (of the schema) that record the collectives in the default mode.
        flight: Whether torch's Flight Recorder lists the same operations. With gloo, it lists an all_reduce for a
            reduce_scatter. The value is false for programs with messages.
    """

    name: str
    body: Callable[[int, int], Any]
    expected: Calls
    layers: frozenset[str]
    flight: bool = True


def layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))


def train(model: torch.nn.Module, steps: int = STEPS) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.ones(4, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp(**options: Any) -> torch.nn.Module:
    """Return a DDP model in which every layer has its own bucket after the first step."""
    return torch.nn.parallel.DistributedDataParallel(layers(), bucket_cap_mb=0.0001, **options)


# DDP first compares the shapes of the parameters: it gathers the number of parameters, and rank 0 broadcasts
# the shapes. Then rank 0 broadcasts the weights.
CONSTRUCTED: Calls = [("all_gather", None), ("broadcast", None), ("broadcast", 3 * LAYER)]
WHOLE: Calls = [("all_reduce", 3 * LAYER)]  # the first step, in which all gradients are one bucket
# After the first backward pass, DDP rebuilds its buckets, and rank 0 broadcasts their indices and sizes.
REBUILT: Calls = [("broadcast", None), ("broadcast", None)]
REDUCED: Calls = [("all_reduce", LAYER)] * 3


def run_ddp(rank: int, world: int) -> None:
    train(ddp())


def run_ddp_unused(rank: int, world: int) -> None:
    train(ddp(find_unused_parameters=True))


def run_ddp_static(rank: int, world: int) -> None:
    model = ddp(static_graph=True, gradient_as_bucket_view=True)
    train(model, 2)
    with model.no_sync():
        model(torch.ones(4, WIDTH)).sum().backward()
    model(torch.ones(4, WIDTH)).sum().backward()


def run_ddp_hook(rank: int, world: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = ddp()
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    train(model)


def run_ddp_builtin_hook(rank: int, world: int) -> None:
    model = ddp()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    train(model)


def run_functional(rank: int, world: int) -> None:
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    x = torch.ones(4)
    functional.all_reduce(x, "sum", group).wait()
    functional.broadcast(x, 1, group).wait()
    functional.all_gather_tensor(x, 0, group).wait()
    functional.reduce_scatter_tensor(x, "max", 0, group).wait()
    functional.all_to_all_single(x, None, None, group).wait()
    functional.all_to_all_single(torch.ones(6), [3, 3], [3, 3], group).wait()
    for part in functional.all_reduce_coalesced([x, torch.ones(2)], "sum", group):
        part.wait()
    for part in functional.all_gather_into_tensor_coalesced([x, torch.ones(2)], group):
        part.wait()
    for part in functional.reduce_scatter_tensor_coalesced([x, torch.ones(2)], "sum", [0, 0], group):
        part.wait()


FUNCTIONAL: Calls = [
    ("all_reduce", 16),
    ("broadcast", 16),
    ("all_gather", 32),
    ("reduce_scatter", 16),
    ("all_to_all", 16),
    ("all_to_all", 24),
    ("all_reduce", 24),
    ("all_gather", 48),
    ("reduce_scatter", 24),
]


def run_functional_autograd(rank: int, world: int) -> None:
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    x = torch.ones(4, requires_grad=True)
    # The results are squared because torch 2.11 requires contiguous gradients.
    functional.all_gather_tensor_autograd(x, 0, group).square().sum().backward()
    functional.reduce_scatter_tensor_autograd(x, "sum", 0, group).square().sum().backward()
    functional.all_to_all_single_autograd(x, [2, 2], [2, 2], group).square().sum().backward()


# The backward pass of an all_gather is a reduce_scatter, and vice versa.
FUNCTIONAL_AUTOGRAD: Calls = [
    ("all_gather", 32),
    ("reduce_scatter", 32),
    ("reduce_scatter", 16),
    ("all_gather", 16),
    ("all_to_all", 16),
    ("all_to_all", 16),
]


def run_dtensor(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = init_device_mesh(device(), (world,))
    local = torch.ones(4, 2)
    DTensor.from_local(local, mesh, [Shard(0)], run_check=False).full_tensor()
    DTensor.from_local(local, mesh, [Partial()], run_check=False).redistribute(mesh, [Replicate()]).to_local()
    DTensor.from_local(local, mesh, [Partial()], run_check=False).redistribute(mesh, [Shard(0)]).to_local()
    DTensor.from_local(local, mesh, [Replicate()], run_check=False).redistribute(mesh, [Shard(0)]).to_local()


DTENSOR: Calls = [("all_gather", 64), ("all_reduce", 32), ("reduce_scatter", 32)]


def run_compiled(rank: int, world: int, backend: str = "aot_eager") -> None:
    import torch.distributed._functional_collectives as functional

    @torch.compile(backend=backend, fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", "0") + 1

    @torch.compile(backend=backend)
    def in_place(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    for _ in range(3):
        function(torch.ones(4))
        in_place(torch.ones(6))


COMPILED: Calls = [("all_reduce", 16), ("all_reduce", 24)] * 3


def run_zero_optimizer(rank: int, world: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = layers()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.01)
    for _ in range(2):
        model(torch.ones(4, WIDTH)).sum().backward()
        optimizer.step()


def run_backend(rank: int, world: int) -> None:
    pg = dist.group.WORLD
    backend = pg._get_backend(torch.device(device()))
    backend.allreduce([torch.ones(4)]).wait()
    backend.broadcast([torch.ones(2)], dist.BroadcastOptions()).wait()
    pg.allreduce([torch.ones(3)]).wait()
    dist.all_reduce(torch.ones(1))


def run_fsdp1(rank: int, world: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        layers(), auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}), device_id=torch.device(device())
    )
    train(model, 2)


def run_fsdp2(rank: int, world: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = layers()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    train(model, 2)


def run_pipeline(rank: int, world: int) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = PipelineStage(layers()[rank], rank, world, torch.device(device()))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda output, target: (output - target).sum())
    batch = torch.ones(4, WIDTH)
    if rank == 0:
        schedule.step(batch)
    else:
        schedule.step(target=batch)


def run_p2p(rank: int, world: int) -> None:
    other = 1 - rank
    x = torch.ones(4)
    if rank == 0:
        dist.send(x, other)
        dist.recv(x, other)
        dist.recv(x, other if device() == "cuda" else None)  # with NCCL, a recv must name its source
        dist.isend(x, other, tag=5).wait()
    else:
        dist.recv(x, other)
        dist.send(x, other)
        dist.send(x, other)
        dist.irecv(x, other, tag=5).wait()
    operations = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.ones(4), other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    objects: list[Any] = ["word"] if rank == 0 else [None]
    if rank == 0:
        dist.send_object_list(objects, other)
    else:
        dist.recv_object_list(objects, other)


def _exchange_lists(x: torch.Tensor, async_op: bool) -> list[Any]:
    received = [torch.ones(4), torch.ones(4)]
    return [dist.all_to_all(received, [x, x], async_op=async_op)] if EXCHANGES_LISTS else []


def run_plain(rank: int, world: int) -> None:
    x = torch.ones(4)
    for async_op in (False, True):
        works = [
            dist.all_reduce(x, async_op=async_op),
            dist.broadcast(x, 1, async_op=async_op),
            dist.reduce(x, 0, async_op=async_op),
            dist.all_gather([torch.ones(4), torch.ones(4)], x, async_op=async_op),
            dist.all_gather_into_tensor(torch.ones(8), x, async_op=async_op),
            dist.reduce_scatter(torch.ones(4), [x, x], async_op=async_op),
            dist.reduce_scatter_tensor(torch.ones(2), x, async_op=async_op),
            dist.all_to_all_single(torch.ones(4), x, async_op=async_op),
            *_exchange_lists(x, async_op),
            dist.gather(x, [torch.ones(4), torch.ones(4)] if rank == 1 else None, dst=1, async_op=async_op),
            dist.scatter(torch.ones(4), [x, x] if rank == 1 else None, src=1, async_op=async_op),
            dist.barrier(async_op=async_op),
        ]
        for work in works:
            if async_op:
                work.wait()
    if device() == "cpu":
        dist.monitored_barrier()  # only gloo supports this barrier
    dist.all_gather_object([None, None], "word")
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(torch.ones(2))


PLAIN: Calls = [
    ("all_reduce", 16),
    ("broadcast", 16),
    ("reduce", 16),
    ("all_gather", 32),
    ("all_gather", 32),
    ("reduce_scatter", 32),
    ("reduce_scatter", 16),
    ("all_to_all", 16),
    *([("all_to_all", 32)] if EXCHANGES_LISTS else []),
    ("gather", 32),
    ("scatter", 32),
    ("barrier", 0),
]


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x.clone())
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(gradient.clone())
        return gradient


def run_modes(rank: int, world: int) -> None:
    import threading

    import torch.distributed._functional_collectives as functional

    x = torch.ones(4, requires_grad=True)
    x.register_hook(lambda gradient: dist.broadcast(gradient.clone(), 0))
    _Doubled.apply(x).sum().backward()
    with torch.no_grad():
        dist.all_reduce(torch.ones(4))
        functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).wait()
    with torch.inference_mode():
        dist.all_reduce(torch.ones(4))
        functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).wait()
    with torch.autocast(device()):
        dist.all_reduce(torch.ones(4))
        functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).wait()
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(4, device=device())), name="other")
    thread.start()
    thread.join()


MODES: Calls = [("all_reduce", 16), ("all_reduce", 16), ("broadcast", 16), *[("all_reduce", 16)] * 7]

# A stage sends a description of its outputs as a pickled object: first its length, then its bytes. With torch
# 2.13, the next stage also sends back a description of the gradients. With torch 2.11 it does not, because a
# gradient has the shape and type of the output. The code below searches the source of torch instead of
# importing it, because the import takes a second and other tests that import this module do not need it.
_PIPELINING = Path(torch.__file__).parent / "distributed" / "pipelining"
GRADIENTS_ARE_DESCRIBED = "def _backward_metadata_inference(" in (_PIPELINING / "stage.py").read_text()
# In torch 2.15, all stages vote with an all_reduce whether they know their shapes. Then each pair of peers
# connects: the lower rank sends one element, and all ranks take part in an all_reduce. Before 2.15, each peer
# sends one element to the other (in 2.11 to connect the stages, in 2.13 to vote).
PEERS_ARE_PRECONNECTED = "_preconnect_shared_p2p_edges(" in (_PIPELINING / "schedules.py").read_text()
_PIPELINE: Calls = [
    *(
        [("all_reduce", 4), ("send", 4), ("all_reduce", 4)]
        if PEERS_ARE_PRECONNECTED
        else [("send", 4), ("recv", 4)]
    ),
    ("send", 8),
    ("send", None),
    *([("recv", 8), ("recv", None)] if GRADIENTS_ARE_DESCRIBED else []),
    # One message in each direction for each micro-batch.
    *[("send", 2 * WIDTH * 4)] * 2,
    *[("recv", 2 * WIDTH * 4)] * 2,
]
# FSDP gathers three layers for the forward pass and again for the backward pass. In the backward pass, FSDP
# gathers the next layer before it reduces the gradients of the current layer.
_SHARDED: Calls = [
    *[("all_gather", LAYER)] * 5,
    ("reduce_scatter", LAYER),
    ("all_gather", LAYER),
    *[("reduce_scatter", LAYER)] * 2,
] * 2
_METHODS = frozenset({"process_group"})
_CPP = frozenset({"c10d"})
_FUNCTIONAL = frozenset({"functional"})

PROGRAMS = [
    Program(
        "plain API",
        run_plain,
        [
            *PLAIN * 2,
            *([("barrier", 0)] if device() == "cpu" else []),
            *[("all_gather", None)] * 2,
            ("all_reduce", 24),
        ],
        _METHODS,
        False,
    ),
    Program(
        "messages",
        run_p2p,
        [
            ("send", 16),
            ("recv", 16),
            ("recv", 16),
            ("send", 16),
            ("send", 16),
            ("recv", 16),
            ("send", 8),
            ("send", None),
        ],
        _METHODS,
        False,
    ),
    Program("DDP", run_ddp, CONSTRUCTED + WHOLE + REBUILT + REDUCED * 2, _CPP),
    # The buckets are not rebuilt. In each step, an all_reduce of one int32 per parameter determines the parameters that
    # any rank used.
    Program(
        "DDP, find_unused_parameters", run_ddp_unused, CONSTRUCTED + [*REDUCED, ("all_reduce", 12)] * 3, _CPP
    ),
    # The first step determines which parameters are used. Nothing is sent inside no_sync.
    Program(
        "DDP, static graph and no_sync",
        run_ddp_static,
        [*CONSTRUCTED, ("all_reduce", 12), *(WHOLE * 2), *REBUILT, *REDUCED],
        _CPP,
    ),
    Program(
        "DDP, communication hook", run_ddp_hook, CONSTRUCTED + WHOLE + REBUILT + REDUCED * 2, _CPP | _METHODS
    ),
    # The hook compresses gradients to fp16, which halves the bytes.
    Program(
        "DDP, built-in hook",
        run_ddp_builtin_hook,
        CONSTRUCTED + [("all_reduce", 3 * LAYER // 2)] + REBUILT + [("all_reduce", LAYER // 2)] * 6,
        _CPP,
    ),
    Program("FSDP1", run_fsdp1, _SHARDED, _METHODS),
    Program("FSDP2", run_fsdp2, _SHARDED, _METHODS),
    Program("functional collectives", run_functional, FUNCTIONAL, _FUNCTIONAL, False),
    Program(
        "functional collectives under autograd", run_functional_autograd, FUNCTIONAL_AUTOGRAD, _FUNCTIONAL
    ),
    Program("DTensor", run_dtensor, DTENSOR, _FUNCTIONAL),
    Program("torch.compile", run_compiled, COMPILED, _FUNCTIONAL),
    Program("ZeroRedundancyOptimizer", run_zero_optimizer, [("broadcast", LAYER)] * 6, _METHODS),
    Program("pipelining", run_pipeline, _PIPELINE, _METHODS, False),
    Program(
        "Backend's methods",
        run_backend,
        [("all_reduce", 16), ("broadcast", 8), ("all_reduce", 12), ("all_reduce", 4)],
        frozenset({"backend"}) | _METHODS,
    ),
    Program("grad modes, hooks, threads", run_modes, MODES, _METHODS | _FUNCTIONAL),
]
