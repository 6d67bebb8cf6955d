"""Renders the log lines of one process of a job in the formats of NCCL 2.28, for benchmarks/nccl_log.py.

The formats are those of ``src/debug.cc`` (line prefixes), ``src/enqueue.cc`` (operations, tuning), ``src/init.cc``
(communicators), ``src/graph`` and ``src/transport`` (topology) of NVIDIA/nccl at v2.28.9-1. This module does not import
commprof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

GPUS_PER_HOST = 8
TENSOR_PARALLEL = 4
GROUPS = ("world", "tensor", "data")
BYTES_OF_TYPE = {4: 8, 7: 4, 9: 2}  # int64, float32, bfloat16


class Call(NamedTuple):
    """An operation of a step.

    Attributes:
        group: The group whose communicator runs the operation.
        name: The name of the operation as NCCL prints it.
        datatype, reduction: Numbers of ``nccl.h``.
    """

    group: str
    name: str
    count: int
    datatype: int
    reduction: int = 0
    root: int = 0
    autograd: bool = False


STEP = (
    *(Call("tensor", "AllReduce", 8_388_608, 9) for _ in range(4)),
    *(Call("tensor", "AllGather", 2_097_152, 9) for _ in range(3)),
    Call("world", "Send", 1_048_576, 9),
    Call("world", "Recv", 1_048_576, 9),
    *(Call("tensor", "ReduceScatter", 2_097_152, 9, autograd=True) for _ in range(3)),
    *(Call("data", "AllReduce", 3_276_800, 7, autograd=True) for _ in range(4)),
    *(Call("data", "Reduce", 1_638_400, 7, root=root, autograd=True) for root in (0, 1)),
    Call("data", "AlltoAll", 65_536, 9),
    Call("world", "AllReduce", 1, 7, reduction=2),
    Call("world", "AllReduce", 1, 7),
    Call("data", "AllGather", 819_200, 9),
    Call("data", "Broadcast", 409_600, 7, root=1),
    Call("world", "Broadcast", 96, 4),
    Call("world", "AllReduce", 1, 4),
)
PER_RANK = frozenset({"AllGather", "ReduceScatter", "AlltoAll"})
POINT_TO_POINT = frozenset({"Send", "Recv"})


class Membership(NamedTuple):
    """A communicator from the point of view of one of its ranks."""

    group: str
    address: str
    rank: int
    members: tuple[int, ...]  # global ranks
    color: int

    @property
    def size(self) -> int:
        """The number of ranks in the communicator."""
        return len(self.members)


@dataclass
class Process:
    """Renders the lines of one rank. The text is a %-format template, so that every literal percent sign is doubled."""

    rank: int
    world: int
    truth: Counter[str]

    def __post_init__(self) -> None:
        self.host = f"gpu-node-{self.rank // GPUS_PER_HOST:02d}"
        self.pid = 41_000 + 17 * self.rank
        self.device = self.rank % GPUS_PER_HOST
        tensor = self.rank // TENSOR_PARALLEL
        place = self.rank % TENSOR_PARALLEL
        self.groups = {
            "world": self._join("world", tuple(range(self.world)), 0),
            "tensor": self._join(
                "tensor", tuple(range(tensor * TENSOR_PARALLEL, (tensor + 1) * TENSOR_PARALLEL)), tensor
            ),
            "data": self._join("data", tuple(range(place, self.world, TENSOR_PARALLEL)), place),
        }

    def _join(self, group: str, members: tuple[int, ...], color: int) -> Membership:
        address = f"0x55{self.rank:02x}{GROUPS.index(group):02x}a4{self.rank * 64:04x}"
        return Membership(group, address, members.index(self.rank), members, color)

    def info(self, text: str, thread: int = 0, kind: str = "chatter") -> str:
        """Return an INFO line of thread ``pid + thread``."""
        self.truth[kind] += 1
        return f"{self.host}:{self.pid}:{self.pid + thread} [{self.device}] NCCL INFO {text}\n"

    def call(self, text: str, thread: int = 0, kind: str = "calls_without_data") -> str:
        """Return a CALL line, which contains no device."""
        self.truth[kind] += 1
        return f"{self.host}:{self.pid}:{self.pid + thread} NCCL CALL {text}\n"

    def operation(self, number: int, call: Call) -> str:
        """Return the COLL line and the CALL line of call ``number`` of a step, and on rank 0 also its TUNING line."""
        comm = self.groups[call.group]
        thread = 213 if call.autograd else 0
        send = f"7f{self.rank:02x}%(a{number})06x00"
        receive = send if call.name in ("AllReduce", "Broadcast") else f"7e{self.rank:02x}%(a{number})06x00"
        root = call.root
        if call.name in POINT_TO_POINT:
            root = (comm.rank + (1 if call.name == "Send" else -1)) % comm.size
            send = ""  # Since 2.12, Send and Recv both print their buffer as recvbuff.
        stream = f"0x55{self.rank:02x}00c{GROUPS.index(call.group)}{self.rank * 16:04x}"
        coll = self.info(
            f"{call.name}: opCount %(o{number})x sendbuff {'0x' + send if send else '(nil)'} recvbuff 0x{receive} "
            f"count %(c{number})d datatype {call.datatype} op {call.reduction} root {root} comm {comm.address} "
            f"[nranks={comm.size}] stream {stream}",
            thread,
            "operations",
        )
        twin = self.call(
            f"nccl{call.name}({send or 0},{receive},%(c{number})d,{call.datatype},{call.reduction},{root},"
            f"{comm.address},{stream})",
            thread,
            "operations",
        )
        if comm.rank or call.name in POINT_TO_POINT or call.name == "AlltoAll":
            return coll + twin
        algorithm = ("TREE", "RING")[number % 2]
        return (
            coll
            + twin
            + self.info(
                f"{call.name}: %(b{number})d Bytes -> Algo {algorithm} proto {('LL', 'LL128', 'SIMPLE')[number % 3]} "
                f"channel{{Lo..Hi}}={{0..{3 + number % 4}}}",
                thread,
                "tuning",
            )
        )

    def step(self, calls: Mapping[int, Call]) -> list[str]:
        """Return the lines of one step: the operations, in the groups that torch opens.

        Args:
            calls: The operations by their number in the step.
        """
        texts: list[str] = []
        for number, call in calls.items():
            text = self.operation(number, call)
            if call.name == "Send":
                text = self.call("ncclGroupStart()") + text
            elif call.name == "Recv":
                text += self.call("ncclGroupEnd()")
            texts.extend(text.splitlines(keepends=True))
        return texts

    def start(self) -> list[str]:
        """Return the lines that a process prints only once."""
        self.truth["foreign"] += 1
        return [
            f"[{self.rank}] launching train.py on {self.host}, pid {self.pid}\n",
            self.info("cudaDriverVersion 12090"),
            self.info("NCCL version 2.28.9+cuda12.9", kind="banners"),
            self.info(f"NCCL_DEBUG_SUBSYS set by environment to ALL; host {self.host}"),
            self.info("NCCL_IB_HCA set by environment to mlx5_0,mlx5_1."),
            self.info("NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.7<0>"),
            self.info("Using network IB", 7),
        ]

    def init(self) -> list[str]:
        """Return the lines about the creation of three communicators: their topology and the line of torch."""
        return [text for comm in self.groups.values() for text in self._init(comm)]

    def _init(self, comm: Membership) -> Iterator[str]:
        world = self.groups["world"].address
        common = (
            f"comm {comm.address} rank {comm.rank} nranks {comm.size} cudaDev {self.device} nvmlDev {self.device} "
            f"busId {0x1B000 + self.device * 0x1000:x} "
        )
        if comm.group == "world":
            name, ident = "ncclCommInitRankConfig", "commId 0x%(id)016x"
            begin, end = f"{name} {common}{ident} - Init START", f"{name} {common}{ident} - Init COMPLETE"
            call = f"ncclCommInitRank({comm.address}, {comm.size}, 0x%(id)016x, {comm.rank}, {self.device})"
        else:
            split = GROUPS.index(comm.group)
            ident = f"parent {world} splitCount {split} color {comm.color} key {self.rank}"
            # The START line has no space before its dash.
            begin = f"ncclCommSplit {common}{ident}- Init START"
            end = f"ncclCommSplit {common}{ident} - Init COMPLETE"
            call = (
                f"ncclCommSplit({world}, {comm.color}, {self.rank}, {comm.address}, {comm.rank}, {comm.size})"
            )
        yield self.info(begin, 7, "inits")
        yield self.info(
            "Bootstrap timings total 0.0%(n)d (create 0.000024, send 0.000092, recv 0.0%(n)d, ring 0.000011)",
            7,
        )
        yield from self._topology(comm)
        yield self.call(call, 7, "inits")
        yield self.info(end, 7, "inits")
        yield self.info(
            f"Init timings - {'ncclCommSplit' if comm.group != 'world' else 'ncclCommInitRankConfig'}: rank {comm.rank} "
            f"nranks {comm.size} total 0.54 (kernels 0.20, alloc 0.05, bootstrap 0.16, allgathers 0.00, topo 0.13)",
            7,
        )
        self.truth["torch_lines"] += 1
        number = GROUPS.index(comm.group)
        described = ("default_pg", "tensor_parallel", "data_parallel")[number]
        yield (
            f"I1121 12:00:07.738664 {self.pid + 7} ProcessGroupNCCL.cpp:2183] [PG ID {number} PG GUID {number}({described}) "
            f"Rank {comm.rank}] ProcessGroupNCCL created ncclComm_ {comm.address} on CUDA device: {self.device}\n"
        )

    def _topology(self, comm: Membership) -> Iterator[str]:
        channels = 8 if comm.group == "world" else 4
        rings = [ring_order(comm.size, channel) for channel in range(channels)]
        yield self.info("=== System : maxBw 48.0 totalBw 240.0 ===", 7)
        yield self.info(
            "Pattern 4, crossNic 0, nChannels 4, bw 24.000000/24.000000, type NVL/PIX, sameChannels 1", 7
        )
        yield self.info(
            f"comm {comm.address} rank {comm.rank} nRanks {comm.size} nNodes {max(1, comm.size // 8)} localRanks "
            f"{min(8, comm.size)} localRank {comm.rank % 8} MNNVL 0",
            7,
        )
        trees = [tree_place(comm.size, comm.rank, tree) for tree in range(channels)]
        for tree, (up, down) in enumerate(trees):
            yield self.info(f"Tree {tree} : {up} -> {comm.rank} -> {down}/-1/-1", 7, "tree_lines")
        if comm.rank == 0:
            for channel, ring in enumerate(rings):
                order = " ".join(map(str, ring))
                yield self.info(f"Channel {channel:02d}/{channels:02d} : {order}", 7, "ring_orders")
            yield from self._model()
        for channel, ring in enumerate(rings):
            before, after = neighbours(ring, comm.rank)
            yield self.info(f"Ring {channel:02d} : {before} -> {comm.rank} -> {after}", 7, "ring_neighbours")
        listed = " ".join(
            f"[{tree}] {down}/-1/-1->{comm.rank}->{up}" for tree, (up, down) in enumerate(trees)
        )
        yield self.info(f"Trees {listed}", 7, "trees_lines")
        yield self.info("P2P Chunksize set to 131072", 7)
        for channel, ring in enumerate(rings):
            yield from self._links(comm, channel, ring)
        yield self.info("Connected all rings, use ring PXN 0 GDR 1", 7)
        yield self.info("Connected all trees", 7)
        yield self.info("threadThresholds 8/8/64 | 128/8/64 | 512 | 512", 7)
        yield self.info(
            f"{channels} coll channels, 0 collnet channels, 0 nvls channels, 8 p2p channels, 2 p2p channels per peer",
            7,
        )

    def _links(self, comm: Membership, channel: int, ring: Sequence[int]) -> Iterator[str]:
        before, after = neighbours(ring, comm.rank)
        for sender, receiver in ((comm.rank, after), (before, comm.rank)):
            ends = [comm.members[rank] for rank in (sender, receiver)]
            devices = [end % GPUS_PER_HOST for end in ends]
            sends = sender == comm.rank
            text = f"Channel {channel:02d}/0 : {sender}[{devices[0]}] -> {receiver}[{devices[1]}] "
            if ends[0] // GPUS_PER_HOST != ends[1] // GPUS_PER_HOST:
                way = "[send]" if sends else "[receive]"
                yield self.info(f"{text}{way} via NET/IB/{channel % 2}/GDRDMA", 31, "links")
            elif sends:
                via = "SHM/direct/direct" if channel == 3 else "P2P/CUMEM/read"
                yield self.info(f"{text}via {via}", 31, "links")

    def _model(self) -> Iterator[str]:
        row = " |".join(
            f"{time:7.1f}/{width:6.1f}"
            for time, width in zip((5.1, 8.5, 14.0), (0.0, 6.0, 48.2), strict=True)
        )
        yield self.info("  Algorithm   |                            Tree                  |      Ring |", 7)
        yield self.info("  Protocol    |             LL |          LL128 |         Simple |", 7)
        yield self.info(" Max NThreads |            512 |            640 |            512 |", 7)
        for name in ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"):
            yield self.info(f"{name:>13} |{row} |", 7)

    def failure(self, reporter: int) -> list[str]:
        """Return the lines at the end of an epoch.

        The rank ``reporter`` prints a warning and the propagation of its error. All ranks abort their communicators.
        """
        texts = []
        if self.rank == reporter:
            self.truth["warnings"] += 1
            self.truth["lines_without_text"] += 1
            texts = [
                f"\n[2026-11-21 12:01:%(n)d] {self.host}:{self.pid}:{self.pid + 31} [{self.device}] "
                "transport/net_ib.cc:1021 NCCL WARN NET/IB : Got completion from peer 10.0.0.9 with status=12\n",
                self.info("transport/net.cc:1327 -> 6", 31, "traces"),
                self.info("proxy.cc:728 -> 6", 31, "traces"),
                self.info("proxy.cc:909 -> 6 [Progress Thread]", 31, "traces"),
            ]
        return texts + [
            self.info(
                f"comm {comm.address} rank {comm.rank} nranks {comm.size} cudaDev {self.device} "
                f"busId {0x1B000 + self.device * 0x1000:x} - Abort COMPLETE",
                55,
                "ends",
            )
            for comm in self.groups.values()
        ]

    def chatter(self, number: int) -> str:
        """Return a line without information about operations or communicators."""
        local = number % GPUS_PER_HOST
        ours = (
            lambda: self.info("misc/utils.cc:233 memory stack hunk malloc(65536)"),
            lambda: self.info(f"New proxy recv connection {number} from local rank {local}, transport 2", 31),
            lambda: self.info(f"Connected to proxy localRank {local} -> connection 0x7d{self.rank:02x}%(n)06x00", 31),
            lambda: self.info(f"init.cc:1714 Cuda Host Alloc Size {number * 512} pointer 0x7c{self.rank:02x}%(n)06x00"),
            lambda: self.info(f"NET/IB: NCCL Dev {number % 2} Port 1 qpn %(n)d mtu 5 GID 3 (0/0) fifoRkey=0x%(n)x", 31),
            lambda: self.info(f"[Proxy Progress] Device {self.device} CPU core {number}", 31),
            lambda: self.info("ncclProxyCallAsync: opId=0x7f%(n)06x op.type=4 op.reqBuff=0x7f00aa expectedRespSize=256", 31),
        )  # fmt: skip
        if number % 4:
            return ours[number % len(ours)]()
        self.truth["foreign"] += 1
        foreign = (
            f"[rank{self.rank}]: step %(s)d | loss 2.3%(n)d | lr 3.0e-04 | tokens/s %(n)d | 41.2%% of peak\n",
            f"I1121 12:00:08.%(n)06d {self.pid + 91} ProcessGroupNCCL.cpp:3271] [PG ID 0 PG GUID 0(default_pg) "
            f"Rank {self.rank}] NCCL_DEBUG: INFO, last enqueued work %(s)d\n",
            f"[default{self.device}]:  iteration %(s)d/ 500000 | consumed samples: %(n)d | elapsed time (ms): 512.3\n",
        )
        return foreign[number // 4 % len(foreign)]


def ring_order(size: int, channel: int) -> list[int]:
    """Return the ranks in the order of the ring of ``channel``. The rings of odd channels are reversed."""
    return [0, *(range(size - 1, 0, -1) if channel % 2 else range(1, size))]


def neighbours(ring: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the ranks before and after ``rank`` in a ring."""
    place = ring.index(rank)
    return ring[place - 1], ring[(place + 1) % len(ring)]


def tree_place(size: int, rank: int, tree: int) -> tuple[int, int]:
    """Return the parent and the child of ``rank``, or -1 if there is none.

    The trees are chains. Odd trees start at the last rank.
    """
    up, down = (rank + 1, rank - 1) if tree % 2 else (rank - 1, rank + 1)
    return (up if up < size else -1), (down if down < size else -1)
