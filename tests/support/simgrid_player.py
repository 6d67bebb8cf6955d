"""Plays programs of ranks in SimGrid, for a Python that has it: cases as JSON from stdin, when each rank ended to stdout.

Every rank has a link of its own of 1 byte per nanosecond; a message is a flow over the link of each rank, as many bytes as
it takes nanoseconds alone. It begins when all ranks of its group have issued it and the flow before it in the same groups
has ended. How flows share a link is SimGrid's. Standard library and simgrid only.
"""

from __future__ import annotations

import json
import sys

from simgrid import Actor, Comm, Engine, LinkInRoute, NetZone, Semaphore, this_actor

NS = 1e6  # of what is a second there, whose precision is 1e-9


def rank_body(rank, case, issued, ended):
    """What a rank computes, issues and waits for."""
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
    """The flow of a message over the link of a rank."""
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
    """All cases beside each other, each with hosts of its own."""
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
    """Two hosts with a link between them."""
    pair = [zone.create_host(f"{end}{name}", NS).seal() for end in ("from", "to")]
    link = zone.create_link(f"link{name}", NS).set_latency(0).seal()
    zone.add_route(pair[0].netpoint, pair[1].netpoint, None, None, [LinkInRoute(link)], True)
    return pair


def start(case, hosts):
    """Make the actors of a case; what they share has to be kept until they have ended."""
    messages, ranks = len(case["groups"]), ranks_of(case)
    case["ends"] = {}
    marks = [[[Semaphore(0) for _ in range(ranks)] for _ in range(messages)] for _ in range(3)]
    for rank in range(ranks):
        for message in range(messages):
            Actor.create("flow", hosts[rank][0], flow_body, rank, message, case, hosts, *marks)
        Actor.create("rank", hosts[rank][0], rank_body, rank, case, *marks[:2])
    return marks


main()
