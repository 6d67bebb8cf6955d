"""Simulates the programs of ranks in SimGrid. This needs a Python in which simgrid is installed.

The program reads cases as JSON from standard input and writes the time at which each rank ends to standard
output. Every rank has a separate link of 1 byte per nanosecond. A message is a flow over the link of each rank,
with as many bytes as the message takes nanoseconds alone. A flow begins when all ranks of its group have issued
the message and the previous flow in the same groups has ended. SimGrid determines how flows share a link. Only
the standard library and simgrid are used.
"""

from __future__ import annotations

import json
import sys

from simgrid import Actor, Comm, Engine, LinkInRoute, NetZone, Semaphore, this_actor

NS = 1e6  # nanoseconds per simulated second, because the precision of SimGrid is 1e-9 s


def rank_body(rank, case, issued, ended):
    """Simulate a rank: its computations, the messages that it issues, and its waits."""
    for (kind, message), spans in zip(case["events"], case["spans"], strict=False):
        this_actor.sleep_for(spans[rank] / NS)
        if kind == "issue":
            for member in group_of(case, message, rank):
                issued[message][member].release()
        else:
            ended[message][rank].acquire()
    this_actor.sleep_for(case["spans"][-1][rank] / NS)
    case["ends"][rank] = Engine.clock * NS


def flow_body(rank, message, case, hosts, issued, ended, passed):
    """Simulate the flow of a message over the link of a rank."""
    for _ in group_of(case, message, rank):
        issued[message][rank].acquire()
    groups = case["groups"][message]
    before = [each for each in range(message) if case["groups"][each] == groups]
    if before:
        passed[before[-1]][rank].acquire()
    source, target = hosts[rank]
    Comm.sendto_async(source, target, int(case["durations"][message][rank])).wait()
    ended[message][rank].release()
    passed[message][rank].release()


def group_of(case, message, rank):
    return next(group for group in case["groups"][message] if rank in group)


def main():
    """Simulate all cases at the same time, each with separate hosts."""
    engine = Engine(
        [
            "player",
            "--log=root.thres:critical",
            "--cfg=network/model:CM02",
            "--cfg=network/TCP-gamma:0",
            "--cfg=network/crosstraffic:0",
            "--cfg=network/weight-S:0",
            "--cfg=network/bandwidth-factor:1",
        ]
    )
    cases = json.load(sys.stdin)
    zone = NetZone.create_full_zone("all")
    hosts = [
        [linked(zone, f"{number}-{rank}") for rank in range(ranks_of(case))]
        for number, case in enumerate(cases)
    ]
    zone.seal()
    kept = [start(case, of_case) for case, of_case in zip(cases, hosts, strict=False)]
    engine.run()
    del kept
    json.dump([[case["ends"][rank] for rank in range(ranks_of(case))] for case in cases], sys.stdout)


def ranks_of(case):
    return len(case["spans"][0])


def linked(zone, name):
    """Return two hosts with a link between them."""
    pair = [zone.create_host(f"{end}{name}", NS).seal() for end in ("from", "to")]
    link = zone.create_link(f"link{name}", NS).set_latency(0).seal()
    zone.add_route(pair[0].netpoint, pair[1].netpoint, None, None, [LinkInRoute(link)], True)
    return pair


def start(case, hosts):
    """Create the actors of a case and return their semaphores.

    The caller must keep the semaphores until the actors have ended.
    """
    messages, ranks = len(case["groups"]), ranks_of(case)
    case["ends"] = {}
    marks = [[[Semaphore(0) for _ in range(ranks)] for _ in range(messages)] for _ in range(3)]
    for rank in range(ranks):
        for message in range(messages):
            Actor.create("flow", hosts[rank][0], flow_body, rank, message, case, hosts, *marks)
        Actor.create("rank", hosts[rank][0], rank_body, rank, case, *marks[:2])
    return marks


main()
