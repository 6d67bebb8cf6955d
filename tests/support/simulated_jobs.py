"""A discrete-event simulation of a job. The compute times, link rates and groups are known and determine the records.

::

    job = Job(world=3, hosts=["a", "b", "c"], rates={"b": (20, 20)})      # b sends and receives at 20 Mbit/s
    for step in range(10):
        job.all(Step(step), Compute(5 * MS), Call("all_reduce", 256 << 10))
        job.do(2, Compute(MS))                                            # or the actions of one rank
    run = job.run()                                                       # a SyntheticRun

The simulation uses nothing of commprof except the columns of its tables.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

from support.runs import SyntheticRun

MS = 1_000_000
FAST = 8_000.0  # Mbit/s
_LATENCY = 20_000  # ns, of each transfer
_COPIES_NS = 100_000  # the time in which C++ copies gradients after its wait
_FROM_ROOT = ("broadcast", "scatter")
_TO_ROOT = ("reduce", "gather")


@dataclass(frozen=True)
class Step:
    """The begin of a training step."""

    number: int


@dataclass(frozen=True)
class Compute:
    """A computation of ``ns`` nanoseconds on one rank."""

    ns: int


@dataclass(frozen=True)
class Call:
    """A collective or a message. If ``is_async`` is true, the program is blocked only in ``Wait``."""

    op: str
    payload: int
    group: tuple[int, ...] | None = None
    pg: str = "0"
    peer: int = -1
    is_async: bool = False
    layer: str = "process_group"


@dataclass(frozen=True)
class Wait:
    """A wait for all asynchronous calls so far.

    ``is_recorded`` states whether the recorder sees the wait. With ``apart_ns``, C++ waits. This wait is recorded as a
    stall, and ``apart_ns`` is the distance in ns between the bounds of its exposed time.
    """

    is_recorded: bool = True
    apart_ns: int | None = None


@dataclass
class _Instance:
    """One collective or message: when each rank arrived, and when each rank has its result."""

    call: Call
    arrived: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)


@dataclass
class _Rank:
    actions: list[object] = field(default_factory=list)
    place: int = 0
    now: int = 0
    step: int = -1
    counts: dict[object, int] = field(default_factory=dict)
    pending: list[dict] = field(default_factory=list)
    called: tuple[_Instance, dict] | None = None
    # The rank, the time of its first call, and the begin of its wait.
    stalled: tuple[int, int, int] | None = None


class Job:
    """A simulated job in which each rank has a separate program.

    Args:
        hosts: The host of each rank. By default, all ranks are on one host.
        rates: The rates (sent, received) of each host in Mbit/s. The default rate is FAST. If there is only one host,
            the keys are ranks, such as ``rank 1``.
        shifts: The number of ns by which the clock of each host is ahead.
    """

    def __init__(self, world, hosts=None, rates=None, shifts=None):
        self.world = world
        self.hosts = hosts or ["a"] * world
        self.rates = rates or {}
        self.shifts = shifts or {}
        self.ranks = [_Rank() for _ in range(world)]
        self._instances: dict[object, _Instance] = {}
        self._seq = [0] * world

    def do(self, rank, *actions):
        """Append ``actions`` to the program of ``rank``."""
        self.ranks[rank].actions += actions

    def all(self, *actions):
        """Append ``actions`` to the program of every rank."""
        for rank in range(self.world):
            self.do(rank, *actions)

    def run(self) -> SyntheticRun:
        run = SyntheticRun(world_size=self.world)
        self._clocks(run)
        while True:
            moved = [self._advance(number, rank, run) for number, rank in enumerate(self.ranks)]
            if not any(moved):
                break
        left = [rank.actions[rank.place] for rank in self.ranks if rank.place < len(rank.actions)]
        assert not left, f"the simulated job hangs at {left}"
        return run

    def _advance(self, number, rank, run) -> bool:
        """Execute the actions of ``rank`` that are possible now, and return whether there were any."""
        begin = rank.place
        while rank.place < len(rank.actions):
            if not self._act(number, rank, rank.actions[rank.place], run):
                break
            rank.place += 1
        return rank.place > begin

    def _act(self, number, rank, action, run) -> bool:
        if isinstance(action, Step):
            rank.step = action.number
        elif isinstance(action, Compute):
            rank.now += action.ns
        elif isinstance(action, Wait):
            return self._wait(rank, action, run)
        else:
            return self._call(number, rank, action, run)
        return True

    def _call(self, number, rank, call, run) -> bool:
        if rank.called is None:
            instance = self._instance(number, rank, call)
            instance.arrived[number] = rank.now
            rank.called = (instance, self._record(number, rank, call, instance, run))
        instance, row = rank.called
        if call.is_async:
            row["return_ns"] = row["issue_ns"] + 1000
            rank.now += 1000
            rank.pending.append({"instance": instance, "row": row, "rank": number})
        else:
            self._finish(instance)
            if number not in instance.ended:
                return False
            shift = row["issue_ns"] - rank.now
            rank.now = max(rank.now, instance.ended[number])
            row["return_ns"] = row["wait_end_ns"] = rank.now + shift
        rank.called = None
        return True

    def _wait(self, rank, wait, run) -> bool:
        if wait.apart_ns is not None and rank.stalled is None and rank.pending:
            first = rank.pending[0]
            rank.stalled = (first["rank"], first["row"]["issue_ns"], rank.now)
        while rank.pending:
            mine = rank.pending[0]
            instance, row, number = mine["instance"], mine["row"], mine["rank"]
            self._finish(instance)
            if number not in instance.ended:
                return False
            begin = rank.now
            rank.now = max(begin, instance.ended[number])
            if wait.is_recorded and wait.apart_ns is None:
                shift = self.shifts.get(self.hosts[number], 0)
                row["wait_begin_ns"], row["wait_end_ns"] = begin + shift, rank.now + shift
            rank.pending.pop(0)
        if rank.stalled is not None:
            (number, since, begin), rank.stalled = rank.stalled, None
            shift, blocked = self.shifts.get(self.hosts[number], 0), rank.now - begin
            run.add(
                "stalls", rank=number, attempt=0, pid=run.pid(number), step=rank.step, place="backward",
                since_ns=since, begin_ns=begin + shift, end_ns=rank.now + shift + _COPIES_NS,
                exposed_low_ns=max(0, blocked - wait.apart_ns), exposed_high_ns=blocked,
            )  # fmt: skip
            rank.now += _COPIES_NS
        return True

    def _members(self, call, number):
        if call.op == "send":
            return (number, call.peer)
        if call.op == "recv":
            return (call.peer, number)
        return call.group or tuple(range(self.world))

    def _instance(self, number, rank, call) -> _Instance:
        members = self._members(call, number)
        stream = ("message" if call.op in ("send", "recv") else "collective", call.pg, members)
        count = rank.counts.get(stream, 0)
        rank.counts[stream] = count + 1
        return self._instances.setdefault((*stream, count), _Instance(call))

    def _finish(self, instance):
        """Determine when each member has its result, after all necessary members have arrived."""
        call, arrived = instance.call, instance.arrived
        if call.op in (*_FROM_ROOT, *_TO_ROOT):
            self._finish_rooted(call, arrived, instance.ended)
            return
        if instance.ended:
            return
        if call.op in ("send", "recv"):
            if len(arrived) == 2:
                sender, receiver = (
                    next(iter(arrived)) if call.op == "send" else call.peer,
                    call.peer if call.op == "send" else next(iter(arrived)),
                )
                begin = max(arrived.values())
                instance.ended[sender] = arrived[sender] + _LATENCY  # a send is buffered
                instance.ended[receiver] = begin + self._takes(sender, receiver, call.payload)
            return
        members = call.group or tuple(range(self.world))
        if len(arrived) == len(members):
            last = max(arrived.values())
            for rank, took in self._ring(members, call).items():
                instance.ended[rank] = last + took

    def _finish_rooted(self, call, arrived, ended):
        """Determine when each member of a rooted collective has its result.

        Sends are buffered, so only receivers wait. A receiver waits for its sender, and the root waits for
        every sender.
        """
        root, members = call.peer, call.group or tuple(range(self.world))
        # The payload of a scatter or gather is the buffer of the root. Each rank sends or receives a part of
        # the buffer.
        size = call.payload // (len(members) if call.op in ("scatter", "gather") else 1)
        for rank in arrived:
            if call.op == "broadcast" and rank != root:
                self._finish_in_tree(call, arrived, ended, self._way_down(members, root, rank))
                continue
            senders = [root] if call.op in _FROM_ROOT else [each for each in members if each != rank]
            if (rank == root) == (call.op in _FROM_ROOT):
                ended[rank] = arrived[rank] + _LATENCY
            elif all(each in arrived for each in senders):
                begin = max(arrived[each] for each in (*senders, rank))
                ended[rank] = begin + max(self._takes(each, rank, size) for each in senders)

    def _way_down(self, members, root, rank):
        """Return the path from the root of gloo's binomial tree to ``rank``.

        The n-th rank after the root receives the data from the rank whose number is n without its highest bit.
        """
        first = members.index(root)
        place, way = (members.index(rank) - first) % len(members), []
        while place:
            way.insert(0, members[(first + place) % len(members)])
            place -= 1 << (place.bit_length() - 1)
        return [root, *way]

    def _finish_in_tree(self, call, arrived, ended, way):
        if all(rank in arrived for rank in way):
            have = arrived[way[0]]
            for sender, receiver in pairwise(way):
                have = max(have, arrived[receiver]) + self._takes(sender, receiver, call.payload)
            ended[way[-1]] = have

    def _ring(self, members, call) -> dict[int, int]:
        """Return the duration of a ring collective for each rank.

        In each step of the ring, a rank receives the chunk that its neighbor had after the previous step.
        """
        count, way = len(members), {"all_gather": -1}.get(call.op, 1)
        steps = (count - 1) * (2 if call.op == "all_reduce" else 1)
        chunk = call.payload // count
        have = dict.fromkeys(members, 0)
        last_sent = dict.fromkeys(members, 0)
        for _ in range(steps):
            before = dict(have)
            for place, rank in enumerate(members):
                sender = members[(place + way) % count]
                begin = max(before[rank], before[sender])
                have[rank] = begin + self._takes(sender, rank, chunk)
                last_sent[sender] = begin
        return {rank: max(have[rank], last_sent[rank]) + _LATENCY for rank in members}

    def _takes(self, sender, receiver, size) -> int:
        places = [
            self.hosts[rank] if len(set(self.hosts)) > 1 else f"rank {rank}" for rank in (sender, receiver)
        ]
        if places[0] == places[1]:
            rate = FAST
        else:
            rate = min(self.rates.get(places[0], (FAST, FAST))[0], self.rates.get(places[1], (FAST, FAST))[1])
        return _LATENCY + round(size * 8 * 1000 / rate)

    def _record(self, number, rank, call, instance, run) -> dict:
        shift = self.shifts.get(self.hosts[number], 0)
        members = self._members(call, number)
        is_message = call.op in ("send", "recv")
        run.add_collective(
            call.op, ranks=(number,), group=tuple(range(self.world)) if is_message else members, pg=call.pg,
            payload_bytes=call.payload, step=rank.step, peer=call.peer, issue_ns=rank.now + shift,
            is_async=call.is_async, layer=call.layer, **({"group_rank": 0} if is_message else {}),
        )  # fmt: skip
        return run.rows["collectives"][-1]

    def _clocks(self, run):
        for rank, host in enumerate(self.hosts):
            for name, row in (
                ("clocks", {"monotonic_ns": 0, "realtime_ns": 0, "uncertainty_ns": 0, "clock": f"clock of {host}"}),
                ("clock_offsets", {"reference_rank": 0, "time_ns": 0, "exchanges": 30, "error_ns": 0,
                                   "offset_ns": self.shifts.get(self.hosts[0], 0) - self.shifts.get(host, 0)}),
            ):  # fmt: skip
                begin = self.shifts.get(host, 0)
                times = (begin, begin + 20_000 * MS) if name == "clock_offsets" else (0,)
                for time in times:
                    run.add(name, rank=rank, attempt=0, pid=run.pid(rank), host=host, **row | (
                        {"time_ns": time} if name == "clock_offsets" else {}
                    ))  # fmt: skip


def of_ddp(world=2, late_ns=20 * MS, since=0, apart_ns=50_000, count=40, seed=1, metric=False):
    """Return a job that behaves like DDP: each step reduces three buckets.

    C++ waits for the buckets at the end of the backward pass. Rank 1 is late by ``late_ns`` from step ``since``
    on. With ``metric``, the program also issues one all_reduce before and one after the backward pass, and
    waits for each.
    """
    job, chance = Job(world), random.Random(seed)
    for step in range(count):
        for rank in range(world):
            delay = late_ns * (rank == 1 and step >= since)
            own = [Call("all_reduce", 4)] * metric
            job.do(rank, Step(step), *own, Compute(10 * MS + delay + chance.randrange(MS // 10)))
            for _ in range(3):
                job.do(rank, Compute(2 * MS), Call("all_reduce", 1 << 20, is_async=True, layer="c10d"))
            job.do(rank, Wait(apart_ns=apart_ns), *own)
    return job


def saved(job, path, count=40):
    """Run ``job``, which has ``count`` steps, and write its run directory."""
    run = job.run()
    for step in range(count):
        run.add_step(step, begin_ns=0)
    return run.write(path)
